"""What an operator's decision makes of a queue node, where several messages are blocked."""

from __future__ import annotations

from dataclasses import replace

import pytest

from qdo.coordination.layout import Above, Marks, QueueNode
from qdo.coordination.operator import unblocked
from qdo.errors import NotBlockedError

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
