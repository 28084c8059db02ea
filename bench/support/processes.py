"""Starting, stopping and measuring the processes of a benchmark."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from tests.support.paths import ROOT

_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")


class ProgramError(Exception):
    """A program under test ended or stopped responding. Contains the end of its output."""


class Program:
    """A process with its output in a file. Its descendants end with it."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        environment: Mapping[str, str] | None = None,
        folder: Path | None = None,
        talk: bool = False,
    ) -> None:
        """Start `command`.

        :param environment: added to this process' environment, with the repository importable.
        :param talk: use pipes as standard input and output instead of the log.
        """
        self.command = list(command)
        # stop() closes and thereby removes it.
        self._log = tempfile.NamedTemporaryFile(  # noqa: SIM115
            prefix="bench-", suffix=".log"
        )
        inherited = {**os.environ, "PYTHONPATH": str(ROOT), **(environment or {})}
        self.process = subprocess.Popen(
            self.command,
            stdin=subprocess.PIPE if talk else subprocess.DEVNULL,
            stdout=subprocess.PIPE if talk else self._log,
            stderr=self._log,
            cwd=folder or ROOT,
            env=inherited,
            start_new_session=True,
            text=talk,
        )

    @property
    def pid(self) -> int:
        return self.process.pid

    def failure(self, what: str) -> ProgramError:
        """Return the error for this program, with the end of its log."""
        tail = Path(self._log.name).read_text(errors="replace")[-2000:]
        return ProgramError(f"{' '.join(self.command[:6])} {what}\n{tail}")

    def read_line(self, timeout_seconds: float) -> str:
        """Return the next line of output; needs `talk`."""
        stream = self.process.stdout
        if stream is None:
            raise ValueError("started without a pipe")
        # Programs print one line per answer, so the stream's buffer contains no further line.
        if not select.select([stream], [], [], timeout_seconds)[0]:
            raise self.failure(f"printed nothing for {timeout_seconds:g} s")
        line = stream.readline()
        if not line:
            self.process.wait(10)
            raise self.failure(f"ended with {self.process.returncode}")
        return str(line)

    def write_line(self, line: str) -> None:
        """Write one line of input; needs `talk`."""
        stream = self.process.stdin
        if stream is None:
            raise ValueError("started without a pipe")
        stream.write(line + "\n")
        stream.flush()

    def wait(self, timeout_seconds: float) -> None:
        """Wait until it exits successfully."""
        try:
            code = self.process.wait(timeout_seconds)
        except subprocess.TimeoutExpired:
            raise self.failure(f"still runs after {timeout_seconds:g} s") from None
        if code:
            raise self.failure(f"ended with {code}")

    def stop(self, patience_seconds: float = 10.0) -> None:
        """Stop it with SIGTERM, then kill it and its descendants. Idempotent."""
        family = tree(self.pid) if self.process.poll() is None else []
        if family:
            self.process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(patience_seconds)
        for pid, started in family:
            if _started(pid) == started:  # still the same process, not a later one with the same id
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                with contextlib.suppress(BrokenPipeError):
                    stream.close()
        self._log.close()

    def __enter__(self) -> Program:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()


# --- figures of /proc ---------------------------------------------------------------


def _fields(pid: int) -> list[str]:
    """Return the fields of /proc/<pid>/stat after the name, [] if the process is gone."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return []
    return text.rpartition(")")[2].split()


def _started(pid: int) -> str | None:
    fields = _fields(pid)
    return fields[19] if fields and fields[0] != "Z" else None


def tree(pid: int) -> list[tuple[int, str]]:
    """Return `pid` and its descendants, as (pid, start time) pairs."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit() and (fields := _fields(int(name))):
            children.setdefault(int(fields[1]), []).append(int(name))
    found: list[tuple[int, str]] = []
    waiting = [pid]
    while waiting:
        here = waiting.pop()
        started = _started(here)
        if started is not None:
            found.append((here, started))
            waiting.extend(children.get(here, ()))
    return found


def cpu_seconds(pid: int) -> float:
    """Return the processor time of `pid` and its living descendants."""
    return sum(_cpu_of_each(pid).values())


def server_cpu_seconds(pid: int) -> float:
    """Return the processor time of `pid`, its living descendants, and its children that ended."""
    fields = _fields(pid)
    ended = (int(fields[13]) + int(fields[14])) / _TICKS_PER_SECOND if fields else 0.0
    return cpu_seconds(pid) + ended


def _cpu_of_each(pid: int) -> dict[tuple[int, str], float]:
    """Return the processor time of each process of a tree, by process id and start time."""
    found = {}
    for member in tree(pid):
        if fields := _fields(member[0]):
            found[member] = (int(fields[11]) + int(fields[12])) / _TICKS_PER_SECOND
    return found


def idle_percent(pid: int, seconds: float) -> float:
    """Return the share of a core that the processes use while idle.

    A process that ends in between is left out, because its earlier usage is unknown.
    """
    before, start = _cpu_of_each(pid), time.monotonic()
    _pause(seconds)
    used = sum(now - before.get(each, 0.0) for each, now in _cpu_of_each(pid).items())
    return 100 * used / (time.monotonic() - start)


def _pause(seconds: float) -> None:
    select.select([], [], [], seconds)


# --- reports of a worker -----------------------------------------------


class Report:
    """A named pipe into which the processes of a run write lines of JSON."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "report.pipe"
        os.mkfifo(self.path, 0o600)
        # Also open for writing, so that a read never returns the end of the file.
        self._fd = os.open(self.path, os.O_RDWR | os.O_CLOEXEC)
        self._rest = b""

    def read(self, timeout_seconds: float, *programs: Program) -> dict[str, Any]:
        """Return the next report; raise ProgramError if one of `programs` ends before it."""
        deadline = time.monotonic() + timeout_seconds
        with _watched(programs) as ends:
            while b"\n" not in self._rest:
                left = deadline - time.monotonic()
                if left <= 0:
                    raise _late(programs, timeout_seconds)
                ready, _, _ = select.select([self._fd, *ends], [], [], left)
                if self._fd in ready:
                    self._rest += os.read(self._fd, 1 << 20)
                elif ready:
                    raise ends[ready[0]].failure("ended before it reported")
        line, _, self._rest = self._rest.partition(b"\n")
        value: dict[str, Any] = json.loads(line)
        return value

    def close(self) -> None:
        os.close(self._fd)
        self.path.unlink()

    def __enter__(self) -> Report:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _late(programs: Sequence[Program], seconds: float) -> ProgramError:
    if programs:
        return programs[0].failure(f"did not report within {seconds:g} s")
    return ProgramError(f"no report within {seconds:g} s")


@contextlib.contextmanager
def _watched(programs: Sequence[Program]) -> Iterator[dict[int, Program]]:
    """Yield descriptors that become readable once a program ends."""
    ends = {os.pidfd_open(program.pid): program for program in programs}
    try:
        yield ends
    finally:
        for descriptor in ends:
            os.close(descriptor)
