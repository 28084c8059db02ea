"""Read the stacks of a worker process through memory that its parent shares.

The process writes its stacks at a signal. The signal handler is C code of `faulthandler`. So the
parent gets the stacks even while a job blocks the event loop or holds the interpreter lock.
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

# Apps rarely use real-time signals. Without a handler, the signal would end the process. So the
# parent sends it only to registered workers, which have set their handler.
STACKS_SIGNAL = signal.SIGRTMIN + 7 if hasattr(signal, "SIGRTMIN") else signal.SIGUSR2
# Maximum seconds that a process may take to write its stacks.
PATIENCE_SECONDS = 1.0
_LOOK_SECONDS = 0.005
_MASKS = re.compile(rb"^(?:ShdPnd|SigBlk):\s*([0-9a-f]+)$", re.MULTILINE)


def write_at_signal(fd: int) -> None:
    """At each `STACKS_SIGNAL`, write the stacks of all threads of this process to a descriptor."""
    faulthandler.register(STACKS_SIGNAL, file=fd, all_threads=True)


class StackDumps:
    """The memory for the stacks of one child, for any thread of the parent."""

    def __init__(self) -> None:
        self.fd = make_memory("qdo-stacks")
        self._taking = threading.Lock()
        self._using = threading.Lock()

    def take(self, pid: int) -> str:
        """Return the stacks of the child's threads that the child writes within the timeout."""
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
        """Stop sending signals. Call this before the kernel may reuse the pid."""
        with self._using:
            os.close(self.fd)
            self.fd = -1

    def _ask(self, pid: int) -> bool:
        with self._using:
            if self.fd < 0:
                return False
            # Reset the file position, which parent and child share.
            os.ftruncate(self.fd, 0)
            os.lseek(self.fd, 0, os.SEEK_SET)
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, STACKS_SIGNAL)
            return True

    def _read(self) -> bytes:
        with self._using:
            return b"" if self.fd < 0 else os.pread(self.fd, os.fstat(self.fd).st_size, 0)


def _is_handling(pid: int) -> bool:
    """Return whether the signal is pending, or its handler runs, in a process's main thread."""
    # The kernel blocks a signal during its handler.
    try:
        with open(f"/proc/{pid}/status", "rb") as file:
            masks = _MASKS.findall(file.read())
    except OSError:
        return False
    return any(int(mask, 16) >> (STACKS_SIGNAL - 1) & 1 for mask in masks)
