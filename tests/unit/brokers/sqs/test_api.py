"""SQS requests about held messages, and the meaning of the answers."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import gevent
import pytest
from botocore.exceptions import EndpointConnectionError
from gevent.event import Event

from qdo.brokers.aws.address import BodyPointer, ServiceAddress
from qdo.brokers.sqs.api import SqsApi
from qdo.brokers.sqs.codec import Received, pointing
from qdo.brokers.sqs.in_flight import InFlightMessage, InFlightMessages
from qdo.errors import QdoError, UnreachableError
from tests.support.aws.sqs_consumer import AnyQueue

ENDPOINT = "http://127.0.0.1:1"
Say = Callable[[str, Mapping[str, Any]], dict[str, Any]]


class FakeCalls:
    """Records requests; returns the configured answers."""

    def __init__(self) -> None:
        self.asked: list[Mapping[str, Any]] = []
        self.say: Say = lambda action, value: {}

    def call(self, action: str, value: Mapping[str, Any]) -> dict[str, Any]:
        self.asked.append(value)
        return self.say(action, value)

    def close(self) -> None:
        """Nothing is open."""


@pytest.fixture
def calls() -> FakeCalls:
    return FakeCalls()


class FakeObjects:
    """Keeps which bodies were read.

    :ivar fault: by key, the error raised by reading.
    """

    def __init__(self) -> None:
        self.read: list[str] = []
        self.fault: dict[str, QdoError] = {}

    def is_ours(self, pointer: BodyPointer) -> bool:
        return pointer.bucket == "ours"

    def get(self, pointer: BodyPointer) -> bytes:
        self.read.append(pointer.key)
        if pointer.key in self.fault:
            raise self.fault[pointer.key]
        return pointer.key.encode()


def made(calls: FakeCalls, polls: int = 10, objects: FakeObjects | None = None) -> SqsApi:
    place = ServiceAddress("sqs", "eu-west-1", ENDPOINT)
    return SqsApi(
        calls,
        calls,
        place,
        AnyQueue(),
        wait_seconds=20,
        visibility_seconds=60,
        objects=objects,  # type: ignore[arg-type]
        polls=polls,
    )


def large(key: str, group: str = "g", size: int = 500) -> dict[str, Any]:
    """Return a message as SQS gives it whose body is in S3."""
    system = {"SentTimestamp": "1", "MessageGroupId": group, "SequenceNumber": "7"}
    made = pointing({"MessageBody": ""}, BodyPointer("ours", key), size)
    return {
        "MessageId": str(uuid.uuid4()),
        "ReceiptHandle": f"receipt of {key}",
        "Body": made["MessageBody"],
        "MessageAttributes": made["MessageAttributes"],
        "Attributes": system,
    }


def held(*numbers: int) -> list[InFlightMessage]:
    """Return messages as they are held."""
    holding = InFlightMessages(0, (), 60.0, lambda: 0.0)
    holding.take([Received(1, n, n, b"1", "g", None, f"r{n}", "g", 1, None) for n in numbers], 0.0)
    return holding.undone()


def test_a_receive_of_a_fifo_queue_has_its_id(calls: FakeCalls) -> None:
    """The id that its owner passes; a receive of a standard queue has none."""
    requests = made(calls)
    requests.receive("q.fifo", "id")
    requests.receive("q", "id")
    ids = [value.get("ReceiveRequestAttemptId") for value in calls.asked]
    assert ids == ["id", None]


def test_a_poll_that_is_not_wanted_any_more_is_not_made(
    calls: FakeCalls,
) -> None:
    """It waited for others to end, and its claim has ended meanwhile: nothing must come."""
    requests = made(calls, polls=1)
    go_on, wanted = Event(), [True]

    def wait(action: str, value: Mapping[str, Any]) -> dict[str, Any]:
        go_on.wait()
        return {}

    calls.say = wait
    first = gevent.spawn(requests.receive, "a.fifo", "1")
    second = gevent.spawn(requests.receive, "b.fifo", "2", lambda: wanted[0])
    gevent.sleep(0)
    wanted[0] = False
    go_on.set()
    gevent.joinall([first, second], timeout=10, raise_error=True)
    assert [value["QueueUrl"] for value in calls.asked] == ["a.fifo"]
    assert second.value == []


def test_what_an_answer_does_not_name_is_not_done(calls: FakeCalls) -> None:
    """Something between here and SQS answers as it likes: such a delete is tried again."""
    batch = held(1, 2, 3)
    calls.say = lambda action, value: {}
    answer = made(calls).delete("q.fifo", batch)
    assert (answer.done, answer.refused, answer.failed) == ([], [], batch)
    calls.say = lambda action, value: {
        "Successful": [{"Id": "0"}],
        "Failed": [{"Id": "1", "SenderFault": True, "Code": "ReceiptHandleIsInvalid"}],
    }
    answer = made(calls).delete("q.fifo", batch)
    assert (answer.done, answer.refused, answer.failed) == ([batch[0]], [batch[1]], [batch[2]])


@pytest.mark.parametrize(
    ("action", "done", "level"),
    [
        ("extend", False, logging.WARNING),
        ("extend", True, logging.DEBUG),
        ("delete", True, logging.WARNING),
    ],
)
def test_a_done_message_may_be_gone_before_it_is_extended(
    calls: FakeCalls, action: str, done: bool, level: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Its delete was in flight, so there is no warning. All other rejected requests are logged."""
    caplog.set_level(logging.DEBUG)
    failed = {"Id": "0", "SenderFault": True, "Code": "MessageNotInflight"}
    calls.say = lambda action, value: {"Failed": [failed]}
    batch = held(1)
    batch[0].done = done
    requests = made(calls)
    answer = requests.delete("q", batch) if action == "delete" else requests.extend("q", batch)
    assert list(answer.refused) == batch
    (record,) = [each for each in caplog.records if each.name == "qdo.brokers.sqs.api"]
    assert record.levelno == level
    assert isinstance(record.args, tuple)
    assert "MessageNotInflight" in record.args


