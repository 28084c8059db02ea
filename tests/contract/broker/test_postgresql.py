"""What the PostgreSQL broker adds to the contract of all brokers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from qdo.brokers.base import Broker, Outgoing, SendOptions
from qdo.brokers.registry import open_broker
from qdo.errors import QueueLimitError, QueueNotEmptyError
from tests.support.postgresql.schema import prepared


@pytest.fixture
def broker(postgresql_url: str) -> Iterator[Broker]:
    made = open_broker(prepared(postgresql_url), "app")
    yield made
    made.close()


def test_the_number_of_queues_is_limited(broker: Broker) -> None:
    """Existing queues are not concerned; a batch is stored whole or not at all."""
    broker.max_queues = 2
    broker.send_many([Outgoing("a", b"1"), Outgoing("b", b"1")])
    with pytest.raises(QueueLimitError) as raised:
        broker.send(Outgoing("c", b"1"))
    assert raised.value.details == {"queue": "c", "limit": 2}
    with pytest.raises(QueueLimitError):
        broker.send_many([Outgoing("a", b"2"), Outgoing("c", b"1")])
    with pytest.raises(QueueLimitError):
        broker.send(Outgoing("c", b"1", terms=SendOptions(dedup_key="k")))
    assert broker.catalog.backlog("a", 0).count == 1
    broker.delete_queue("b", broker.catalog.head("b"))
    broker.send(Outgoing("c", b"1"))
    assert broker.catalog.names() == ["a", "c"]


def test_a_queue_is_deleted_when_it_is_empty(broker: Broker) -> None:
    """Or on request; messages of a later queue of the same name are its own."""
    broker.send(Outgoing("q", b"1"))
    last = broker.catalog.head("q")
    broker.send(Outgoing("q", b"2"))
    with pytest.raises(QueueNotEmptyError) as raised:
        broker.delete_queue("q", last)
    assert raised.value.details == {"queue": "q", "waiting": 1, "delayed": 0, "dead_letters": 0}
    broker.delete_queue("q", last, with_messages=True)
    assert broker.catalog.names() == []
    broker.send(Outgoing("q", b"3"))
    assert [row[1] for row in broker.reader("q", 0).fetch(10)] == [b"3"]
