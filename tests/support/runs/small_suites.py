"""Runs of pytest on a few files, for tests of what runs the tests."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tests.support.paths import ROOT


def start(
    folder: Path, files: Mapping[str, str], plugins: Iterable[str], *options: Any, **variables: str
) -> subprocess.Popen[str]:
    """Write files into a folder, and start pytest there with plugins of `tests.support.runs`."""
    for name, text in {"pytest.ini": "[pytest]\n", **files}.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    chosen = [f"-ptests.support.runs.{each}" for each in plugins]
    return subprocess.Popen(
        [sys.executable, "-m", "pytest", *chosen, *map(str, options)],
        cwd=folder,
        # Without the plugins of others, which take a third of the time.
        env={**variables, "PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def ended(run: subprocess.Popen[str]) -> tuple[int, str]:
    """Wait for the end of a run; return its code and its output."""
    out, err = run.communicate(timeout=60)
    assert err == ""
    return run.returncode, out


def closing(out: str) -> str:
    """Return the counts of the closing line, by which CI knows pytest."""
    counts = re.search(r"^=+ (.*) in [\d.]+s =+$", out.rstrip().rpartition("\n")[2])
    assert counts, out
    return counts[1]
