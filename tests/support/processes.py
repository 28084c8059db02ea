"""Real processes in tests: start, wait for a line or a condition with a deadline, end, reap."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType

from tests.support.forks.processes import Popen
from tests.support.paths import ROOT

PATIENCE_SECONDS = 20.0
"""How long to wait for a short operation; generous, because machines are busy."""


def wait_until(
    condition: Callable[[], bool],
    what: str | Callable[[], str],
    timeout_seconds: float = PATIENCE_SECONDS,
    pause_seconds: float = 0.03,
) -> float:
    """Wait until `condition()` holds; return the seconds it took, fail the test otherwise.

    :param pause_seconds: the longest pause; polling at 0.002 took a twentieth of a processor.
    """
    began = time.monotonic()
    pause = min(0.002, pause_seconds)
    while not condition():
        if time.monotonic() - began > timeout_seconds:
            said = what if isinstance(what, str) else what()
            raise AssertionError(f"after {timeout_seconds} s still not: {said}")
        time.sleep(pause)
        pause = min(1.25 * pause, pause_seconds)
    return time.monotonic() - began


def whole_lines(path: Path) -> list[str]:
    """Return the lines of a file that others are writing, without one that has no end yet."""
    text = path.read_text() if path.exists() else ""
    return text[: text.rfind("\n") + 1].splitlines()


def log_tail(path: Path, lines: int = 60) -> str:
    """Return the end of a server's log, without its start."""
    if not path.exists():
        return ""
    text = path.read_text(errors="replace").splitlines()[-lines:]
    return "\n".join([f"--- {path}", *text])


def alive(pid: int) -> bool:
    """Return whether a process runs or is stopped; a zombie is dead."""
    return _stat(pid).get("state", "Z") not in "ZX"


def stopped(pid: int) -> bool:
    """Return whether a process is stopped by a signal."""
    return _stat(pid).get("state") == "T"


def children(pid: int) -> list[int]:
    """Return the direct children of a process that are alive, in order of their start."""
    return [each for each in _pids() if _stat(each).get("parent") == str(pid) and alive(each)]


def descendants(pid: int) -> list[int]:
    """Return every living descendant of a process."""
    return [each for child in children(pid) for each in (child, *descendants(child))]


def _pids() -> list[int]:
    return sorted(int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit())


def _in_sessions(leaders: Container[int]) -> list[int]:
    """Return the living processes of sessions; it takes an eighth of the time of `children`."""
    found = []
    for pid in _pids():
        with contextlib.suppress(ProcessLookupError):
            if os.getsid(pid) in leaders and alive(pid):
                found.append(pid)
    return found


def _stat(pid: int) -> dict[str, str]:
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return {}
    state, parent = text.rpartition(")")[2].split()[:2]
    return {"state": state, "parent": parent}


