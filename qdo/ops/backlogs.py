"""Asking a broker what waits in its queues, for no more of them than is worth it."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from heapq import nsmallest

from qdo.brokers.base import Backlog, Broker
from qdo.brokers.side_by_side import side_by_side
from qdo.coordination.layout import QueueNode
from qdo.errors import NotFoundError


def ask(
    broker: Broker,
    names: Sequence[str],
    nodes: Mapping[str, QueueNode],
    workers: Collection[str],
    budget: int | None,
) -> dict[str, Backlog | None]:
    """Return the backlogs of queues, None for one that is gone meanwhile.

    :param nodes: of the queues that have one.
    :param workers: those that are registered.
    :param budget: ask for so many at most; None: for as many as is good for this broker.
    """
    most = broker.backlog_budget if budget is None else budget
    chosen = list(names)
    if most is not None and len(chosen) > most:
        chosen = nsmallest(most, chosen, key=lambda name: _urgency(nodes.get(name), workers))

    def question(name: str) -> Backlog | None:
        node = nodes.get(name, QueueNode())
        try:
            return broker.backlog(name, broker.positions.begin(node.last, node.position))
        except NotFoundError:
            return None

    if broker.backlog_budget is None:  # no requests, but looks into a file
        return {name: question(name) for name in chosen}
    return dict(zip(chosen, side_by_side(question, chosen), strict=True))


def _urgency(node: QueueNode | None, workers: Collection[str]) -> tuple[int, int]:
    """Return what is smallest for the queue that most probably needs somebody.

    Messages that fail, then nobody who has it, then the longest time without progress.
    """
    if node is None:
        return 1, 0
    if node.marks is not None:
        return 0, node.last
    return (2 if node.owner in workers else 1), node.last

