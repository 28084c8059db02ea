"""Sending to SQS: the content of requests, retries, and the results for the sender."""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
from botocore import exceptions as boto
from hypothesis import given
from hypothesis import strategies as st

from qdo.backoff import Backoff
from qdo.broker_errors import (
    AwsError,
    AwsNotFoundError,
    AwsUnreachableError,
    SqsNameError,
    ThrottledError,
)
from qdo.brokers.aws.address import BodyPointer
from qdo.brokers.aws.sending import PATIENCE_SECONDS
from qdo.brokers.base import Outgoing, SendOptions
from qdo.brokers.sqs import sender as sqs_sending
from qdo.brokers.sqs.codec import pointer_of
from qdo.brokers.sqs.queues import SqsQueues
from qdo.brokers.sqs.sender import MAX_SQS_MESSAGE, SqsSender
from qdo.brokers.sqs.url import SqsAddress, sqs_address
from qdo.errors import MessageTooLargeError, PartialSendError, QdoError, UnsupportedError

ADDRESS = sqs_address("sqs://eu-west-1/p-?bucket=large-bodies&max_body=1048576")


def refused(code: str, fault: bool = True) -> dict[str, Any]:
    return {"Code": code, "Message": f"because of {code}", "SenderFault": fault}


def failing(code: str) -> boto.ClientError:
    return boto.ClientError({"Error": {"Code": code, "Message": "because"}}, "SendMessageBatch")


class ScriptedSqs:
    """A fake SQS that accepts everything, except for scripted answers to the next requests."""

    def __init__(self, *script: Callable[[str], Any] | BaseException) -> None:
        self.script = list(script)
        self.requests: list[list[str]] = []
        self.stored: list[str] = []
        self.entries: list[dict[str, Any]] = []
        self.missing: set[str] = set()
        self.created: list[dict[str, Any]] = []
        self.lock = threading.Lock()

    def get_queue_url(self, QueueName: str) -> dict[str, str]:
        if QueueName in self.missing:
            raise failing("AWS.SimpleQueueService.NonExistentQueue")
        return {"QueueUrl": f"http://x/1/{QueueName}"}

    def create_queue(self, **parameters: Any) -> dict[str, str]:
        self.created.append(parameters)
        self.missing.discard(parameters["QueueName"])
        return {"QueueUrl": f"http://x/1/{parameters['QueueName']}"}

    def close(self) -> None:
        """Do nothing."""

    def call(self, action: str, value: Mapping[str, Any]) -> Any:
        assert action == "SendMessageBatch"
        entries: list[dict[str, Any]] = value["Entries"]
        with self.lock:
            bodies = [each["MessageBody"] for each in entries]
            self.requests.append(bodies)
            if value["QueueUrl"].rsplit("/", 1)[1] in self.missing:
                raise failing("AWS.SimpleQueueService.NonExistentQueue")
            step = self.script.pop(0) if self.script else lambda body: None
            if isinstance(step, BaseException):
                raise step
            answer: dict[str, list[Any]] = {"Successful": [], "Failed": []}
            for each in entries:
                fault = step(each["MessageBody"])
                if fault is not None:
                    answer["Failed"].append({"Id": each["Id"], **fault})
                    continue
                self.stored.append(each["MessageBody"])
                self.entries.append(each)
                done = {"Id": each["Id"], "MessageId": f"id of {each['MessageBody']}"}
                answer["Successful"].append(done)
            return answer


