"""The effect of an operator's decision on a queue node with several blocked messages."""

from __future__ import annotations

from dataclasses import replace

import pytest

from qdo.coordination.queue_admin import with_unblock
from qdo.coordination.znodes.progress import FailureRecord, OutOfOrderProgress
from qdo.coordination.znodes.queue_node import QueueNode
from qdo.errors import NotBlockedError, NotBlockingError

FIRST, SECOND = (
    FailureRecord(50, 3, "no", blocked_since=7.0),
    FailureRecord(60, 2, "nor this", blocked_since=8.0),
)
FAILING = FailureRecord(55, 1, "later", retry_at=9.0)
RUNS = ((52, 54),)


@pytest.mark.parametrize("verdict", ["retry", "skip", "dead-letter"])
def test_the_next_blocked_message_comes_foremost(verdict: str) -> None:
    """So that `qdo queues` shows it, and the next decision is about it; nothing else is lost."""
    node = QueueNode(
        last=40, failure=FIRST, out_of_order=OutOfOrderProgress(RUNS, (FAILING, SECOND))
    )
    after = with_unblock(node, "q", verdict)
    assert after.failure == SECOND
    decided = () if verdict == "retry" else (replace(FIRST, blocked_since=0.0, decision=verdict),)
    assert after.out_of_order == OutOfOrderProgress(RUNS, (FAILING, *decided))
    again = with_unblock(after, "q", "retry")
    assert again.failure is None
    assert again.out_of_order == after.out_of_order
    if verdict == "retry":
        assert with_unblock(again, "q", verdict).failures == ()  # the message that only fails
        return
    with pytest.raises(NotBlockedError):
        with_unblock(again, "q", verdict)


def test_nothing_is_left_beside_two_that_are_retried() -> None:
    node = QueueNode(last=40, failure=FIRST, out_of_order=OutOfOrderProgress((), (SECOND,)))
    after = with_unblock(node, "q", "retry")
    assert after == QueueNode(last=40, failure=SECOND)


@pytest.mark.parametrize("verdict", ["retry", "skip", "dead-letter"])
def test_a_message_is_named_by_its_position(verdict: str) -> None:
    """The others stay where they are, the first of them foremost."""
    node = QueueNode(
        last=40, failure=FIRST, out_of_order=OutOfOrderProgress(RUNS, (FAILING, SECOND))
    )
    after = with_unblock(node, "q", verdict, 60)
    decided = () if verdict == "retry" else (replace(SECOND, blocked_since=0.0, decision=verdict),)
    assert after == replace(node, out_of_order=OutOfOrderProgress(RUNS, (FAILING, *decided)))
    assert after.blocking == (FIRST,)


@pytest.mark.parametrize("verdict", ["retry", "skip", "dead-letter"])
def test_all_at_once(verdict: str) -> None:
    """Messages that fail but do not block are not included."""
    node = QueueNode(
        last=40, failure=FIRST, out_of_order=OutOfOrderProgress(RUNS, (FAILING, SECOND))
    )
    after = with_unblock(node, "q", verdict, "all")
    assert after.blocking == ()
    if verdict == "retry":
        assert after == QueueNode(last=40, out_of_order=OutOfOrderProgress(RUNS, (FAILING,)))
    else:
        first, second = (
            replace(each, blocked_since=0.0, decision=verdict) for each in (FIRST, SECOND)
        )
        assert after == QueueNode(
            last=40, failure=first, out_of_order=OutOfOrderProgress(RUNS, (FAILING, second))
        )


def test_a_message_that_only_fails_gives_way_to_one_that_blocks() -> None:
    """Operators see the foremost message."""
    third = FailureRecord(70, 4, "third", blocked_since=9.0)
    node = QueueNode(last=40, failure=FAILING, out_of_order=OutOfOrderProgress((), (SECOND, third)))
    assert with_unblock(node, "q", "retry") == QueueNode(
        40, failure=third, out_of_order=OutOfOrderProgress((), (FAILING,))
    )


@pytest.mark.parametrize("position", [49, 55, 61])
def test_a_position_where_nothing_blocks_is_refused(position: int) -> None:
    """Also that of a message that is still tried."""
    node = QueueNode(last=40, failure=FIRST, out_of_order=OutOfOrderProgress((), (FAILING, SECOND)))
    with pytest.raises(NotBlockingError) as raised:
        with_unblock(node, "q", "skip", position)
    assert raised.value.details["message"] == position
    assert raised.value.exit_code == 5
