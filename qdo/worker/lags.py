"""How far behind the queues of a worker are, as it says in its component node."""

from __future__ import annotations

import heapq
from collections.abc import Iterable

from qdo.worker.slot import Slot

MOST_QUEUES = 100
"""Queues that are named at most, those farthest behind: a component node is read by everybody."""
WORTH_SECONDS = 1.0
"""A queue that is less behind is not named."""


def lags(slots: Iterable[Slot]) -> dict[str, float]:
    """Return how old the first message is that is not done, in seconds, by queue.

    Of queues whose broker must be asked for messages: of others everybody can see it.
    """
    behind = [
        (seconds, slot.queue)
        for slot in slots
        if slot.subscription is not None
        and (seconds := slot.subscription.behind_seconds()) is not None
        and seconds >= WORTH_SECONDS
    ]
    worst = heapq.nlargest(MOST_QUEUES, behind)
    return {queue: round(seconds, 1) for seconds, queue in worst}
