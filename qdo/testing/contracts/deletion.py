"""The contract of a broker whose queues workers delete, and that limits their number."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from qdo.brokers.base import Broker, Outgoing, SendOptions
from qdo.errors import QueueLimitError, QueueNotEmptyError
from qdo.testing.contracts.fixtures import dead_letter


def test_a_done_queue_is_deleted(broker: Broker) -> None:
    """With its messages and deduplication keys; other queues stay; repeating it is harmless."""
    terms = SendOptions(dedup_key="k")
    broker.send_many([Outgoing("q", b"1", terms=terms), Outgoing("kept", b"2")])
    last = broker.catalog.head("q")
    broker.delete_queue("q", last)
    assert broker.catalog.names() == ["kept"]
    broker.delete_queue("q", last)
    again = broker.send(Outgoing("q", b"3", terms=terms))
    assert [row[1] for row in broker.reader("q", 0).fetch(10)] == [b"3"]
    assert broker.catalog.backlog("q", last).count == 1
    assert again


@pytest.mark.parametrize("what", ["waiting", "delayed", "dead_letters"])
def test_only_messages_up_to_a_position_are_deleted(broker: Broker, what: str) -> None:
    """Whatever is not done counts."""
    broker.send(Outgoing("q", b"1"))
    last = broker.catalog.head("q")
    if what == "waiting":
        broker.send(Outgoing("q", b"2"))
    elif what == "delayed":
        broker.send(Outgoing("q", b"2", terms=SendOptions(due=2_000_000_000)))
    else:
        broker.dead_letters.store(dead_letter(position=last))
    with pytest.raises(QueueNotEmptyError) as raised:
        broker.delete_queue("q", last)
    counts = {"waiting": 0, "delayed": 0, "dead_letters": 0, what: 1}
    assert raised.value.details == {"queue": "q", **counts}
    assert len(broker.reader("q", 0).fetch(10)) >= 1  # the done message is still there
    broker.delayed.discard("q", broker.delayed.numbers("q"))
    broker.dead_letters.discard([("q", last)])
    broker.delete_queue("q", broker.catalog.head("q"))
    assert broker.catalog.names() == []
    assert broker.reader("q", 0).fetch(10) == []


def test_the_number_of_queues_is_limited(broker: Broker, connect: Callable[..., Broker]) -> None:
    """Existing queues are not concerned, and other apps in the file have their own number."""
    broker.max_queues = 2
    broker.send_many([Outgoing("a", b"1"), Outgoing("b", b"1")])
    with pytest.raises(QueueLimitError) as raised:
        broker.send(Outgoing("c", b"1"))
    assert raised.value.details == {"queue": "c", "limit": 2}
    with pytest.raises(QueueLimitError):
        broker.send_many([Outgoing("a", b"2"), Outgoing("c", b"1")])
    assert broker.catalog.backlog("a", 0).count == 1  # all or none
    with pytest.raises(QueueLimitError):
        broker.send(Outgoing("c", b"1", terms=SendOptions(dedup_key="k")))
    other = connect("other")
    other.max_queues = 1
    other.send(Outgoing("c", b"1"))
    broker.send(Outgoing("a", b"2"))
    broker.delete_queue("b", broker.catalog.head("b"))
    broker.send(Outgoing("c", b"1"))
