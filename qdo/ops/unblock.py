"""Letting a queue go on that a failing message blocks."""

from __future__ import annotations

from typing import Literal, TypeAlias

from qdo.coordination import operator
from qdo.coordination.client import Client
from qdo.coordination.layout import Layout, Marks

Verdict: TypeAlias = Literal["retry", "skip", "dead-letter"]


def unblock(client: Client, layout: Layout, queue: str, verdict: Verdict) -> Marks:
    """Decide on the message that blocks a queue; return what was known of it.

    Its owner, or the next one, acts upon it: "retry" runs the message again, with its attempts
    counted from 1; "skip" passes it over; "dead-letter" sets it aside with its error.

    :raises NotFoundError: there is no such queue.
    :raises NotBlockedError: it is not blocked.
    """
    marks = operator.unblock(client, layout, queue, verdict).marks
    if marks is None:
        raise RuntimeError(f"queue {queue} was unblocked without a message that blocks it")
    return marks
