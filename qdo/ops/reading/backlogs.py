"""Reads the backlogs of queues, within a budget of requests."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from heapq import nsmallest

from qdo.brokers.base import Broker
from qdo.brokers.catalog import Backlog
from qdo.coordination.znodes.queue_node import NEW, QueueNode
from qdo.errors import NotFoundError, QdoError
from qdo.ops.messages.find import waiting_rows
from qdo.system.parallel import run_parallel


def ask(
    broker: Broker,
    names: Sequence[str],
    nodes: Mapping[str, QueueNode],
    workers: Collection[str],
    budget: int | None,
) -> dict[str, Backlog | QdoError | None]:
    """Return the backlogs of queues, None for a queue that no longer exists.

    Where each backlog is a request, it is the error if the request fails: one queue that cannot be
    read must not hide the others.

    :param nodes: the nodes of the queues that have one.
    :param workers: the registered workers.
    :param budget: maximum number of backlogs to request; None: the broker's own limit.
    """
    most = broker.capabilities.backlog_budget if budget is None else budget
    chosen = list(names)
    if most is not None and len(chosen) > most:
        chosen = nsmallest(most, chosen, key=lambda name: _urgency(nodes.get(name), workers))
    known = {name: nodes.get(name, NEW) for name in chosen}
    resume_after = broker.positions.resume_after
    after = {name: resume_after(node.last, node.position) for name, node in known.items()}
    if broker.capabilities.backlog_budget is None:
        found = broker.catalog.backlogs(after)
        return {
            name: _without_cancelled(broker, name, known[name], position, found[name])
            for name, position in after.items()
        }

    def read(name: str) -> Backlog | QdoError | None:
        try:
            return backlog_of(broker, name, known[name], after[name])
        except NotFoundError:
            return None
        except QdoError as error:
            return error

    return dict(zip(chosen, run_parallel(read, chosen), strict=True))


def backlog_of(broker: Broker, queue: str, node: QueueNode, after: int) -> Backlog:
    """Return the backlog of a queue without its cancelled messages, which never run.

    Kinesis cannot count messages, so there they are part of it until the queue has passed them.

    :raises: as `QueueCatalog.backlog`.
    """
    return _without_cancelled(broker, queue, node, after, broker.catalog.backlog(queue, after))


def _without_cancelled(
    broker: Broker, queue: str, node: QueueNode, after: int, found: Backlog
) -> Backlog:
    progress = node.out_of_order
    if progress is None or not progress.cancelled or not broker.capabilities.countable:
        return found
    cancelled = {each for each in progress.cancelled if each > after}
    count = max(0, found.count - len(cancelled))
    oldest = found.oldest if count else None
    if oldest in cancelled:
        rows = waiting_rows(broker, queue, after, len(cancelled) + 1)
        oldest = next((row.position for row in rows if row.position not in cancelled), None)
    return replace(found, count=count, oldest=oldest)


def _urgency(node: QueueNode | None, workers: Collection[str]) -> tuple[int, int]:
    """Return a sort key: queues that most probably need attention come first.

    First queues with failing messages, then queues without an owner, then those with the longest
    time without progress.
    """
    if node is None:
        return 1, 0
    if node.failure is not None:
        return 0, node.last
    return (2 if node.owner in workers else 1), node.last
