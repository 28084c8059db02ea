"""How a job learns that it should end: what `Message.stopping` looks at, and what is raised.

The sign is one byte. A worker that runs jobs in child processes shares the page it stands on, so
that a job there can see it while it computes: no thread, no message, no lock.
"""

from __future__ import annotations

import mmap
import os
import tempfile


class JobInterrupt(BaseException):
    """Raised inside a job that must end now: its time is over, or its worker aborts it.

    Raised where the executor "greenlet" or "thread" runs it. Not an `Exception`, so that
    ``except Exception`` in a job does not take it for a failure of its own. A job may catch it to
    clean up, and then raise it again or say with an outcome how its attempt ended.
    """


class StopSign:
    """A flag that can be shared with child processes."""

    def __init__(self) -> None:
        self._page: mmap.mmap | bytearray = bytearray(1)
        self._file = -1

    def raised(self) -> bool:
        """Return whether the worker of this process drains."""
        return self._page[0] != 0

    def show(self, stopping: bool) -> None:
        """Raise the sign, or lower it."""
        self._page[0] = stopping

    def share(self) -> int:
        """Return a file descriptor for `adopt`, to be passed to a child process."""
        if self._file < 0:
            handle = _nameless_file()
            os.ftruncate(handle, mmap.PAGESIZE)
            page = mmap.mmap(handle, mmap.PAGESIZE)
            page[0] = self._page[0]
            self._page, self._file = page, handle
        return self._file

    def adopt(self, handle: int) -> None:
        """Look at the sign of the process that shared this descriptor, which is closed."""
        self._page = mmap.mmap(handle, mmap.PAGESIZE)
        os.close(handle)


def _nameless_file() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("qdo-stopping")
    handle, path = tempfile.mkstemp(prefix="qdo-stopping-")
    os.unlink(path)
    return handle


SIGN = StopSign()
"""The sign of this process."""
