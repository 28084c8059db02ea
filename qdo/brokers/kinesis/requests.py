"""Requests and responses of a shard poller, as values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from qdo.brokers.kinesis.clock_skew import SLACK_SECONDS
from qdo.positions import format_position, position_of_time

MOST_RECORDS = 10_000
"""Most records that Kinesis returns at once."""
ANSWER_COST = 32 * 1024 * 1024
"""Memory in bytes that the messages of one response may take; one record may exceed it. Only
aggregated records of tiny messages come near: without them, a response has 10 MB."""
MESSAGE_COST = 400
"""Memory in bytes of a message without its body."""

Taken = tuple[int, bytes, "str | None", "str | None"]
"""Position, body, key and headers of a message."""


@dataclass(frozen=True, slots=True)
class GetIterator:
    """Request a shard iterator.

    :ivar kind: ShardIteratorType.
    :ivar sequence: of the record to begin at.
    :ivar time: Unix time to begin at.
    """

    kind: str
    sequence: int | None = None
    time: float | None = None


@dataclass(frozen=True, slots=True)
class GetRecords:
    """Request the records at an iterator, at most `limit`."""

    iterator: str
    limit: int


@dataclass(frozen=True, slots=True)
class Records:
    """The response to `GetRecords`.

    :ivar first: sequence number of the first record, None without records.
    :ivar last: position after all messages of the last record in `rows`, 0 without records.
    :ivar rows: the messages.
    :ivar records: number of records in the response.
    :ivar size: size of these records in bytes.
    :ivar next_iterator: None at the end of a closed shard.
    :ivar behind_seconds: distance of the response from the tip of the shard.
    """

    first: int | None
    last: int
    rows: Sequence[Taken]
    records: int
    size: int
    next_iterator: str | None
    behind_seconds: float
    record_cost: int = 1
    """Memory in bytes that the messages of one record take, on average."""
    cut: bool = False
    """`rows` has the messages of the first records only: all of them would take too much memory.
    The others must be requested again."""


@dataclass(frozen=True, slots=True)
class RetentionPeriod:
    """How long a stream keeps records.

    :ivar seconds: age at which a record is deleted.
    :ivar since: Unix time of the stream's creation; no record is older.
    """

    seconds: float
    since: float = 0.0


@dataclass(frozen=True, slots=True)
class StartPosition:
    """Where to begin reading a shard that has no position.

    :ivar kind: oldest or latest, or a Unix time.
    :ivar inherits: the shard has parents that are read first. Then `latest` begins with its
        first message, not with its newest.
    """

    kind: str | float = "oldest"
    inherits: bool = False

    def seek(self, now: float) -> GetIterator:
        """Return the request for the first iterator."""
        if isinstance(self.kind, float):
            return GetIterator("AT_TIMESTAMP", time=self.kind)
        if self.kind == "latest" and not self.inherits:
            # A time, not LATEST: the iterator may expire before the first record arrives.
            return GetIterator("AT_TIMESTAMP", time=now - SLACK_SECONDS)
        return GetIterator("TRIM_HORIZON")

    def words(self) -> str:
        """Return a description of the first message that is read."""
        if isinstance(self.kind, float):
            return f"the first message after {format_position(position_of_time(self.kind))}"
        if self.inherits:
            return "its first message, because its parent shards are read before it"
        return f"the {'newest' if self.kind == 'latest' else 'oldest'} message"


class PositionTrimmed(Exception):
    """The record to resume at is no longer in the stream."""
