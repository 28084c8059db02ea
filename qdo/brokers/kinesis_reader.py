"""Reading a shard for those who do not own it: operators' tools. A few requests, then no more."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from qdo.brokers.base import Backlog
from qdo.brokers.kinesis_poller import Read, ShardPoll, Taken
from qdo.brokers.kinesis_reading import Paces, ShardReading

FETCH_BYTES = 16 * 1024 * 1024
"""A fetch of large bodies ends there."""
LOOK_RECORDS = 2
"""The one at the position, and the next."""
BACKLOG_REQUESTS = 4
"""Requests for one look at what waits: an iterator, and a few answers that may be empty."""

Begin = Callable[[int], ShardReading]


class PassingReader:
    """Reads on from a position, at the rate that all readers of a shard share.

    :param begin: makes the reading behind a position; it may ask Kinesis.
    :param stopped: ends waiting for the next request.
    """

    def __init__(
        self, shard: str, after: int, begin: Begin, paces: Paces, stopped: threading.Event
    ) -> None:
        self._shard = shard
        self._after = after
        self._begin = begin
        self._paces = paces
        self._stopped = stopped
        self._reading: ShardReading | None = None
        self._rows: list[Taken] = []

    def fetch(self, limit: int) -> list[Taken]:
        """Return the next messages, at most `limit`, fewer at the tip and of large bodies."""
        size = 0
        while len(self._rows) < limit and size < FETCH_BYTES:
            rows = self._more(limit - len(self._rows))
            if rows is None:
                break
            self._rows += rows
            size += sum(len(row[1]) for row in rows)
        found, self._rows = self._rows[:limit], self._rows[limit:]
        return found

    def close(self) -> None:
        """Nothing is held."""

    @property
    def poll(self) -> ShardPoll:
        """The state of reading; asks where the shard begins the first time."""
        return self._begun().poll

    def _begun(self) -> ShardReading:
        if self._reading is None:
            self._reading = self._begin(self._after)
        return self._reading

    def _more(self, count: int) -> list[Taken] | None:
        """Ask for so many messages; return what came, None at the tip."""
        reading = self._begun()
        while True:
            rows = self._ask(reading, count + 1)  # the first may be one that is known
            if rows:
                return rows
            if rows is None or reading.poll.at_tip:
                return None

    def _ask(self, reading: ShardReading, most: int) -> list[Taken] | None:
        """Make the next request once it is due; None: there is none, or no more time."""
        while not self._stopped.is_set():
            now = time.time()
            request = reading.poll.next(now, most)
            if request is None:
                return None
            pause = reading.poll.due_in(now)
            if not pause and isinstance(request, Read):
                pause = self._paces.wait(self._shard, now)
            if pause <= 0:
                return reading.step(request, now)
            self._stopped.wait(pause)
        return None

    def finds(self) -> bool:
        """Return whether the position is that of a record, or comes before all that are kept."""
        reading = self._begun()
        while reading.poll.has_place is None:
            if self._ask(reading, LOOK_RECORDS) is None or reading.poll.at_tip:
                break
        return reading.poll.has_place is True

    def look(self) -> Backlog:
        """Return whether anything waits, after a few requests at most."""
        reading = self._begun()
        rows: list[Taken] = []
        for _ in range(BACKLOG_REQUESTS):
            # What onlookers take of a shard its owner cannot have.
            request = reading.poll.next(time.time(), LOOK_RECORDS)
            if request is None or rows or reading.poll.at_tip or self._stopped.is_set():
                break
            self._stopped.wait(reading.poll.due_in(time.time()))
            rows = reading.step(request, time.time())
        return reading.seen(rows[0][0] if rows else None, time.time())
