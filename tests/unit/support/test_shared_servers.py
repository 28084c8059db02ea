"""Servers that all processes of a test run use."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest

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
