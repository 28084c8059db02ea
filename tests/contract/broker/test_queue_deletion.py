"""Deleting queues of the embedded broker, and the limit of their number."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from qdo.brokers.base import Outgoing, SendOptions
from qdo.brokers.dead_letters import DeadLetterRecord
from qdo.brokers.embedded.broker import RETIRE_CHUNK, EmbeddedBroker
from qdo.errors import QueueLimitError, QueueNotEmptyError, UnsupportedError
from qdo.positions import position_of_time
from tests.support.fakes.scripted_broker import ScriptedBroker


class SettableClock:
    """A clock for positions that tests set."""

    def __init__(self) -> None:
        self.now = position_of_time(1_700_000_000)

    def __call__(self) -> int:
        return self.now


@pytest.fixture
def clock() -> SettableClock:
    return SettableClock()


@pytest.fixture
def broker(tmp_path: Path, clock: SettableClock) -> Iterator[EmbeddedBroker]:
    made = EmbeddedBroker(str(tmp_path / "messages.db"), "app", clock)
    yield made
    made.close()


def _letter(position: int) -> DeadLetterRecord:
    return DeadLetterRecord(
        queue="q", position=position, body=b"1", key=None, headers=None, error="no",
        traceback="", attempts=1, worker="worker-1", fence=1,
    )  # fmt: skip


def test_a_done_queue_is_deleted(broker: EmbeddedBroker) -> None:
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


def test_positions_grow_after_a_deletion(broker: EmbeddedBroker, clock: SettableClock) -> None:
    """Even if the clock was set back: a recorded position must not pass over new messages."""
    broker.send(Outgoing("q", b"1"))
    last = broker.catalog.head("q")
    broker.delete_queue("q", last)
    clock.now -= 10_000_000
    broker.send(Outgoing("q", b"2"))
    assert broker.catalog.head("q") > last


@pytest.mark.parametrize("what", ["waiting", "delayed", "dead_letters"])
def test_only_messages_up_to_a_position_are_deleted(broker: EmbeddedBroker, what: str) -> None:
    """Whatever is not done counts."""
    broker.send(Outgoing("q", b"1"))
    last = broker.catalog.head("q")
    if what == "waiting":
        broker.send(Outgoing("q", b"2"))
    elif what == "delayed":
        broker.send(Outgoing("q", b"2", terms=SendOptions(due=2_000_000_000)))
    else:
        broker.dead_letters.store(_letter(last))
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


def test_a_large_queue_is_deleted_in_parts(broker: EmbeddedBroker) -> None:
    """Other writers get their turn in between."""
    broker.send_many([Outgoing("q", b"1")] * (3 * RETIRE_CHUNK))
    before = broker.commits
    broker.delete_queue("q", broker.catalog.head("q"))
    assert broker.commits - before >= 4
    assert broker.catalog.names() == []


def test_the_number_of_queues_is_limited(broker: EmbeddedBroker, tmp_path: Path) -> None:
    """Existing queues are not concerned, and other apps in the file have their own number."""
    broker.max_queues = 2
    broker.send_many([Outgoing("a", b"1"), Outgoing("b", b"1")])
    with pytest.raises(QueueLimitError) as raised:
        broker.send(Outgoing("c", b"1"))
    assert raised.value.details == {"queue": "c", "limit": 2}
    with pytest.raises(QueueLimitError):
        broker.send_many([Outgoing("a", b"2"), Outgoing("c", b"1")])
    assert broker.catalog.backlog("a", 0).count == 1  # all or none
    other = EmbeddedBroker(str(tmp_path / "messages.db"), "other")
    other.max_queues = 1
    other.send(Outgoing("c", b"1"))
    other.close()
    broker.send(Outgoing("a", b"2"))
    broker.delete_queue("b", broker.catalog.head("b"))
    broker.send(Outgoing("c", b"1"))


def test_other_brokers_refuse() -> None:
    """Their queues belong to a service."""
    with pytest.raises(UnsupportedError):
        ScriptedBroker().delete_queue("q", 0)
