"""The status of queues. Reads only, and returns frozen values."""

from __future__ import annotations

import fnmatch
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from qdo.brokers.ahead import check_head
from qdo.brokers.base import Broker
from qdo.brokers.catalog import Backlog
from qdo.coordination.bulk_reads import NodeValue, read_children, read_nodes
from qdo.coordination.client import Client
from qdo.coordination.znodes.layout import Layout
from qdo.coordination.znodes.progress import FailureRecord
from qdo.coordination.znodes.queue_node import QueueNode
from qdo.coordination.znodes.worker_node import WorkerNode
from qdo.errors import PositionAheadError, QdoError
from qdo.ops.backlogs import ask
from qdo.ops.room import crowded_out
from qdo.ops.worker_status import component_nodes, details_of
from qdo.queues import QueueFilter, why_untaken
from qdo.text import one_line

MOST_SECONDS = 1e12
"""A longer lag was written by another program."""


@dataclass(frozen=True, slots=True)
class QueueStatus:
    """The owner and the progress of a queue.

    :ivar owner: worker in its node, None if the queue is free.
    :ivar owner_gone: that worker is no longer registered: the queue is free as well.
    :ivar last: position up to which everything is done, 0 before the first message.
    :ivar position: the broker's own position for it, None if its positions are times.
    :ivar backlog: messages after `last`; None if the broker does not know the queue, cannot
        count or was not asked, or if `last` cannot be read.
    :ivar approximate: the backlog is an estimate of the broker.
    :ivar behind_seconds: age of the next message, 0 at the tip; None if unknown.
    :ivar oldest: position of the first message of the backlog.
    :ivar delayed: messages that are not due yet; they are not in the backlog.
    :ivar dead_letters: number of dead letters; None if the broker did not return it.
    :ivar fault: why the queue is not processed: its node cannot be read, for instance.
    :ivar error: why the broker did not return the backlog.
    :ivar untaken: why no registered worker takes this queue, None if one does.
    :ivar waits_for: queues that must be finished before this one may begin.
    :ivar marks: failure record of the failing message; it tells whether the queue is blocked.
    :ivar also_blocking: failure records of further messages that wait for an operator.
    """

    queue: str
    owner: str | None
    owner_gone: bool
    last: int
    backlog: int | None
    oldest: int | None
    dead_letters: int | None
    fault: str | None
    delayed: int = 0
    marks: FailureRecord | None = None
    also_blocking: tuple[FailureRecord, ...] = ()
    untaken: str | None = None
    position: str | None = None
    approximate: bool = False
    behind_seconds: float | None = None
    waits_for: tuple[str, ...] = ()
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Statuses:
    """The status of queues, by name.

    :ivar unasked: how many backlogs were not requested from the broker, to save requests.
    :ivar dead_letters_error: why the dead letters of all queues are unknown.
    """

    queues: list[QueueStatus]
    unasked: int = 0
    dead_letters_error: str | None = None


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Everything that was read about the queues of an app; `assemble` makes statuses of it.

    :ivar names: the queues to report.
    :ivar nodes: their queue nodes, with faults; and those of the queues they wait for.
    :ivar workers: registered workers; None without a coordinator.
    :ivar filters: the different filters of the workers that stay.
    :ivar listed: queues that the broker lists.
    :ivar dead_letters: number of dead letters by queue; or the error of the request.
    :ivar backlogs: by queue, as far as the broker was asked; or the error of the request.
    :ivar lags: seconds by queue, as reported by workers.
    :ivar faults: by queue, why it is not processed, as reported by workers.
    :ivar parents: by queue, the queues that must be finished first.
    :ivar unasked: number of backlogs that were not requested.
    :ivar countable: the broker can count messages.
    :ivar end: text of the position of a finished queue, None if queues never finish.
    """

    names: Sequence[str]
    nodes: Mapping[str, QueueNode]
    workers: Collection[str]
    filters: Collection[QueueFilter]
    listed: Collection[str]
    dead_letters: Mapping[str, int] | QdoError
    backlogs: Mapping[str, Backlog | QdoError | None]
    lags: Mapping[str, float]
    faults: Mapping[str, str]
    parents: Mapping[str, Sequence[str]]
    unasked: int
    countable: bool
    end: str | None


def queue_statuses(
    client: Client | None,
    layout: Layout,
    broker: Broker | None,
    glob: str = "*",
    budget: int | None = None,
) -> Statuses:
    """Return the status of every queue that matches.

    Includes every queue that has a node or a message. A queue that is finished, or that the
    broker no longer has, is included only while it has dead letters. Without `client` owners and
    positions are unknown, without `broker` messages are.

    :param budget: maximum number of backlogs to request from the broker, those of the queues
        that most probably need attention first; None: the broker's own limit.
    :raises CoordinatorUnreachableError: the connection is lost.
    :raises UnreachableError: the broker cannot be read.
    """
    return assemble(read_snapshot(client, layout, broker, glob, budget))


def read_snapshot(
    client: Client | None, layout: Layout, broker: Broker | None, glob: str, budget: int | None
) -> Snapshot:
    """Read everything that the statuses of the matching queues need; see `queue_statuses`."""
    nodes = _queue_nodes(client, layout, glob) if client else {}
    workers = _names(client, layout.workers) if client else frozenset()
    listed = frozenset(broker.catalog.names_to_show()) if broker else frozenset()
    stored = frozenset(_matching(listed, glob))
    counted = _dead_letters(broker) if broker else {}
    dead = {} if isinstance(counted, QdoError) else counted
    end = broker.capabilities.end_position_text if broker else None
    if broker is not None:
        nodes = {name: _with_fault(name, node, broker) for name, node in nodes.items()}
    over = {
        name
        for name, node in nodes.items()
        if not dead.get(name) and _is_over(node, name, stored, end)
    }
    names = sorted(stored.union(nodes, _matching(dead, glob)) - over)
    whole = [name for name in names if name in stored and nodes.get(name, _NEW).fault is None]
    backlogs = _backlogs(broker, whole, nodes, workers, budget) if broker else {}
    components = [dict(details_of(read.data)) for read in _components(client, layout)]
    parents: dict[str, Sequence[str]] = {}
    if client is not None and broker is not None and end is not None:
        parents = {
            name: broker.catalog.parents(name)
            for name in names
            if name in listed and name not in nodes
        }
        others = {each for found in parents.values() for each in found if each not in nodes}
        nodes = {**nodes, **_read_queue_nodes(client, layout, others)}
    return Snapshot(
        names=names,
        nodes=nodes,
        workers=workers,
        filters=_filters(client, layout, workers) if client else (),
        listed=listed,
        dead_letters=counted,
        backlogs=backlogs,
        lags=_lags(components) if broker and broker.capabilities.doorbell else {},
        faults=_faults(components)
        | crowded_out(client, layout, broker, [name for name in names if name not in nodes]),
        parents=parents,
        unasked=len(whole) - len(backlogs),
        countable=broker is not None and broker.capabilities.countable,
        end=end,
    )


def assemble(snapshot: Snapshot) -> Statuses:
    """Return the statuses of a snapshot; reads nothing."""
    dead = snapshot.dead_letters
    return Statuses(
        [_queue_status(name, snapshot) for name in snapshot.names],
        snapshot.unasked,
        str(dead) if isinstance(dead, QdoError) else None,
    )


_NEW = QueueNode()


def _queue_status(queue: str, snapshot: Snapshot) -> QueueStatus:
    node = snapshot.nodes.get(queue, _NEW)
    answer = snapshot.backlogs.get(queue)
    backlog = answer if isinstance(answer, Backlog) else None
    lag = snapshot.lags.get(queue)
    dead = snapshot.dead_letters
    return QueueStatus(
        queue=queue,
        owner=node.owner or None,
        owner_gone=bool(node.owner) and node.owner not in snapshot.workers,
        last=node.last,
        backlog=backlog.count if backlog and snapshot.countable else None,
        oldest=backlog.oldest if backlog else None,
        dead_letters=None if isinstance(dead, QdoError) else dead.get(queue, 0),
        fault=node.fault or (backlog.fault if backlog else None) or snapshot.faults.get(queue),
        delayed=backlog.delayed if backlog else 0,
        marks=node.failure,
        also_blocking=tuple(each for each in node.blocking if each is not node.failure),
        untaken=why_untaken(queue, snapshot.filters),
        position=node.position,
        approximate=backlog is not None and backlog.approximate,
        behind_seconds=lag if backlog is None or lag is not None else backlog.behind_seconds,
        waits_for=tuple(
            name for name in snapshot.parents.get(queue, ()) if _is_pending(name, snapshot)
        ),
        error=str(answer) if isinstance(answer, QdoError) else None,
    )


def _is_pending(parent: str, snapshot: Snapshot) -> bool:
    """Return whether a queue exists and is not finished yet."""
    exists = parent in snapshot.nodes or parent in snapshot.listed
    return exists and not _is_finished(snapshot.nodes.get(parent), snapshot.end)


def _with_fault(name: str, node: QueueNode, broker: Broker) -> QueueNode:
    """Return a node whose fault is the reason why the queue is not processed."""
    node = node.checked(broker.positions)
    finished = _is_finished(node, broker.capabilities.end_position_text)
    if node.fault is None and finished and broker.catalog.is_reopened(name):
        return replace(node, fault="it was finished, but a queue of the same name was created")
    if node.deleted and node.fault is None and not finished:
        return replace(node, fault="it is marked as deleted")
    return node


def _dead_letters(broker: Broker) -> Mapping[str, int] | QdoError:
    """Return the number of dead letters by queue, or the error: they hide no queue."""
    try:
        return broker.dead_letters.counts()
    except QdoError as error:
        return error


def _is_over(node: QueueNode, name: str, stored: Collection[str], end: str | None) -> bool:
    """Return whether nothing but the node is left of a queue.

    A finished queue is over even before a leader has marked it as deleted.
    """
    return (node.deleted and name not in stored) or (
        _is_finished(node, end) and not node.owner and node.fault is None
    )


def _is_finished(node: QueueNode | None, end: str | None) -> bool:
    return node is not None and end is not None and node.position == end


def _filters(client: Client, layout: Layout, workers: Iterable[str]) -> set[QueueFilter]:
    """Return the different filters of the workers that stay."""
    nodes = read_nodes(client, [layout.worker(name) for name in workers])
    parsed = [WorkerNode.parse(node.data) for node in nodes]
    return {node.filter for node in parsed if not node.draining}


def _queue_nodes(client: Client, layout: Layout, glob: str) -> dict[str, QueueNode]:
    return _read_queue_nodes(client, layout, _matching(_names(client, layout.queues), glob))


def _read_queue_nodes(client: Client, layout: Layout, names: Iterable[str]) -> dict[str, QueueNode]:
    found = read_nodes(client, [layout.queue(name) for name in names])
    return {
        read.path.rpartition("/")[2]: QueueNode.parse(read.data, read.refused) for read in found
    }


def _components(client: Client | None, layout: Layout) -> list[NodeValue]:
    return component_nodes(client, layout) if client else []


def _lags(components: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Return the lag of queues in seconds, as workers report it for queues that have one."""
    found: dict[str, float] = {}
    for component in components:
        behind = component.get("behind")
        if isinstance(behind, dict):
            found.update(
                (queue, float(seconds))
                for queue, seconds in behind.items()
                if isinstance(seconds, (int, float)) and 0 <= seconds < MOST_SECONDS
            )
    return found


