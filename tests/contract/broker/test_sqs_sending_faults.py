"""Sending to SQS while requests fail in transit: which messages are stored, and how often."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from qdo.backoff import Backoff
from qdo.broker_errors import AccessDeniedError, AwsUnreachableError
from qdo.brokers.aws import sending as aws_sending
from qdo.brokers.base import Outgoing, SendOptions
from qdo.brokers.registry import open_broker
from qdo.brokers.sqs import dead_letters as sqs_letter_hands
from qdo.brokers.sqs import sender as sqs_sending
from qdo.brokers.sqs.broker import SqsBroker
from qdo.brokers.sqs.codec import make_position
from qdo.errors import PartialSendError, QdoError
from qdo.testing.contracts.fixtures import dead_letter
from tests.support.aws.clients import client
from tests.support.aws.fault_proxy import Proxy
from tests.support.aws.messages import raw_messages
from tests.support.processes import wait_until

REGION = "eu-west-1"
REFUSED = ["throttle", "limit", "error", "unavailable", "reset-before"]
"""Faults that keep a request from the server."""
UNHEARD = ["reset-after", "unanswered"]
"""Faults after which the server has done the work and the sender does not know it."""
LETTER = dead_letter("a.fifo", make_position(10**17, 5, 6), body=b"1")


@pytest.fixture
def proxy(sqs_proxy: Proxy) -> Proxy:
    return sqs_proxy


@pytest.fixture
def broker(proxy: Proxy, aws_prefix: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[SqsBroker]:
    monkeypatch.setattr(sqs_sending, "SEND_BACKOFF", Backoff(0.001, 3.0))
    url = f"sqs://{REGION}/{aws_prefix}?endpoint={proxy.url}&wait_seconds=0"
    made = open_broker(url, "app")
    assert isinstance(made, SqsBroker)
    yield made
    made.close()


@pytest.fixture
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sending is given up soon."""
    monkeypatch.setattr(aws_sending, "PATIENCE_SECONDS", 0.3)


@pytest.fixture
def stored(sqs_url: str, aws_prefix: str) -> Callable[[str], list[int]]:
    """Return the numbers that are in a queue, in their order; queues a and a.fifo are made."""
    sqs: Any = client("sqs", sqs_url, region=REGION)
    urls = {
        name: sqs.create_queue(QueueName=aws_prefix + name, Attributes=attributes)["QueueUrl"]
        for name, attributes in (("a", {}), ("a.fifo", {"FifoQueue": "true"}))
    }
    return lambda queue: [int(each["Body"]) for each in raw_messages(sqs, urls[queue])]


def numbered(queue: str, count: int) -> list[Outgoing]:
    return [Outgoing(queue, b"%d" % number, "k") for number in range(count)]


@pytest.mark.parametrize("fault", [*REFUSED, *UNHEARD])
def test_a_fifo_queue_has_everything_once_and_in_order(
    broker: SqsBroker, proxy: Proxy, stored: Callable[[str], list[int]], fault: str
) -> None:
    """Whether the server did the work of a spoilt request or not."""
    for skip in (0, 2, 1):
        proxy.spoil(fault, "SendMessageBatch", skip=skip, count=2)
    assert len(set(broker.send_many(numbered("a.fifo", 55)))) == 55
    assert stored("a.fifo") == list(range(55))
    assert sum(each.fault == fault for each in proxy.log("SendMessageBatch")) >= 4


@pytest.mark.parametrize("fault", [*REFUSED, *UNHEARD])
def test_a_standard_queue_has_everything(
    broker: SqsBroker, proxy: Proxy, stored: Callable[[str], list[int]], fault: str
) -> None:
    """Only messages of a request whose answer was lost are stored twice."""
    proxy.spoil(fault, "SendMessageBatch", skip=1, count=1)
    broker.send_many(numbered("a", 30))
    counts = Counter(stored("a"))
    assert counts.keys() == set(range(30))
    again = {number for number, count in counts.items() if count > 1}
    assert again == (set(range(10, 20)) if fault in UNHEARD else set())


def test_a_slow_answer_is_waited_for(
    broker: SqsBroker, proxy: Proxy, stored: Callable[[str], list[int]]
) -> None:
    """It is not a fault."""
    proxy.spoil("slow", "SendMessageBatch", seconds=0.3)
    broker.send_many(numbered("a", 12))
    assert sorted(stored("a")) == list(range(12))
    assert len(proxy.log("SendMessageBatch")) == 2


def test_a_burst_is_throttled_for_a_while(
    broker: SqsBroker, proxy: Proxy, stored: Callable[[str], list[int]]
) -> None:
    """Time ends the attempts, not their number."""
    proxy.spoil("throttle", "SendMessageBatch", count=8)
    broker.send_many(numbered("a.fifo", 3))
    assert stored("a.fifo") == [0, 1, 2]


