"""Heartbeats of the sessions of an embedded coordinator, and the expiry of silent sessions.

A session shows that it lives by writing the time into a slot of a file beside the database. That is
one small write to memory that needs no lock and no disk, so even a process that waits for the
database keeps its session. These times only suggest which session to expire. Whether a session
lives is decided by its row in the database alone, in a transaction.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from qdo.coordination.embedded.store import SessionRow
from qdo.system.clock import clock
from qdo.system.files import Rights, open_file

_SLOT = struct.Struct("<q")
_BLOCK = 4096


@cache
def boot() -> str:
    """Return the id of this boot of the machine: `clock` starts again with each boot."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


class Heartbeats:
    """The file of slots."""

    def __init__(self, path: str, rights: Rights) -> None:
        self._fd = open_file(path, os.O_RDWR, rights)

    def reserve(self, slot: int) -> None:
        """Allocate a slot, so no heartbeat fails for lack of disk space; raises OSError."""
        end = (slot * _SLOT.size // _BLOCK + 1) * _BLOCK
        os.posix_fallocate(self._fd, 0, end)

    def beat(self, slot: int) -> None:
        """Write a heartbeat."""
        os.pwrite(self._fd, _SLOT.pack(int(clock() * 1e9)), slot * _SLOT.size)

    def read(self) -> list[float]:
        """Return the time of the last heartbeat of every slot."""
        size = os.fstat(self._fd).st_size
        return [beat / 1e9 for (beat,) in _SLOT.iter_unpack(os.pread(self._fd, size, 0))]

    def close(self) -> None:
        """Close the file; idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class ExpiryMonitor:
    """Finds sessions that were silent for their whole timeout.

    Silence counts only while the monitor itself was awake. After it slept, for instance with the
    whole machine, all sessions get their full timeout again, as from a newly elected leader.
    """

    def __init__(self) -> None:
        self._awake_since = 0.0
        self._due = float("inf")

    def silent(self, rows: Iterable[SessionRow], beats: list[float], now: float) -> list[int]:
        """Return the sessions to expire, and compute when to check again: see `due`."""
        rows = list(rows)
        shortest = min((row.timeout_milliseconds for row in rows), default=0) / 1000
        if now - self._due > shortest / 4:
            self._awake_since = now
        ends = {row.id: self._end(row, beats) for row in rows}
        self._due = min((end for end in ends.values() if end > now), default=float("inf"))
        return [session for session, end in ends.items() if end <= now]

    def _end(self, row: SessionRow, beats: list[float]) -> float:
        if row.boot != boot():
            return 0.0
        last = beats[row.slot] if row.slot < len(beats) else 0.0
        return max(last, self._awake_since) + row.timeout_milliseconds / 1000

    def due(self) -> float:
        """Return when the next session would be expired if it stayed silent."""
        return self._due

    def expect(self, due: float) -> None:
        """Record that the next check will be at `due`, if that is sooner."""
        self._due = min(self._due, due)
