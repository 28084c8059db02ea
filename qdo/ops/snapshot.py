"""Reads the input for the status of queues, such as nodes, backlogs and long runs."""

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
from qdo.system.native import run_parallel
from qdo.text import fine_duration, short_duration

# Maximum lag in seconds. qdo never writes a longer lag.
MOST_SECONDS = 1e12
# Key of `Snapshot.unread` if the broker could not count the requests.
REQUESTS = "the number of requests"
# Key of `Snapshot.unread` if the broker is missing.
MESSAGES = "the messages"


def ask(
    broker: Broker,
    names: Sequence[str],
    nodes: Mapping[str, QueueNode],
    workers: Collection[str],
    budget: int | None,
) -> dict[str, Backlog | QdoError | None]:
    """Return the backlogs of queues; None for a queue that no longer exists.

    If the request for one backlog fails, the result has the error in its place. One unreadable
    queue must not hide the other queues.

    :param budget: maximum number of backlogs to request; None for the broker's own limit.
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
            name: _reached(
                broker,
                name,
                position,
                _without_cancelled(broker, name, known[name], position, found[name]),
            )
            for name, position in after.items()
        }

    def read(name: str) -> Backlog | QdoError | None:
        try:
            backlog = backlog_of(broker, name, known[name], after[name])
            return _reached(broker, name, after[name], backlog)
        except NotFoundError:
            return None
        except QdoError as error:
            return error

    return dict(zip(chosen, run_parallel(read, chosen), strict=True))


def _reached(broker: Broker, queue: str, done: int, backlog: Backlog) -> Backlog:
    """Return the backlog, with a fault if the recorded position is in the future."""
    if backlog.fault is not None:
        return backlog
    try:
        check_head(broker, queue, done, backlog.head)
    except PositionAheadError as error:
        return replace(backlog, fault=str(error))
    return backlog


def backlog_of(broker: Broker, queue: str, node: QueueNode, after: int) -> Backlog:
    """Return the backlog of a queue, excluding cancelled messages, because they never run."""
    return _without_cancelled(broker, queue, node, after, broker.catalog.backlog(queue, after))


def _without_cancelled(
    broker: Broker, queue: str, node: QueueNode, after: int, found: Backlog
) -> Backlog:
    progress = node.out_of_order
    # Kinesis cannot count messages. Its backlog includes cancelled messages until the queue has
    # passed them.
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
    """Return a sort key that puts the queues that probably need attention first."""
    # First come queues with failing messages, then queues without an owner, then the queues that
    # have made no progress for longest.
    if node is None:
        return 1, 0
    if node.failure is not None:
        return 0, node.last
    return (2 if node.owner in workers else 1), node.last


@dataclass(frozen=True, slots=True)
class LongRun:
    """A message in flight."""

    # `message.id`.
    id: str
    attempt: int
    # Running time in seconds at the time of the worker's report.
    seconds: float
    # The usual maximum for messages of the queue; None unless this message has run much longer.
    usual_seconds: float | None = None

    def text(self) -> str:
        """Return a sentence without a period."""
        text = f"Message {self.id} has run for {short_duration(self.seconds)}"
        if self.usual_seconds is None:
            return text
        return f"{text} (usually {fine_duration(self.usual_seconds)} at most)"


def long_runs(reports: Iterable[WorkerReport]) -> dict[str, LongRun]:
    """Return the longest run of each queue. Ignore negative durations."""
    longest: dict[str, LongRun] = {}
    runs = (run for report in reports for run in report.long_runs)
    for queue, id, attempt, seconds, usual in runs:
        if seconds < 0 or (usual or 0.0) < 0:
            continue
        if queue not in longest or longest[queue].seconds < seconds:
            longest[queue] = LongRun(id, attempt, seconds, usual)
    return longest


class Snapshot:
    """The input for the statuses of queues, from one reading."""

    def __init__(
        self,
        client: Client | None,
        layout: Layout,
        broker: Broker | None,
        glob: str,
        budget: int | None,
        fault: QdoError | None = None,
    ) -> None:
        self._client = client
        self._layout = layout
        self._broker = broker
        # The unreadable parts, with the reasons.
        self.unread: dict[str, str] = {}
        self._read_fleet()
        self.listed = frozenset(broker.catalog.names_to_show()) if broker else frozenset[str]()
        stored = frozenset(_matching(self.listed, glob))
        # Number of dead letters by queue; None if the broker did not return the numbers.
        self.dead_letters = self._dead_letters(fault)
        dead = self.dead_letters or {}
        # Text of the position of a finished queue; None if queues never finish.
        self.end = broker.capabilities.end_position_text if broker else None
        self.reads = self._queue_nodes(_matching(self._named(dead), glob))
        nodes = {name: self._with_fault(name, node) for name, node in _parsed(self.reads).items()}
        self.names = self._to_report(nodes, stored, frozenset(_matching(dead, glob)))
        whole = [
            name for name in self.names if name in stored and nodes.get(name, NEW).fault is None
        ]
        backlogs = ask(broker, whole, nodes, self.workers or (), budget) if broker else {}
        self.unasked = len(whole) - len(backlogs)
        # The backlog of each queue, or the error of its request.
        self.backlogs = backlogs if fault is None else dict.fromkeys(self.names, fault)
        nodeless = [name for name in self.names if name not in nodes]
        self.parents = self._parents(nodeless) | hidden_parents(broker, nodeless)
        others = {each for found in self.parents.values() for each in found} - nodes.keys()
        self.nodes = {**nodes, **_parsed(self._queue_nodes(others))}
        self.unclaimed = self._unclaimed()
        self.missing = frozenset(self.names) - self.listed if broker else frozenset[str]()
        self.pools = self._pools(glob)
        self._take_reports(self._components or ())
        self.faults |= self._crowded_out(nodeless)
        self.pauses = self._pauses()
        self.countable = broker is not None and broker.capabilities.countable
        # Whether positions are times.
        self.timed = broker is not None and broker.positions is TIME_POSITIONS
        self.at = time.time()

    def count_dead(self, queue: str) -> int | None:
        return None if self.dead_letters is None else self.dead_letters.get(queue, 0)

    def _read_fleet(self) -> None:
        """Read the nodes of workers. Use None for a folder that this account cannot list."""
        layout = self._layout
        queues = self._below(layout.queues, "the list of queues in the coordinator")
        workers = self._below(layout.workers, "the list of workers")
        components = self._below(f"{layout.components}/worker", "the reports of workers")
        if queues is None and workers is None and components is None and self._client is not None:
            account = self._client.access.account_name()
            raise NodeRefusedError(path=layout.queues, account=account)
        self._queues = None if queues is None else [_name(path) for path in queues]
        self.workers = None if workers is None else self._read_by_name(workers)
        self._components = None if components is None else self._read(components)
        parsed = [WorkerNode.parse(node.data) for node in (self.workers or {}).values()]
        # Ignore workers that are draining.
        self.filters = {node.filter for node in parsed if not node.draining}

    def _take_reports(self, nodes: Sequence[NodeValue]) -> None:
        reports = [WorkerReport.parse(node.data) for node in nodes]
        self.reports = {str(each.worker): each for each in reports}
        # Time of the last report of each worker's process, by the coordinator's clock.
        self.reported = {
            str(report.worker): node.written for report, node in zip(reports, nodes, strict=True)
        }
        has_lags = self._broker is not None and self._broker.capabilities.doorbell
        self.lags = _lags(reports) if has_lags else {}
        self.faults = {queue: why for each in reports for queue, why in each.faults.items()}
        self.long_runs = long_runs(reports)

    def _below(self, folder: str, content: str) -> list[str] | None:
        if self._client is None:
            return []
        names = read_permitted_children(self._client, [folder]).get(folder, [])
        if names is None:
            error = NodeRefusedError(path=folder, account=self._client.access.account_name())
            self.unread[content] = str(error)
            return None
        return [f"{folder}/{name}" for name in names]

    def _read(self, paths: Sequence[str]) -> list[NodeValue]:
        return read_nodes(self._client, paths) if self._client else []

    def _read_by_name(self, paths: Sequence[str]) -> dict[str, NodeValue]:
        return {_name(read.path): read for read in self._read(paths)}

    def _queue_nodes(self, names: Iterable[str]) -> dict[str, NodeValue]:
        return self._read_by_name([self._layout.queue(name) for name in names])

    def _named(self, dead: Collection[str]) -> Collection[str]:
        """Return the queues that may have a node, even without a list of the nodes."""
        return {*self.listed, *dead} if self._queues is None else self._queues

    def _to_report(
        self, nodes: Mapping[str, QueueNode], stored: Set[str], dead: Set[str]
    ) -> list[str]:
        over = {name for name, node in nodes.items() if self._is_over(name, node, stored)}
        return sorted((stored | dead | nodes.keys()) - (over - dead))

    def _is_over(self, name: str, node: QueueNode, stored: Collection[str]) -> bool:
        if node.deleted and name not in stored:
            return True
        # A finished queue has ended even if no leader has marked it as deleted yet.
        return self.is_finished(node) and not node.owner and node.fault is None

    def is_finished(self, node: QueueNode | None) -> bool:
        """Return whether a queue is finished, such as a shard of Kinesis after a reshard."""
        return node is not None and self.end is not None and node.position == self.end

    def _with_fault(self, name: str, node: QueueNode) -> QueueNode:
        """Return a node whose fault is the reason why no worker processes the queue."""
        broker = self._broker
        if broker is None:
            return node
        node = node.checked(broker.positions)
        finished = self.is_finished(node)
        if node.fault is None and finished and broker.catalog.is_reopened(name):
            return replace(node, fault="it was finished, but a queue of the same name was created")
        if node.deleted and node.fault is None and not finished:
            begun = "its deletion was begun and has not finished"
            fault = begun if name in self.listed else "it is marked as deleted"
            return replace(node, fault=fault)
        return node

    def _unclaimed(self) -> dict[str, str]:
        """Return the reasons why no worker processes assigned queues without an owner."""
        workers = self.workers or {}
        found = ((name, self.nodes.get(name, NEW)) for name in self.names)
        free = {name for name, node in found if not node.fault and node.owner not in workers}
        if not free or not workers:
            return {}
        # Another program that registers as a worker also gets queues, until the rebalancer notices
        # that the program claims none.
        components = self._components
        reporting = None if components is None else {read.session for read in components}
        reasons: dict[str, str] = {}
        shares = self._read_by_name([self._layout.assignment(name) for name in workers])
        for name, read in shares.items():
            foreign = reporting is not None and workers[name].session not in reporting
            which = "which no process of qdo reports for" if foreign else "not claimed yet"
            assigned = parse_assignment(read.data) or frozenset()
            reasons.update(dict.fromkeys(assigned & free, f"assigned to {name}, {which}"))
        return reasons

    def _parents(self, names: Iterable[str]) -> dict[str, Sequence[str]]:
        broker = self._broker
        if self._client is None or broker is None or self.end is None:
            return {}
        return {name: broker.catalog.parents(name) for name in names if name in self.listed}

    def _crowded_out(self, names: Collection[str]) -> dict[str, str]:
        """Return the reason for each queue that has no node because the app has too many queues."""
        limit = None if self._broker is None else self._broker.max_queues
        count = len(self._queues or ())
        if limit is None or count < limit:
            return {}
        reason = f"the app has {count} queues, and max_queues is {limit}; see `qdo delete`"
        return dict.fromkeys(names, reason)

    def _dead_letters(self, fault: QdoError | None) -> Mapping[str, int] | None:
        """Return the number of dead letters by queue. An error must not hide queues."""
        if self._broker is None:
            self.unread.update({} if fault is None else {MESSAGES: str(fault)})
            return None
        try:
            return self._broker.dead_letters.counts()
        except QdoError as error:
            self.unread["the number of dead letters"] = str(error)
            return None

    def _pools(self, glob: str) -> dict[str, PoolCounts]:
        """Return the numbers of requests by pool. An error must not hide queues."""
        if self._broker is None or not self._broker.capabilities.requests:
            return {}
        try:
            counts = self._broker.requests.counts()
        except QdoError as error:
            self.unread[REQUESTS] = str(error)
            return {}
        return {pool: counts[pool] for pool in sorted(_matching(counts, glob))}

    def _pauses(self) -> tuple[Pause, ...]:
        if self._client is None:
            return ()
        nodes = self._read([self._layout.fleet.holds])
        pauses = [pause for node in nodes for pause in PauseNode.parse(node.data).pauses]
        return in_force(self._client, pauses)


def _parsed(reads: Mapping[str, NodeValue]) -> dict[str, QueueNode]:
    return {name: QueueNode.parse(read.data, read.refused) for name, read in reads.items()}


def _lags(reports: Iterable[WorkerReport]) -> dict[str, float]:
    return {
        queue: seconds
        for report in reports
        for queue, seconds in report.behind.items()
        if 0 <= seconds < MOST_SECONDS
    }


def _name(path: str) -> str:
    return path.rpartition("/")[2]


def _matching(names: Iterable[str], glob: str) -> Iterable[str]:
    return (name for name in names if fnmatch.fnmatchcase(name, glob))
