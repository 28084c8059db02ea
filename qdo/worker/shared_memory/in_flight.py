"""The messages in flight, in memory shared with the parent: it outlives this process.

A message that kills its process leaves no exception behind. So each turn writes its current
message to an entry of its own. When the process has died, its parent reads the entries, and adds
an attempt to each message that was in flight (`qdo.coordination.interrupted_attempts`).

A worker without a parent, as in a test, writes to private memory instead. So the loop over
messages needs no check, only one store of 8 bytes.

Layout, little-endian on all supported machines: entries of 1024 bytes, the first of which holds the
state of the event loop (`loop_state`). An entry holds the position of the message in flight (8
bytes, 0: none), the lengths of two names (2 bytes each), and the names of queue and worker. For
positions wider than 8 bytes, the first 8 bytes hold -1 and the position is in the last 48 bytes of
the entry.
"""

from __future__ import annotations

import mmap
import os
import struct
import tempfile
from collections.abc import Iterator
from typing import Literal, Protocol

from qdo.coordination.interrupted_attempts import InFlight
from qdo.positions import TIME_POSITIONS, Positions
from qdo.worker.shared_memory.entries import ENTRY_BYTES, read_entries, text
from qdo.worker.shared_memory.loop_state import LoopState

_WORDS = ENTRY_BYTES // 8
_POSITION: Literal["l", "q"] = "l" if struct.calcsize("l") == 8 else "q"
"""Format of a position. A store as "l" takes 28 ns, as "q" or "Q" 70 to 100 ns (CPython 3.11)."""
_LENGTHS = struct.Struct("<HH")
_MANY = 1 << 15
"""Added to the length of the queue's name if several of its messages may be in flight at once."""
_NAMES_AT = 8 + _LENGTHS.size
_WIDE_BYTES = 48
_WIDE_AT = ENTRY_BYTES - _WIDE_BYTES
_WIDE = -1
"""Marks a position that is in the last bytes of the entry."""
_MOST_ENTRIES = 1 << 18
"""Entries beyond this number are not read; there are two for each of at most 100,000 jobs."""


class InFlightEntries(Protocol):
    """Where a turn writes the position of its message in flight, at the index of its entry."""

    def __setitem__(self, index: int, position: int, /) -> None: ...


class InFlightTable:
    """The entries of one process.

    :ivar positions: positions of the messages in flight, at the indexes from `take`.
    :ivar loop: the state of the event loop.
    :param entries: number of entries.
    :param fd: descriptor of the shared memory, None without a parent.
    """

    def __init__(self, entries: int, fd: int | None = None) -> None:
        size = ENTRY_BYTES * ((entries if fd is not None else 0) + 1)
        self._memory: mmap.mmap
        if fd is None:
            self._memory = mmap.mmap(-1, size)
        else:
            # Sparse: unused entries take no memory.
            os.ftruncate(fd, size)
            self._memory = mmap.mmap(fd, size)
        self.positions = memoryview(self._memory).cast(_POSITION)
        self.loop = LoopState(self._memory, self.positions)
        # The lowest entries are used first: few pages are ever touched.
        self._free = [] if fd is None else list(range(_WORDS * entries, 0, -_WORDS))
        self._kept: dict[str, list[int]] = {}
        """Entries of ended turns by worker, see `give_back`."""

    def notes(self, positions: Positions) -> InFlightEntries:
        """Return the object that accepts the positions of a broker."""
        return (
            self.positions
            if positions is TIME_POSITIONS
            else _WideEntries(self._memory, self.positions)
        )

    def take(self, label: bytes) -> int:
        """Return the index of a free entry for a turn, 0 if none is free.

        :param label: the names of the turn, from `encode_label`.
        """
        if self._kept:
            self._free_kept(_worker_of(label))  # its lease is valid again
        if not self._free:
            return 0
        index = self._free.pop()
        start = 8 * index + 8
        self._memory[start : start + len(label)] = label
        return index

    def give_back(self, index: int, *, in_doubt: bool = False) -> None:
        """Free the entry of a turn that has ended.

        :param in_doubt: whether the lease has expired. The message may then have been in flight
            when the session ended, so its entry is kept until that is known: until the next turn of
            the same worker, or `forget_worker`.
        """
        if in_doubt and index and self.positions[index]:
            start = 8 * index + 8
            worker = _worker_of(self._memory[start : start + ENTRY_BYTES - 8])
            self._kept.setdefault(worker, []).append(index)
        elif index:
            self.positions[index] = 0
            self._free.append(index)

    def of_worker(self, worker: str) -> list[InFlight]:
        """Return the messages in flight under the claims of one worker."""
        return [each for _, each in self._used() if each.worker == worker]

    def forget_worker(self, worker: str) -> None:
        """Forget the messages in flight under the claims of one worker: they are counted."""
        self._free_kept(worker)
        for index, each in self._used():
            if each.worker == worker:
                self.positions[index] = 0

    def _used(self) -> Iterator[tuple[int, InFlight]]:
        for start in range(ENTRY_BYTES, len(self._memory), ENTRY_BYTES):
            if self.positions[start // 8]:
                each = _in_flight(self._memory[start : start + ENTRY_BYTES])
                if each is not None:
                    yield start // 8, each

    def _free_kept(self, worker: str) -> None:
        for index in self._kept.pop(worker, ()):
            self.give_back(index)


class _WideEntries:
    """Writes positions of more than 63 bits."""

    def __init__(self, memory: mmap.mmap, positions: memoryview[int]) -> None:
        self._memory = memory
        self._positions = positions

    def __setitem__(self, index: int, position: int, /) -> None:
        # 0 (none) while writing: half of a position would be the position of another message.
        self._positions[index] = 0
        start = 8 * index + _WIDE_AT
        self._memory[start : start + _WIDE_BYTES] = position.to_bytes(_WIDE_BYTES, "little")
        self._positions[index] = _WIDE


def encode_label(queue: str, worker: str, in_line: bool = True) -> bytes:
    """Return the names of a turn as stored in an entry.

    :param in_line: the queue has at most one message in flight.
    """
    names = queue.encode(), worker.encode()
    lengths = len(names[0]) | (0 if in_line else _MANY), len(names[1])
    return _LENGTHS.pack(*lengths) + b"".join(names)


def _worker_of(label: bytes) -> str:
    queue, worker = _LENGTHS.unpack_from(label)
    start = _LENGTHS.size + (queue & ~_MANY)
    return text(label[start : start + worker])


def make_memory(name: str = "qdo-in-flight") -> int:
    """Return the descriptor of empty memory for a child, which sets its size."""
    if hasattr(os, "memfd_create"):  # Linux
        return os.memfd_create(name)
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def read(fd: int, entry: int = 0) -> list[InFlight]:
    """Return the messages that a dead process had in flight.

    :param entry: index of the only entry to read; 0 for all.
    """
    wanted = entry // _WORDS
    return [
        each
        for number, data in read_entries(fd, _MOST_ENTRIES)
        if (number == wanted if wanted else number > 0) and (each := _in_flight(data)) is not None
    ]


def _in_flight(entry: bytes) -> InFlight | None:
    """Return the message of an entry, None if it has none."""
    position = int.from_bytes(entry[:8], "little", signed=True)
    if position == _WIDE:
        position = int.from_bytes(entry[_WIDE_AT:], "little")
    if not position:
        return None
    queue, worker = _LENGTHS.unpack_from(entry, 8)
    in_line, queue = not queue & _MANY, queue & ~_MANY
    names = entry[_NAMES_AT : _NAMES_AT + queue + worker]
    return InFlight(text(names[:queue]), text(names[queue:]), position, in_line)
