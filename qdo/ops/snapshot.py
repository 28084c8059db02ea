"""Read everything that the status of queues needs: nodes, backlogs, room for queues, long runs."""

from __future__ import annotations

import fnmatch
import time
from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from heapq import nsmallest

from qdo.brokers.base import Broker, check_head
from qdo.brokers.catalog import Backlog
from qdo.brokers.requests import PoolCounts
from qdo.coordination.bulk_reads import NodeValue, read_nodes, read_permitted_children
from qdo.coordination.client import Client
from qdo.coordination.znodes.layout import Layout
from qdo.coordination.znodes.queue_node import NEW, QueueNode
from qdo.coordination.znodes.worker_node import WorkerNode, parse_assignment
from qdo.coordination.znodes.worker_report import WorkerReport
from qdo.errors import NodeRefusedError, NotFoundError, PositionAheadError, QdoError
from qdo.fleet.pause_machine import Pause, PauseNode
from qdo.fleet.pauses import in_force
from qdo.ops.peek import waiting_rows
from qdo.ops.streams import hidden_parents
from qdo.positions import TIME_POSITIONS
from qdo.queues import QueueFilter
from qdo.system.native import run_parallel
from qdo.text import fine_duration, short_duration

# A longer lag was written by another program.
MOST_SECONDS = 1e12
# Key of `Snapshot.unread` if the pools could not be counted.
REQUESTS = "the number of requests"
# Key of `Snapshot.unread` if there should be a broker, and is none.
MESSAGES = "the messages"


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


@dataclass(frozen=True, slots=True)
class FleetNodes:
    """The nodes of an app that the account may read.

    :ivar queues: names of the queue nodes; None if they cannot be listed.
    :ivar workers: the nodes of the registered workers, by name; None if they cannot be listed.
    :ivar components: the nodes of the worker processes; None if they cannot be listed.
    :ivar unread: what cannot be listed, with the reason.
    """

    queues: Collection[str] | None
    workers: Mapping[str, NodeValue] | None
    components: Sequence[NodeValue] | None
    unread: Mapping[str, str]

    def filters(self) -> set[QueueFilter]:
        parsed = [WorkerNode.parse(node.data) for node in (self.workers or {}).values()]
        return {node.filter for node in parsed if not node.draining}


# The nodes if there is no coordinator.
NO_NODES = FleetNodes((), {}, (), {})


def read_fleet_nodes(client: Client, layout: Layout) -> FleetNodes:
    """Read the nodes of an app. A folder that cannot be listed hides no other."""
    unread: dict[str, str] = {}

    def below(folder: str, content: str) -> list[str] | None:
        names = read_permitted_children(client, [folder]).get(folder, [])
        if names is None:
            error = NodeRefusedError(path=folder, account=client.access.account_name())
            unread[content] = str(error)
            return None
        return [f"{folder}/{name}" for name in names]

    queues = below(layout.queues, "the list of queues in the coordinator")
    workers = below(layout.workers, "the list of workers")
    components = below(f"{layout.components}/worker", "the reports of workers")
    return FleetNodes(
        queues=None if queues is None else [_name(path) for path in queues],
        workers=None if workers is None else _by_name(client, workers),
        components=None if components is None else read_nodes(client, components),
        unread=unread,
    )


def unclaimed_queues(
    client: Client, layout: Layout, fleet: FleetNodes, free: Set[str]
) -> dict[str, str]:
    """Return why queues without an owner are not processed although a worker should.

    A worker claims a queue within milliseconds. Another program that registers as a worker gets
    queues, too, until the rebalancer notices that it claims none.

    :param free: the queues without an owner; if there are none, nothing is read.
    """
    workers = fleet.workers or {}
    if not free or not workers:
        return {}
    components = fleet.components
    reporting = None if components is None else {read.session for read in components}
    found: dict[str, str] = {}
    for name, read in _by_name(client, [layout.assignment(name) for name in workers]).items():
        foreign = reporting is not None and workers[name].session not in reporting
        which = "which no process of qdo reports for" if foreign else "not claimed yet"
        reason = f"assigned to {name}, {which}"
        found.update(dict.fromkeys((parse_assignment(read.data) or frozenset()) & free, reason))
    return found


