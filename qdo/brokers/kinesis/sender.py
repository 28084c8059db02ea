"""Send to a stream: up to 500 records per call, in order for each key.

PutRecords may store some records of a call and reject earlier records. So a call contains only one
record per key, and the next record of a key waits until Kinesis has stored the previous record.
Keys do not wait for each other, and messages without a key do not wait at all. All messages to a
named shard form a single lane, as in any queue of qdo. If a response is lost, the sender repeats
the call. Then Kinesis may store the records of the call twice. Within a lane, the two copies of a
record are adjacent.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from qdo.backoff import Backoff
from qdo.brokers.aws.errors import BOTO_ERRORS, is_transient, translation
from qdo.brokers.aws.sending import SendAttempts, rejection, unsent_error
from qdo.brokers.base import NO_DEDUP, NO_DELAY, Outgoing
from qdo.brokers.kinesis.codec import RECORD_BYTES, check_size, encoded, partition_key
from qdo.brokers.kinesis.shards import Shards
from qdo.brokers.kinesis.url import KinesisAddress
from qdo.errors import QdoError, UnsupportedError
from qdo.queues import check_queue_name

log = logging.getLogger(__name__)

MOST_RECORDS = 500
# The maximum size of a call's records. All streams accept this size; newer streams accept twice it.
CALL_BYTES = 5 * 1024 * 1024
SEND_BACKOFF = Backoff(0.1, 5.0)


@dataclass(frozen=True, slots=True)
class _Ready:
    """A message that is ready to send."""

    # The index of the message in the caller's sequence.
    index: int
    # The named shard; None: the shard of the message's key.
    shard: str | None
    # The lane of the message. Messages of one lane keep their order.
    lane: str
    entry: dict[str, Any]
    size: int


# The unsent messages by lane.
_Lanes = OrderedDict[str, deque[_Ready]]


class KinesisSender:
    """Sends messages to one stream. Safe to use from several threads.

    :param client: a boto3 client without retries.
    :param record_bytes: a function that returns the maximum size of a record. The sender calls this
        function only for records over 1 MiB.
    :param stopped: an event that ends the waits between retries.
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
        """Store messages, in their order for each key; return their sequence numbers.

        :raises PartialSendError: Kinesis stored only some messages; the error lists the others.
        :raises QdoError: Kinesis stored no message, for example because a message is invalid.
        """
        lanes: _Lanes = OrderedDict()
        for index, message in enumerate(messages):
            ready = self._ready(index, message)
            lanes.setdefault(ready.lane, deque()).append(ready)
        stored: list[int | None] = [None] * len(messages)
        try:
            self._send(lanes, stored)
        except QdoError as error:
            raise unsent_error(stored, error) from error
        return [number for number in stored if number is not None]

    def _ready(self, index: int, message: Outgoing) -> _Ready:
        queue = check_queue_name(message.queue)
        _check_options(message)
        partition = partition_key(message.key, queue)
        data = encoded(message.body, message.headers, queue)
        size = len(data) + len(partition.encode())
        if size > RECORD_BYTES:
            check_size(queue, data, partition, self._record_bytes())
        entry: dict[str, Any] = {"Data": data, "PartitionKey": partition}
        if queue == self._address.stream:
            return _Ready(index, None, f"key {partition}", entry, size)
        # Set the shard, because the hash of the partition key may belong to another shard.
        entry["ExplicitHashKey"] = str(self._shards.open_one(queue).hash_keys[0])
        return _Ready(index, queue, f"shard {queue}", entry, size)

    def _send(self, lanes: _Lanes, stored: list[int | None]) -> None:
        attempts = SendAttempts(SEND_BACKOFF, self._stopped, self._clock)
        while lanes:
            batch = _heads(lanes)
            error = self._try(batch, stored)
            accepted = [each for each in batch if stored[each.index] is not None]
            for each in accepted:
                _remove_stored(lanes, each)
            if accepted:
                attempts.progress()
            if error is not None and not attempts.wait():
                raise error

    def _try(self, batch: Sequence[_Ready], stored: list[int | None]) -> QdoError | None:
        """Send records once; return an error that allows a retry, or None if Kinesis stored all."""
        entries = [each.entry for each in batch]
        try:
            answer = self._client.put_records(StreamName=self._address.stream, Records=entries)
        except BOTO_ERRORS as error:
            translated = translation(error, self._address.place, "stream", self._address.stream)
            if is_transient(error):
                return translated
            raise translated from error
        failed: Mapping[str, Any] | None = None
        for each, result in zip(batch, answer["Records"], strict=True):
            if result.get("ErrorCode"):
                failed = result
            else:
                stored[each.index] = int(result["SequenceNumber"])
                self._check_shard(each, str(result["ShardId"]))
        if failed is None:
            return None
        stream = f"stream {self._address.stream!r}"
        return rejection(self._address.place, "kinesis:PutRecords", stream, failed)

    def _check_shard(self, ready: _Ready, found: str) -> None:
        """If a message went to a shard other than the requested one, list the shards again."""
        if ready.shard in (None, found):
            return
        log.warning(
            "shard %s of stream %s was closed; a message for it went to its child shard %s",
            ready.shard,
            self._address.stream,
            found,
        )
        self._shards.forget()


def _heads(lanes: _Lanes) -> list[_Ready]:
    """Return the first message of each lane, within the limits of a call."""
    batch: list[_Ready] = []
    size = 0
    for lane in lanes.values():
        size += lane[0].size
        if batch and (len(batch) == MOST_RECORDS or size > CALL_BYTES):
            break
        batch.append(lane[0])
    return batch


def _remove_stored(lanes: _Lanes, done: _Ready) -> None:
    """Remove a stored message, and move its lane to the end, because the others waited longer."""
    lane = lanes[done.lane]
    lane.popleft()
    if lane:
        lanes.move_to_end(done.lane)
    else:
        del lanes[done.lane]


def _check_options(message: Outgoing) -> None:
    options = message.terms
    if options is None:
        return
    if options.due is not None:
        raise UnsupportedError(broker="Kinesis", what="delay messages", remedy=NO_DELAY)
    if options.dedup_key is not None:
        raise UnsupportedError(broker="Kinesis", what="deduplicate messages", remedy=NO_DEDUP)