@pytest.mark.usefixtures("_impatient")
@pytest.mark.parametrize("fault", ["throttle", "reset-before", "denied", "expired"])
def test_an_unsendable_message_is_named_and_stops_its_followers(
    broker: SqsBroker, proxy: Proxy, stored: Callable[[str], list[int]], fault: str
) -> None:
    """The first request gets through, then none; the sender may send the rest later."""
    proxy.spoil(fault, "SendMessageBatch", skip=1, count=0)
    with pytest.raises(PartialSendError) as caught:
        broker.send_many(numbered("a.fifo", 35))
    assert caught.value.details["unsent"] == tuple(range(10, 35))
    proxy.clear()
    messages = numbered("a.fifo", 35)
    broker.send_many([messages[index] for index in caught.value.details["unsent"]])
    assert stored("a.fifo") == list(range(35))


def test_who_rings_is_told_what_was_sent(
    broker: SqsBroker, proxy: Proxy, stored: Callable[[str], list[int]]
) -> None:
    """Each queue once, even if only a part was stored, but no queue without a stored message."""
    told: list[set[str]] = []
    broker.on_sent = lambda queues: told.append(set(queues))
    later = SendOptions(due=time.time() + 60)
    delayed = Outgoing("a", b"9", "k", terms=later)
    broker.send_many([*numbered("a", 12), *numbered("a.fifo", 3), delayed])
    assert told == [{"a", "a.fifo"}]
    broker.send_many([delayed])
    assert told[1:] == [set()]
    proxy.spoil("denied", "SendMessageBatch", skip=1, count=0)
    with pytest.raises(PartialSendError):
        broker.send_many(numbered("a.fifo", 35))
    assert told[2:] == [{"a.fifo"}]


@pytest.mark.usefixtures("_impatient")
def test_a_sender_that_repeats_by_a_dedup_key_stores_once(
    broker: SqsBroker, proxy: Proxy, stored: Callable[[str], list[int]]
) -> None:
    """Even if its sender got an error that nothing could be sent."""
    proxy.spoil("reset-after", "SendMessageBatch", count=0)
    message = replace(numbered("a.fifo", 1)[0], terms=SendOptions(dedup_key="once"))
    with pytest.raises(AwsUnreachableError):
        broker.send(message)
    proxy.clear()
    broker.send(message)
    assert stored("a.fifo") == [0]


@pytest.mark.parametrize("fault", [*REFUSED, *UNHEARD])
def test_a_dead_letter_is_stored_once(broker: SqsBroker, proxy: Proxy, fault: str) -> None:
    """Burying is tried a few times, and the queue of the letters knows them again."""
    broker.dead_letters.store(
        replace(LETTER, position=make_position(10**17, 9, 9))
    )  # makes their queue
    proxy.spoil(fault, "SendMessage", count=2)
    broker.dead_letters.store(LETTER)
    assert len(broker.dead_letters.records()) == 2


@pytest.mark.parametrize("action", ["ReceiveMessage", "SendMessageBatch", "DeleteMessageBatch"])
@pytest.mark.parametrize("fault", ["denied", "reset-after"])
def test_a_letter_is_never_lost_while_it_is_sent_again(
    broker: SqsBroker,
    proxy: Proxy,
    stored: Callable[[str], list[int]],
    monkeypatch: pytest.MonkeyPatch,
    action: str,
    fault: str,
) -> None:
    """Whatever fails: it is a letter, or a message, or both; trying again makes it a message.

    One that was received by a request whose answer was lost is hidden for a while.
    """
    monkeypatch.setattr(sqs_letter_hands, "HIDE_SECONDS", 1)
    monkeypatch.setattr(aws_sending, "PATIENCE_SECONDS", 1.0)
    broker.dead_letters.store(LETTER)
    place = [(LETTER.queue, LETTER.position)]
    proxy.spoil(fault, action, count=0)
    try:
        broker.dead_letters.retry(place)
    except QdoError:
        assert action != "DeleteMessageBatch"
    proxy.clear()
    unsaid = action == "DeleteMessageBatch" and fault == "reset-after"
    wait_until(lambda: unsaid or broker.dead_letters.retry(place) != [None], "seen again")
    assert broker.dead_letters.records() == []
    assert stored("a.fifo") == [1]


def test_letters_are_given_back_where_not_all_could_be_received(
    broker: SqsBroker, proxy: Proxy
) -> None:
    """No process has to wait because another one could not receive all dead letters."""
    for number in range(12):
        broker.dead_letters.store(replace(LETTER, position=make_position(10**17, 5, number)))
    proxy.spoil("denied", "ReceiveMessage", skip=1, count=0)
    with pytest.raises(AccessDeniedError, match="sqs:ReceiveMessage on queue"):
        broker.dead_letters.records()
    proxy.clear()
    assert len(broker.dead_letters.records()) == 12
