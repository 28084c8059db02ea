"""Messages of a shard that were read and are not known to be finished."""

from __future__ import annotations

from bisect import bisect_right

from qdo.brokers.kinesis.positions import index_in_record
from qdo.brokers.kinesis.requests import Taken

KEPT_BYTES = 8 * 1024 * 1024
"""Bodies of fetched messages that are kept so that they can be fetched again."""
COMPACT = 1024
"""Messages dropped before the list is shortened: each time, the rest of the list is moved."""


class PrefetchBuffer:
    """Messages of one shard from a position on, in order.

    Fetched messages stay until they are finished. So an owner whose job failed need not read them
    from Kinesis again. Beyond `KEPT_BYTES` the oldest of them are dropped.

    :param after: position after which the messages begin.
    """

    def __init__(self, after: int) -> None:
        self._floor = after
        self.tip = after
        """Position up to which the shard has no messages but those in the buffer."""
        self._rows: list[Taken] = []
        self._first = 0
        self._next = 0
        self._done: set[int] = set()
        self._kept_bytes = 0
        self.waiting_bytes = 0
        """Bodies of messages that were not fetched yet."""

    @property
    def waiting(self) -> int:
        """Number of messages that were not fetched yet."""
        return len(self._rows) - self._next

    def add(self, rows: list[Taken]) -> None:
        """Append messages."""
        self._rows += rows
        self.waiting_bytes += sum(len(row[1]) for row in rows)

    def take(self, limit: int) -> list[Taken]:
        """Fetch the next messages, at most `limit`."""
        rows = self._rows[self._next : self._next + limit]
        size = sum(len(row[1]) for row in rows)
        self._next += len(rows)
        self.waiting_bytes -= size
        self._kept_bytes += size
        while self._kept_bytes > KEPT_BYTES and self._first < self._next:
            self._drop()
        return rows

    def done(self, position: int) -> None:
        """Mark one message finished; earlier ones may still be running."""
        if index_in_record(position) <= index_in_record(self._floor):
            return
        self._done.add(position)
        while self._first < self._next and self._rows[self._first][0] in self._done:
            self._drop()
        if not self._next - self._first:
            self._done.clear()

    def done_through(self, position: int) -> None:
        """Mark all fetched messages up to a position finished."""
        while self._first < self._next and self._rows[self._first][0] <= position:
            self._drop()

    def _drop(self) -> None:
        row = self._rows[self._first]
        self._first += 1
        self._floor = row[0]
        self._kept_bytes -= len(row[1])
        self._done.discard(row[0])
        if self._first >= COMPACT and 2 * self._first >= len(self._rows):
            del self._rows[: self._first]
            self._next -= self._first
            self._first = 0

    def rewind(self, after: int) -> bool:
        """Fetch again from after a position; return False if the buffer does not reach it."""
        if not self.reaches(after):
            return False
        index = index_in_record(after)
        self._next = bisect_right(self._rows, index, lo=self._first, key=_index)
        self.waiting_bytes = sum(len(row[1]) for row in self._rows[self._next :])
        self._kept_bytes = sum(len(row[1]) for row in self._rows[self._first : self._next])
        return True

    def reaches(self, after: int) -> bool:
        """Return whether the buffer has every message after a position that was read."""
        index = index_in_record(after)
        if index == 0:  # a time before the first message
            return self._floor <= after <= max(self._floor, self.tip)
        return index_in_record(self._floor) <= index <= index_in_record(self.newest())

    def behind(self, after: int) -> int | None:
        """Return the position of the first message after a position, None without one."""
        index = bisect_right(self._rows, index_in_record(after), lo=self._first, key=_index)
        return self._rows[index][0] if index < len(self._rows) else None

    def newest(self) -> int:
        """Return the position of the last message, or the one after which messages will begin."""
        return self._rows[-1][0] if self._first < len(self._rows) else self._floor

    def oldest(self) -> int | None:
        """Return the position of the first unfinished message, None without one."""
        return self._rows[self._first][0] if self._first < len(self._rows) else None


def _index(row: Taken) -> int:
    return index_in_record(row[0])
