"""Receipt handles of a worker process, in memory shared with the parent: it outlives the worker.

A broker such as SQS hides a message from all consumers but its receiver until the visibility
timeout. When the owner of a queue dies, the queue has another owner in a fraction of a second,
but the message would stay hidden. So each receipt handle is kept here. The process that replaces
the dead one releases these messages (`Broker.release`).

Layout, little-endian: entries of 1024 bytes, each with the lengths of a queue's name and of a
receipt handle (2 bytes each; 0: unused), and these two. A handle that does not fit is not kept.
A handle kept for too long is harmless: its message is deleted, and the broker rejects the release.
"""

from __future__ import annotations

import mmap
import os
import struct

from qdo.worker.shared_memory.entries import ENTRY_BYTES, read_entries, text

MOST_ENTRIES = 16_384
"""Handles beyond this number are not kept: their messages are visible after the timeout."""
_LENGTHS = struct.Struct("<HH")
_NOTHING = _LENGTHS.pack(0, 0)


class SharedReceiptStore:
    """The receipt handles of one process.

    :param fd: descriptor of memory shared by a parent. Without it nothing is kept.
    """

    def __init__(self, fd: int | None = None) -> None:
        self._fd = fd
        self._memory: mmap.mmap | None = None
        self._free: list[int] = []
        self._used = 0

    def keep(self, queue: str, receipt: str) -> int:
        """Keep a receipt handle; return the number of its entry, 0 if it was not kept."""
        names = queue.encode(), receipt.encode()
        if self._fd is None or sum(map(len, names)) + _LENGTHS.size > ENTRY_BYTES:
            return 0
        if self._memory is None:
            self._memory = _mapped(self._fd)
        if self._free:
            place = self._free.pop()
        elif self._used < MOST_ENTRIES:
            self._used += 1
            place = self._used
        else:
            return 0
        start = (place - 1) * ENTRY_BYTES
        data = b"".join(names)
        self._memory[start + _LENGTHS.size : start + _LENGTHS.size + len(data)] = data
        # The lengths come last: they make the entry valid.
        self._memory[start : start + _LENGTHS.size] = _LENGTHS.pack(*map(len, names))
        return place

    def drop(self, place: int) -> None:
        """Drop the handle in an entry; `place` is the number that `keep` returned."""
        if place and self._memory is not None:
            start = (place - 1) * ENTRY_BYTES
            self._memory[start : start + _LENGTHS.size] = _NOTHING
            self._free.append(place)


def _mapped(fd: int) -> mmap.mmap:
    # Sparse: unused entries take no memory.
    os.ftruncate(fd, MOST_ENTRIES * ENTRY_BYTES)
    return mmap.mmap(fd, MOST_ENTRIES * ENTRY_BYTES)


def read(fd: int) -> list[tuple[str, str]]:
    """Return queue and receipt handle of each message that a dead process held."""
    found = []
    for _, entry in read_entries(fd, MOST_ENTRIES):
        queue, receipt = _LENGTHS.unpack_from(entry)
        if queue:
            names = entry[_LENGTHS.size : _LENGTHS.size + queue + receipt]
            found.append((text(names[:queue]), text(names[queue:])))
    return found
