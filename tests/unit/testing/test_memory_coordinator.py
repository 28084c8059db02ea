"""The testing kit's replacement of a coordinator."""

from __future__ import annotations

from dataclasses import replace

import pytest

from qdo.coordination.interrupted_attempts import InFlight
from qdo.coordination.znodes.queue_node import FailureRecord
from qdo.errors import NotFoundError
from qdo.testing.state import MemoryCoordinator


@pytest.fixture
def record() -> MemoryCoordinator:
    """A queue that one worker has claimed."""
    record = MemoryCoordinator()
    record.claim("q", "one")
    return record


def test_only_the_owner_writes(record: MemoryCoordinator) -> None:
    """Who lost the queue meanwhile changes nothing, not even after it is free."""
    node = record.node("q").moved_to(5)
    assert record.write("q", node, "one")
    record.claim("q", "two")
    assert not record.write("q", node.moved_to(9), "one")
    record.free("two")
    assert not record.write("q", node.moved_to(9), "one")
    assert (record.node("q").last, record.node("q").owner) == (5, "")


def test_fences_grow_with_every_claim(record: MemoryCoordinator) -> None:
    """Over all queues, and whatever is written in between."""
    first, _ = record.claim("q", "two")
    second, _ = record.claim("p", "two")
    record.write("p", record.node("p").moved_to(3), "two")
    third, node = record.claim("p", "one")
    assert first < second < third
    assert (node.owner, node.last) == ("one", 3)


def test_the_dead_free_their_own_queues_only(record: MemoryCoordinator) -> None:
    """Another worker's stay where they are."""
    record.claim("p", "two")
    record.free("one")
    assert [record.node(queue).owner for queue in record.queues()] == ["two", ""]


def test_a_crash_is_counted_for_the_owner(record: MemoryCoordinator) -> None:
    """By the rule of a worker's parent: not for done messages, nor for another's queue."""
    record.claim("p", "two")
    hands = [InFlight("q", "one", 7), InFlight("p", "one", 8)]
    record.count_crash(hands, "died")
    assert record.node("q").failure == FailureRecord(7, 1, "died", crashed=True)
    assert record.node("p").failure is None


def test_an_operators_change_is_counted(record: MemoryCoordinator) -> None:
    """Like `seek` in the node; a queue that never had an owner cannot be changed."""
    changed = record.change("q", lambda node: replace(node, last=4))
    assert (changed.last, changed.seek, changed.owner) == (4, 1, "one")
    with pytest.raises(NotFoundError):
        record.change("p", lambda node: node)
