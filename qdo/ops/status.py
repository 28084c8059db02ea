"""What is going on: queues, workers, dead letters. Reads only, and returns frozen values."""

from __future__ import annotations

import fnmatch
import json
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from qdo.brokers.base import Backlog, Broker
from qdo.coordination.client import Client
from qdo.coordination.layout import Layout, Marks, QueueNode, WorkerNode
from qdo.coordination.reads import read_children, read_nodes
from qdo.filters import EVERYTHING, QueueFilter
from qdo.ops.backlogs import ask


@dataclass(frozen=True, slots=True)
class QueueStatus:
    """Where a queue is and how far.

    :ivar owner: worker that its node names, None while it is free.
    :ivar owner_gone: that worker is no longer registered, so that the queue is free as well.
    :ivar last: position up to which everything is done, 0 before the first message.
    :ivar position: the broker's own position beside it, None where its positions are times.
    :ivar backlog: messages behind `last`; None where the broker does not know the queue, cannot
        count or was not asked, or where `last` cannot be read.
    :ivar approximate: the broker knows the backlog only roughly.
    :ivar behind_seconds: age of the next message, 0 at the tip; None where nobody says it.
    :ivar oldest: position of the first of them.
    :ivar delayed: messages that are not due yet; they are not in the backlog.
    :ivar dead_letters: messages set aside.
    :ivar fault: why the queue's node cannot be read; such a queue stands still.
    :ivar untaken: none of the registered workers takes queues of this name.
    :ivar waits_for: queues that must be finished before this one may begin.
    :ivar marks: of the message that fails, None while none does; the queue stands still if they
        say that it is blocked.
    :ivar also_blocking: of further messages that wait for an operator.
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
    also_blocking: tuple[Marks, ...] = ()
    untaken: bool = False
    position: str | None = None
    approximate: bool = False
    behind_seconds: float | None = None
    waits_for: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Statuses:
    """The status of queues, by name.

    :ivar unasked: how many backlogs the broker was not asked for, to save requests.
    """

    queues: list[QueueStatus]
    unasked: int = 0


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
    client: Client | None,
    layout: Layout,
    broker: Broker | None,
    glob: str = "*",
    budget: int | None = None,
) -> Statuses:
    """Return the status of every queue that matches.

    A queue counts that has a node or a message; one that is done to its end, or that its broker
    has no more, only while it has dead letters. Without `client` nothing is known of owners and
    positions, without `broker` nothing of messages.

    :param budget: ask the broker for so many backlogs at most, first for those of queues that
        most probably need somebody; None: for as many as is good for this broker.
    :raises CoordinatorUnreachableError: the connection is lost.
    :raises UnreachableError: the broker cannot be read.
    """
    nodes = _queue_nodes(client, layout, glob) if client else {}
    workers = _names(client, layout.workers) if client else frozenset()
    takers = _takers(client, layout, workers) if client else []
    listed = frozenset(broker.queues()) if broker else frozenset()
    stored = frozenset(_matching(listed, glob))
    dead = broker.dead_letter_counts() if broker else {}
    if broker is not None:
        nodes = {name: _told(name, node, broker) for name, node in nodes.items()}
    over = {
        name
        for name, node in nodes.items()
        if not dead.get(name) and _is_over(node, name, stored, broker)
    }
    names = sorted(stored.union(nodes, _matching(dead, glob)) - over)
    whole = [name for name in names if name in stored and nodes.get(name, _NEW).fault is None]
    backlogs = ask(broker, whole, nodes, workers, budget) if broker else {}
    lags = _lags(client, layout) if client and broker and broker.polled else {}
    found = [
        _queue_status(
            name,
            nodes.get(name, _NEW),
            workers,
            broker,
            backlogs.get(name),
            dead.get(name, 0),
            bool(takers) and not any(takes(name) for takes in takers),
            lags.get(name),
        )
        for name in names
    ]
    if client is not None and broker is not None and broker.finished_text is not None:
        found = _with_parents(found, client, layout, broker, nodes, listed)
    return Statuses(found, len(whole) - len(backlogs))


_NEW = QueueNode()


def _told(name: str, node: QueueNode, broker: Broker) -> QueueNode:
    """Return a node with what keeps it from being processed as its fault."""
    node = node.checked(broker.positions)
    if node.fault is None and _is_finished(node, broker) and broker.goes_on(name):
        return replace(node, fault="it is finished, and another one of its name was made anew")
    if node.deleted and node.fault is None and not _is_finished(node, broker):
        return replace(node, fault="it is marked as deleted")
    return node


def _is_over(
    node: QueueNode, name: str, stored: Collection[str], broker: Broker | None
) -> bool:
    """Return whether a queue is nobody's business any more, and only its node is left.

    One that is finished is so before a leader, if there is any, has marked it as deleted.
    """
    return (node.deleted and name not in stored) or (
        _is_finished(node, broker) and not node.owner and node.fault is None
    )


def _is_finished(node: QueueNode | None, broker: Broker | None) -> bool:
    finished = None if broker is None else broker.finished_text
    return node is not None and finished is not None and node.position == finished


def _with_parents(
    found: Iterable[QueueStatus],
    client: Client,
    layout: Layout,
    broker: Broker,
    nodes: Mapping[str, QueueNode],
    listed: Collection[str],
) -> list[QueueStatus]:
    """Return statuses, those of queues that were not begun yet with what they wait for."""
    parents = {
        each.queue: broker.parents(each.queue)
        for each in found
        if each.queue in listed and each.queue not in nodes
    }
    others = {name for names in parents.values() for name in names if name not in nodes}
    known = {**nodes, **_read_queue_nodes(client, layout, others)}

    def awaited(name: str) -> bool:
        return (name in known or name in listed) and not _is_finished(known.get(name), broker)

    return [
        replace(each, waits_for=tuple(filter(awaited, parents.get(each.queue, ()))))
        for each in found
    ]


def _takers(
    client: Client, layout: Layout, workers: Iterable[str]
) -> list[Callable[[str], bool]]:
    """Return what says whether a queue is taken, for each filter of the workers that stay."""
    nodes = read_nodes(client, [layout.worker(name) for name in workers])
    parsed = [WorkerNode.parse(node.data) for node in nodes]
    return [takes.matcher() for takes in {node.takes for node in parsed if not node.draining}]


def _queue_nodes(client: Client, layout: Layout, glob: str) -> dict[str, QueueNode]:
    return _read_queue_nodes(client, layout, _matching(_names(client, layout.queues), glob))


def _read_queue_nodes(
    client: Client, layout: Layout, names: Iterable[str]
) -> dict[str, QueueNode]:
    found = read_nodes(client, [layout.queue(name) for name in names])
    return {read.path.rpartition("/")[2]: QueueNode.parse(read.data) for read in found}


def _queue_status(
    queue: str,
    node: QueueNode,
    workers: frozenset[str],
    broker: Broker | None,
    backlog: Backlog | None,
    dead: int,
    untaken: bool,
    lag: float | None,
) -> QueueStatus:
    countable = broker is not None and broker.capabilities.countable
    return QueueStatus(
        queue=queue,
        owner=node.owner or None,
        owner_gone=bool(node.owner) and node.owner not in workers,
        last=node.last,
        backlog=backlog.count if backlog and countable else None,
        oldest=backlog.oldest if backlog else None,
        dead_letters=dead,
        fault=node.fault,
        delayed=backlog.delayed if backlog else 0,
        marks=node.marks,
        also_blocking=tuple(each for each in node.blocking if each is not node.marks),
        untaken=untaken,
        position=node.position,
        approximate=backlog is not None and backlog.approximate,
        behind_seconds=lag if backlog is None or lag is not None else backlog.behind_seconds,
    )


def _lags(client: Client, layout: Layout) -> dict[str, float]:
    """Return how far behind workers say their queues are, of those that are at all."""
    found: dict[str, float] = {}
    for read in read_nodes(client, _below(client, f"{layout.components}/worker")):
        behind = dict(_details(read.data)).get("behind")
        if isinstance(behind, dict):
            found.update(
                (queue, float(seconds))
                for queue, seconds in behind.items()
                if isinstance(seconds, (int, float))
            )
    return found


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
