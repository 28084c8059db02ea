"""The costs of tests that a run prints, in a small suite with xdist."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.paths import ROOT

pytestmark = pytest.mark.slow

BUSY = """
import subprocess, sys, time

BURN = "import time\\nwhile time.process_time() < 0.3: pass"


def test_child():
    subprocess.run([sys.executable, "-c", BURN], check=True)


def test_own():
    until = time.process_time() + 0.3
    while time.process_time() < until:
        pass
"""
IDLE = "def test_idle():\n    pass\n"


@pytest.mark.parametrize("processes", ["0", "2"])
def test_costs_are_listed_by_folder_and_file(tmp_path: Path, processes: str) -> None:
    """The time of children that have ended counts; the dearest file comes first."""
    for name, text in (("unit/test_busy.py", BUSY), ("integration/cli/deep/test_idle.py", IDLE)):
        path = tmp_path / "tests" / name
        path.parent.mkdir(parents=True)
        path.write_text(text)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    command = [sys.executable, "-m", "pytest", "-p", "xdist", "-p", "tests.support.runs.costs"]
    ended = subprocess.run(
        [*command, "-n", processes, "--import-mode", "importlib", "tests"],
        cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    rows = re.findall(r"^(\S+) +(\d+) +([\d.]+) +[\d.]+$", ended.stdout, re.MULTILINE)
    items = {name: int(count) for name, count, _ in rows}
    seconds = {name: float(processor) for name, _, processor in rows}
    assert items["unit"] == items["unit/test_busy.py"] == 2
    assert items["integration/cli"] == 1
    assert items["all"] == 3
    assert seconds["unit"] >= 0.6
    assert seconds["integration/cli"] < 0.3
    assert seconds["all"] >= seconds["unit"] + seconds["shared"]
    names = [name for name, _, _ in rows]
    assert names.index("unit/test_busy.py") < names.index("integration/cli/deep/test_idle.py")
