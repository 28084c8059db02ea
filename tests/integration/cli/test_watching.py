"""`--watch` on a real terminal, and without one."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import signal
import struct
import sys
import termios
from collections.abc import Iterator
from pathlib import Path

import pytest

from qdo import App
from tests.support.cli import clean_environment, command
from tests.support.forks.processes import Popen
from tests.support.processes import Proc, wait_until

QUEUES = ("-m", "qdo", "queues", "--app", "desk", "--watch", "0.5s")
STATUS = ("-m", "qdo", "status", "--app", "desk", "--watch", "1s")


def messages(folder: Path) -> Path:
    """Return the broker's file of commands that run in a folder."""
    return folder / "qdo-data" / "messages.db"


class Terminal:
    """A command with a terminal of its own, 80 by 24."""

    def __init__(self, folder: Path, arguments: tuple[str, ...]) -> None:
        self.own, theirs = pty.openpty()
        fcntl.ioctl(self.own, termios.TIOCSWINSZ, struct.pack("4H", 24, 80, 0, 0))
        self.before = termios.tcgetattr(theirs)
        self.theirs = theirs
        self.process = Popen(
            [sys.executable, *arguments],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            cwd=folder,
            env=clean_environment({"TERM": "xterm"}),
            start_new_session=True,
        )
        self._written = b""

    @property
    def written(self) -> str:
        while select.select([self.own], [], [], 0)[0]:
            self._written += os.read(self.own, 65536)
        return self._written.decode(errors="replace")

    def type(self, keys: bytes) -> None:
        os.write(self.own, keys)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.own)
        os.close(self.theirs)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    with App("desk", broker=f"sqlite:{messages(tmp_path)}") as app:
        app.send("first", 1)
    return tmp_path


@pytest.fixture(params=[QUEUES, STATUS], ids=["queues", "status"])
def terminal(folder: Path, request: pytest.FixtureRequest) -> Iterator[Terminal]:
    terminal = Terminal(folder, request.param)
    yield terminal
    terminal.close()


def test_a_screen_follows_the_queues_until_q(folder: Path, terminal: Terminal) -> None:
    wait_until(lambda: "first" in terminal.written, "the first screen")
    with App("desk", broker=f"sqlite:{messages(folder)}") as app:
        app.send("second", 1)
    wait_until(lambda: "second" in terminal.written, "a later screen")
    terminal.type(b"xq")
    assert terminal.process.wait(20) == 0
    assert terminal.written.startswith("\x1b[?1049h")
    assert terminal.written.endswith("\x1b[?1049l")
    assert termios.tcgetattr(terminal.theirs) == terminal.before


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_gives_the_terminal_back(terminal: Terminal, number: signal.Signals) -> None:
    wait_until(lambda: "first" in terminal.written, "the first screen")
    terminal.process.send_signal(number)
    assert terminal.process.wait(20) == 128 + number
    assert "\x1b[?1049l" in terminal.written
    assert termios.tcgetattr(terminal.theirs) == terminal.before


def test_without_a_terminal_outputs_follow_each_other(folder: Path) -> None:
    with Proc.python(*QUEUES, "-o", "name", cwd=folder, env=clean_environment()) as proc:
        proc.wait_for_line("^first$", count=2)
    assert "\x1b" not in proc.output


@pytest.mark.parametrize("wrong", ["0s", "soon"])
def test_wrong_durations_are_rejected(folder: Path, wrong: str) -> None:
    ended = command("-m", "qdo", "queues", "--app", "desk", "-w", wrong, cwd=folder)
    assert (ended.code, ended.out) == (2, "")
