"""Which messages are in hand, in memory shared with the parent: it outlives this process.

A message that kills its process leaves no exception behind. So each turn keeps word of what it
runs in a place of its own, and when the process has died its parent reads them, and adds an
attempt to each message that was in hand (`qdo.coordination.crashes`). Where the parent has no
memory to share, as for a worker run by a test, the same is written to memory of no use to
anybody, so that the loop over messages need not ask: one store of 8 bytes.

Layout, little-endian on every machine that counts: places of 1024 bytes, of which the first
one is nobody's. A place holds the position of the message in hand (8 bytes, 0: none), the lengths
of the two names (2 bytes each), and the names of queue and worker. Where positions are wider than
that, the 8 bytes hold -1 and the position is in the last 48 bytes of the place.
"""

from __future__ import annotations

import mmap
import os
import struct
import tempfile
from collections.abc import Iterator
from typing import Literal, Protocol

from qdo.coordination.crashes import InHand
from qdo.positions import TIMES, Positions

PLACE_BYTES = 1024
"""Holds the longest names: 200 characters of at most 4 bytes, and a worker's."""
_WORDS = PLACE_BYTES // 8
_POSITION: Literal["l", "q"] = "l" if struct.calcsize("l") == 8 else "q"
"""Format of a position. A store as "l" takes 28 ns, as "q" or "Q" 70 to 100 ns (CPython 3.11)."""
_LENGTHS = struct.Struct("<HH")
_MANY = 1 << 15
"""Added to the length of a queue's name that has several messages in hand at once."""
_NAMES_AT = 8 + _LENGTHS.size
_WIDE_BYTES = 48
_WIDE_AT = PLACE_BYTES - _WIDE_BYTES
_WIDE = -1
"""Stands for a position that is in the last bytes of the place."""


class Notes(Protocol):
    """Where a turn writes the position of the message in hand, at the index of its place."""

    def __setitem__(self, index: int, position: int, /) -> None: ...


class Hands:
    """The places of one process.

    :ivar positions: write the position of the message in hand at the index from `take`.
    """

    def __init__(self, places: int, fd: int | None = None) -> None:
        size = PLACE_BYTES * ((places if fd is not None else 0) + 1)
        self._memory: mmap.mmap
        if fd is None:
            self._memory = mmap.mmap(-1, size)
        else:
            # Sparse: what is never used takes no memory.
            os.ftruncate(fd, size)
            self._memory = mmap.mmap(fd, size)
        self.positions = memoryview(self._memory).cast(_POSITION)
        # The lowest places are used first, so that few pages are ever touched.
        self._free = [] if fd is None else list(range(_WORDS * places, 0, -_WORDS))

    def notes(self, positions: Positions) -> Notes:
        """Return where to write the positions of a broker."""
        return self.positions if positions is TIMES else _WideNotes(self._memory, self.positions)

    def take(self, label: bytes) -> int:
        """Return the index of a free place, for a turn whose names are in `label`."""
        if not self._free:
            return 0
        index = self._free.pop()
        start = 8 * index + 8
        self._memory[start : start + len(label)] = label
        return index

    def give_back(self, index: int) -> None:
        """Take note that the turn has ended and nothing is in hand there."""
        if index:
            self.positions[index] = 0
            self._free.append(index)


class _WideNotes:
    """Writes positions of more than 63 bits."""

    def __init__(self, memory: mmap.mmap, positions: memoryview[int]) -> None:
        self._memory = memory
        self._positions = positions

    def __setitem__(self, index: int, position: int, /) -> None:
        # Nothing is in hand while it is written: half of a position would be another message's.
        self._positions[index] = 0
        start = 8 * index + _WIDE_AT
        self._memory[start : start + _WIDE_BYTES] = position.to_bytes(_WIDE_BYTES, "little")
        self._positions[index] = _WIDE


def label(queue: str, worker: str, in_line: bool = True) -> bytes:
    """Return the names of a turn as a place holds them.

    :param in_line: the queue has one message in hand at a time.
    """
    names = queue.encode(), worker.encode()
    lengths = len(names[0]) | (0 if in_line else _MANY), len(names[1])
    return _LENGTHS.pack(*lengths) + b"".join(names)


def make_memory(name: str = "qdo-hands") -> int:
    """Return the descriptor of memory for a child, which makes it as large as it needs."""
    if hasattr(os, "memfd_create"):  # Linux
        return os.memfd_create(name)
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def read(fd: int) -> list[InHand]:
    """Return what a dead process had in hand."""
    size = os.fstat(fd).st_size
    if not size:
        return []  # it died before it began
    with mmap.mmap(fd, size, prot=mmap.PROT_READ) as memory:
        return list(_found(memory))


def _found(memory: mmap.mmap) -> Iterator[InHand]:
    for start in range(PLACE_BYTES, len(memory), PLACE_BYTES):
        position = int.from_bytes(memory[start : start + 8], "little", signed=True)
        if position == _WIDE:
            wide = memory[start + _WIDE_AT : start + PLACE_BYTES]
            position = int.from_bytes(wide, "little")
        if position:
            queue, worker = _LENGTHS.unpack_from(memory, start + 8)
            in_line, queue = not queue & _MANY, queue & ~_MANY
            names = memory[start + _NAMES_AT : start + _NAMES_AT + queue + worker]
            yield InHand(names[:queue].decode(), names[queue:].decode(), position, in_line)
