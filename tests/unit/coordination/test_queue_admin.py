"""The effect of an operator's decision on a queue node with several failing messages."""

from __future__ import annotations

from dataclasses import replace

import pytest

from qdo.coordination.queue_admin import chosen, with_decision
from qdo.coordination.znodes.queue_node import FailureRecord, OutOfOrderProgress, QueueNode
from qdo.errors import AlreadyDecidedError, MessageNotFailingError, NotFailingError

FIRST, SECOND = (
    FailureRecord(50, 3, "no", blocked_since=7.0),
    FailureRecord(60, 2, "nor this", blocked_since=8.0),
)
FAILING = FailureRecord(55, 1, "later", retry_at=9.0)
RUNS = ((52, 54),)
NODE = QueueNode(last=40, failure=FIRST, out_of_order=OutOfOrderProgress(RUNS, (FAILING, SECOND)))
DECISIONS = pytest.mark.parametrize("decision", ["retry", "skip", "dead-letter"])


def decided(decision: str, *records: FailureRecord) -> tuple[FailureRecord, ...]:
    """Return the records as a decision leaves them."""
    if decision == "retry":
        return ()
    return tuple(replace(each, blocked_since=0.0, decision=decision) for each in records)


@DECISIONS
def test_the_next_blocked_message_comes_foremost(decision: str) -> None:
    """So that `qdo queues` shows it, and the next decision is about it; nothing else is lost."""
    after = with_decision(NODE, "q", decision, "first")
    assert after.failure == SECOND
    assert after.out_of_order is not None
    assert after.out_of_order.done_ranges == RUNS
    left = (*decided(decision, FIRST), FAILING)
    assert set(after.out_of_order.other_failures) == set(left)
    assert chosen(after, "q", "first") == (SECOND,)


def test_nothing_is_left_beside_two_that_are_retried() -> None:
    node = QueueNode(last=40, failure=FIRST, out_of_order=OutOfOrderProgress((), (SECOND,)))
    after = with_decision(node, "q", "retry", "first")
    assert after == QueueNode(last=40, failure=SECOND)


@DECISIONS
@pytest.mark.parametrize("named", [SECOND, FAILING], ids=["blocking", "failing"])
def test_a_message_is_named_by_its_position(decision: str, named: FailureRecord) -> None:
    """The others stay as they are, the first blocking one foremost."""
    after = with_decision(NODE, "q", decision, (named.position,))
    others = tuple(each for each in (FIRST, FAILING, SECOND) if each is not named)
    assert set(after.failures) == {*others, *decided(decision, named)}
    assert after.failure == FIRST


@DECISIONS
def test_all_at_once(decision: str) -> None:
    """Those that block, and those that wait for their next attempt."""
    after = with_decision(NODE, "q", decision, "all")
    assert after.failures == decided(decision, FIRST, FAILING, SECOND)
    assert (after.blocking, after.retrying) == ((), ())
    with pytest.raises(NotFailingError):
        with_decision(after, "q", decision, "all")


def test_a_message_that_only_fails_gives_way_to_one_that_blocks() -> None:
    """Operators see the foremost message."""
    third = FailureRecord(70, 4, "third", blocked_since=9.0)
    node = QueueNode(last=40, failure=FAILING, out_of_order=OutOfOrderProgress((), (SECOND, third)))
    assert with_decision(node, "q", "retry", "first") == QueueNode(
        40, failure=third, out_of_order=OutOfOrderProgress((), (FAILING,))
    )


@pytest.mark.parametrize("position", [49, 53, 61])
def test_a_message_that_does_not_fail_is_refused(position: int) -> None:
    """Even beside others that do: it is decided about all of them, or about none."""
    with pytest.raises(MessageNotFailingError) as raised:
        with_decision(NODE, "q", "skip", (50, position))
    assert raised.value.details["message"] == position
    assert raised.value.exit_code == 5


@DECISIONS
def test_the_first_of_two_decisions_counts(decision: str) -> None:
    """The owner may be executing it."""
    after = with_decision(NODE, "q", "skip", (55,))
    with pytest.raises(AlreadyDecidedError) as raised:
        with_decision(after, "q", decision, (55,))
    assert raised.value.details["decision"] == "skip"
    assert raised.value.exit_code == 5
