"""The stacks of a worker process: samples of them, and dumps in memory shared with its parent.

A worker process writes its stacks into memory shared with its parent, at a signal. C code of
`faulthandler` writes them, within the handler of the signal. So the parent reads them even while a
job blocks the event loop, and even while it holds the interpreter lock: no Python code of the
process has to run.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import re
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from types import FrameType

from qdo.fleet.action_machine import Result
from qdo.system.clock import clock
from qdo.system.native import sleep
from qdo.worker.shared_memory import make_memory

STACKS_SIGNAL = signal.SIGRTMIN + 7 if hasattr(signal, "SIGRTMIN") else signal.SIGUSR2
"""Apps rarely use a real-time signal; the default handler of those that are unused ends a process,
so it is sent only to workers that have registered: they have their handler before."""
PATIENCE_SECONDS = 1.0
"""How long a process may take to write its stacks."""
_LOOK_SECONDS = 0.005
_MASKS = re.compile(rb"^(?:ShdPnd|SigBlk):\s*([0-9a-f]+)$", re.MULTILINE)
_FRAME = re.compile(r'  File "(.*)", line (?:\d+|\?\?\?) in (.*)')


def write_at_signal(fd: int) -> None:
    """Write the stacks of all threads of this process to a descriptor at each `STACKS_SIGNAL`."""
    faulthandler.register(STACKS_SIGNAL, file=fd, all_threads=True)


class StackDumps:
    """The memory for the stacks of one child; any thread of the parent may read it."""

    def __init__(self) -> None:
        self.fd = make_memory("qdo-stacks")
        self._taking = threading.Lock()
        self._using = threading.Lock()

    def take(self, pid: int) -> str:
        """Return the stacks of all threads of the child, as far as it writes them in time."""
        with self._taking:
            deadline, before, text = clock() + PATIENCE_SECONDS, -1, b""
            if not self._ask(pid):
                return ""
            while clock() < deadline:
                time.sleep(_LOOK_SECONDS)
                text = self._read()
                if text and len(text) == before and not _is_handling(pid):
                    break
                before = len(text)
        return text.decode(errors="replace")

    def close(self) -> None:
        """Stop sending signals; called before the kernel may use the pid again."""
        with self._using:
            os.close(self.fd)
            self.fd = -1

    def _ask(self, pid: int) -> bool:
        with self._using:
            if self.fd < 0:
                return False
            # The child shares the position in the file.
            os.ftruncate(self.fd, 0)
            os.lseek(self.fd, 0, os.SEEK_SET)
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, STACKS_SIGNAL)
            return True

    def _read(self) -> bytes:
        with self._using:
            return b"" if self.fd < 0 else os.pread(self.fd, os.fstat(self.fd).st_size, 0)


def _is_handling(pid: int) -> bool:
    """Return whether the signal waits for the main thread of a process, or its handler runs there.

    The kernel blocks a signal during its handler. Always False without /proc.
    """
    try:
        with open(f"/proc/{pid}/status", "rb") as file:
            masks = _MASKS.findall(file.read())
    except OSError:
        return False
    return any(int(mask, 16) >> (STACKS_SIGNAL - 1) & 1 for mask in masks)


def functions(dump: str) -> list[list[tuple[str, str]]]:
    """Return the stacks of a dump, each as files and functions from the outermost one."""
    stacks: list[list[tuple[str, str]]] = []
    for line in dump.splitlines():
        frame = _FRAME.fullmatch(line)
        if frame is None:
            stacks.append([])
        elif stacks:
            stacks[-1].insert(0, (frame[1], frame[2]))
    return [stack for stack in stacks if stack]


SAMPLE_SECONDS = 0.01
MAX_FRAMES = 100
"""The innermost frames of a stack that are counted."""


class Samples:
    """Counts of equal stacks."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self.taken = 0

    def add(self, stacks: Iterable[Iterable[str]]) -> None:
        """Add the stacks of one moment, each from its outermost function."""
        self.taken += 1
        self._counts.update(";".join(stack) for stack in stacks)

    def folded(self) -> str:
        """Return a line for each stack, the most frequent first: functions, and a count."""
        return "".join(f"{stack} {count}\n" for stack, count in self._counts.most_common())


def profile_result(samples: Samples, seconds: float) -> Result:
    return Result(f"{samples.taken} samples in {seconds:g} s", samples.folded())


def frame_label(file: str, function: str) -> str:
    """Return a function in the form of a folded stack."""
    folder, name = os.path.split(file)
    if name == "__init__.py":
        name = f"{os.path.basename(folder)}/{name}"
    return f"{name}:{function}".replace(";", ",").replace(" ", "_")


def sample(seconds: float, is_left_out: Callable[[int], bool]) -> Samples:
    """Sample the threads of this process except those left out; blocks a native thread."""
    samples, until = Samples(), clock() + seconds
    while clock() < until:
        frames = sys._current_frames()
        samples.add(_stack(frame) for ident, frame in frames.items() if not is_left_out(ident))
        del frames
        sleep(SAMPLE_SECONDS)
    return samples


def _stack(frame: FrameType | None) -> list[str]:
    labels: list[str] = []
    while frame is not None and len(labels) < MAX_FRAMES:
        code = frame.f_code
        labels.append(frame_label(code.co_filename, code.co_name))
        frame = frame.f_back
    return labels[::-1]