def _faults(components: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """Return why queues are not processed, as workers report it."""
    found: dict[str, str] = {}
    for component in components:
        faults = component.get("faults")
        if isinstance(faults, dict):
            found.update((queue, one_line(reason)) for queue, reason in faults.items())
    return found


def _backlogs(
    broker: Broker,
    names: list[str],
    nodes: Mapping[str, QueueNode],
    workers: Collection[str],
    budget: int | None,
) -> dict[str, Backlog | QdoError | None]:
    answers = ask(broker, names, nodes, workers, budget)
    return {
        name: _reached(broker, name, nodes.get(name, _NEW), each) for name, each in answers.items()
    }


def _reached(
    broker: Broker, queue: str, node: QueueNode, answer: Backlog | QdoError | None
) -> Backlog | QdoError | None:
    """Return a backlog whose fault tells that the recorded position is in the future, if it is."""
    if isinstance(answer, Backlog) and answer.fault is None:
        try:
            done = broker.positions.resume_after(node.last, node.position)
            check_head(broker, queue, done, answer.head)
        except PositionAheadError as error:
            return replace(answer, fault=str(error))
    return answer


def _names(client: Client, path: str) -> frozenset[str]:
    return frozenset(read_children(client, [path]).get(path, ()))


def _matching(names: Iterable[str], glob: str) -> Iterable[str]:
    return (name for name in names if fnmatch.fnmatchcase(name, glob))
