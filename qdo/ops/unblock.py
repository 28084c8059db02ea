"""Letting a queue go on that failing messages block."""

from __future__ import annotations

from typing import Literal, TypeAlias

from qdo.coordination import operator
from qdo.coordination.client import Client
from qdo.coordination.layout import Layout, Marks
from qdo.coordination.operator import Which

Verdict: TypeAlias = Literal["retry", "skip", "dead-letter"]


def unblock(
    client: Client, layout: Layout, queue: str, verdict: Verdict, which: Which = "first"
) -> tuple[Marks, ...]:
    """Decide on messages that block a queue; return what was known of them.

    Its owner, or the next one, acts upon it: "retry" runs a message again, with its attempts
    counted from 1; "skip" passes it over; "dead-letter" sets it aside with its error.

    :param which: position of the message, "first" or "all".
    :raises NotFoundError: there is no such queue.
    :raises NotBlockedError: it is not blocked, or by no such message.
    """
    return operator.unblock(client, layout, queue, verdict, which)
