"""Asking Kinesis for the records of a shard, one request at a time."""

from __future__ import annotations

import base64
import datetime
import email.utils
import logging
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from qdo.brokers.aws_address import KinesisAddress
from qdo.brokers.aws_errors import (
    BOTO_ERRORS,
    code_of,
    is_not_found,
    is_passing,
    is_throttling,
    translated,
    translation,
)
from qdo.brokers.aws_wire import Calls
from qdo.brokers.base import Backlog
from qdo.brokers.kinesis_aggregation import is_aggregated, unpack
from qdo.brokers.kinesis_poller import (
    SKEW_SECONDS,
    Answer,
    Gone,
    Keeping,
    Read,
    Seek,
    ShardPoll,
    Taken,
)
from qdo.brokers.kinesis_positions import HEIR, POSITIONS, pack, sequence_of, time_in, whole
from qdo.brokers.kinesis_records import decoded, key_of
from qdo.errors import PositionTrimmedError
from qdo.message import format_position, position_of_time

log = logging.getLogger(__name__)

PATIENCE = 3
"""So many failures in a row that may pass by themselves are only logged."""
SUMMARY_SECONDS = 60.0
"""How long what the stream says of itself is believed."""

SEEKERS = 16
"""Iterators that are asked for at once: a worker may begin with a thousand shards."""
TARGET = "Kinesis_20131202"
METHODS = {"GetRecords": "get_records"}
"""Of a boto3 client, by action."""

_INVALID = "InvalidArgumentException"
_EXPIRED = "ExpiredIteratorException"


class Paces:
    """When each shard may be read again by this process, whoever reads it."""

    def __init__(self, pause_seconds: float) -> None:
        self.pause_seconds = pause_seconds
        self._next: dict[str, float] = {}
        self._lock = threading.Lock()

    def wait(self, shard: str, now: float) -> float:
        """Return how many seconds a read must wait; 0: it may be made, which is counted."""
        with self._lock:
            left = self._next.get(shard, 0.0) - now
            if 0 < left <= self.pause_seconds:  # else the clock was set back
                return left
            self._next[shard] = now + self.pause_seconds
        return 0.0

    def forget(self, shard: str) -> None:
        """Drop a shard that nobody here reads any more."""
        with self._lock:
            self._next.pop(shard, None)


class Source:
    """The stream, as those see it who read. Safe to use from several threads.

    :param client: of boto3; repeats nothing by itself.
    :param calls: makes the reads, of which there are very many.
    :ivar ahead_seconds: by so much the clock here is ahead of that of Kinesis, at least; 0 if it
        is not.
    """

    def __init__(self, client: Any, calls: Calls, address: KinesisAddress) -> None:
        self._client = client
        self._calls = calls
        self.address = address
        self.ahead_seconds = 0.0
        self._seeks = threading.BoundedSemaphore(SEEKERS)
        self._said: tuple[Mapping[str, Any], float] | None = None

    def seek(self, shard: str, seek: Seek) -> str:
        """Return an iterator; raises what boto3 raises."""
        request: dict[str, Any] = {
            "StreamName": self.address.stream,
            "ShardId": shard,
            "ShardIteratorType": seek.kind,
        }
        if seek.sequence is not None:
            request["StartingSequenceNumber"] = str(seek.sequence)
        if seek.time is not None:
            request["Timestamp"] = datetime.datetime.fromtimestamp(seek.time, datetime.timezone.utc)
        with self._seeks:
            asked_at = time.time()
            answer = self._client.get_shard_iterator(**request)
        self.ahead_seconds = _ahead(answer, asked_at)
        return str(answer["ShardIterator"])

    def read(self, read: Read, hash_keys: tuple[int, int] | None) -> Answer:
        """Return records; raises what boto3 raises.

        :param hash_keys: of the shard.
        """
        asked = {"ShardIterator": read.iterator, "Limit": read.limit}
        response = self._calls.call("GetRecords", asked)
        return answer_of(response, hash_keys)

    def keeping(self) -> Keeping:
        """Return what the stream keeps.

        :raises QdoError: see `aws_errors.translation`.
        """
        said = self._summary()
        created = said.get("StreamCreationTimestamp")
        return Keeping(
            seconds=float(said["RetentionPeriodHours"]) * 3600,
            since=0.0 if created is None else created.timestamp(),
        )

    def record_bytes(self) -> int:
        """Return how large a record of the stream may be.

        :raises: as `keeping`.
        """
        return int(self._summary().get("MaxRecordSizeInKiB") or 1024) * 1024

    def _summary(self) -> Mapping[str, Any]:
        known = self._said
        if known is not None and known[1] > time.monotonic():
            return known[0]
        with translated(self.address.place, "stream", self.address.stream):
            answer = self._client.describe_stream_summary(StreamName=self.address.stream)
        said: Mapping[str, Any] = answer["StreamDescriptionSummary"]
        self._said = said, time.monotonic() + SUMMARY_SECONDS
        return said


