"""What the Makefile installs before a target runs."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EVERYTHING = "[test,docs]"


@pytest.mark.parametrize(
    ("target", "extras"), [("demo", []), ("check", [EVERYTHING]), ("docs", [EVERYTHING])]
)
def test_a_target_installs_only_what_it_needs(target: str, extras: list[str], tmp_path: Path):
    """pip shows its progress: a first installation may take minutes."""
    if shutil.which("make") is None:
        pytest.skip("make is not installed")
    plan = subprocess.run(
        ["make", "--dry-run", target, f"VENV={tmp_path / 'venv'}"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    installs = [line.split() for line in plan.splitlines() if " pip install " in line]
    assert [words[-1].strip("'") for words in installs] == [".", *(f".{each}" for each in extras)]
    assert not any("--quiet" in words or "-q" in words for words in installs)
