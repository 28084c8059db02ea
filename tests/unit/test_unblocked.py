"""What an operator's decision makes of a queue node, where several messages are blocked."""

from __future__ import annotations

from dataclasses import replace

import pytest

from qdo.coordination.layout import Above, Marks, QueueNode
from qdo.coordination.operator import unblocked
from qdo.errors import NotBlockedError, NotBlockingError

FIRST, SECOND = Marks(50, 3, "no", since=7.0), Marks(60, 2, "nor this", since=8.0)
FAILING = Marks(55, 1, "later", due=9.0)
RUNS = ((52, 54),)


@pytest.mark.parametrize("verdict", ["retry", "skip", "dead-letter"])
def test_the_next_blocked_message_comes_foremost(verdict: str) -> None:
    """So that `qdo queues` shows it, and the next decision is about it; nothing else is lost."""
    node = QueueNode(last=40, marks=FIRST, above=Above(RUNS, (FAILING, SECOND)))
    after = unblocked(node, "q", verdict)
    assert after.marks == SECOND
    decided = () if verdict == "retry" else (replace(FIRST, since=0.0, verdict=verdict),)
    assert after.above == Above(RUNS, (FAILING, *decided))
    again = unblocked(after, "q", "retry")
    assert again.marks is None
    assert again.above == after.above
    with pytest.raises(NotBlockedError):
        unblocked(again, "q", verdict)


def test_nothing_is_left_beside_two_that_are_retried() -> None:
    node = QueueNode(last=40, marks=FIRST, above=Above((), (SECOND,)))
    after = unblocked(node, "q", "retry")
    assert after == QueueNode(last=40, marks=SECOND)


@pytest.mark.parametrize("verdict", ["retry", "skip", "dead-letter"])
def test_a_message_is_named_by_its_position(verdict: str) -> None:
    """The others stay where they are, the first of them foremost."""
    node = QueueNode(last=40, marks=FIRST, above=Above(RUNS, (FAILING, SECOND)))
    after = unblocked(node, "q", verdict, 60)
    decided = () if verdict == "retry" else (replace(SECOND, since=0.0, verdict=verdict),)
    assert after == replace(node, above=Above(RUNS, (FAILING, *decided)))
    assert after.blocking == (FIRST,)


@pytest.mark.parametrize("verdict", ["retry", "skip", "dead-letter"])
def test_all_at_once(verdict: str) -> None:
    """Those that fail and do not block are none of them."""
    node = QueueNode(last=40, marks=FIRST, above=Above(RUNS, (FAILING, SECOND)))
    after = unblocked(node, "q", verdict, "all")
    assert after.blocking == ()
    if verdict == "retry":
        assert after == QueueNode(last=40, above=Above(RUNS, (FAILING,)))
    else:
        first, second = (replace(each, since=0.0, verdict=verdict) for each in (FIRST, SECOND))
        assert after == QueueNode(last=40, marks=first, above=Above(RUNS, (FAILING, second)))


def test_a_message_that_only_fails_gives_way_to_one_that_blocks() -> None:
    """What is foremost is what operators see."""
    third = Marks(70, 4, "third", since=9.0)
    node = QueueNode(last=40, marks=FAILING, above=Above((), (SECOND, third)))
    assert unblocked(node, "q", "retry") == QueueNode(40, marks=third, above=Above((), (FAILING,)))


@pytest.mark.parametrize("position", [49, 55, 61])
def test_a_position_where_nothing_blocks_is_refused(position: int) -> None:
    """Also that of a message that is still tried."""
    node = QueueNode(last=40, marks=FIRST, above=Above((), (FAILING, SECOND)))
    with pytest.raises(NotBlockingError, match=f"no message at position {position} blocks") as told:
        unblocked(node, "q", "skip", position)
    assert told.value.exit_code == 5
