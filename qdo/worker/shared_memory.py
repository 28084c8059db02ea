"""Memory that worker processes share with their parent, and that outlives a process.

A message that kills its process leaves no exception behind. So each turn writes its current message
to its own entry. After the death of a process, its parent reads the entries. The parent adds an
attempt to each message that was in flight (`qdo.coordination.interrupted_attempts`).

A blocked loop cannot report its state, either. So a timer of the loop stores the time in this
memory, and the watchdog's native thread stores the blocking job (`qdo.worker.duties.watchdog`). The
parent can read both even while a job holds the interpreter lock (`qdo.worker.supervisor.blocked`).

A broker such as SQS hides a received message from all other consumers until the visibility timeout.
When the owner of a queue dies, another worker owns the queue within a fraction of a second, but the
message would stay hidden. So a process keeps its receipt handles in this memory, and its
replacement releases the messages (`Broker.release`).
"""

from __future__ import annotations

import mmap
import os
import struct
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from qdo.coordination.interrupted_attempts import InFlight
from qdo.positions import TIME_POSITIONS, Positions

# Bytes of an entry. The longest names fit: 200 characters of at most 4 bytes, and the name of a
# worker.
ENTRY_BYTES = 1024
_CHUNK_BYTES = ENTRY_BYTES << 10

# The first entry of the in-flight table contains the state of the event loop. The byte order is
# little-endian, as on all supported machines. After 8 unused bytes follow five numbers of 8 bytes.
# The first is the time of the last beat (0: the loop is unwatched). The second is the time of the
# last contact with the coordinator. The third is the limit. The fourth is the index of the entry in
# flight that blocks the loop (0: unknown). The fifth is the beat at which the watchdog found this
# entry. Then follow 2 bytes of length and a description. Times are in nanoseconds. Each number is
# stored and read atomically, so the parent never sees a part of a number.
_BEAT, _CONTACT, _LIMIT, _ENTRY, _FOUND_AT = range(1, 6)
_NUMBERS = struct.Struct("<8x5qH")
_LENGTH_AT = _NUMBERS.size - 2
_TEXT_BYTES = 900
_NANOSECONDS = 1_000_000_000

# Every other entry begins with the position of the message in flight (8 bytes, 0 without a
# message). Then follow the lengths (2 bytes each) of the names of queue and worker, and the names.
_WORDS = ENTRY_BYTES // 8
# The format of a position. Storing "l" takes 28 ns, and storing "q" or "Q" 70 to 100 ns (CPython
# 3.11).
_POSITION: Literal["l", "q"] = "l" if struct.calcsize("l") == 8 else "q"
_LENGTHS = struct.Struct("<HH")
# A bit in the length of the queue's name. The bit means that several messages of the queue may be
# in flight at once.
_MANY = 1 << 15
_NAMES_AT = 8 + _LENGTHS.size
# Replaces a position of more than 63 bits, which is then in the last bytes of the entry.
_WIDE = -1
_WIDE_BYTES = 48
_WIDE_AT = ENTRY_BYTES - _WIDE_BYTES
# Maximum number of entries to read. A table has two entries for each of at most 100,000 jobs.
_MOST_ENTRIES = 1 << 18

# Maximum number of handles in a receipt store. An entry has two lengths (0 in an unused entry), the
# name of a queue and a receipt handle. The store does not keep handles that are too long or beyond
# this number, so their messages become visible only after the timeout. A handle that is kept for
# too long is harmless, because the broker rejects the release of a deleted message.
MOST_ENTRIES = 16_384
_NOTHING = _LENGTHS.pack(0, 0)


def read_entries(fd: int, most: int) -> Iterator[tuple[int, bytes]]:
    """Yield the numbers and contents of the first `most` entries; skip large empty parts."""
    # Do not map the memory, because the dead process may have shrunk it. Access to a mapping of
    # shrunk memory would kill this process.
    for at in range(0, min(os.fstat(fd).st_size, most * ENTRY_BYTES), _CHUNK_BYTES):
        chunk = os.pread(fd, _CHUNK_BYTES, at)
        if chunk.count(0) < len(chunk):
            for start in range(0, len(chunk) - ENTRY_BYTES + 1, ENTRY_BYTES):
                yield (at + start) // ENTRY_BYTES, chunk[start : start + ENTRY_BYTES]


def text(data: bytes) -> str:
    return data.decode(errors="replace")