class FakeBucket:
    """Stands for a bucket of S3."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []

    def put(self, queue: str, body: bytes) -> BodyPointer:
        self.bodies.append(body)
        return BodyPointer("large-bodies", f"{queue}/{len(self.bodies)}")


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sqs_sending, "SEND_BACKOFF", Backoff(0.0, 3.0))


def sender(
    service: ScriptedSqs, address: SqsAddress = ADDRESS, bucket: FakeBucket | None = None
) -> SqsSender:
    objects: Any = bucket
    queues = SqsQueues(service, address)
    ticks = itertools.count()  # of one second

    def clock() -> float:
        return float(next(ticks))

    return SqsSender(service, address, queues, objects, threading.Event(), clock)


def messages(count: int, queue: str = "a.fifo") -> list[Outgoing]:
    return [Outgoing(queue, str(number).encode(), "k") for number in range(count)]


def ids(sent: Sequence[Any]) -> list[str]:
    return [each.id for each in sent]


def test_ten_in_a_request() -> None:
    """In their order; the ids come back in it."""
    service = ScriptedSqs()
    assert ids(sender(service).send(messages(25))) == [f"id of {n}" for n in range(25)]
    assert [len(each) for each in service.requests] == [10, 10, 5]
    assert service.stored == list(map(str, range(25)))
    assert sender(service).send([]) == []


def test_one_mebibyte_in_a_request() -> None:
    """Attributes count."""
    service = ScriptedSqs()
    half = MAX_SQS_MESSAGE // 2
    sender(service).send([Outgoing("a", b"x" * half)] * 3)
    assert [len(each) for each in service.requests] == [2, 1]
    service = ScriptedSqs()
    sender(service).send([Outgoing("a", b"x" * half, key="k")] * 3)
    assert [len(each) for each in service.requests] == [1, 1, 1]


def test_what_failed_is_sent_again_before_what_stands_behind_it() -> None:
    """So that an order can be lost within one request only, where SQS itself loses it."""
    service = ScriptedSqs(
        lambda body: refused("InternalError", False) if body in "37" else None,
        lambda body: refused("RequestThrottled") if body == "7" else None,
    )
    assert ids(sender(service).send(messages(12))) == [f"id of {n}" for n in range(12)]
    assert service.requests[1:3] == [["3", "7"], ["7"]]
    assert service.requests[3] == ["10", "11"]


def test_an_order_that_sqs_lost_is_named(caplog: pytest.LogCaptureFixture) -> None:
    """If it stored a message but not an earlier one of its group; otherwise nothing is logged."""
    groups = ["a", "b", "a", "c", "b", "c"]
    sent = [Outgoing("q.fifo", str(n).encode(), key) for n, key in enumerate(groups)]
    service = ScriptedSqs(lambda body: refused("InternalError", False) if body in "045" else None)
    with caplog.at_level(logging.WARNING):
        sender(service).send(sent)
    (record,) = caplog.records
    assert record.args == ("p-q.fifo", "a")
    assert service.stored == ["1", "2", "3", "0", "4", "5"]
    caplog.clear()
    plain = ScriptedSqs(lambda body: refused("InternalError", False) if body == "0" else None)
    sender(plain).send([Outgoing("q", str(n).encode(), "k") for n in range(3)])
    assert caplog.records == []


def test_all_attempts_in_vain() -> None:
    """The sender gets the reason after half a minute; nothing was sent."""
    service = ScriptedSqs(*[failing("ThrottlingException")] * 99)
    with pytest.raises(ThrottledError):
        sender(service).send(messages(3))
    assert len(service.requests) == PATIENCE_SECONDS
    service = ScriptedSqs(*[lambda body: refused("InternalError", False)] * 99)
    with pytest.raises(AwsUnreachableError, match="because of InternalError"):
        sender(service).send(messages(1))


def test_attempts_go_on_while_some_messages_are_stored() -> None:
    """The half minute begins again with each message that SQS accepts."""
    takes_one = [
        *[failing("ThrottlingException")] * 20,
        lambda body: None if body == "0" else refused("RequestThrottled"),
        *[failing("ThrottlingException")] * 20,
    ]
    service = ScriptedSqs(*takes_one)
    assert len(sender(service).send(messages(2))) == 2


def test_a_throttled_address_is_asked_for_again() -> None:
    """Sending begins with a request for the queue's URL, which SQS throttles as well."""
    service, faults = ScriptedSqs(), [failing("ThrottlingException")] * 12
    ask = service.get_queue_url

    def throttled(QueueName: str) -> dict[str, str]:
        if faults:
            raise faults.pop()
        return ask(QueueName)

    service.get_queue_url = throttled  # type: ignore[method-assign]
    assert len(sender(service).send(messages(1))) == 1
    faults += [failing("ThrottlingException")] * 12
    small = replace(ADDRESS, max_body=1)
    assert len(sender(service, small, FakeBucket()).send([Outgoing("a", b"1" * 9)])) == 1


def test_an_answer_that_mentions_no_message() -> None:
    """Such as the page of a proxy: messages that are not confirmed as stored are sent again."""
    service = ScriptedSqs()
    take = service.call
    empty: list[dict[str, Any]] = [{}, {}]

    def forgetful(action: str, value: Mapping[str, Any]) -> Any:
        return empty.pop() if empty else take(action, value)

    service.call = forgetful  # type: ignore[method-assign]
    assert ids(sender(service).send(messages(1))) == ["id of 0"]
    assert empty == []


def test_a_refused_message_ends_the_sending_to_its_queue() -> None:
    """Messages behind it must not overtake it; the error names the unsent messages."""
    service = ScriptedSqs(
        lambda body: None,
        lambda body: refused("InvalidMessageContents") if body == "13" else None,
    )
    with pytest.raises(PartialSendError) as caught:
        sender(service).send(messages(25))
    error = caught.value
    assert error.exit_code == 4
    assert "19 of 25 messages were sent" in str(error)
    assert "not those with the numbers 13, 20, 21, 22, 23 and 1 more" in str(error)
    assert "InvalidMessageContents" in str(error)
    assert error.details["unsent"] == (13, 20, 21, 22, 23, 24)
    assert error.details["sent"][0].id == "id of 0"


