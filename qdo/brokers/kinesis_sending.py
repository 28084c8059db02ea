"""Sending to a stream: up to 500 records a request, and the order of each key kept.

PutRecords may store some records of a request and refuse those before them. So a request holds no
two records of one key: the next one of a key waits until the one before is stored. Keys do not wait
for each other, and messages without a key wait for nobody. Messages that are sent to one shard by
its name are in line all together, as those of any queue of qdo. A request whose answer was lost is
made again: its records may be stored twice, one right behind the other as far as their line goes.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from qdo.brokers.aws_address import KinesisAddress
from qdo.brokers.aws_errors import BOTO_ERRORS, is_passing, is_throttling_code, translation
from qdo.brokers.base import NO_DEDUP, NO_DELAY, Outgoing
from qdo.brokers.kinesis_records import RECORD_BYTES, check_size, encoded, partition_key
from qdo.brokers.kinesis_shards import Shards
from qdo.errors import (
    AwsUnreachableError,
    PartlySentError,
    QdoError,
    ThrottledError,
    UnsupportedError,
)
from qdo.names import check_queue_name

log = logging.getLogger(__name__)

MOST_RECORDS = 500
REQUEST_BYTES = 5 * 1024 * 1024
"""Of all records of a request. Newer streams take twice that; all take this."""
FIRST_PAUSE_SECONDS = 0.1
MAX_PAUSE_SECONDS = 5.0
PATIENCE_SECONDS = 30.0
"""After so long without a record stored the sender is told."""
_NAMED_AT_MOST = 5


@dataclass(frozen=True, slots=True)
class _Ready:
    """A message that can be sent.

    :ivar index: its place in what the caller gave.
    :ivar shard: the one it must go to, None for that of its key.
    :ivar lane: what it must keep its order with.
    """

    index: int
    shard: str | None
    lane: str
    entry: dict[str, Any]
    size: int


_Lanes = OrderedDict[str, deque[_Ready]]
"""What is still to be sent, in lanes."""


class KinesisSender:
    """Sends messages to one stream. Safe to use from several threads.

    :param client: of boto3; makes each request once.
    :param record_bytes: asks how large a record may be, where one has more than the usual 1 MiB.
    :param stopped: ends waiting between tries.
    """

    def __init__(
        self,
        client: Any,
        address: KinesisAddress,
        shards: Shards,
        record_bytes: Callable[[], int],
        stopped: threading.Event,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._client = client
        self._address = address
        self._shards = shards
        self._record_bytes = record_bytes
        self._stopped = stopped
        self._clock = clock

    def send(self, messages: Sequence[Outgoing]) -> list[int]:
        """Store messages, those of each key in the given order; return their sequence numbers.

        Nothing is sent if one of them cannot be sent at all.

        :raises PartlySentError: some were stored; it says which were not.
        :raises QdoError: none was.
        """
        lanes: _Lanes = OrderedDict()
        for index, message in enumerate(messages):
            ready = self._ready(index, message)
            lanes.setdefault(ready.lane, deque()).append(ready)
        stored: list[int | None] = [None] * len(messages)
        try:
            self._send(lanes, stored)
        except QdoError as error:
            raise _outcome(stored, error) from error
        return [number for number in stored if number is not None]

    # --- what is to be sent ---

    def _ready(self, index: int, message: Outgoing) -> _Ready:
        queue = check_queue_name(message.queue)
        _check_terms(message)
        partition = partition_key(message.key, queue)
        data = encoded(message.body, message.headers, queue)
        size = len(data) + len(partition.encode())
        if size > RECORD_BYTES:
            check_size(queue, data, partition, self._record_bytes())
        entry: dict[str, Any] = {"Data": data, "PartitionKey": partition}
        if queue == self._address.stream:
            return _Ready(index, None, f"key {partition}", entry, size)
        # The hash key of a key would lead elsewhere.
        entry["ExplicitHashKey"] = str(self._shards.open_one(queue).hash_keys[0])
        return _Ready(index, queue, f"shard {queue}", entry, size)

    # --- sending it ---

    def _send(self, lanes: _Lanes, stored: list[int | None]) -> None:
        tries, since = 0, self._clock()
        while lanes:
            batch = _heads(lanes)
            error = self._try(batch, stored)
            passed = [each for each in batch if stored[each.index] is not None]
            for each in passed:
                _next_of_lane(lanes, each)
            if passed:
                tries, since = 0, self._clock()
            if error is None:
                continue
            tries += 1
            late = self._clock() - since > PATIENCE_SECONDS
            if late or self._stopped.wait(_pause(tries)):
                raise error

    def _try(self, batch: Sequence[_Ready], stored: list[int | None]) -> QdoError | None:
        """Send records once; return why some of them are to be sent again, None when all are in.

        :raises QdoError: sending them again would not help.
        """
        entries = [each.entry for each in batch]
        try:
            answer = self._client.put_records(StreamName=self._address.stream, Records=entries)
        except BOTO_ERRORS as error:
            said = translation(error, self._address.place, "stream", self._address.stream)
            if is_passing(error):
                return said
            raise said from error
        failed: Mapping[str, Any] | None = None
        for each, result in zip(batch, answer["Records"], strict=True):
            if result.get("ErrorCode"):
                failed = result
            else:
                stored[each.index] = int(result["SequenceNumber"])
                self._check_shard(each, str(result["ShardId"]))
        return None if failed is None else self._failure(failed)

    def _check_shard(self, ready: _Ready, found: str) -> None:
        """Learn that a shard was closed after it was listed."""
        if ready.shard in (None, found):
            return
        log.warning(
            "shard %s of stream %s was closed: a message for it went to its child %s",
            ready.shard,
            self._address.stream,
            found,
        )
        self._shards.forget()

    def _failure(self, failed: Mapping[str, Any]) -> QdoError:
        """Return the error for a record that was not stored."""
        code = str(failed["ErrorCode"])
        reason = " ".join(str(failed.get("ErrorMessage") or "no reason was given").split())
        if is_throttling_code(code):
            return ThrottledError(
                service="Kinesis",
                action="kinesis:PutRecords",
                resource=f"stream {self._address.stream!r}",
                reason=f"{code}: {reason}",
            )
        return AwsUnreachableError(
            service="Kinesis",
            region=self._address.region,
            reason=f"it did not take a record: {code}: {reason}",
            hint="",
        )


def _heads(lanes: _Lanes) -> list[_Ready]:
    """Return the next message of each lane, as many as a request takes."""
    batch: list[_Ready] = []
    size = 0
    for lane in lanes.values():
        size += lane[0].size
        if batch and (len(batch) == MOST_RECORDS or size > REQUEST_BYTES):
            break
        batch.append(lane[0])
    return batch


def _next_of_lane(lanes: _Lanes, done: _Ready) -> None:
    """Take a stored message out of its lane, which comes behind those that wait longer."""
    lane = lanes[done.lane]
    lane.popleft()
    if lane:
        lanes.move_to_end(done.lane)
    else:
        del lanes[done.lane]


def _outcome(stored: Sequence[int | None], error: QdoError) -> QdoError:
    """Return what to raise: the reason itself where nothing was stored."""
    unsent = tuple(index for index, number in enumerate(stored) if number is None)
    if len(unsent) == len(stored):
        return error
    more = f" and {len(unsent) - _NAMED_AT_MOST} more" if len(unsent) > _NAMED_AT_MOST else ""
    return PartlySentError(
        done=len(stored) - len(unsent),
        total=len(stored),
        rest=", ".join(map(str, unsent[:_NAMED_AT_MOST])) + more,
        reason=str(error),
        unsent=unsent,
    )


def _check_terms(message: Outgoing) -> None:
    terms = message.terms
    if terms is None:
        return
    if terms.due is not None:
        raise UnsupportedError(broker="Kinesis", what="delay messages", remedy=NO_DELAY)
    if terms.dedup_key is not None:
        raise UnsupportedError(broker="Kinesis", what="deduplicate messages", remedy=NO_DEDUP)


def _pause(tries: int) -> float:
    """Return seconds until the next try: growing, and never the same for all senders."""
    longest = min(FIRST_PAUSE_SECONDS * 2.0 ** min(tries - 1, 10), MAX_PAUSE_SECONDS)
    return random.uniform(longest / 2, longest)