@dataclass(frozen=True, slots=True)
class LoopReport:
    """The state of an event loop as the parent reads it."""

    # Clock time at which the loop last ran.
    beat: float
    # Clock time of the process's last contact with the coordinator.
    contact: float
    # Seconds for which the job in flight may block the loop.
    limit_seconds: float
    # Index of the entry in flight that blocks the loop; 0 if unknown.
    entry: int = 0
    # The message and the job that block the loop; "" if unknown.
    blocked_by: str = ""


class LoopState:
    """Writes the state of this process's loop to the in-flight table; a word has 8 bytes."""

    def __init__(self, memory: mmap.mmap, words: memoryview[int]) -> None:
        self._memory = memory
        self._words = words

    def beat(self, now: float, contact: float, limit_seconds: float) -> None:
        """Store the times of a beat and a contact, and the limit of an unknown job."""
        self._words[_CONTACT] = int(contact * _NANOSECONDS)
        self._words[_LIMIT] = int(limit_seconds * _NANOSECONDS)
        self._words[_BEAT] = int(now * _NANOSECONDS)

    def blocked(self, beat: float, limit_seconds: float, entry: int, blocked_by: str) -> None:
        """Store the job that has blocked the loop since a beat, and the job's limit."""
        text = blocked_by.encode()[:_TEXT_BYTES]
        self._memory[_LENGTH_AT : _LENGTH_AT + 2 + len(text)] = struct.pack("<H", len(text)) + text
        self._words[_ENTRY] = entry
        self._words[_LIMIT] = int(limit_seconds * _NANOSECONDS)
        self._words[_FOUND_AT] = int(beat * _NANOSECONDS)

    def unwatched(self) -> None:
        """Store that the loop is no longer watched."""
        self._words[_BEAT] = 0


def read_loop(fd: int) -> LoopReport | None:
    """Return the loop's state from an in-flight table; None if the loop is unwatched."""
    data = os.pread(fd, _NUMBERS.size + _TEXT_BYTES, 0)
    if len(data) < _NUMBERS.size:
        return None  # the process has not created its table yet
    beat, contact, limit, entry, found_at, length = _NUMBERS.unpack_from(data)
    if not beat:
        return None
    report = LoopReport(beat / _NANOSECONDS, contact / _NANOSECONDS, limit / _NANOSECONDS)
    if found_at != beat:
        return report
    blocked_by = text(data[_NUMBERS.size : _NUMBERS.size + length])
    return replace(report, entry=entry, blocked_by=blocked_by)


class InFlightTable:
    """The entries of one process for its messages in flight.

    :ivar positions: positions of the messages in flight, at the indexes that `take` returns.
    :param fd: descriptor of the shared memory; None without a parent.
    """

    def __init__(self, entries: int, fd: int | None = None) -> None:
        size = ENTRY_BYTES * ((entries if fd is not None else 0) + 1)
        self._memory: mmap.mmap
        if fd is None:
            self._memory = mmap.mmap(-1, size)
        else:
            # Unused entries of this sparse file take no memory.
            os.ftruncate(fd, size)
            self._memory = mmap.mmap(fd, size)
        self.positions = memoryview(self._memory).cast(_POSITION)
        self.loop = LoopState(self._memory, self.positions)
        # Use the lowest entries first, to touch few memory pages.
        self._free = [] if fd is None else list(range(_WORDS * entries, 0, -_WORDS))
        # Entries of ended turns in doubt, by worker; see `give_back`.
        self._kept: dict[str, list[int]] = {}

    def notes(self, positions: Positions) -> memoryview[int] | _WideEntries:
        """Return the array in which turns write positions at the indexes of their entries."""
        if positions is TIME_POSITIONS:
            return self.positions
        return _WideEntries(self._memory, self.positions)

    def take(self, label: bytes) -> int:
        """Return the index of a free entry for a turn, or 0 if all are used; see `encode_label`."""
        if self._kept:
            self._free_kept(_worker_of(label))  # the worker's lease is valid again
        if not self._free:
            return 0
        index = self._free.pop()
        start = 8 * index + 8
        self._memory[start : start + len(label)] = label
        return index

    def give_back(self, index: int, *, in_doubt: bool = False) -> None:
        """Free the entry of an ended turn; `in_doubt` means that the lease has expired."""
        if in_doubt and index and self.positions[index]:
            # The message may have been in flight when the session ended. So keep its entry until
            # the next turn of the same worker, or until `forget_worker`.
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
        """Forget the messages of one worker. Call this after counting their attempts."""
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
        # Store 0 during the write, because a partly written position would mean another message.
        self._positions[index] = 0
        start = 8 * index + _WIDE_AT
        self._memory[start : start + _WIDE_BYTES] = position.to_bytes(_WIDE_BYTES, "little")
        self._positions[index] = _WIDE


