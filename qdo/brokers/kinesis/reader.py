"""Make the calls of a shard poller, and buffer the messages until they are done."""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections.abc import Callable

from qdo.broker_errors import PositionTrimmedError
from qdo.brokers.aws.errors import (
    BOTO_ERRORS,
    code_of,
    is_not_found,
    is_throttling,
    is_transient,
    translation,
)
from qdo.brokers.catalog import Backlog
from qdo.brokers.kinesis.api import (
    SKEW_SECONDS,
    GetIterator,
    GetRecords,
    KinesisApi,
    PositionTrimmed,
    RetentionPeriod,
    Taken,
)
from qdo.brokers.kinesis.poller import ShardPoller
from qdo.brokers.kinesis.positions import (
    CHILD_START,
    POSITIONS,
    index_in_record,
    sequence_of,
    time_in,
)
from qdo.errors import QdoError
from qdo.positions import format_position, position_of_time

log = logging.getLogger(__name__)

# The number of successive transient failures that the reader only logs.
PATIENCE = 3
_INVALID = "InvalidArgumentException"
_EXPIRED = "ExpiredIteratorException"
# The minimum retention of a stream.
LEAST_RETENTION_SECONDS = 86_400.0
# The maximum size in bytes of the fetched bodies that the buffer keeps for a second fetch.
KEPT_BYTES = 8 * 1024 * 1024
# The minimum number of dropped messages before the buffer shortens its list, which moves the rest.
COMPACT = 1024


class ShardReader:
    """Makes the calls of a `ShardPoller` and handles their failures.

    :param hash_keys: the range of the shard. If None, the range is unknown, and the reader keeps
        messages of other shards.
    :param trimmed: the reaction if the position is gone. ``stop``: raise an error. ``oldest``:
        continue with the oldest record. ``look``: like ``oldest`` but without logging, for callers
        that do not process messages.
    :param is_listed: a function that returns whether the stream still has the shard.
    :ivar failure: the error of the latest call; None if the call succeeded.
    :ivar gap: the error if the record at the position is gone, even without ``stop``; else None.
    """

    def __init__(
        self,
        source: KinesisApi,
        shard: str,
        hash_keys: tuple[int, int] | None,
        poll: ShardPoller,
        trimmed: str,
        is_listed: Callable[[], bool] = lambda: True,
    ) -> None:
        self._api = source
        self._shard = shard
        self._hash_keys = hash_keys
        self.poll = poll
        self._trimmed = trimmed
        self._is_listed = is_listed
        self.failure: QdoError | None = None
        self.gap: PositionTrimmedError | None = None

    def step(self, call: GetIterator | GetRecords, now: float) -> list[Taken]:
        """Make one call of the poller at `now`, a Unix time; return the received messages.

        :raises PositionTrimmedError: the stream no longer has the record at the position.
        :raises QdoError: the failure is permanent, or happened too often in succession.
        """
        self.failure = None
        try:
            if isinstance(call, GetIterator):
                self.poll.iterator_received(self._api.seek(self._shard, call))
                return []
            return self.poll.records_received(self._api.read(call, self._hash_keys), now)
        except PositionTrimmed:
            self._position_trimmed(now)
        except BOTO_ERRORS as error:
            self._failed(error, call, now)
        return []

    def backlog(self, oldest: int | None, now: float) -> Backlog:
        """Return the known backlog of the shard at `now`, a Unix time.

        :param oldest: the position of the oldest read message that is waiting.
        """
        # The head is the current time at Kinesis, because its clock dates the messages. A later
        # head would include messages that have not arrived yet.
        behind = self.poll.behind_seconds(now, oldest)
        empty = oldest is None and (self.poll.ended or self.poll.tip.reached)
        head = position_of_time(now - self._api.ahead_seconds)
        return Backlog(
            0 if empty else 1,
            oldest,
            head,
            approximate=True,
            behind_seconds=behind,
            retention_seconds=self._retention_seconds(behind),
        )

    def _retention_seconds(self, behind: float | None) -> float | None:
        """Return the stream's retention, if it may affect messages of this age."""
        if behind is None or behind < LEAST_RETENTION_SECONDS / 2:
            return None
        try:
            return self._api.retention().seconds
        except QdoError as error:
            log.debug("the retention of the stream cannot be read: %s", error)
            return None

    def _failed(self, error: Exception, call: GetIterator | GetRecords, now: float) -> None:
        address = self._api.address
        found = translation(error, address.place, "shard", f"{address.stream}/{self._shard}")
        if code_of(error) == _EXPIRED:
            log.info("queue %s: the shard iterator expired; requesting a new one", self._shard)
            self.poll.iterator_expired()
        elif code_of(error) == _INVALID and isinstance(call, GetIterator) and call.sequence:
            self._position_trimmed(now)
        elif code_of(error) == _INVALID and _has_time(call) and self.poll.timestamp_rejected():
            log.warning(
                "queue %s: the clock of this machine is ahead of the clock of Kinesis; reading"
                " from a time %g minutes earlier. Correct the clock",
                self._shard,
                SKEW_SECONDS / 60,
            )
        elif is_throttling(error):
            self.failure = found
            pause = self.poll.call_throttled(now)
            # Occasional throttling is harmless. Usually another process, such as a CLI command, has
            # read the shard.
            level = logging.WARNING if self.poll.consecutive_errors >= PATIENCE else logging.INFO
            log.log(level, "queue %s: throttled by Kinesis; retrying in %.1f s", self._shard, pause)
        else:
            pause = self.poll.call_failed(now)
            if is_not_found(error) and not self._is_listed():
                self.expired()
                return
            self.failure = found
            if not is_transient(error) or self.poll.failures > PATIENCE:
                raise found from error
            log.warning("queue %s: %s; retrying in %.1f s", self._shard, found, pause)

    def _position_trimmed(self, now: float) -> None:
        retention = self._api.retention()
        poll = self.poll
        if poll.proves_complete(now, retention):
            log.info(
                "queue %s: its last record was deleted because of its age; no message was missed",
                self._shard,
            )
            poll.resume_at_oldest()
            return
        self.gap = error = self._trimmed_error(retention)
        if self._trimmed == "stop":
            poll.call_failed(now)
            raise error
        if self._trimmed == "oldest":
            log.warning("%s: continuing with the oldest record", error)
        poll.resume_at_oldest()

    def expired(self) -> None:
        """Finish the shard, because it is gone with all its records.

        :raises PositionTrimmedError: workers have not processed the shard to its end.
        """
        poll = self.poll
        if poll.ended:
            return
        sought_oldest = poll.after == POSITIONS.earliest
        if self._trimmed == "stop" and not sought_oldest:
            raise self._trimmed_error(self._api.retention())
        if self._trimmed != "look":
            log.warning("queue %s: the shard has expired; the queue ends here", self._shard)
        poll.finish()

    def _trimmed_error(self, retention: RetentionPeriod) -> PositionTrimmedError:
        after = self.poll.after
        return PositionTrimmedError(
            queue=self._shard,
            position=sequence_of(after),
            time=format_position(time_in(after)) if after > CHILD_START else "never",
            stream=self._api.address.stream,
            hours=f"{retention.seconds / 3600:g}",
        )


