"""The log of real workers on a terminal: text of other parties neither controls nor forges it."""

from __future__ import annotations

import os
import re
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import qdo
from qdo.brokers.base import Outgoing
from tests.support.cli import WORKER, clean_environment
from tests.support.fakes.hostile_text import HOSTILE, HOSTILE_NAME, TEXT, unsafe
from tests.support.forks.processes import Popen
from tests.support.processes import wait_until

JOBS = "from tests.apps.hostile_log import app\n"
RECORD = re.compile(
    r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z (DEBUG|INFO|WARNING|ERROR) +(qdo|kazoo)\."
)
QUEUES = [f"{kind}-{HOSTILE_NAME}" for kind in ("other", "batch", "process")]
LAST = 4
"""The body that stops the worker."""


def opened(folder: Path) -> qdo.App:
    return qdo.App("a", broker=f"sqlite:{folder / 'qdo-data/messages.db'}")


class OnTerminal:
    """A `qdo-worker` on a terminal of its own."""

    def __init__(self, folder: Path) -> None:
        main, other = os.openpty()
        self._main = main
        self._data = b""
        self.process = Popen(
            [sys.executable, *WORKER, "jobs:app"],
            cwd=folder,
            env=clean_environment(),
            stdin=other,
            stdout=other,
            stderr=other,
            start_new_session=True,
        )
        os.close(other)
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    @property
    def shown(self) -> str:
        return self._data.decode().replace("\r\n", "\n")

    def _read(self) -> None:
        try:
            while data := os.read(self._main, 1 << 16):
                self._data += data
        except OSError:  # the last process has closed the terminal
            pass

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
        self.process.wait()
        self._reader.join()
        os.close(self._main)


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[OnTerminal]:
    (tmp_path / "jobs.py").write_text(JOBS)
    with opened(tmp_path) as app:
        app.broker.send_many([Outgoing(QUEUES[0], b"\x1b[2J{", None, None)])
        for body in ("wait", "worse", *range(LAST)):
            app.send(QUEUES[0], body, key=TEXT[:100], headers={"x": TEXT})
        for queue in QUEUES[1:]:
            app.send_many([(queue, TEXT)] * 3)
    terminal = OnTerminal(tmp_path)
    yield terminal
    terminal.close()


def test_text_of_others_does_not_reach_the_terminal(terminal: OnTerminal, tmp_path: Path) -> None:
    """Names of queues, errors, their kinds, reasons, bodies, keys and headers, of each executor."""
    with opened(tmp_path) as app:
        letters = app.broker.dead_letters
        wait_until(
            lambda: sum(len(letters.records(queue)) for queue in QUEUES) == 11,
            "the dead letters",
            60.0,
        )
        app.send(QUEUES[0], LAST)
    assert terminal.process.wait() == 0
    wait_until(lambda: "stops the worker" in terminal.shown, "the end")
    shown = terminal.shown
    for event in ("skipped", "retrying", "as a whole", "an observer", "job_failure"):
        assert event in shown
    assert unsafe(shown) == set()
    for line in shown.splitlines():
        assert line.startswith("    ") or RECORD.match(line), line
    assert HOSTILE not in shown