def _by_name(client: Client, paths: Sequence[str]) -> dict[str, NodeValue]:
    return {_name(read.path): read for read in read_nodes(client, paths)}


def _name(path: str) -> str:
    return path.rpartition("/")[2]


def crowded_out(broker: Broker | None, nodes: int, names: Collection[str]) -> dict[str, str]:
    """Return why queues are not processed, by queue.

    :param names: queues that have no node.
    """
    limit = None if broker is None else broker.max_queues
    if limit is None or nodes < limit:
        return {}
    reason = f"the app has {nodes} queues, and max_queues is {limit}; see `qdo delete`"
    return dict.fromkeys(names, reason)


@dataclass(frozen=True, slots=True)
class LongRun:
    """A message in flight.

    :ivar id: `message.id`.
    :ivar seconds: for how long it had been running when its worker reported it.
    :ivar usual_seconds: what messages of its queue usually take at most, if this one runs for much
        longer; otherwise None.
    """

    id: str
    attempt: int
    seconds: float
    usual_seconds: float | None = None

    def text(self) -> str:
        """Return a sentence without its full stop."""
        text = f"Message {self.id} has run for {short_duration(self.seconds)}"
        if self.usual_seconds is None:
            return text
        return f"{text} (usually {fine_duration(self.usual_seconds)} at most)"


