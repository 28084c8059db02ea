"""What is going on: queues, workers, dead letters. Reads only, and returns frozen values."""

from __future__ import annotations

import fnmatch
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from qdo.brokers.base import Broker
from qdo.coordination.client import Client
from qdo.coordination.layout import Layout, Marks, QueueNode, WorkerNode
from qdo.coordination.reads import read_children, read_nodes
from qdo.filters import EVERYTHING, QueueFilter


@dataclass(frozen=True, slots=True)
class QueueStatus:
    """Where a queue is and how far.

    :ivar owner: worker that its node names, None while it is free.
    :ivar owner_gone: that worker is no longer registered, so that the queue is free as well.
    :ivar last: position up to which everything is done, 0 before the first message.
    :ivar backlog: messages behind `last`; None where the broker does not know the queue or
        `last` cannot be read.
    :ivar oldest: position of the first of them.
    :ivar delayed: messages that are not due yet; they are not in the backlog.
    :ivar dead_letters: messages set aside.
    :ivar fault: why the queue's node cannot be read; such a queue stands still.
    :ivar untaken: none of the registered workers takes queues of this name.
    :ivar marks: of the message that fails, None while none does; the queue stands still if they
        say that it is blocked.
    """

    queue: str
    owner: str | None
    owner_gone: bool
    last: int
    backlog: int | None
    oldest: int | None
    dead_letters: int
    fault: str | None
    delayed: int = 0
    marks: Marks | None = None
    untaken: bool = False


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    """A registered worker.

    :ivar queues: how many it handles.
    :ivar assigned: how many the rebalancer grants it.
    :ivar takes: which queues it may be granted.
    :ivar details: what the process says of itself: host, pid, version, started, state, ...
    """

    worker: str
    queues: int
    assigned: int
    details: tuple[tuple[str, Any], ...]
    takes: QueueFilter = EVERYTHING


def queue_statuses(
    client: Client | None, layout: Layout, broker: Broker | None, glob: str = "*"
) -> list[QueueStatus]:
    """Return the status of every queue that matches, by name.

    A queue counts that has a node or a message. Without `client` nothing is known of owners
    and positions, without `broker` nothing of messages.

    :raises CoordinatorUnreachableError: the connection is lost.
    :raises UnreachableError: the broker cannot be read.
    """
    nodes = _queue_nodes(client, layout, glob) if client else {}
    workers = _names(client, layout.workers) if client else frozenset()
    takers = _takers(client, layout, workers) if client else []
    stored = frozenset(_matching(broker.queues(), glob)) if broker else frozenset()
    dead = broker.dead_letter_counts() if broker else {}
    return [
        _queue_status(
            queue,
            nodes.get(queue, QueueNode()),
            workers,
            broker if queue in stored else None,
            dead.get(queue, 0),
            bool(takers) and not any(takes(queue) for takes in takers),
        )
        for queue in sorted(stored.union(nodes, _matching(dead, glob)))
    ]


def _takers(
    client: Client, layout: Layout, workers: Iterable[str]
) -> list[Callable[[str], bool]]:
    """Return what says whether a queue is taken, for each filter of the workers that stay."""
    nodes = read_nodes(client, [layout.worker(name) for name in workers])
    parsed = [WorkerNode.parse(node.data) for node in nodes]
    return [takes.matcher() for takes in {node.takes for node in parsed if not node.draining}]


def _queue_nodes(client: Client, layout: Layout, glob: str) -> dict[str, QueueNode]:
    names = list(_matching(_names(client, layout.queues), glob))
    found = read_nodes(client, [layout.queue(name) for name in names])
    nodes = {read.path.rpartition("/")[2]: QueueNode.parse(read.data) for read in found}
    return {name: node for name, node in nodes.items() if not node.deleted}


def _queue_status(
    queue: str,
    node: QueueNode,
    workers: frozenset[str],
    broker: Broker | None,
    dead: int,
    untaken: bool,
) -> QueueStatus:
    backlog = broker.backlog(queue, node.last) if broker and node.fault is None else None
    return QueueStatus(
        queue=queue,
        owner=node.owner or None,
        owner_gone=bool(node.owner) and node.owner not in workers,
        last=node.last,
        backlog=backlog.count if backlog else None,
        oldest=backlog.oldest if backlog else None,
        dead_letters=dead,
        fault=node.fault,
        delayed=backlog.delayed if backlog else 0,
        marks=node.marks,
        untaken=untaken,
    )


def worker_statuses(client: Client, layout: Layout) -> list[WorkerStatus]:
    """Return every registered worker, in the order of registration.

    A worker and its component node belong to one session: that is how they are matched.

    :raises CoordinatorUnreachableError: the connection is lost.
    """
    workers = _below(client, layout.workers)
    described = {
        read.session: _details(read.data)
        for read in read_nodes(client, _below(client, f"{layout.components}/worker"))
    }
    names = [path.rpartition("/")[2] for path in workers]
    assigned = {
        read.path.rpartition("/")[2]: len(WorkerNode.parse(read.data).queues)
        for read in read_nodes(client, [layout.assignment(name) for name in names])
    }
    statuses = []
    for read in read_nodes(client, workers):
        name = read.path.rpartition("/")[2]
        node = WorkerNode.parse(read.data)
        details = described.get(read.session, ())
        granted = assigned.get(name, 0)
        statuses.append(WorkerStatus(name, len(node.queues), granted, details, node.takes))
    return statuses


def _details(data: bytes) -> tuple[tuple[str, Any], ...]:
    try:
        value = json.loads(data)
    except ValueError:
        return ()
    return tuple(value.items()) if isinstance(value, dict) else ()


def _names(client: Client, path: str) -> frozenset[str]:
    return frozenset(read_children(client, [path]).get(path, ()))


def _below(client: Client, path: str) -> list[str]:
    return [f"{path}/{name}" for name in sorted(_names(client, path))]


def _matching(names: Iterable[str], glob: str) -> Iterable[str]:
    return (name for name in names if fnmatch.fnmatchcase(name, glob))