def test_a_queue_that_is_refused_does_not_hold_up_others() -> None:
    """They are sent side by side."""
    service = ScriptedSqs()
    service.missing = {"p-b"}
    mixed = [Outgoing("ab"[number % 2], str(number).encode()) for number in range(6)]
    with pytest.raises(PartialSendError, match="'p-b' does not exist") as caught:
        sender(service).send(mixed)
    assert caught.value.details["unsent"] == (1, 3, 5)
    assert service.stored == ["0", "2", "4"]


@pytest.mark.parametrize("known", [False, True])
def test_a_missing_queue_is_created_if_the_address_says_so(known: bool) -> None:
    """Also where it was deleted after its address was asked for."""
    service = ScriptedSqs()
    address = replace(ADDRESS, create="fifo", tag=("team", "a"), visibility_seconds=33)
    own = sender(service, address)
    if known:
        own.send(messages(1))
    service.missing = {"p-a.fifo"}
    own.send(messages(1))
    (created,) = service.created
    assert created["QueueName"] == "p-a.fifo"
    assert created["tags"] == {"team": "a"}
    assert created["Attributes"] == {
        "FifoQueue": "true",
        "MessageRetentionPeriod": "1209600",
        "VisibilityTimeout": "33",
    }


def test_somebody_else_may_create_the_queue_first() -> None:
    """Even with other attributes: the queue exists, which is all that matters."""
    service = ScriptedSqs()
    service.missing = {"p-a"}

    def create(**parameters: Any) -> Any:
        service.missing.clear()
        raise failing("QueueAlreadyExists")

    service.create_queue = create  # type: ignore[method-assign]
    sender(service, replace(ADDRESS, create="standard")).send(messages(1, "a"))
    assert service.stored == ["0"]


def test_a_missing_queue_is_not_created_as_what_its_name_is_not() -> None:
    """A FIFO queue is one by its name."""
    service = ScriptedSqs()
    service.missing = {"p-a", "p-a.fifo"}
    with pytest.raises(SqsNameError, match="create=fifo"):
        sender(service, replace(ADDRESS, create="fifo")).send(messages(1, "a"))
    with pytest.raises(SqsNameError, match="create=standard"):
        sender(service, replace(ADDRESS, create="standard")).send(messages(1))
    with pytest.raises(AwsNotFoundError, match="create it, or send to it with create=standard"):
        sender(service).send(messages(1))
    assert service.created == []


@pytest.mark.parametrize(
    ("queue", "terms", "words"),
    [
        ("a.fifo", SendOptions(due=2e9), "delay single messages of a FIFO queue"),
        ("a", SendOptions(due=2e10), "delay a message by more than 900 s"),
        ("a", SendOptions(dedup_key="x"), "deduplicate messages of a standard queue"),
        ("a.fifo", SendOptions(dedup_key="x", dedup_seconds=60), "deduplicate for 60 s"),
    ],
)
def test_what_sqs_cannot_do_is_refused_before_anything_is_sent(
    queue: str, terms: SendOptions, words: str
) -> None:
    """Nothing of the call is sent."""
    service = ScriptedSqs()
    with pytest.raises(UnsupportedError, match=words) as caught:
        sender(service).send([Outgoing("a", b"1"), Outgoing(queue, b"2", terms=terms)])
    assert caught.value.exit_code == 5
    assert service.requests == []


@pytest.mark.parametrize("queue", ["a/b", "ö", "x" * 79, "a.b", "dead-letters"])
def test_names_that_sqs_does_not_take(queue: str) -> None:
    """Nor those of qdo's own dead-letter queues."""
    with pytest.raises(SqsNameError) as caught:
        sender(ScriptedSqs()).send([Outgoing(queue, b"1")])
    assert caught.value.exit_code == 2


def test_a_delay_is_rounded_up_to_whole_seconds() -> None:
    """No message is ever too early; one that was due already is sent at once."""
    service = ScriptedSqs()
    now = time.time()
    for due in (now + 2.5, now - 10, -7.5):
        sender(service).send([Outgoing("a", b"1", terms=SendOptions(due=due))])
    assert [each["DelaySeconds"] for each in service.entries] == [3, 0, 8]


def test_bodies_over_the_limit_are_refused_without_a_bucket() -> None:
    """The limit of bodies is the address's, that of a whole message is SQS's."""
    small = replace(ADDRESS, max_body=10)
    with pytest.raises(MessageTooLargeError, match="10"):
        sender(ScriptedSqs(), small).send([Outgoing("a", b"x" * 11)])
    with pytest.raises(MessageTooLargeError, match="1048576"):
        sender(ScriptedSqs()).send([Outgoing("a", b"x" * MAX_SQS_MESSAGE, key="k")])