def _has_time(call: GetIterator | GetRecords) -> bool:
    return isinstance(call, GetIterator) and call.time is not None


class PrefetchBuffer:
    """The messages of one shard after a position, in order.

    :ivar tip: the position up to which the buffer has all messages of the shard.
    :ivar waiting_bytes: the size of the bodies that the owner has not fetched yet.
    """

    # Fetched messages stay in the buffer until they are finished. So an owner can retry a failed
    # job without reading from Kinesis again. Beyond `KEPT_BYTES`, the buffer drops the oldest of
    # the fetched messages.

    def __init__(self, after: int) -> None:
        self._floor = after
        self.tip = after
        self._rows: list[Taken] = []
        self._first = 0
        self._next = 0
        self._done: set[int] = set()
        self._kept_bytes = 0
        self.waiting_bytes = 0

    @property
    def waiting(self) -> int:
        return len(self._rows) - self._next

    def add(self, rows: list[Taken]) -> None:
        self._rows += rows
        self.waiting_bytes += sum(len(row[1]) for row in rows)

    def take(self, limit: int) -> list[Taken]:
        rows = self._rows[self._next : self._next + limit]
        size = sum(len(row[1]) for row in rows)
        self._next += len(rows)
        self.waiting_bytes -= size
        self._kept_bytes += size
        while self._kept_bytes > KEPT_BYTES and self._first < self._next:
            self._drop()
        return rows

    def done(self, position: int) -> None:
        """Mark one message finished; earlier messages may still be running."""
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
        """Rewind the next fetch to a position; return False if the buffer begins later."""
        if not self.reaches(after):
            return False
        index = index_in_record(after)
        self._next = bisect_right(self._rows, index, lo=self._first, key=_index)
        self.waiting_bytes = sum(len(row[1]) for row in self._rows[self._next :])
        self._kept_bytes = sum(len(row[1]) for row in self._rows[self._first : self._next])
        return True

    def reaches(self, after: int) -> bool:
        """Return whether the buffer still has every message that was read after a position."""
        index = index_in_record(after)
        if index == 0:  # a time before the first message
            return self._floor <= after <= max(self._floor, self.tip)
        return index_in_record(self._floor) <= index <= index_in_record(self.newest())

    def behind(self, after: int) -> int | None:
        """Return the position of the first message after a position; None if there is none."""
        index = bisect_right(self._rows, index_in_record(after), lo=self._first, key=_index)
        return self._rows[index][0] if index < len(self._rows) else None

    def newest(self) -> int:
        """Return the position of the last message, or of the last dropped message if empty."""
        return self._rows[-1][0] if self._first < len(self._rows) else self._floor

    def oldest(self) -> int | None:
        """Return the position of the first unfinished message; None if there is none."""
        return self._rows[self._first][0] if self._first < len(self._rows) else None


def _index(row: Taken) -> int:
    return index_in_record(row[0])
