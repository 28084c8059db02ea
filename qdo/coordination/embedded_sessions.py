"""Signs of life of the sessions of an embedded coordinator, and who was silent for too long.

A session shows that it lives by writing the time into a slot of a file beside the database:
one small write to memory that needs no lock and no disk, so that even a process that waits for
the database keeps its session. These times only tell whom to expire; whether a session lives is
decided by its row in the database alone, in a transaction.
"""

from __future__ import annotations

import os
import struct
import time
from collections import deque
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from qdo.coordination.embedded_store import SessionRow

_SLOT = struct.Struct("<q")
_BLOCK = 4096
_ON_TIME_SECONDS = 0.02
_REMEMBERED_GAPS = 64


def clock() -> float:
    """Return seconds that are the same for all processes and go on while the machine sleeps."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


@cache
def boot() -> str:
    """Return what tells this start of the machine from any other: `clock` starts again then."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


class Beats:
    """The file of slots."""

    def __init__(self, path: str) -> None:
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)

    def reserve(self, slot: int) -> None:
        """Make room for a slot, so that beating never fails for want of disk; raise OSError."""
        end = (slot * _SLOT.size // _BLOCK + 1) * _BLOCK
        os.posix_fallocate(self._fd, 0, end)

    def beat(self, slot: int) -> None:
        """Leave a sign of life."""
        os.pwrite(self._fd, _SLOT.pack(int(clock() * 1e9)), slot * _SLOT.size)

    def read(self) -> list[float]:
        """Return the time of the last sign of life of every slot."""
        size = os.fstat(self._fd).st_size
        return [beat / 1e9 for (beat,) in _SLOT.iter_unpack(os.pread(self._fd, size, 0))]

    def close(self) -> None:
        """Close the file; idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class Watchdog:
    """Judges which sessions were silent for their whole time-out, as far as it could see.

    Time in which the judge itself did not run does not count as silence: when the whole machine
    slept, or all of its processes were stopped, nobody is expired for it afterwards.
    """

    def __init__(self) -> None:
        self._due = float("inf")
        self._asleep: deque[tuple[float, float]] = deque(maxlen=_REMEMBERED_GAPS)

    def silent(self, rows: Iterable[SessionRow], beats: list[float], now: float) -> list[int]:
        """Return the sessions to expire, and note when to look again: see `due`."""
        if now > self._due + _ON_TIME_SECONDS:
            self._asleep.append((self._due, now))
        ends = {row.id: self._end(row, beats) for row in rows}
        self._due = min((end for end in ends.values() if end > now), default=float("inf"))
        return [session for session, end in ends.items() if end <= now]

    def _end(self, row: SessionRow, beats: list[float]) -> float:
        if row.boot != boot():
            return 0.0
        last = beats[row.slot] if row.slot < len(beats) else 0.0
        asleep = sum(end - max(begin, last) for begin, end in self._asleep if end > last)
        return last + asleep + row.timeout_milliseconds / 1000

    def due(self) -> float:
        """Return when the next session would be expired if it stayed silent."""
        return self._due

    def expect(self, due: float) -> None:
        """Note that the next look will be at `due` if that is sooner."""
        self._due = min(self._due, due)