def _ahead(answer: Mapping[str, Any], asked_at: float) -> float:
    """Return by how much the clock here is ahead of the date of an answer, at least."""
    said = answer.get("ResponseMetadata", {}).get("HTTPHeaders", {}).get("date", "")
    try:
        latest = email.utils.parsedate_to_datetime(said).timestamp() + 1.0  # whole seconds
    except (TypeError, ValueError):
        return 0.0
    return max(0.0, asked_at - latest)


def answer_of(response: Mapping[str, Any], hash_keys: tuple[int, int] | None) -> Answer:
    """Return what GetRecords said, with messages in the place of records."""
    records = response["Records"]
    rows: list[Taken] = []
    size = 0
    for record in records:
        data = _data(record)
        size += len(data)
        rows += _messages(record, data, hash_keys)
    last = whole(int(records[-1]["SequenceNumber"]), _arrival(records[-1])) if records else 0
    return Answer(
        first=int(records[0]["SequenceNumber"]) if records else None,
        last=last,
        rows=rows,
        records=len(records),
        size=size,
        next_iterator=response.get("NextShardIterator"),
        behind_seconds=(response.get("MillisBehindLatest") or 0) / 1000,
    )


def _messages(
    record: Mapping[str, Any], data: bytes, hash_keys: tuple[int, int] | None
) -> list[Taken]:
    sequence, arrival = int(record["SequenceNumber"]), _arrival(record)
    unpacked = unpack(data, hash_keys) if is_aggregated(data) else None
    if unpacked is None:
        body, headers = decoded(data)
        # A stream that distributes records by itself may name no partition key.
        key = key_of(record.get("PartitionKey"))
        return [(pack(sequence, 0, arrival), body, key, headers)]
    rows: list[Taken] = []
    for each in unpacked:
        body, headers = decoded(each.data)
        position = pack(sequence, each.subsequence, arrival)
        rows.append((position, body, key_of(each.partition_key), headers))
    return rows


def _data(record: Mapping[str, Any]) -> bytes:
    data: str | bytes = record["Data"]
    return base64.b64decode(data) if isinstance(data, str) else data


def _arrival(record: Mapping[str, Any]) -> int:
    moment: float | datetime.datetime = record["ApproximateArrivalTimestamp"]
    seconds = moment.timestamp() if isinstance(moment, datetime.datetime) else moment
    return position_of_time(seconds)