def test_bodies_over_the_limit_go_to_s3() -> None:
    """Once, however often their message is sent; also where only the attributes are too much."""
    service, bucket = ScriptedSqs(failing("ThrottlingException")), FakeBucket()
    small = replace(ADDRESS, max_body=10)
    sent = [Outgoing("a", b"x" * size, key="k") for size in (10, 11)]
    sender(service, small, bucket).send(sent)
    assert bucket.bodies == [b"x" * 11]
    first, second = service.entries
    assert first["MessageBody"] == "x" * 10
    pointer = pointer_of(second["MessageBody"], second["MessageAttributes"])
    assert pointer == BodyPointer("large-bodies", "a/1")
    assert second["MessageAttributes"]["ExtendedPayloadSize"]["StringValue"] == "11"
    assert second["MessageAttributes"]["qdo-key"]["StringValue"] == "k"
    sender(service, ADDRESS, bucket).send([Outgoing("a", b"x" * MAX_SQS_MESSAGE, key="k")])
    assert len(bucket.bodies[1]) == MAX_SQS_MESSAGE


def test_headers_too_long_for_any_message() -> None:
    """They cannot go to S3."""
    head = '{"a":"%s"}' % ("x" * MAX_SQS_MESSAGE)
    with pytest.raises(MessageTooLargeError):
        sender(ScriptedSqs(), bucket=FakeBucket()).send([Outgoing("a", b"1", headers=head)])


def test_closing_ends_the_waiting_between_tries(monkeypatch: pytest.MonkeyPatch) -> None:
    """A waiting sender gets the error that its message was not sent."""
    monkeypatch.setattr(sqs_sending, "SEND_BACKOFF", Backoff(60.0, 60.0))
    service = ScriptedSqs(*[failing("ThrottlingException")] * 9)
    stopped = threading.Event()
    own = SqsSender(service, ADDRESS, SqsQueues(service, ADDRESS), None, stopped)
    stopped.set()
    with pytest.raises(ThrottledError):
        own.send(messages(1))
    assert len(service.requests) == 1


def test_refusals_name_action_and_queue() -> None:
    """An entry's own error reads as that of a request."""
    service = ScriptedSqs(lambda body: refused("AWS.SimpleQueueService.SomethingElse"))
    with pytest.raises(AwsError, match=r"sqs:SendMessage on queue 'p-a\.fifo'"):
        sender(service).send(messages(1))


entry_fates = st.sampled_from(["taken", "taken", "taken", "later", "never"])
request_fates = st.one_of(
    st.sampled_from(["throttled", "lost", "denied"]),
    st.lists(entry_fates, min_size=10, max_size=10),
)


@given(
    fates=st.lists(request_fates, max_size=12),
    queues=st.lists(st.sampled_from(["a", "b.fifo"]), min_size=1, max_size=40),
)
def test_whatever_fails_is_told_and_nothing_else(fates: list[Any], queues: list[str]) -> None:
    """Each message is stored once under its id, or is reported as not sent. The
    stored messages of a queue keep their order, unless SQS itself reordered a request."""
    lost = boto.ReadTimeoutError(endpoint_url="x")
    whole = {"throttled": failing("Throttling"), "denied": failing("AccessDenied"), "lost": lost}
    disorder = False

    def step(fate: list[str]) -> Callable[[str], Any]:
        left = iter(fate)
        behind = False

        def entry(body: str) -> Any:
            nonlocal behind, disorder
            kind = next(left)
            disorder |= behind and kind == "taken"
            behind |= kind != "taken"
            return {"taken": None, "later": refused("Oh", False), "never": refused("No")}[kind]

        return entry

    service = ScriptedSqs(*(whole[each] if isinstance(each, str) else step(each) for each in fates))
    sent = [Outgoing(queue, str(n).encode(), "k") for n, queue in enumerate(queues)]
    told: Sequence[Any]
    partly: PartialSendError | None = None
    try:
        told = sender(service).send(sent)
    except PartialSendError as error:
        partly, told = error, error.details["sent"]
    except QdoError:
        told = [None] * len(queues)
    if partly is not None:
        unsent = [index for index, each in enumerate(told) if each is None]
        assert tuple(unsent) == partly.details["unsent"]
        assert partly.details["done"] == len(queues) - len(unsent)
    for number, each in enumerate(told):
        assert each is None or each.id == f"id of {number}"
    stored = [int(body) for body in service.stored]
    assert sorted(stored) == [number for number, each in enumerate(told) if each is not None]
    if not disorder:
        for queue in set(queues):
            own = [number for number in stored if queues[number] == queue]
            assert own == sorted(own)
