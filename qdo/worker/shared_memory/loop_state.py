"""The state of a process's event loop, in memory shared with the parent.

A blocked loop cannot report anything itself. So its timer stores the time here, and the watchdog's
native thread stores what blocks it (`qdo.worker.duties.watchdog`). The parent reads both, even
while a job holds the interpreter lock and no thread of the process runs
(`qdo.worker.supervisor.blocked`).

Layout: the first entry of the in-flight table, which no turn uses. After its first 8 bytes follow
five numbers of 8 bytes: the time of the last beat (0: nothing watches the loop), the time of the
last contact with the coordinator, the limit, the index of the entry in flight that blocks the loop
(0: unknown), and the beat for which that was found; then 2 bytes of length and a description. Times
are in nanoseconds.
"""

from __future__ import annotations

import mmap
import os
import struct
from dataclasses import dataclass

_BEAT, _CONTACT, _LIMIT, _ENTRY, _FOUND_AT = range(1, 6)
"""Indexes of the numbers. Each is stored and read at once: the parent never sees half of one."""
_NUMBERS = struct.Struct("<8x5qH")
_LENGTH_AT = _NUMBERS.size - 2
_TEXT_BYTES = 900
_NANOSECONDS = 1_000_000_000


@dataclass(frozen=True, slots=True)
class LoopReport:
    """The state of an event loop as its parent reads it.

    :ivar beat: clock time at which the loop last ran.
    :ivar contact: clock time of its last contact with the coordinator.
    :ivar limit_seconds: how long the job in flight may block the loop.
    :ivar entry: index of the entry in flight that blocks the loop; 0 if unknown.
    :ivar blocked_by: the message and the job that block the loop; "" if unknown.
    """

    beat: float
    contact: float
    limit_seconds: float
    entry: int = 0
    blocked_by: str = ""


class LoopState:
    """The state of the loop of this process.

    :param memory: the memory of the in-flight table, and its `words` of 8 bytes.
    """

    def __init__(self, memory: mmap.mmap, words: memoryview[int]) -> None:
        self._memory = memory
        self._words = words

    def beat(self, now: float, contact: float, limit_seconds: float) -> None:
        """Store that the loop runs, and how long an unknown job may block it from now on.

        :param contact: when the coordinator last answered.
        """
        self._words[_CONTACT] = int(contact * _NANOSECONDS)
        self._words[_LIMIT] = int(limit_seconds * _NANOSECONDS)
        self._words[_BEAT] = int(now * _NANOSECONDS)

    def blocked(self, beat: float, limit_seconds: float, entry: int, blocked_by: str) -> None:
        """Store which job has blocked the loop since a beat, and how long it may do so."""
        text = blocked_by.encode()[:_TEXT_BYTES]
        self._memory[_LENGTH_AT : _LENGTH_AT + 2 + len(text)] = struct.pack("<H", len(text)) + text
        self._words[_ENTRY] = entry
        self._words[_LIMIT] = int(limit_seconds * _NANOSECONDS)
        self._words[_FOUND_AT] = int(beat * _NANOSECONDS)

    def unwatched(self) -> None:
        """Store that nothing watches the loop any more."""
        self._words[_BEAT] = 0


def read_loop(fd: int) -> LoopReport | None:
    """Return the state of another process's loop; None while nothing watches it.

    :param fd: descriptor of its in-flight table.
    """
    data = os.pread(fd, _NUMBERS.size + _TEXT_BYTES, 0)
    if len(data) < _NUMBERS.size:
        return None  # it has not created its table yet
    beat, contact, limit, entry, found_at, length = _NUMBERS.unpack_from(data)
    if not beat:
        return None
    seconds = beat / _NANOSECONDS, contact / _NANOSECONDS, limit / _NANOSECONDS
    if found_at != beat:
        return LoopReport(*seconds)
    text = data[_NUMBERS.size : _NUMBERS.size + length]
    return LoopReport(*seconds, entry, text.decode(errors="replace"))
