"""What the testing kit keeps instead of a coordinator."""

from __future__ import annotations

from dataclasses import replace

import pytest

from qdo.coordination.crashes import InHand
from qdo.coordination.layout import Marks
from qdo.errors import NotFoundError
from qdo.testing.record import Record


@pytest.fixture
def record() -> Record:
    """A queue that one worker has claimed."""
    record = Record()
    record.claim("q", "one")
    return record


def test_only_the_owner_writes(record: Record) -> None:
    """Who lost the queue meanwhile changes nothing, not even after it is free."""
    node = record.node("q").moved_to(5)
    assert record.write("q", node, "one")
    record.claim("q", "two")
    assert not record.write("q", node.moved_to(9), "one")
    record.free("two")
    assert not record.write("q", node.moved_to(9), "one")
    assert (record.node("q").last, record.node("q").owner) == (5, "")


def test_fences_grow_with_every_claim(record: Record) -> None:
    """Over all queues, and whatever is written in between."""
    first, _ = record.claim("q", "two")
    second, _ = record.claim("p", "two")
    record.write("p", record.node("p").moved_to(3), "two")
    third, node = record.claim("p", "one")
    assert first < second < third
    assert (node.owner, node.last) == ("one", 3)


def test_the_dead_free_their_own_queues_only(record: Record) -> None:
    """Another worker's stay where they are."""
    record.claim("p", "two")
    record.free("one")
    assert [record.node(queue).owner for queue in record.queues()] == ["two", ""]


def test_a_crash_is_counted_for_the_owner(record: Record) -> None:
    """By the rule of a worker's parent: not for what is done, nor for another's queue."""
    record.claim("p", "two")
    hands = [InHand("q", "one", 7), InHand("p", "one", 8)]
    record.count_crash(hands, "died")
    assert record.node("q").marks == Marks(7, 1, "died", crashed=True)
    assert record.node("p").marks is None


def test_an_operators_change_is_counted(record: Record) -> None:
    """As `seek` in the node; a queue that nobody has ever had cannot be changed."""
    changed = record.change("q", lambda node: replace(node, last=4))
    assert (changed.last, changed.seek, changed.owner) == (4, 1, "one")
    with pytest.raises(NotFoundError):
        record.change("p", lambda node: node)
