"""Word of the messages in hand that outlives its process, and what is made of it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qdo.coordination.crashes import InHand, marked_node
from qdo.coordination.layout import Above, Marks, QueueNode
from qdo.worker.hands import Hands, label, make_memory, read

POSITION = 135471512647131000


@pytest.fixture
def memory() -> Iterator[int]:
    fd = make_memory()
    yield fd
    os.close(fd)


def test_what_is_in_hand_can_be_read(memory: int) -> None:
    """Queue, worker and position of each turn under way, and nothing of those that ended."""
    hands = Hands(3, memory)
    first, second = (hands.take(label(name, "worker-1")) for name in ("a", "b"))
    hands.positions[first] = POSITION
    assert read(memory) == [InHand("a", "worker-1", POSITION)]
    hands.positions[second] = 7
    hands.give_back(first)
    assert read(memory) == [InHand("b", "worker-1", 7)]
    third = hands.take(label("c", "worker-22"))
    assert third == first
    assert read(memory) == [InHand("b", "worker-1", 7)]


def test_it_outlives_its_process(memory: int) -> None:
    """Killed in the middle, without a word."""
    code = (
        "import os, signal\n"
        "from qdo.worker.hands import Hands, label\n"
        f"hands = Hands(100, {memory})\n"
        "hands.positions[hands.take(label('q', 'worker-1'))] = 42\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], pass_fds=(memory,), check=False)
    assert ended.returncode == -9
    assert read(memory) == [InHand("q", "worker-1", 42)]


def test_a_process_that_died_before_it_began_had_nothing(memory: int) -> None:
    """Its memory was never made."""
    assert read(memory) == []


def test_more_turns_than_places_do_no_harm(memory: int) -> None:
    """They keep word where nobody looks."""
    hands = Hands(1, memory)
    first, second = hands.take(label("a", "w")), hands.take(label("b", "w"))
    hands.positions[first] = hands.positions[second] = 5
    assert [each.queue for each in read(memory)] == ["a"]
    hands.give_back(second)
    hands.give_back(first)
    assert read(memory) == []
    assert hands.take(label("c", "w")) == first


def test_without_shared_memory_turns_need_not_ask() -> None:
    """A worker without a parent writes as well, to nobody."""
    hands = Hands(100)
    index = hands.take(label("q", "w"))
    hands.positions[index] = POSITION
    hands.give_back(index)


@given(st.text(st.characters(exclude_categories=("Cs",)), min_size=1, max_size=200))
def test_any_name_of_a_queue_fits(name: str) -> None:
    """200 characters of 4 bytes each, and the worker's."""
    fd = make_memory()
    try:
        hands = Hands(2, fd)
        hands.positions[hands.take(label(name, "worker-0000000101"))] = POSITION
        assert read(fd) == [InHand(name, "worker-0000000101", POSITION)]
    finally:
        os.close(fd)


IN_HAND = InHand("q", "worker-1", 50)


@pytest.mark.parametrize(
    "node",
    [
        QueueNode(last=40, owner="worker-2"),
        QueueNode(last=40),
        QueueNode(last=50, owner="worker-1"),
        QueueNode(last=40, owner="worker-1", fault="garbage"),
        QueueNode(last=40, owner="worker-1", marks=Marks(50, 3, since=1.0)),
        QueueNode(last=40, owner="worker-1", marks=Marks(50, 3, verdict="skip")),
    ],
)
def test_where_no_attempt_is_counted(node: QueueNode) -> None:
    """Another's queue, a message that is recorded as done, garbage, a blocked queue."""
    assert marked_node(node, IN_HAND, "it died") is None


@pytest.mark.parametrize(("marks", "attempts"), [(None, 1), (Marks(50, 3), 4), (Marks(45, 9), 1)])
def test_a_crash_is_one_attempt_more(marks: Marks | None, attempts: int) -> None:
    """Everything else in the node stays."""
    node = QueueNode(last=40, owner="worker-1", seek=2, marks=marks, extra=(("note", 1),))
    counted = marked_node(node, IN_HAND, "it died")
    assert counted == QueueNode(
        last=40,
        owner="worker-1",
        seek=2,
        marks=Marks(50, attempts, "it died", crashed=True),
        extra=(("note", 1),),
    )


SEVERAL = InHand("q", "worker-1", 50, in_line=False)


def test_a_place_says_whether_its_queue_has_several_in_hand(memory: int) -> None:
    """Then the marks of one message do not give way to those of another."""
    hands = Hands(2, memory)
    name = "q" * 200
    for in_line in (True, False):
        hands.positions[hands.take(label(name, "worker-1", in_line))] = 50
    assert {(each.queue, each.in_line) for each in read(memory)} == {(name, True), (name, False)}


def test_every_message_in_hand_gets_its_attempt() -> None:
    """Those that had failed before are counted on, the others from 1, and none is forgotten."""
    node = QueueNode(last=40, owner="worker-1", marks=Marks(45, 2), above=Above(((47, 48),)))
    marked = marked_node(node, SEVERAL, "it died")
    assert marked is not None
    first = Marks(50, 1, "it died", crashed=True)
    assert marked.marks == Marks(45, 2)
    assert marked.above == Above(((47, 48),), (first,))
    again = marked_node(marked, SEVERAL, "it died")
    assert again is not None
    assert again.above is not None
    assert again.above.marks == (Marks(50, 2, "it died", crashed=True),)
    head = marked_node(again, InHand("q", "worker-1", 45, in_line=False), "it died")
    assert head is not None
    assert head.marks == Marks(45, 3, "it died", crashed=True)


@pytest.mark.parametrize(
    "node",
    [
        QueueNode(last=40, owner="worker-1", above=Above(((45, 55),))),
        QueueNode(last=40, owner="worker-1", above=Above((), (Marks(50, 3, since=1.0),))),
        QueueNode(last=40, owner="worker-1", above=Above((), (Marks(50, 3, verdict="skip"),))),
    ],
)
def test_where_no_attempt_is_counted_beyond_last(node: QueueNode) -> None:
    """Done above the watermark; waiting for an operator; decided by one."""
    assert marked_node(node, SEVERAL, "it died") is None
