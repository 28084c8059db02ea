"""The costs of tests that a run prints and compares, in a small suite."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.runs.costs import dearer, folder_of, read_table
from tests.support.runs.small_suites import ended, start

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
STRICT = """
from tests.support.runs import costs

costs.MORE_SECONDS = 0.0
costs.MOST_OTHERS = {most_others}
"""
"""So that seconds are enough for this test beside any other programs."""


FILES = {
    "tests/unit/test_busy.py": BUSY,
    "tests/integration/cli/deep/test_idle.py": IDLE,
}


def run(folder: Path, *options: str, most_others: float = 99.0) -> tuple[int, str]:
    """Run the suite; return its exit code and its output."""
    files = FILES | {"tests/conftest.py": STRICT.format(most_others=most_others)}
    options = ("--import-mode", "importlib", "tests", *options)
    return ended(start(folder, files, ("costs", "processes"), *options))


@pytest.mark.parametrize("processes", ["0", "2"])
def test_costs_are_listed_by_folder_and_file(tmp_path: Path, processes: str) -> None:
    """The time of children that have ended counts; the dearest file comes first."""
    code, out = run(tmp_path, "--processes", processes)
    assert code == 0, out
    rows = re.findall(r"^(\S+) +(\d+) +([\d.]+) +[\d.]+$", out, re.MULTILINE)
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


def test_a_dearer_folder_fails_the_run(tmp_path: Path) -> None:
    """Although all its tests pass; the table that this run would write lets the next one pass."""
    table = tmp_path / "costs.txt"
    table.write_text("# by hand\nunit 0.01\nintegration/cli 9\nshared 99\n")
    code, out = run(tmp_path, "--costs", str(table))
    assert code == 1
    assert re.findall(r"^failed: (\S+) costs", out, re.MULTILINE) == ["unit"]
    assert run(tmp_path, "--write-costs", str(table))[0] == 0
    written = read_table(table.read_text())
    assert written.keys() == {"unit", "integration/cli", "shared", "others"}
    table.write_text("".join(f"{name} {2 * cost + 1}\n" for name, cost in written.items()))
    assert run(tmp_path, "--costs", str(table))[0] == 0


def test_a_run_beside_other_programs_is_not_compared(tmp_path: Path) -> None:
    """Its folders differ by more than the table allows."""
    table = tmp_path / "costs.txt"
    table.write_text("unit 0.01\nintegration/cli 9\nshared 99\n")
    code, out = run(tmp_path, "--costs", str(table), most_others=-99.0)
    assert (code, "not compared" in out) == (0, True)


def test_small_differences_fail_no_run() -> None:
    """Below 15 %, and below 5 s: runs of the same tests differ by that."""
    table = read_table("# comment\nunit  100.0\nfaults 20\n")
    assert dearer({"unit": 114.9, "faults": 25.0, "new": 5.0}, table) == {}
    assert dearer({"unit": 115.1, "faults": 25.1, "new": 5.1}, table) == {
        "unit": 115.1,
        "faults": 25.1,
        "new": 5.1,
    }


def test_a_machine_that_is_slow_for_all_folders_is_not_blamed() -> None:
    """The loop may be as fast as ever; a folder that exceeds what all others do is found."""
    table = dict.fromkeys("abcdef", 100.0)
    assert dearer(dict.fromkeys(table, 140.0), table) == {}
    found = {**dict.fromkeys(table, 140.0), "f": 162.0}
    assert dearer(found, table) == {"f": 162.0}


def test_files_count_under_two_folders_at_most() -> None:
    assert folder_of("tests/integration/cli/messages/test_peek.py") == "integration/cli"
    assert folder_of("tests/unit/jobs/test_retry.py") == "unit"
