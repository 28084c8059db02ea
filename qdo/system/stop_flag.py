"""The flag that tells jobs to end: `Message.stopping` reads it.

The flag is one byte. A worker that runs jobs in child processes shares its page with them. A job
there sees it even while it computes: without a thread, a message or a lock.
"""

from __future__ import annotations

import mmap
import os
import tempfile


class StopFlag:
    """A flag that can be shared with child processes."""

    def __init__(self) -> None:
        self._page: mmap.mmap | bytearray = bytearray(1)
        self._file = -1

    def raised(self) -> bool:
        """Return whether the worker of this process is draining."""
        return self._page[0] != 0

    def show(self, stopping: bool) -> None:
        """Set or clear the flag."""
        self._page[0] = stopping

    def share(self) -> int:
        """Return a file descriptor for `adopt` in a child process."""
        if self._file < 0:
            handle = _unnamed_file()
            os.ftruncate(handle, mmap.PAGESIZE)
            page = mmap.mmap(handle, mmap.PAGESIZE)
            page[0] = self._page[0]
            self._page, self._file = page, handle
        return self._file

    def adopt(self, handle: int) -> None:
        """Use the flag of the process that shared this descriptor; closes the descriptor."""
        self._page = mmap.mmap(handle, mmap.PAGESIZE)
        os.close(handle)


def _unnamed_file() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("qdo-stopping")
    handle, path = tempfile.mkstemp(prefix="qdo-stopping-")
    os.unlink(path)
    return handle


SIGN = StopFlag()
"""The stop flag of this process."""
