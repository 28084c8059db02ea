"""The stacks of a worker process, in memory shared with its parent.

The process writes its stacks at a signal. C code of `faulthandler` writes them in the signal
handler, without Python code. So the parent can read them even while a job blocks the event loop or
holds the interpreter lock.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import re
import signal
import threading
import time

from qdo.system.clock import clock
from qdo.worker.shared_memory import make_memory

# Apps rarely use a real-time signal. The default handler of an unused signal ends the process, so
# the parent sends it only to registered workers, which have set their handler.
STACKS_SIGNAL = signal.SIGRTMIN + 7 if hasattr(signal, "SIGRTMIN") else signal.SIGUSR2
# How long a process may take to write its stacks.
PATIENCE_SECONDS = 1.0
_LOOK_SECONDS = 0.005
_MASKS = re.compile(rb"^(?:ShdPnd|SigBlk):\s*([0-9a-f]+)$", re.MULTILINE)


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
        """Return the stacks of the child's threads, as far as the child writes them in time."""
        with self._taking:
            if not self._ask(pid):
                return ""
            deadline = clock() + PATIENCE_SECONDS
            before = -1
            text = b""
            while clock() < deadline:
                time.sleep(_LOOK_SECONDS)
                text = self._read()
                if text and len(text) == before and not _is_handling(pid):
                    break
                before = len(text)
        return text.decode(errors="replace")

    def close(self) -> None:
        """Stop sending signals; called before the kernel may reuse the pid."""
        with self._using:
            os.close(self.fd)
            self.fd = -1

    def _ask(self, pid: int) -> bool:
        with self._using:
            if self.fd < 0:
                return False
            # Parent and child share the position in the file.
            os.ftruncate(self.fd, 0)
            os.lseek(self.fd, 0, os.SEEK_SET)
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, STACKS_SIGNAL)
            return True

    def _read(self) -> bytes:
        with self._using:
            return b"" if self.fd < 0 else os.pread(self.fd, os.fstat(self.fd).st_size, 0)


def _is_handling(pid: int) -> bool:
    """Return whether the signal is pending or being handled in a process's main thread."""
    # The kernel blocks a signal during its handler.
    try:
        with open(f"/proc/{pid}/status", "rb") as file:
            masks = _MASKS.findall(file.read())
    except OSError:
        return False
    return any(int(mask, 16) >> (STACKS_SIGNAL - 1) & 1 for mask in masks)
