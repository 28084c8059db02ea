"""What of a shard is in hand: read, and not known to be done."""

from __future__ import annotations

from bisect import bisect_right

from qdo.brokers.kinesis_poller import Taken
from qdo.brokers.kinesis_positions import place_of

KEPT_BYTES = 8 * 1024 * 1024
"""Bodies of messages that were given out and are kept, so that they can be given out again."""
COMPACT = 1024
"""Messages given up before the list is cut: each cut moves what is left."""


class Hand:
    """Messages of one shard from a position on, in order.

    Given-out messages stay until they are done, so that an owner whose job failed need not wait for
    Kinesis to give them again; beyond `KEPT_BYTES` the oldest of them go.

    :param after: position behind which they begin.
    """

    def __init__(self, after: int) -> None:
        self._floor = after
        self.tip = after
        """Position up to which it is known that there is nothing but what is in hand."""
        self._rows: list[Taken] = []
        self._first = 0
        self._given = 0
        self._done: set[int] = set()
        self._kept_bytes = 0
        self.waiting_bytes = 0
        """Bodies of messages that were not given out."""

    @property
    def waiting(self) -> int:
        """How many messages were not given out."""
        return len(self._rows) - self._given

    def add(self, rows: list[Taken]) -> None:
        """Add the messages that come next."""
        self._rows += rows
        self.waiting_bytes += sum(len(row[1]) for row in rows)

    def take(self, limit: int) -> list[Taken]:
        """Return the next messages, at most `limit`."""
        rows = self._rows[self._given : self._given + limit]
        size = sum(len(row[1]) for row in rows)
        self._given += len(rows)
        self.waiting_bytes -= size
        self._kept_bytes += size
        while self._kept_bytes > KEPT_BYTES and self._first < self._given:
            self._drop()
        return rows

    def done(self, position: int) -> None:
        """Take note that a message is done; those before it need not be."""
        if place_of(position) <= place_of(self._floor):
            return
        self._done.add(position)
        while self._first < self._given and self._rows[self._first][0] in self._done:
            self._drop()
        if not self._given - self._first:
            self._done.clear()

    def done_through(self, position: int) -> None:
        """Take note that all given-out messages up to a position are done."""
        while self._first < self._given and self._rows[self._first][0] <= position:
            self._drop()

    def _drop(self) -> None:
        row = self._rows[self._first]
        self._first += 1
        self._floor = row[0]
        self._kept_bytes -= len(row[1])
        self._done.discard(row[0])
        if self._first >= COMPACT and 2 * self._first >= len(self._rows):
            del self._rows[: self._first]
            self._given -= self._first
            self._first = 0

    def rewind(self, after: int) -> bool:
        """Give out again what is behind a position; return False where that is not in hand."""
        if not self.reaches(after):
            return False
        place = place_of(after)
        self._given = bisect_right(self._rows, place, lo=self._first, key=_place)
        self.waiting_bytes = sum(len(row[1]) for row in self._rows[self._given :])
        self._kept_bytes = sum(len(row[1]) for row in self._rows[self._first : self._given])
        return True

    def reaches(self, after: int) -> bool:
        """Return whether everything behind a position, as far as it was read, is in hand."""
        place = place_of(after)
        if place == 0:  # a time, from before the first message
            return self._floor <= after <= max(self._floor, self.tip)
        return place_of(self._floor) <= place <= place_of(self.newest())

    def behind(self, after: int) -> int | None:
        """Return the position of the first message behind a position, None without one."""
        index = bisect_right(self._rows, place_of(after), lo=self._first, key=_place)
        return self._rows[index][0] if index < len(self._rows) else None

    def newest(self) -> int:
        """Return the position of the last message, or that behind which the first one will be."""
        return self._rows[-1][0] if self._first < len(self._rows) else self._floor

    def oldest(self) -> int | None:
        """Return the position of the first message that is not done, None without one."""
        return self._rows[self._first][0] if self._first < len(self._rows) else None


def _place(row: Taken) -> int:
    return place_of(row[0])
