"""What a worker process holds at a broker, in memory shared with the parent: it outlives it.

A mailbox such as SQS hides a message from everybody but its owner until a time-out. When the
owner dies, the queue has another one in a fraction of a second, who would have to wait for the
message all the same. So each receipt is kept here, and the process that is started in the place
of the dead one has what it held shown again (`Broker.give_back`).

Layout, little-endian: places of 1024 bytes, each with the lengths of a queue's name and of a
receipt (2 bytes each; 0: nothing here), and these. A receipt that does not fit is not kept, and
one that is kept without need does no harm: its message is deleted, and giving it back is refused.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Iterator

PLACE_BYTES = 1024
MOST_PLACES = 16_384
"""Receipts beyond so many are not kept: their messages are seen again after the time-out."""
_LENGTHS = struct.Struct("<HH")
_NOTHING = _LENGTHS.pack(0, 0)


class Receipts:
    """Those of one process.

    :param fd: of memory that a parent shares, None where there is none: then nothing is kept.
    """

    def __init__(self, fd: int | None = None) -> None:
        self._fd = fd
        self._memory: mmap.mmap | None = None
        self._free: list[int] = []
        self._used = 0

    def keep(self, queue: str, receipt: str) -> int:
        """Keep a receipt; return where, 0 for nowhere."""
        names = queue.encode(), receipt.encode()
        if self._fd is None or sum(map(len, names)) + _LENGTHS.size > PLACE_BYTES:
            return 0
        if self._memory is None:
            self._memory = _mapped(self._fd)
        if self._free:
            place = self._free.pop()
        elif self._used < MOST_PLACES:
            self._used += 1
            place = self._used
        else:
            return 0
        start = (place - 1) * PLACE_BYTES
        data = b"".join(names)
        self._memory[start + _LENGTHS.size : start + _LENGTHS.size + len(data)] = data
        # The lengths last: with them the place counts.
        self._memory[start : start + _LENGTHS.size] = _LENGTHS.pack(*map(len, names))
        return place

    def drop(self, place: int) -> None:
        """Forget what is kept at a place, as `keep` returned it."""
        if place and self._memory is not None:
            start = (place - 1) * PLACE_BYTES
            self._memory[start : start + _LENGTHS.size] = _NOTHING
            self._free.append(place)


def _mapped(fd: int) -> mmap.mmap:
    # Sparse: what is never used takes no memory.
    os.ftruncate(fd, MOST_PLACES * PLACE_BYTES)
    return mmap.mmap(fd, MOST_PLACES * PLACE_BYTES)


def read(fd: int) -> list[tuple[str, str]]:
    """Return queue and receipt of each message that a dead process held."""
    size = os.fstat(fd).st_size
    if not size:
        return []  # it never held anything
    with mmap.mmap(fd, size, prot=mmap.PROT_READ) as memory:
        return list(_found(memory))


def _found(memory: mmap.mmap) -> Iterator[tuple[str, str]]:
    for start in range(0, len(memory), PLACE_BYTES):
        queue, receipt = _LENGTHS.unpack_from(memory, start)
        if queue:
            begin = start + _LENGTHS.size
            names = memory[begin : begin + queue + receipt]
            yield names[:queue].decode(), names[queue:].decode()