class Proc:
    """A process whose output, stdout and stderr as one, is collected line by line.

    As a context manager it leaves nothing behind: the process and all its descendants are
    killed, and it is reaped.
    """

    def __init__(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | Path = ROOT,
    ) -> None:
        surroundings = {**os.environ, "PYTHONPATH": str(ROOT)}
        # With it, print() writes a line and its end apart, and a line of the log could come
        # between them.
        surroundings.pop("PYTHONUNBUFFERED", None)
        self._process = Popen(
            list(argv),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**surroundings, **(env or {})},
            cwd=cwd,
            start_new_session=True,
        )
        self._lines: list[str] = []
        self._news = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @classmethod
    def python(
        cls, *argv: str, env: Mapping[str, str] | None = None, cwd: str | Path = ROOT
    ) -> Proc:
        """Start this Python with arguments."""
        return cls([sys.executable, *argv], env=env, cwd=cwd)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def ended(self) -> bool:
        return self._process.poll() is not None

    @property
    def output(self) -> str:
        """Everything it has printed so far."""
        with self._news:
            return "\n".join(self._lines)

    def wait_for_line(
        self, pattern: str, *, count: int = 1, timeout_seconds: float = PATIENCE_SECONDS
    ) -> list[re.Match[str]]:
        """Wait until `count` lines match a regular expression; return the matches of all."""
        found: list[re.Match[str]] = []

        def enough() -> bool:
            found[:] = [match for line in self._lines if (match := re.search(pattern, line))]
            return len(found) >= count

        with self._news:
            if not self._news.wait_for(enough, timeout_seconds):
                raise AssertionError(
                    f"{len(found)} of {count} lines match {pattern!r} in:\n"
                    + "\n".join(self._lines)
                )
        return found

    def send(self, number: signal.Signals) -> None:
        """Send it a signal."""
        self._process.send_signal(number)

    def wait(self, timeout_seconds: float = PATIENCE_SECONDS) -> int:
        """Wait for its end and return its exit code, negative for a signal."""
        try:
            code = self._process.wait(timeout_seconds)
        except subprocess.TimeoutExpired as error:
            raise AssertionError(f"still running; it said:\n{self.output}") from error
        self._reader.join(1.0)
        return code

    def kill(self) -> None:
        """Kill it and its descendants, and reap it; idempotent."""
        if self._process.poll() is not None:
            return
        family = left = [self.pid, *descendants(self.pid)]
        while left:
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self._process.wait()
            left = _in_sessions(family)  # those started while it looked for them

    def __enter__(self) -> Proc:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.kill()
        self._reader.join(2.0)
        if error is not None:  # pytest shows it beside the failure
            print(f"process {self.pid} said:\n{self.output}")
        if self._process.stdout is not None and not self._reader.is_alive():
            self._process.stdout.close()

    def _read(self) -> None:
        if self._process.stdout is None:
            return
        with self._process.stdout as lines:  # open until the last process that has it has ended
            for line in lines:
                with self._news:
                    self._lines.append(line.rstrip("\n"))
                    self._news.notify_all()


@contextlib.contextmanager
def paused(pid: int, *addresses: str) -> Iterator[None]:
    """Stop a process (SIGSTOP) for the time of the block, as `freeze` does."""
    try:
        freeze(pid, *addresses)
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def freeze(pid: int, *addresses: str) -> None:
    """Stop a process, though never while it holds the write lock of one of its SQLite files.

    A process stopped within a write stops all others (docs/design.rst); another test shows it.
    """
    files = [address[7:] for address in addresses if address.startswith("sqlite:")]
    while True:
        os.kill(pid, signal.SIGSTOP)
        wait_until(lambda: stopped(pid), f"process {pid} is stopped")
        if all(map(_can_be_written, files)):
            return
        os.kill(pid, signal.SIGCONT)
        # A process that writes all the time is mostly stopped within a write. Let others write
        # between two attempts: their connections are dropped if the file is locked for long.
        time.sleep(0.05)


def _can_be_written(path: str) -> bool:
    with contextlib.closing(sqlite3.connect(path, timeout=0.05, isolation_level=None)) as file:
        try:
            file.execute("BEGIN IMMEDIATE")
        except sqlite3.OperationalError:
            return False
        file.execute("ROLLBACK")
        return True


@contextlib.contextmanager
def child(code: str, *arguments: str, kill: bool = False) -> Iterator[subprocess.Popen[str]]:
    """Run code in a process with pipes, which ends with its input or, with `kill`, at once."""
    process = Popen(
        [sys.executable, "-c", code, *arguments],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        with process:
            yield process
            if process.stdin is not None and not process.stdin.closed:
                process.stdin.close()
            if kill:
                process.kill()
    finally:
        process.kill()


def said(process: subprocess.Popen[str]) -> str:
    """Return the next line that a child prints."""
    if process.stdout is None:
        raise AssertionError("the child was started without a pipe")
    return process.stdout.readline().strip()
