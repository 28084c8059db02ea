"""Resumes a queue that failing messages block."""

from __future__ import annotations

from typing import Literal, TypeAlias

from qdo.coordination import queue_admin as operator
from qdo.coordination.client import Client
from qdo.coordination.queue_admin import Which
from qdo.coordination.znodes.layout import Layout
from qdo.coordination.znodes.progress import FailureRecord

Decision: TypeAlias = Literal["retry", "skip", "dead-letter"]


def unblock(
    client: Client, layout: Layout, queue: str, decision: Decision, which: Which = "first"
) -> tuple[FailureRecord, ...]:
    """Decide about messages that block a queue; return their failure records.

    The queue's present or next owner executes the decision. "retry" runs a message again, with
    its attempts counted from 1; "skip" skips it; "dead-letter" stores it as a dead letter with
    its error.

    :param which: position of the message, "first" or "all".
    :raises NotFoundError: there is no such queue.
    :raises NotBlockedError: the queue, or this message, is not blocked.
    """

    return operator.unblock(client, layout, queue, decision, which)
