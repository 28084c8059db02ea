"""Runs of items in several processes, in small suites."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from pathlib import Path

import pytest

from tests.support.processes import wait_until
from tests.support.runs.small_suites import closing, ended, start

pytestmark = pytest.mark.slow

SUITE = """
import os
import time
from pathlib import Path

import pytest

PLACE = Path(__file__).parent


@pytest.fixture(scope="session")
def server(tmp_path_factory, shared_folder):
    assert tmp_path_factory.getbasetemp().parent == shared_folder
    yield
    (PLACE / f"ended-{os.getpid()}").touch()


def ran(name):
    with (PLACE / "ran").open("a") as file:
        file.write(f"{os.getpid()} {name}\\n")


@pytest.mark.together("group")
@pytest.mark.parametrize("number", range(8))
def test_grouped(number, server):
    ran("grouped")


@pytest.mark.parametrize("number", range(20))
def test_single(number, server):
    ran("single")
    time.sleep(0.02)


def test_lost(server):
    ran("lost")
    if "LOSE" in os.environ:
        os.kill(os.getpid(), 9)


def test_waits(server):
    (PLACE / "waits").touch()
    if "WAIT" in os.environ:
        time.sleep(60)


def test_fails(server):
    ran("fails")
    assert "FAIL" not in os.environ, "printed by the report"
"""


def started(folder: Path, *options: str, **environment: str) -> subprocess.Popen[str]:
    """Start a run in three processes."""
    options = ("--processes", "3", f"--basetemp={folder / 'temporary'}", *options)
    return start(folder, {"test_suite.py": SUITE}, ["processes"], *options, **environment)


def pids(folder: Path) -> dict[str, list[str]]:
    """Return the processes that have run each kind of items, one for each item."""
    found: dict[str, list[str]] = {}
    for line in (folder / "ran").read_text().splitlines():
        pid, name = line.split()
        found.setdefault(name, []).append(pid)
    return found


def test_a_group_runs_in_one_process(tmp_path: Path) -> None:
    """All others are given out to all processes, each of which ends its fixtures."""
    run = started(tmp_path)
    code, out = ended(run)
    assert (code, closing(out)) == (0, "31 passed")
    found = pids(tmp_path)
    assert len(found["grouped"]) == 8
    assert len(set(found["grouped"])) == 1
    assert len(found["single"]) == 20
    assert len(set(found["single"])) == 3
    assert str(run.pid) not in found["single"]
    assert len(list(tmp_path.glob("ended-*"))) == 3
    assert len(list((tmp_path / "temporary").glob("process*"))) == 3


def test_a_lost_process_costs_one_item(tmp_path: Path) -> None:
    """A new one runs its others, and none runs twice."""
    code, out = ended(started(tmp_path, LOSE="1"))
    assert (code, closing(out)) == (1, "1 failed, 30 passed"), out
    assert re.search(r"the process that ran \S+::test_lost was killed by signal 9", out)
    assert {name: len(each) for name, each in pids(tmp_path).items()} == {
        "grouped": 8,
        "single": 20,
        "lost": 1,
        "fails": 1,
    }


def test_a_failure_ends_the_run_on_request(tmp_path: Path) -> None:
    """Its report is that of a run in one process; items that have begun end."""
    code, out = ended(started(tmp_path, "-x", FAIL="1"))
    assert code == 1
    assert closing(out).startswith("1 failed, ")
    assert "E       AssertionError: printed by the report" in out
    assert "stopping after 1 failures" in out


def test_an_item_that_takes_too_long_is_named(tmp_path: Path) -> None:
    """With the line at which it waits."""
    code, out = ended(started(tmp_path, "-ppytest_timeout", "--timeout", "2", WAIT="1"))
    assert code == 1
    assert "Failed: Timeout (>2.0s)" in out
    assert ">           time.sleep(60)" in out


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_an_interrupted_run_ends_all_fixtures(tmp_path: Path, number: signal.Signals) -> None:
    """Also those of processes that run an item, which they end first."""
    run = started(tmp_path, WAIT="1")
    wait_until((tmp_path / "waits").exists, "an item waits")
    children = Path(f"/proc/{run.pid}/task/{run.pid}/children").read_text().split()
    assert children
    run.send_signal(number)
    for pid in children:
        os.kill(int(pid), signal.SIGINT)  # as the terminal does
    out, _ = run.communicate(timeout=60)
    wanted = {f"ended-{pid}" for pid in children}
    wait_until(
        lambda: wanted <= {each.name for each in tmp_path.glob("ended-*")},
        "all fixtures have ended",
    )
    if number == signal.SIGINT:
        assert run.returncode == pytest.ExitCode.INTERRUPTED
        assert "KeyboardInterrupt" in out
