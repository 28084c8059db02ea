"""Read a shard with only a few calls and without owning the shard, for operators' commands.

Methods raise a QdoError if Kinesis does not respond.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from qdo.broker_errors import PositionTrimmedError
from qdo.brokers.catalog import Backlog
from qdo.brokers.kinesis.api import GetIterator, GetRecords, ShardReadLimiter, Taken
from qdo.brokers.kinesis.poller import ShardPoller
from qdo.brokers.kinesis.reader import ShardReader

# The total size of bodies at which a fetch ends.
FETCH_BYTES = 16 * 1024 * 1024
# The number of records to look at: the record at the position, and the next record.
LOOK_RECORDS = 2
# The maximum number of calls to find the backlog: one for an iterator, and a few for records.
# Responses may be empty.
BACKLOG_CALLS = 4
# No call for the backlog begins after this time, because a shard that does not respond must not
# delay other shards.
BACKLOG_SECONDS = 10.0

Begin = Callable[[int], ShardReader]


class PeekReader:
    """Reads a shard after a position, at the rate that all readers of the shard share."""

    def __init__(
        self,
        shard: str,
        after: int,
        begin: Begin,
        limiter: ShardReadLimiter,
        stopped: threading.Event,
    ) -> None:
        self._shard = shard
        self._after = after
        self._begin = begin
        self._limiter = limiter
        self._stopped = stopped
        self._reader: ShardReader | None = None
        self._rows: list[Taken] = []

    def fetch(self, limit: int) -> list[Taken]:
        """Return the next messages, at most `limit`; fewer at the tip or if bodies are large."""
        size = 0
        while len(self._rows) < limit and size < FETCH_BYTES:
            rows = self._read(limit - len(self._rows))
            if rows is None:
                break
            self._rows += rows
            size += sum(len(row[1]) for row in rows)
        found = self._rows[:limit]
        self._rows = self._rows[limit:]
        return found

    @property
    def poll(self) -> ShardPoller:
        """The poller of the shard; the first access may make calls."""
        return self._started().poll

    def _started(self) -> ShardReader:
        if self._reader is None:
            self._reader = self._begin(self._after)
        return self._reader

    def _read(self, count: int) -> list[Taken] | None:
        """Read until messages arrive; return None at the tip."""
        reader = self._started()
        while True:
            rows = self._call(reader, count + 1)  # one more, because the first record may be known
            if rows:
                return rows
            if rows is None or reader.poll.tip.reached:
                return None

    def _call(self, reader: ShardReader, most: int) -> list[Taken] | None:
        """Make the next call once it is due; return None after the last call, or on a stop."""
        while not self._stopped.is_set():
            now = time.time()
            call = reader.poll.next(now, most)
            if call is None:
                return None
            pause = reader.poll.due_in(now)
            if not pause and isinstance(call, GetRecords):
                pause = self._limiter.wait(self._shard, now)
            if pause <= 0:
                return reader.step(call, now)
            self._stopped.wait(pause)
        return None

    def finds(self) -> bool:
        """Return whether the shard still has the record at the position."""
        reader = self._started()
        while reader.poll.has_position is None:
            if self._call(reader, LOOK_RECORDS) is None or reader.poll.tip.reached:
                break
        return reader.poll.has_position is True

    def head(self) -> int:
        """Return the current time at Kinesis, because its clock dates the messages."""
        # The response to a call for an iterator shows how far the local clock is ahead.
        reader = self._started()
        call = reader.poll.next(time.time())
        if isinstance(call, GetIterator):
            reader.step(call, time.time())
        if reader.failure is not None:
            raise reader.failure
        return reader.backlog(None, time.time()).head

    def look(self) -> Backlog:
        """Make a few calls to find out whether messages are waiting; return the backlog."""
        reader = self._started()
        until = time.monotonic() + BACKLOG_SECONDS
        rows: list[Taken] = []
        for _ in range(BACKLOG_CALLS):
            # Each read counts toward the rate limit of the shard, so the owner can read less often.
            call = reader.poll.next(time.time(), LOOK_RECORDS)
            if call is None or rows or reader.poll.tip.reached or self._stopped.is_set():
                break
            if time.monotonic() > until:
                break
            self._stopped.wait(reader.poll.due_in(time.time()))
            rows = reader.step(call, time.time())
        if reader.failure is not None:
            raise reader.failure
        return reader.backlog(rows[0][0] if rows else None, time.time())

    @property
    def gap(self) -> PositionTrimmedError | None:
        """The error that a worker would get because the record at the position is gone, or None."""
        return self._started().gap
