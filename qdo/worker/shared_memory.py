"""Memory that worker processes share with their parent, and that outlives a dead process.

A message that kills its process leaves no exception behind. So each turn writes its current message
to a separate entry. After the death of a process, its parent reads the entries. The parent adds an
attempt to each message that was in flight (`qdo.coordination.interrupted_attempts`).

A blocked loop cannot report anything, either. So its timer stores the time here, and the watchdog's
native thread stores the name of the blocking job (`qdo.worker.duties.watchdog`). The parent reads
both even while a job holds the interpreter lock (`qdo.worker.supervisor.blocked`).

A broker such as SQS hides a message from all consumers but its receiver until the visibility
timeout. When the owner of a queue dies, another worker owns the queue within a fraction of a
second. Without a remedy, the message would stay hidden. So each receipt handle is kept here, and
the replacement of the dead process releases these messages (`Broker.release`).
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

# Fits the longest names: 200 characters of at most 4 bytes, and the name of a worker.
ENTRY_BYTES = 1024
_CHUNK_BYTES = ENTRY_BYTES << 10

# The first entry of the in-flight table has the state of the event loop, little-endian as all
# supported machines. After 8 unused bytes follow five numbers of 8 bytes: the time of the last beat
# (0: nothing watches the loop), the time of the last contact with the coordinator, the limit, the
# index of the entry in flight that blocks the loop (0: unknown), and the beat for which this entry
# was found. Then follow 2 bytes of length and a description. Times are in nanoseconds. Each number
# is stored and read atomically: the parent never sees a part of a number.
_BEAT, _CONTACT, _LIMIT, _ENTRY, _FOUND_AT = range(1, 6)
_NUMBERS = struct.Struct("<8x5qH")
_LENGTH_AT = _NUMBERS.size - 2
_TEXT_BYTES = 900
_NANOSECONDS = 1_000_000_000

# Every other entry holds the position of the message in flight (8 bytes, 0: none), the lengths of
# two names (2 bytes each), and the names of queue and worker.
_WORDS = ENTRY_BYTES // 8
# Format of a position. A store as "l" takes 28 ns, as "q" or "Q" 70 to 100 ns (CPython 3.11).
_POSITION: Literal["l", "q"] = "l" if struct.calcsize("l") == 8 else "q"
_LENGTHS = struct.Struct("<HH")
# Added to the length of the queue's name if several of its messages may be in flight at once.
_MANY = 1 << 15
_NAMES_AT = 8 + _LENGTHS.size
# Marks a position of more than 63 bits, which is in the last bytes of the entry.
_WIDE = -1
_WIDE_BYTES = 48
_WIDE_AT = ENTRY_BYTES - _WIDE_BYTES
# Maximum entries to read. There are two entries for each of at most 100,000 jobs.
_MOST_ENTRIES = 1 << 18

# An entry of a receipt store has two lengths (0: unused), the name of a queue and a receipt handle.
# A handle that does not fit is not kept. A handle kept for too long is harmless: its message is
# deleted, and the broker rejects the release. Handles beyond this number are not kept either: their
# messages become visible after the timeout.
MOST_ENTRIES = 16_384
_NOTHING = _LENGTHS.pack(0, 0)


def read_entries(fd: int, most: int) -> Iterator[tuple[int, bytes]]:
    """Yield the numbers and contents of the first `most` entries, without empty parts."""
    # The dead process may have changed the size of the memory. So the memory is not mapped: access
    # to a mapping of shrunk memory would kill this process.
    for at in range(0, min(os.fstat(fd).st_size, most * ENTRY_BYTES), _CHUNK_BYTES):
        chunk = os.pread(fd, _CHUNK_BYTES, at)
        if chunk.count(0) < len(chunk):
            for start in range(0, len(chunk) - ENTRY_BYTES + 1, ENTRY_BYTES):
                yield (at + start) // ENTRY_BYTES, chunk[start : start + ENTRY_BYTES]


def text(data: bytes) -> str:
    return data.decode(errors="replace")


@dataclass(frozen=True, slots=True)
class LoopReport:
    """The state of an event loop, read by the parent."""

    # Clock time at which the loop last ran.
    beat: float
    # Clock time of the process's last contact with the coordinator.
    contact: float
    # How long the job in flight may block the loop.
    limit_seconds: float
    # Index of the entry in flight that blocks the loop; 0 if unknown.
    entry: int = 0
    # The message and the job that block the loop; "" if unknown.
    blocked_by: str = ""


class LoopState:
    """The state of this process's loop, in the `words` of 8 bytes of the in-flight table."""

    def __init__(self, memory: mmap.mmap, words: memoryview[int]) -> None:
        self._memory = memory
        self._words = words

    def beat(self, now: float, contact: float, limit_seconds: float) -> None:
        """Store that the loop runs, and how long an unknown job may now block the loop."""
        self._words[_CONTACT] = int(contact * _NANOSECONDS)
        self._words[_LIMIT] = int(limit_seconds * _NANOSECONDS)
        self._words[_BEAT] = int(now * _NANOSECONDS)

    def blocked(self, beat: float, limit_seconds: float, entry: int, blocked_by: str) -> None:
        """Store which job has blocked the loop since a beat, and the job's limit."""
        text = blocked_by.encode()[:_TEXT_BYTES]
        self._memory[_LENGTH_AT : _LENGTH_AT + 2 + len(text)] = struct.pack("<H", len(text)) + text
        self._words[_ENTRY] = entry
        self._words[_LIMIT] = int(limit_seconds * _NANOSECONDS)
        self._words[_FOUND_AT] = int(beat * _NANOSECONDS)

    def unwatched(self) -> None:
        """Store that nothing watches the loop anymore."""
        self._words[_BEAT] = 0