class ShardReading:
    """Makes the requests of a `ShardPoll`, and decides on their failures.

    :param hash_keys: of the shard; None: not known, messages of other shards are kept.
    :param trimmed: what to do when the position is gone: ``stop``, which is an error; ``oldest``:
        go on with that; ``look``: the same, without a word, for those who process nothing.
    :param is_listed: asks whether the stream still has the shard.
    """

    def __init__(
        self,
        source: Source,
        shard: str,
        hash_keys: tuple[int, int] | None,
        poll: ShardPoll,
        trimmed: str,
        is_listed: Callable[[], bool] = lambda: True,
    ) -> None:
        self._source = source
        self._shard = shard
        self._hash_keys = hash_keys
        self.poll = poll
        self._trimmed = trimmed
        self._is_listed = is_listed

    def step(self, request: Seek | Read, now: float) -> list[Taken]:
        """Make one request of the poll; return the messages that came.

        :param now: Unix time.
        :raises PositionTrimmedError: the record after which to go on is gone.
        :raises QdoError: what does not pass by itself, or did not for a while.
        """
        try:
            if isinstance(request, Seek):
                self.poll.found(self._source.seek(self._shard, request))
                return []
            return self.poll.answered(self._source.read(request, self._hash_keys), now)
        except Gone:
            self._gone(now)
        except BOTO_ERRORS as error:
            self._failed(error, request, now)
        return []

    def seen(self, oldest: int | None, now: float) -> Backlog:
        """Return what is known of what waits in the shard.

        The head is the present as Kinesis has it, whose clock dates the messages: a later one
        would stand for messages that come yet, too.

        :param oldest: position of the first message that waits, as far as it was read.
        :param now: Unix time.
        """
        behind = self.poll.behind_seconds(now, oldest)
        nothing = oldest is None and (self.poll.ended or self.poll.at_tip)
        head = position_of_time(now - self._source.ahead_seconds)
        return Backlog(0 if nothing else 1, oldest, head, approximate=True, behind_seconds=behind)

    def _failed(self, error: Exception, request: Seek | Read, now: float) -> None:
        if code_of(error) == _EXPIRED:
            log.info("queue %s: its iterator expired, a new one is asked for", self._shard)
            self.poll.expired()
        elif code_of(error) == _INVALID and isinstance(request, Seek) and request.sequence:
            self._gone(now)
        elif code_of(error) == _INVALID and _is_of_time(request) and self.poll.too_early():
            log.warning(
                "queue %s: the clock of this machine is ahead of that of Kinesis: it is read from a"
                " time %g minutes earlier; set the clock right",
                self._shard,
                SKEW_SECONDS / 60,
            )
        elif is_throttling(error):
            pause = self.poll.refused(now)
            # Now and then it is nothing: somebody else had a look at the shard.
            level = logging.WARNING if self.poll.refusals >= PATIENCE else logging.INFO
            log.log(level, "queue %s: Kinesis throttles, read again in %.1f s", self._shard, pause)
        else:
            pause = self.poll.doubted(now)
            if is_not_found(error) and not self._is_listed():
                self.expired()
                return
            address = self._source.address
            found = translation(error, address.place, "shard", f"{address.stream}/{self._shard}")
            if not is_passing(error) or self.poll.doubts > PATIENCE:
                raise found from error
            log.warning("queue %s: %s; read again in %.1f s", self._shard, found, pause)

    def _gone(self, now: float) -> None:
        keeping = self._source.keeping()
        poll = self.poll
        if poll.proves_complete(now, keeping):
            log.info(
                "queue %s: its last record is too old to be kept; none was missed", self._shard
            )
            poll.accept()
            return
        error = self._lost(keeping)
        if self._trimmed == "stop":
            poll.doubted(now)
            raise error
        if self._trimmed == "oldest":
            log.warning("%s: it goes on with the oldest", error)
        poll.accept()

    def expired(self) -> None:
        """Take note that the shard is gone, and everything that was in it.

        Who was sent to the oldest message that is left has nothing left to read.

        :raises PositionTrimmedError: it was not processed to its end.
        """
        poll = self.poll
        if poll.ended:
            return
        sought = poll.after == POSITIONS.earliest
        if self._trimmed == "stop" and not sought:
            raise self._lost(self._source.keeping())
        if self._trimmed != "look":
            log.warning("queue %s: its shard has expired, it ends here", self._shard)
        poll.finish()

    def _lost(self, keeping: Keeping) -> PositionTrimmedError:
        after = self.poll.after
        return PositionTrimmedError(
            queue=self._shard,
            position=sequence_of(after),
            time=format_position(time_in(after)) if after > HEIR else "never",
            stream=self._source.address.stream,
            hours=f"{keeping.seconds / 3600:g}",
        )


def _is_of_time(request: Seek | Read) -> bool:
    return isinstance(request, Seek) and request.time is not None
