"""The Kinesis calls of one stream, and the rate limits of its shards.

The local clock may be ahead of the clock of Kinesis. Kinesis dates records by its own clock, and
rejects AT_TIMESTAMP for a time in the future of this clock.

Calls for iterators and records raise `qdo.brokers.aws.errors.BOTO_ERRORS`. All other calls raise
the errors of `qdo.brokers.aws.errors.translation`.
"""

from __future__ import annotations

import base64
import datetime
import email.utils
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from qdo.brokers.aws.errors import translate
from qdo.brokers.aws.http import Calls
from qdo.brokers.kinesis.codec import decoded, is_aggregated, key_of, unpack
from qdo.brokers.kinesis.positions import pack, whole
from qdo.brokers.kinesis.url import KinesisAddress
from qdo.encoding import unreadable
from qdo.positions import format_position, position_of_time
from qdo.system.clock import paced
from qdo.text import describe

# The initially assumed skew. A read by time begins at least this long before now.
SLACK_SECONDS = 5.0
# The largest possible skew. AWS rejects calls with signatures that are further in the future.
SKEW_SECONDS = 300.0
# The maximum number of records that Kinesis returns at once.
MOST_RECORDS = 10_000
# The maximum memory for the messages of one response, in bytes; a single record may need more. Only
# aggregated records of tiny messages reach this limit. Other responses have at most 10 MB.
ANSWER_COST = 32 * 1024 * 1024
# The memory for a message without its body, in bytes.
MESSAGE_COST = 400
# The position, body, key and headers of a message.
Taken = tuple[int, bytes, "str | None", "str | None"]
# The time for which this process caches the description of the stream.
SUMMARY_SECONDS = 60.0
# The maximum number of concurrent calls for iterators, because a worker may own a thousand shards.
SEEKERS = 16
TARGET = "Kinesis_20131202"
# The names of a boto3 client's methods by action.
METHODS = {"GetRecords": "get_records"}


class ClockSkew:
    """The clock skew that a poller assumes; reads by time begin `slack_seconds` before now."""

    def __init__(self) -> None:
        self.slack_seconds = SLACK_SECONDS

    def timestamp_rejected(self) -> bool:
        """Assume the largest skew; return whether this is a change, so that a retry may help."""
        helps = self.slack_seconds < SKEW_SECONDS
        self.slack_seconds = SKEW_SECONDS
        return helps

    @staticmethod
    def complete_until(read_at: float) -> float:
        """Return the time at Kinesis before which no further records can arrive."""
        # `read_at` is the Unix time, by the local clock, of the read that reached the tip. If the
        # local clock is ahead, later records can have earlier times than `read_at`.
        return read_at - SKEW_SECONDS

    @staticmethod
    def ahead_seconds(response: Mapping[str, Any], sent_at: float) -> float:
        """Return the minimum skew that a response's date proves, or 0; `sent_at` is a Unix time."""
        headers = response.get("ResponseMetadata", {}).get("HTTPHeaders", {})
        try:
            date = email.utils.parsedate_to_datetime(headers.get("date", ""))
        except (TypeError, ValueError):
            return 0.0
        return max(0.0, sent_at - (date.timestamp() + 1.0))  # dates have whole seconds


@dataclass(frozen=True, slots=True)
class GetIterator:
    """Ask for a shard iterator."""

    # The ShardIteratorType.
    kind: str
    # The sequence number of the record to begin at.
    sequence: int | None = None
    # The Unix time to begin at.
    time: float | None = None


@dataclass(frozen=True, slots=True)
class GetRecords:
    iterator: str
    limit: int


@dataclass(frozen=True, slots=True)
class Records:
    """The response to `GetRecords`."""

    # The sequence number of the first record; None without records.
    first: int | None
    # The position after all messages of the last record in `rows`; 0 without records.
    last: int
    rows: Sequence[Taken]
    records: int
    # The total size of the records in bytes.
    size: int
    # The next iterator; None at the end of a closed shard.
    next_iterator: str | None
    # The distance of the response from the tip of the shard.
    behind_seconds: float
    # The mean memory for the messages of one record, in bytes.
    record_cost: int = 1
    # Whether `rows` has only the messages of the first records, to limit memory. The poller must
    # request the other records again.
    cut: bool = False


@dataclass(frozen=True, slots=True)
class RetentionPeriod:
    """The retention of a stream, and the time of its creation."""

    seconds: float
    # The Unix time of the stream's creation; all records are newer.
    since: float = 0.0


@dataclass(frozen=True, slots=True)
class StartPosition:
    """The place at which to begin a shard without a recorded position."""

    # "oldest" or "latest" for the oldest or latest message, or a Unix time.
    kind: str | float = "oldest"
    # Whether the shard has parents, which workers read first. In a shard with parents, `latest`
    # begins with the first message, not with the newest message.
    inherits: bool = False

    def seek(self, now: float) -> GetIterator:
        if isinstance(self.kind, float):
            return GetIterator("AT_TIMESTAMP", time=self.kind)
        if self.kind == "latest" and not self.inherits:
            # Use a time instead of LATEST, because the iterator may expire before the first record.
            return GetIterator("AT_TIMESTAMP", time=now - SLACK_SECONDS)
        return GetIterator("TRIM_HORIZON")

    def words(self) -> str:
        if isinstance(self.kind, float):
            return f"the first message after {format_position(position_of_time(self.kind))}"
        if self.inherits:
            return "its first message, because its parent shards are read before it"
        return f"the {'newest' if self.kind == 'latest' else 'oldest'} message"


class PositionTrimmed(Exception):
    """The record to resume at is no longer in the stream."""


