"""Servers that all processes of a test run use."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest

from tests.support.processes import alive
from tests.support.runs.small_suites import closing, ended
from tests.support.runs.small_suites import start as start_run
from tests.support.shared_servers import Started, shared


def start() -> Started:
    return Started(1, "", subprocess.Popen(["/bin/sleep", "60"]))


@pytest.mark.parametrize("others", [False, True])
def test_a_server_is_left_to_its_last_user(others: bool, tmp_path: Path) -> None:
    """Popen warns at its end of a process that nothing has waited for, and warnings are errors."""
    started: list[Started] = []

    def begin() -> Started:
        started.append(start())
        return started[0]

    with shared(tmp_path, "server", begin) as found:
        other = shared(tmp_path, "server", start)
        if others:
            assert other.__enter__()["pid"] == found["pid"]
    started[0].process.__del__()  # type: ignore[attr-defined]
    if others:
        other.__exit__(None, None, None)
        assert os.waitpid(found["pid"], 0)[1] == signal.SIGKILL


SUITE = """
import os
from pathlib import Path

import pytest
from tests.support.shared_servers import shared
from tests.unit.support.test_shared_servers import start

@pytest.fixture(scope="session")
def server(shared_folder):
    with shared(shared_folder, "server", start) as found:
        yield found


@pytest.mark.parametrize("number", range(4))
def test_number(number, server):
    Path(__file__).with_name("pid").write_text(str(server["pid"]))
    if number == 1:
        os.kill(os.getpid(), 9)
"""


def test_a_server_of_a_killed_process_ends_with_the_run(tmp_path: Path) -> None:
    """The killed process counts as a user forever; the process that began the run ends it."""
    options = "--processes", "2", f"--basetemp={tmp_path / 'temporary'}"
    run = start_run(tmp_path, {"test_all.py": SUITE}, ["processes"], *options)
    code, out = ended(run)
    assert (code, closing(out)) == (1, "1 failed, 3 passed"), out
    assert not alive(int((tmp_path / "pid").read_text()))