def encode_label(queue: str, worker: str, in_line: bool = True) -> bytes:
    """Encode the names of a turn; `in_line` means that only one message may be in flight."""
    queue_name = queue.encode()
    worker_name = worker.encode()
    size = len(queue_name) | (0 if in_line else _MANY)
    return _LENGTHS.pack(size, len(worker_name)) + queue_name + worker_name


def _worker_of(label: bytes) -> str:
    queue, worker = _LENGTHS.unpack_from(label)
    start = _LENGTHS.size + (queue & ~_MANY)
    return text(label[start : start + worker])


def make_memory(name: str = "qdo-in-flight") -> int:
    """Return the descriptor of empty memory for a child; the child sets the size."""
    if hasattr(os, "memfd_create"):  # Linux
        return os.memfd_create(name)
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def read_in_flight(fd: int, entry: int = 0) -> list[InFlight]:
    """Return the messages in flight of a dead process, or only the message at index `entry`."""
    only = entry // _WORDS
    return [
        each
        for number, data in read_entries(fd, _MOST_ENTRIES)
        if (number == only if only else number > 0) and (each := _in_flight(data)) is not None
    ]


def _in_flight(entry: bytes) -> InFlight | None:
    """Return the message of an entry; None if the entry is empty."""
    position = int.from_bytes(entry[:8], "little", signed=True)
    if position == _WIDE:
        position = int.from_bytes(entry[_WIDE_AT:], "little")
    if not position:
        return None
    length, worker = _LENGTHS.unpack_from(entry, 8)
    queue = length & ~_MANY
    names = entry[_NAMES_AT : _NAMES_AT + queue + worker]
    return InFlight(text(names[:queue]), text(names[queue:]), position, not length & _MANY)


class SharedReceiptStore:
    """The receipt handles of one process, in memory that a parent, if any, shares."""

    def __init__(self, fd: int | None = None) -> None:
        self._fd = fd
        self._memory: mmap.mmap | None = None
        self._free: list[int] = []
        self._used = 0

    def keep(self, queue: str, receipt: str) -> int:
        """Keep a receipt handle; return its entry number, or 0 if the store is full."""
        names = queue.encode(), receipt.encode()
        if self._fd is None or sum(map(len, names)) + _LENGTHS.size > ENTRY_BYTES:
            return 0
        if self._memory is None:
            self._memory = _mapped(self._fd)
        if self._free:
            entry = self._free.pop()
        elif self._used < MOST_ENTRIES:
            self._used += 1
            entry = self._used
        else:
            return 0
        start = (entry - 1) * ENTRY_BYTES
        data = b"".join(names)
        self._memory[start + _LENGTHS.size : start + _LENGTHS.size + len(data)] = data
        # Write the lengths last, because the lengths make the entry valid.
        self._memory[start : start + _LENGTHS.size] = _LENGTHS.pack(*map(len, names))
        return entry

    def drop(self, place: int) -> None:
        """Drop the handle with an entry number from `keep`."""
        if place and self._memory is not None:
            start = (place - 1) * ENTRY_BYTES
            self._memory[start : start + _LENGTHS.size] = _NOTHING
            self._free.append(place)


def _mapped(fd: int) -> mmap.mmap:
    # Unused entries of this sparse file take no memory.
    os.ftruncate(fd, MOST_ENTRIES * ENTRY_BYTES)
    return mmap.mmap(fd, MOST_ENTRIES * ENTRY_BYTES)


def read_receipts(fd: int) -> list[tuple[str, str]]:
    """Return queue and receipt handle of each message that a dead process held."""
    receipts = []
    for _, entry in read_entries(fd, MOST_ENTRIES):
        queue, receipt = _LENGTHS.unpack_from(entry)
        if queue:
            names = entry[_LENGTHS.size : _LENGTHS.size + queue + receipt]
            receipts.append((text(names[:queue]), text(names[queue:])))
    return receipts