class ShardReadLimiter:
    """Limits the rate at which all readers of this process together read each shard."""

    def __init__(self, pause_seconds: float) -> None:
        self.pause_seconds = pause_seconds
        self._next: dict[str, float] = {}
        self._lock = threading.Lock()

    def wait(self, shard: str, now: float) -> float:
        """Return the seconds to wait before a read; if the result is 0, count the read."""
        with self._lock:
            left = self._next.get(shard, 0.0) - now
            if 0 < left <= self.pause_seconds:  # a longer time means that the clock was set back
                return left
            self._next[shard] = now + self.pause_seconds
        return 0.0

    def forget(self, shard: str) -> None:
        with self._lock:
            self._next.pop(shard, None)


class KinesisApi:
    """The read calls of one stream. Safe to use from several threads.

    :param client: a boto3 client without retries.
    :param calls: an object that makes the GetRecords calls, the most frequent calls.
    :ivar ahead_seconds: the minimum time by which the local clock is provably ahead of Kinesis.
    """

    def __init__(self, client: Any, calls: Calls, address: KinesisAddress) -> None:
        self._client = client
        self._calls = calls
        self.address = address
        self.ahead_seconds = 0.0
        self._seeks = threading.BoundedSemaphore(SEEKERS)
        self._cached_summary: tuple[Mapping[str, Any], float] | None = None

    def seek(self, shard: str, seek: GetIterator) -> str:
        call: dict[str, Any] = {
            "StreamName": self.address.stream,
            "ShardId": shard,
            "ShardIteratorType": seek.kind,
        }
        if seek.sequence is not None:
            call["StartingSequenceNumber"] = str(seek.sequence)
        if seek.time is not None:
            call["Timestamp"] = datetime.datetime.fromtimestamp(seek.time, datetime.UTC)
        with self._seeks:
            sent_at = time.time()
            response = self._client.get_shard_iterator(**call)
        self.ahead_seconds = ClockSkew.ahead_seconds(response, sent_at)
        return str(response["ShardIterator"])

    def read(self, read: GetRecords, hash_keys: tuple[int, int] | None) -> Records:
        call = {"ShardIterator": read.iterator, "Limit": read.limit}
        return parse_records(self._calls.call("GetRecords", call), hash_keys)

    def retention(self) -> RetentionPeriod:
        summary = self._summary()
        created = summary.get("StreamCreationTimestamp")
        return RetentionPeriod(
            seconds=float(summary["RetentionPeriodHours"]) * 3600,
            since=0.0 if created is None else created.timestamp(),
        )

    def record_bytes(self) -> int:
        return int(self._summary().get("MaxRecordSizeInKiB") or 1024) * 1024

    def _summary(self) -> Mapping[str, Any]:
        cached = self._cached_summary
        if cached is not None and cached[1] > time.monotonic():
            return cached[0]
        with translate(self.address.place, "stream", self.address.stream):
            response = self._client.describe_stream_summary(StreamName=self.address.stream)
        summary: Mapping[str, Any] = response["StreamDescriptionSummary"]
        self._cached_summary = summary, time.monotonic() + SUMMARY_SECONDS
        return summary


def parse_records(response: Mapping[str, Any], hash_keys: tuple[int, int] | None) -> Records:
    """Parse a GetRecords response, and decode its records to messages."""
    # Once the decoded messages exceed `ANSWER_COST`, omit all later records.
    records = response["Records"]
    rows: list[Taken] = []
    cost = taken = 0
    for record in records:
        found = _messages(record, hash_keys)
        rows += found
        taken += 1
        cost += sum(len(row[1]) for row in found) + MESSAGE_COST * len(found)
        if cost > ANSWER_COST:
            break
    newest = records[taken - 1] if taken else None
    return Records(
        first=int(records[0]["SequenceNumber"]) if records else None,
        last=0 if newest is None else whole(int(newest["SequenceNumber"]), _arrival(newest)),
        rows=rows,
        records=len(records),
        size=sum(_size(record["Data"]) for record in records),
        next_iterator=response.get("NextShardIterator"),
        behind_seconds=(response.get("MillisBehindLatest") or 0) / 1000,
        record_cost=cost // max(1, taken),
        cut=taken < len(records),
    )


def _messages(record: Mapping[str, Any], hash_keys: tuple[int, int] | None) -> list[Taken]:
    """Return the messages of a record; an invalid record becomes one unreadable message."""
    # A record may have any content, because other programs may write to the stream.
    data = _data(record)
    sequence = int(record["SequenceNumber"])
    arrival = _arrival(record)
    # If Kinesis itself distributes the records of the stream, the partition key may be missing.
    key = key_of(record.get("PartitionKey"))
    try:
        unpacked = unpack(data, hash_keys) if is_aggregated(data) else None
        if unpacked is None:
            return [(pack(sequence, 0, arrival), *_content(data, key))]
        return [
            (
                pack(sequence, each.subsequence, arrival),
                *_content(each.data, key_of(each.partition_key)),
            )
            for each in paced(unpacked)
        ]
    except Exception as error:  # noqa: BLE001 - one record must not stop its shard
        return [(pack(sequence, 0, arrival), data, key, unreadable(describe(error)))]


def _content(data: bytes, key: str | None) -> tuple[bytes, str | None, str | None]:
    body, headers = decoded(data)
    return body, key, headers


def _size(data: str | bytes) -> int:
    if isinstance(data, bytes):
        return len(data)
    return len(data) // 4 * 3 - data[-2:].count("=")


def _data(record: Mapping[str, Any]) -> bytes:
    data: str | bytes = record["Data"]
    return base64.b64decode(data) if isinstance(data, str) else data


def _arrival(record: Mapping[str, Any]) -> int:
    moment: float | datetime.datetime = record["ApproximateArrivalTimestamp"]
    seconds = moment.timestamp() if isinstance(moment, datetime.datetime) else moment
    return position_of_time(seconds)