def test_rejected_messages_are_one_line_without_receipts(
    calls: FakeCalls, caplog: pytest.LogCaptureFixture
) -> None:
    """SQS repeats the receipt handle of each message, which has hundreds of characters."""
    batch = held(*range(10))
    for each in batch:
        each.receipt *= 200
    calls.say = lambda action, value: {
        "Failed": [
            {
                "Id": each["Id"],
                "SenderFault": True,
                "Code": "ReceiptHandleIsInvalid",
                "Message": f"Value {each['ReceiptHandle']} is invalid: expired.",
            }
            for each in value["Entries"]
        ]
    }
    made(calls).delete("q", batch)
    (record,) = [each for each in caplog.records if each.name == "qdo.brokers.sqs.api"]
    line = record.getMessage()
    assert "10 messages" in line
    assert "expired" in line
    assert len(line) < 200


def test_bodies_in_s3_for_which_there_is_no_room_are_not_read(calls: FakeCalls) -> None:
    """Their messages, the last ones of the answer, are released."""
    objects = FakeObjects()
    sizes: list[Sequence[int]] = []

    def came(given: Sequence[Received]) -> int:
        sizes.append([each.size for each in given])
        return 2

    calls.say = lambda action, value: (
        {"Messages": [large("a", size=300), large("b"), large("c"), large("d")]}
        if action == "ReceiveMessage"
        else {}
    )
    found = made(calls, objects=objects).receive("q", "id", lambda: 10, came)
    assert [each.body for each in found] == [b"a", b"b"]
    assert objects.read == ["a", "b"]
    assert sizes == [[300, 500, 500, 500]]
    back = calls.asked[-1]["Entries"]
    assert [each["ReceiptHandle"] for each in back] == ["receipt of c", "receipt of d"]
    assert {each["VisibilityTimeout"] for each in back} == {0}


@pytest.mark.parametrize(
    ("queue", "bodies", "read"),
    [
        ("q.fifo", [b"a1", b"b1", b"c1"], ["a1", "b1", "b2", "c1"]),
        ("q", [b"a1", b"b1", b"b3", b"c1"], ["a1", "b1", "b2", "b3", "c1"]),
    ],
)
def test_a_body_that_cannot_be_had_holds_up_its_group_only(
    calls: FakeCalls,
    caplog: pytest.LogCaptureFixture,
    queue: str,
    bodies: list[bytes],
    read: list[str],
) -> None:
    """Its message stays hidden, and comes again."""
    objects = FakeObjects()
    objects.fault["b2"] = QdoError(reason="not allowed")
    names = ["a1", "b1", "b2", "b3", "c1"]
    calls.say = lambda action, value: {"Messages": [large(each, each[0]) for each in names]}
    owed: list[float] = []
    found = made(calls, objects=objects).receive(queue, "id", owed=owed.append)
    assert [each.body for each in found] == bodies
    assert objects.read == read
    assert owed == [60]
    assert len(calls.asked) == 1
    (record,) = caplog.records
    assert record.args is not None
    assert tuple(record.args)[:3] == (queue, 5 - len(bodies), 60)


def test_s3_out_of_reach_is_not_asked_again_and_again(calls: FakeCalls) -> None:
    """Each time can take minutes; messages with their own body are still received."""
    objects = FakeObjects()
    objects.fault = dict.fromkeys(["a1", "b1"], UnreachableError(what="S3", reason="reset"))
    small = {**large("d1", "d"), "Body": "{}", "MessageAttributes": {}}
    answer = {"Messages": [large("a1", "a"), large("b1", "b"), large("c1", "c"), small]}
    calls.say = lambda action, value: answer
    (found,) = made(calls, objects=objects).receive("q.fifo", "id")
    assert (found.body, objects.read) == (b"{}", ["a1", "b1"])
    answer["Messages"].pop()
    with pytest.raises(UnreachableError):
        made(calls, objects=objects).receive("q.fifo", "id")


def test_what_cannot_be_given_back_comes_again(calls: FakeCalls) -> None:
    """It comes after a while; until then its queue must not count as empty."""
    objects = FakeObjects()
    objects.fault["a"] = QdoError(reason="not allowed")

    def say(action: str, value: Mapping[str, Any]) -> dict[str, Any]:
        if action != "ReceiveMessage":
            raise EndpointConnectionError(endpoint_url=ENDPOINT)
        return {"Messages": [large("a")]}

    calls.say = say
    owed: list[float] = []
    with pytest.raises(QdoError, match="not allowed"):
        made(calls, objects=objects).receive("q.fifo", "id", owed=owed.append)
    assert owed == [60]
