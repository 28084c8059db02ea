"""Sending to a stream that stores some records of a request and rejects others."""

from __future__ import annotations

import itertools
import random
import threading
from collections.abc import Callable
from functools import cached_property
from typing import Any

import pytest
from botocore.exceptions import ClientError, ConnectTimeoutError, ReadTimeoutError

from qdo.backoff import Backoff
from qdo.broker_errors import AccessDeniedError, AwsUnreachableError, ThrottledError
from qdo.brokers.base import Outgoing
from qdo.brokers.kinesis import sender as kinesis_sending
from qdo.brokers.kinesis.sender import CALL_BYTES, MOST_RECORDS, KinesisSender
from qdo.brokers.kinesis.shards import Shards
from qdo.brokers.kinesis.url import KinesisAddress
from qdo.errors import PartialSendError, UsageError

ADDRESS = KinesisAddress(region="eu-west-1", stream="s")


def shown(name: str, keys: tuple[int, int], *, closed: bool = False) -> dict[str, Any]:
    numbers = {"StartingSequenceNumber": "1"}
    if closed:
        numbers["EndingSequenceNumber"] = "9"
    start, end = map(str, keys)
    return {
        "ShardId": name,
        "HashKeyRange": {"StartingHashKey": start, "EndingHashKey": end},
        "SequenceNumberRange": numbers,
    }


class FakeStream:
    """Stands in for boto3's client.

    :ivar stored: (partition key, body) of each record, in order.
    :ivar verdict: returns for each record whether it is stored.
    :ivar errors: raised by the next requests, None for none.
    :ivar stopped: ends the waiting of its sender.
    """

    def __init__(self) -> None:
        self.stopped = threading.Event()
        self.stored: list[tuple[str, bytes]] = []
        self.requests: list[list[dict[str, Any]]] = []
        self.verdict: Callable[[], bool] = lambda: True
        self.errors: list[Exception | None] = []
        self.after_storing = False
        self.shards = [shown("a", (0, 99)), shown("b", (100, 199)), shown("c", (0, 9), closed=True)]
        self._numbers = itertools.count(1)

    def send(self, messages: list[Outgoing]) -> list[int]:
        """Send with a clock on which each look takes a second."""
        return self.sender.send(messages)

    @cached_property
    def sender(self) -> KinesisSender:
        shards, limit = Shards(self, ADDRESS), lambda: 1_048_576
        clock = map(float, itertools.count()).__next__
        return KinesisSender(self, ADDRESS, shards, limit, self.stopped, clock=clock)

    def list_shards(self, **_: Any) -> dict[str, Any]:
        return {"Shards": self.shards}

    def put_records(self, StreamName: str, Records: list[dict[str, Any]]) -> dict[str, Any]:
        assert StreamName == "s"
        self.requests.append(Records)
        error = self.errors.pop(0) if self.errors else None
        if error is not None and not self.after_storing:
            raise error
        answers = [self._put(record) for record in Records]
        if error is not None:
            raise error
        return {"Records": answers}

    def _put(self, record: dict[str, Any]) -> dict[str, Any]:
        if not self.verdict():
            return {"ErrorCode": "ProvisionedThroughputExceededException", "ErrorMessage": "no"}
        self.stored.append((record["PartitionKey"], record["Data"]))
        shard = "b" if int(record.get("ExplicitHashKey", 0)) >= 100 else "a"
        return {"SequenceNumber": str(next(self._numbers)), "ShardId": shard}


@pytest.fixture
def stream(monkeypatch: pytest.MonkeyPatch) -> FakeStream:
    monkeypatch.setattr(kinesis_sending, "SEND_BACKOFF", Backoff(0.0, 0.0))
    return FakeStream()


def messages(count: int, keys: int, queue: str = "s") -> list[Outgoing]:
    return [Outgoing(queue, b"%d" % number, f"k{number % keys}") for number in range(count)]


@pytest.mark.parametrize("seed", range(50))
def test_the_order_of_each_key_survives_partial_failures(stream: FakeStream, seed: int) -> None:
    """Whichever records are rejected, all are stored once, and no key is reordered."""
    dice = random.Random(seed)
    share, keys, count = dice.random() * 0.9, dice.randrange(1, 40), dice.randrange(1, 300)
    stream.verdict = lambda: dice.random() >= share or len(stream.requests) % 5 == 0
    numbers = stream.send(messages(count, keys))
    assert len(numbers) == len(set(numbers)) == count == len(stream.stored)
    for key in {key for key, _ in stream.stored}:
        mine = [int(body) for of, body in stream.stored if of == key]
        assert mine == sorted(mine)
    by_number = dict(enumerate(stream.stored, 1))
    assert [int(by_number[number][1]) for number in numbers] == list(range(count))


def test_no_request_holds_two_records_of_a_key(stream: FakeStream) -> None:
    """Else one could be stored before the other is."""
    stream.send(messages(100, 7))
    for request in stream.requests:
        keys = [record["PartitionKey"] for record in request]
        assert len(keys) == len(set(keys))
    assert len(stream.requests) == 15  # as many as the busiest key has messages