def long_runs(reports: Iterable[WorkerReport]) -> dict[str, LongRun]:
    """Return the longest run of each queue. Negative durations are left out."""
    found: dict[str, LongRun] = {}
    runs = (run for report in reports for run in report.long_runs)
    for queue, id, attempt, seconds, usual in runs:
        if seconds < 0 or (usual or 0.0) < 0:
            continue
        if queue not in found or found[queue].seconds < seconds:
            found[queue] = LongRun(id, attempt, seconds, usual)
    return found


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All data that was read about the queues of an app; `QueueStatus` explains the facts by queue.

    :ivar nodes: their queue nodes, with faults; and those of the queues they wait for.
    :ivar workers: registered workers; None if they are unknown.
    :ivar filters: the different filters of the workers that stay.
    :ivar pools: the numbers of their requests, by pool.
    :ivar backlogs: by queue, as far as the broker was asked; or the error of the request.
    :ivar lags: seconds by queue; workers report these, `faults` and `long_runs`.
    :ivar unasked: number of backlogs that were not requested.
    :ivar unread: what could not be read, with the reason.
    :ivar at: Unix time of the reader's clock.
    :ivar timed: positions are times.
    :ivar reported: when the process of each worker last reported, by the coordinator's clock.
    :ivar reports: the reports, by worker.
    :ivar end: text of the position of a finished queue, None if queues never finish.
    """

    names: Sequence[str]
    nodes: Mapping[str, QueueNode]
    workers: Collection[str] | None
    filters: Collection[QueueFilter]
    unclaimed: Mapping[str, str]
    listed: Collection[str]
    missing: Collection[str]
    dead_letters: Mapping[str, int] | None
    pools: Mapping[str, PoolCounts]
    backlogs: Mapping[str, Backlog | QdoError | None]
    lags: Mapping[str, float]
    faults: Mapping[str, str]
    parents: Mapping[str, Sequence[str]]
    unasked: int
    unread: Mapping[str, str]
    countable: bool
    pauses: Sequence[Pause]
    end: str | None
    at: float
    timed: bool
    reads: Mapping[str, NodeValue]
    reported: Mapping[str, float]
    reports: Mapping[str, WorkerReport]
    long_runs: Mapping[str, LongRun]


def read_snapshot(
    client: Client | None,
    layout: Layout,
    broker: Broker | None,
    glob: str,
    budget: int | None,
    fault: QdoError | None = None,
) -> Snapshot:
    """Read everything that the statuses of the matching queues need; see `queue_statuses`."""
    fleet = _fleet(client, layout)
    unread = dict(fleet.unread)
    listed = frozenset(broker.catalog.names_to_show()) if broker else frozenset()
    stored = frozenset(_matching(listed, glob))
    counted = _dead_letters(broker, unread, fault)
    dead = counted or {}
    end = broker.capabilities.end_position_text if broker else None
    reads = _read_queue_nodes(client, layout, _matching(_named(fleet, listed, dead), glob))
    nodes = {name: _with_fault(name, each, broker, listed) for name, each in _parsed(reads).items()}
    names = _to_report(nodes, stored, frozenset(_matching(dead, glob)), end)
    whole = [name for name in names if name in stored and nodes.get(name, NEW).fault is None]
    backlogs = _backlogs(broker, whole, nodes, fleet.workers or (), budget) if broker else {}
    nodeless = [name for name in names if name not in nodes]
    parents = _parents(client, broker, nodeless, listed) | hidden_parents(broker, nodeless)
    reports = [WorkerReport.parse(read.data) for read in fleet.components or ()]
    return Snapshot(
        names=names,
        nodes=_with_parents(client, layout, nodes, parents),
        workers=fleet.workers,
        filters=fleet.filters(),
        unclaimed=_unclaimed(client, layout, fleet, names, nodes),
        listed=listed,
        missing=frozenset(names) - listed if broker else frozenset(),
        dead_letters=counted,
        pools=_pools(broker, glob, unread),
        backlogs=backlogs if fault is None else dict.fromkeys(names, fault),
        lags=_lags(reports) if broker and broker.capabilities.doorbell else {},
        faults=_faults(reports) | crowded_out(broker, len(fleet.queues or ()), nodeless),
        parents=parents,
        unasked=len(whole) - len(backlogs),
        unread=unread,
        pauses=_pauses(client, layout),
        countable=broker is not None and broker.capabilities.countable,
        end=end,
        at=time.time(),
        timed=broker is not None and broker.positions is TIME_POSITIONS,
        reads=reads,
        reported=_reported(reports, fleet.components or ()),
        reports={str(each.worker): each for each in reports},
        long_runs=long_runs(reports),
    )


def _fleet(client: Client | None, layout: Layout) -> FleetNodes:
    if client is None:
        return NO_NODES
    fleet = read_fleet_nodes(client, layout)
    if fleet.queues is None and fleet.workers is None and fleet.components is None:
        raise NodeRefusedError(path=layout.queues, account=client.access.account_name())
    return fleet


def _named(fleet: FleetNodes, listed: Collection[str], dead: Collection[str]) -> Collection[str]:
    """Return which queues may have a node, also where the folder of nodes cannot be listed."""
    return {*listed, *dead} if fleet.queues is None else fleet.queues


def _to_report(
    nodes: Mapping[str, QueueNode], stored: Set[str], dead: Set[str], end: str | None
) -> list[str]:
    over = {name for name, node in nodes.items() if is_over(node, name, stored, end)}
    return sorted((stored | dead | nodes.keys()) - (over - dead))


def _with_parents(
    client: Client | None,
    layout: Layout,
    nodes: Mapping[str, QueueNode],
    parents: Mapping[str, Collection[str]],
) -> dict[str, QueueNode]:
    others = {each for found in parents.values() for each in found} - nodes.keys()
    return {**nodes, **_parsed(_read_queue_nodes(client, layout, others))}


def _read_queue_nodes(
    client: Client | None, layout: Layout, names: Iterable[str]
) -> dict[str, NodeValue]:
    found = read_nodes(client, [layout.queue(name) for name in names]) if client else []
    return {read.path.rpartition("/")[2]: read for read in found}


def _parsed(reads: Mapping[str, NodeValue]) -> dict[str, QueueNode]:
    return {name: QueueNode.parse(read.data, read.refused) for name, read in reads.items()}


def _unclaimed(
    client: Client | None,
    layout: Layout,
    fleet: FleetNodes,
    names: Iterable[str],
    nodes: Mapping[str, QueueNode],
) -> dict[str, str]:
    if client is None or fleet.workers is None:
        return {}
    read = ((name, nodes.get(name, NEW)) for name in names)
    free = {name for name, node in read if not node.fault and node.owner not in fleet.workers}
    return unclaimed_queues(client, layout, fleet, free)


def _parents(
    client: Client | None, broker: Broker | None, names: Iterable[str], listed: Collection[str]
) -> dict[str, Sequence[str]]:
    if client is None or broker is None or broker.capabilities.end_position_text is None:
        return {}
    return {name: broker.catalog.parents(name) for name in names if name in listed}


def _with_fault(
    name: str, node: QueueNode, broker: Broker | None, listed: Collection[str]
) -> QueueNode:
    """Return a node whose fault is the reason why the queue is not processed."""
    if broker is None:
        return node
    node = node.checked(broker.positions)
    finished = is_finished(node, broker.capabilities.end_position_text)
    if node.fault is None and finished and broker.catalog.is_reopened(name):
        return replace(node, fault="it was finished, but a queue of the same name was created")
    if node.deleted and node.fault is None and not finished:
        begun = "its deletion was begun and has not finished"
        return replace(node, fault=begun if name in listed else "it is marked as deleted")
    return node


def _dead_letters(
    broker: Broker | None, unread: dict[str, str], fault: QdoError | None
) -> Mapping[str, int] | None:
    """Return the number of dead letters by queue; an error hides no queue."""
    if broker is None:
        unread.update({} if fault is None else {MESSAGES: str(fault)})
        return None
    try:
        return broker.dead_letters.counts()
    except QdoError as error:
        unread["the number of dead letters"] = str(error)
        return None


def _pools(broker: Broker | None, glob: str, unread: dict[str, str]) -> dict[str, PoolCounts]:
    """Return the numbers of requests by pool; an error hides no queue."""
    if broker is None or not broker.capabilities.requests:
        return {}
    try:
        found = broker.requests.counts()
    except QdoError as error:
        unread[REQUESTS] = str(error)
        return {}
    return {pool: found[pool] for pool in sorted(_matching(found, glob))}


def is_over(node: QueueNode, name: str, stored: Collection[str], end: str | None) -> bool:
    """Return whether nothing but the node is left of a queue.

    A finished queue is over even before a leader has marked it as deleted.
    """
    return (node.deleted and name not in stored) or (
        is_finished(node, end) and not node.owner and node.fault is None
    )


def is_finished(node: QueueNode | None, end: str | None) -> bool:
    """Return whether a queue is finished, as the shards of Kinesis are after a reshard."""
    return node is not None and end is not None and node.position == end


def _reported(reports: Iterable[WorkerReport], components: Iterable[NodeValue]) -> dict[str, float]:
    pairs = zip(reports, components, strict=True)
    return {str(report.worker): read.written for report, read in pairs}


def _lags(reports: Iterable[WorkerReport]) -> dict[str, float]:
    return {
        queue: seconds
        for report in reports
        for queue, seconds in report.behind.items()
        if 0 <= seconds < MOST_SECONDS
    }


def _faults(reports: Iterable[WorkerReport]) -> dict[str, str]:
    return {queue: why for report in reports for queue, why in report.faults.items()}


def _backlogs(
    broker: Broker,
    names: list[str],
    nodes: Mapping[str, QueueNode],
    workers: Collection[str],
    budget: int | None,
) -> dict[str, Backlog | QdoError | None]:
    answers = ask(broker, names, nodes, workers, budget)
    return {
        name: _reached(broker, name, nodes.get(name, NEW), each) for name, each in answers.items()
    }


def _reached(
    broker: Broker, queue: str, node: QueueNode, answer: Backlog | QdoError | None
) -> Backlog | QdoError | None:
    """Return the backlog, with a fault if the recorded position is in the future."""
    if isinstance(answer, Backlog) and answer.fault is None:
        try:
            done = broker.positions.resume_after(node.last, node.position)
            check_head(broker, queue, done, answer.head)
        except PositionAheadError as error:
            return replace(answer, fault=str(error))
    return answer


def _pauses(client: Client | None, layout: Layout) -> tuple[Pause, ...]:
    if client is None:
        return ()
    nodes = read_nodes(client, [layout.fleet.holds])
    return in_force(
        client, [pause for node in nodes for pause in PauseNode.parse(node.data).pauses]
    )


def _matching(names: Iterable[str], glob: str) -> Iterable[str]:
    return (name for name in names if fnmatch.fnmatchcase(name, glob))