def read_loop(fd: int) -> LoopReport | None:
    """Return the loop's state from a process's in-flight table; None if nothing watches it."""
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
    """The entries of one process.

    :ivar positions: positions of the messages in flight, at the indexes from `take`.
    :param fd: descriptor of the shared memory, None without a parent.
    """

    def __init__(self, entries: int, fd: int | None = None) -> None:
        size = ENTRY_BYTES * ((entries if fd is not None else 0) + 1)
        self._memory: mmap.mmap
        if fd is None:
            self._memory = mmap.mmap(-1, size)
        else:
            # The memory is sparse: unused entries take no memory.
            os.ftruncate(fd, size)
            self._memory = mmap.mmap(fd, size)
        self.positions = memoryview(self._memory).cast(_POSITION)
        self.loop = LoopState(self._memory, self.positions)
        # Use the lowest entries first, so that few memory pages are touched.
        self._free = [] if fd is None else list(range(_WORDS * entries, 0, -_WORDS))
        # Entries of ended turns by worker, see `give_back`.
        self._kept: dict[str, list[int]] = {}

    def notes(self, positions: Positions) -> memoryview[int] | _WideEntries:
        """Return the array in which turns write positions, at the indexes of their entries."""
        if positions is TIME_POSITIONS:
            return self.positions
        return _WideEntries(self._memory, self.positions)

    def take(self, label: bytes) -> int:
        """Return the index of a free entry for a turn, 0 if none is free; see `encode_label`."""
        if self._kept:
            self._free_kept(_worker_of(label))  # its lease is valid again
        if not self._free:
            return 0
        index = self._free.pop()
        start = 8 * index + 8
        self._memory[start : start + len(label)] = label
        return index

    def give_back(self, index: int, *, in_doubt: bool = False) -> None:
        """Free the entry of a turn that has ended; `in_doubt`: the lease has expired."""
        if in_doubt and index and self.positions[index]:
            # The message may have been in flight when the session ended. So its entry is kept until
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
        """Forget the messages of one worker after their attempts are counted."""
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
        # Store 0 (none) while writing, because a partly written position means another message.
        self._positions[index] = 0
        start = 8 * index + _WIDE_AT
        self._memory[start : start + _WIDE_BYTES] = position.to_bytes(_WIDE_BYTES, "little")
        self._positions[index] = _WIDE


def encode_label(queue: str, worker: str, in_line: bool = True) -> bytes:
    """Return the encoded names of a turn; `in_line`: at most one message is in flight."""
    queue_name = queue.encode()
    worker_name = worker.encode()
    size = len(queue_name) | (0 if in_line else _MANY)
    return _LENGTHS.pack(size, len(worker_name)) + queue_name + worker_name


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


def read_in_flight(fd: int, entry: int = 0) -> list[InFlight]:
    """Return the messages that a dead process had in flight, or only the message of one `entry`."""
    only = entry // _WORDS
    return [
        each
        for number, data in read_entries(fd, _MOST_ENTRIES)
        if (number == only if only else number > 0) and (each := _in_flight(data)) is not None
    ]


def _in_flight(entry: bytes) -> InFlight | None:
    """Return the message of an entry, None if the entry is empty."""
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
    """Receipt handles of one process, in memory shared with a parent, if there is one."""

    def __init__(self, fd: int | None = None) -> None:
        self._fd = fd
        self._memory: mmap.mmap | None = None
        self._free: list[int] = []
        self._used = 0

    def keep(self, queue: str, receipt: str) -> int:
        """Keep a receipt handle; return its entry number, 0 if the handle was not kept."""
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
        # Write the lengths last, because they make the entry valid.
        self._memory[start : start + _LENGTHS.size] = _LENGTHS.pack(*map(len, names))
        return entry

    def drop(self, place: int) -> None:
        """Drop the handle for which `keep` returned this number."""
        if place and self._memory is not None:
            start = (place - 1) * ENTRY_BYTES
            self._memory[start : start + _LENGTHS.size] = _NOTHING
            self._free.append(place)


def _mapped(fd: int) -> mmap.mmap:
    # The memory is sparse: unused entries take no memory.
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