def test_messages_without_a_key_fill_requests(stream: FakeStream) -> None:
    """They need not wait for other messages."""
    stream.send([Outgoing("s", b"1") for _ in range(2 * MOST_RECORDS + 1)])
    assert [len(request) for request in stream.requests] == [MOST_RECORDS, MOST_RECORDS, 1]


def test_requests_are_no_larger_than_kinesis_takes(stream: FakeStream) -> None:
    """Keys count as well."""
    stream.send([Outgoing("s", bytes(1_000_000)) for _ in range(12)])
    sizes = [
        sum(len(each["Data"]) + len(each["PartitionKey"]) for each in request)
        for request in stream.requests
    ]
    assert max(sizes) <= CALL_BYTES
    assert len(sizes) == 3


def test_messages_to_a_shard_go_one_after_the_other(stream: FakeStream) -> None:
    """It is a queue: all of it keeps its order, with or without keys."""
    stream.send([Outgoing("b", b"%d" % number) for number in range(5)])
    assert [body for _, body in stream.stored] == [b"%d" % number for number in range(5)]
    assert [len(request) for request in stream.requests] == [1] * 5
    assert {request[0]["ExplicitHashKey"] for request in stream.requests} == {"100"}


def refusal(code: str, status: int = 400) -> ClientError:
    answer: Any = {
        "Error": {"Code": code, "Message": "no"},
        "ResponseMetadata": {"HTTPStatusCode": status},
    }
    return ClientError(answer, "PutRecords")


@pytest.mark.parametrize(
    "error",
    [
        refusal("ProvisionedThroughputExceededException"),
        refusal("KMSThrottlingException"),
        refusal("InternalFailure", 500),
        ConnectTimeoutError(endpoint_url="http://x"),
    ],
)
def test_what_passes_is_waited_for(stream: FakeStream, error: Exception) -> None:
    """The whole request is made again."""
    stream.errors = [None, error, error]
    stream.send(messages(10, 2))
    assert [int(body) for _, body in stream.stored] == list(range(10))


def test_a_lost_answer_repeats_and_does_not_reorder(stream: FakeStream) -> None:
    """Records may be stored twice, one copy right behind the other within their key."""
    stream.after_storing = True
    lost = ReadTimeoutError(endpoint_url="http://x")
    stream.errors = [None, lost, None, lost, lost]
    stream.send(messages(20, 4))
    for key in range(4):
        mine = [int(body) for of, body in stream.stored if of == f"k{key}"]
        assert mine == sorted(mine)
        assert sorted(set(mine)) == list(range(key, 20, 4))
    assert len(stream.stored) == 20 + 3 * 4


def test_patience_ends_where_nothing_is_stored(stream: FakeStream) -> None:
    """The error states the reason, and the messages stored before it are counted."""
    stream.verdict = lambda: False
    with pytest.raises(ThrottledError) as throttled:
        stream.send(messages(3, 3))
    assert throttled.value.details["action"] == "kinesis:PutRecords"
    assert throttled.value.details["resource"] == "stream 's'"
    stream.verdict = lambda: len(stream.stored) < 7
    with pytest.raises(PartialSendError) as partial:
        stream.send(messages(20, 20))
    details = partial.value.details
    assert (details["done"], details["total"]) == (7, 20)
    assert details["unsent"] == tuple(range(7, 20))
    assert "7, 8, 9" in details["rest"]


def test_what_does_not_pass_is_told_at_once(stream: FakeStream) -> None:
    """One request, no waiting."""
    stream.errors = [refusal("AccessDeniedException")]
    with pytest.raises(AccessDeniedError):
        stream.send(messages(3, 3))
    assert len(stream.requests) == 1


def test_closing_ends_waiting(stream: FakeStream) -> None:
    """A sender that waits for its next attempt gets the reason of the wait."""

    def refuse() -> bool:
        stream.stopped.set()
        return False

    stream.verdict = refuse
    with pytest.raises(ThrottledError):
        stream.send(messages(1, 1))
    assert len(stream.requests) == 1


def test_records_that_kinesis_failed_to_store_are_sent_again(
    stream: FakeStream, monkeypatch: pytest.MonkeyPatch
) -> None:
    """InternalFailure is the other reason that it names for a single record."""
    monkeypatch.setattr(
        stream, "_put", lambda record: {"ErrorCode": "InternalFailure", "ErrorMessage": "no"}
    )
    with pytest.raises(AwsUnreachableError) as caught:
        stream.send(messages(1, 1))
    assert "InternalFailure: no" in caught.value.details["reason"]
    assert len(stream.requests) > 3


def test_a_shard_that_was_closed_meanwhile_is_noticed(
    stream: FakeStream, caplog: pytest.LogCaptureFixture
) -> None:
    """The record went to a child shard; the next one is rejected."""
    stream.shards = [shown("old", (0, 199))]
    stream.send([Outgoing("old", b"1")])
    assert [each.args for each in caplog.records] == [("old", "s", "a")]
    stream.shards = [shown("old", (0, 199), closed=True), shown("a", (0, 199))]
    with pytest.raises(UsageError, match="'old'"):
        stream.send([Outgoing("old", b"2")])
