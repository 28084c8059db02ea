"""Reads the status of queues. Functions return frozen values and change nothing."""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from itertools import takewhile
from typing import Any

from qdo.brokers.base import Broker
from qdo.brokers.catalog import NO_BACKLOG, Backlog
from qdo.brokers.requests import PoolCounts
from qdo.coordination.client import Client
from qdo.coordination.znodes.layout import Layout
from qdo.coordination.znodes.queue_node import NEW, FailureRecord, QueueNode
from qdo.coordination.znodes.worker_report import MOST_RUNS, WorkerReport
from qdo.errors import QdoError
from qdo.fleet.pause_machine import pauses_of
from qdo.fleet.pauses import pause_text
from qdo.jobs.policy_tables import literal_characters
from qdo.ops.snapshot import LongRun, Snapshot
from qdo.positions import format_last, time_of_position
from qdo.queues import MAX_GLOBS_CHARACTERS, QueueFilter, why_untaken
from qdo.text import pluralize

# Maximum rate in a node. qdo never writes a higher rate.
MOST_PACE = 1e12
NO_REPORT = WorkerReport()


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueStatus:
    """The owner and progress of a queue.

    `dump` publishes the fields before `marks` under their names.
    """

    queue: str
    # The worker in the queue's node; None if the queue is free.
    owner: str | None
    # True if `owner` is no longer registered, so the queue is free. None if this account cannot
    # list the workers.
    owner_gone: bool | None
    # The reason why no registered worker takes this queue; None if a worker takes the queue.
    untaken: str | None = None
    # The worker that has not claimed its assigned queue; None if the queue has an owner or is
    # unassigned.
    unclaimed: str | None = None
    # Queues that must finish before this queue may begin.
    waits_for: tuple[str, ...] = ()
    # The limits whose permits the queue waits for.
    limits: tuple[str, ...] = ()
    # Position up to which all messages are done; 0 before the first message.
    last: int
    # The broker's own form of this position; None if positions are times.
    position: str | None = None
    # Number of messages after `last`. None if `last` cannot be read, or if the broker lacks the
    # queue, cannot count messages or was not asked.
    backlog: int | None
    approximate: bool = False
    # Age of the next message in seconds; 0 without a next message, None if unknown.
    behind_seconds: float | None = None
    # Age in seconds at which the broker deletes even unread messages; None if the broker keeps
    # messages or the age is unknown.
    retention_seconds: float | None = None
    # Position of the first message of the backlog.
    oldest: int | None
    # Number of messages that are not due yet. The backlog does not include them.
    delayed: int = 0
    # Number of dead letters; None if the broker did not return the number.
    dead_letters: int | None
    # The reason why no worker processes the queue, such as an unreadable node, or None.
    fault: str | None
    # The reason why the broker did not return the backlog, or None.
    error: str | None = None
    # The reason why the queue is paused in the whole fleet; None if the queue is not paused.
    held: str | None = None
    # Number of ended messages per second, as measured by the owner; None if not reported.
    per_second: float | None = None
    # Mean number of messages sent per second since the oldest waiting message; None if unknown.
    sent_per_second: float | None = None
    # Mean duration of a message in seconds, as measured by the owner; None if not reported.
    message_seconds: float | None = None
    # The message that has run for the longest time; None if no message runs for a long time.
    running: LongRun | None = None
    # Failure record of the failing message, which shows whether the queue is blocked.
    marks: FailureRecord | None = None
    # Failure records of further messages that wait for an operator.
    also_blocking: tuple[FailureRecord, ...] = ()
    # Failure records of further messages that do not wait for an operator.
    also_failing: tuple[FailureRecord, ...] = ()
    # Number of received messages in the backlog, if the broker hides received messages.
    in_flight: int = 0
    # Whether the broker lacks the queue, so that no message waits.
    missing: bool = False
    # Whether the queue is marked as deleted, because of `qdo delete` or because the broker lost the
    # queue.
    deleted: bool = False
    # Whether the broker deleted messages before a worker read them. `fault` has the details.
    lost: bool = False
    # Number of times that operators moved `last`.
    seek: int = 0
    # Unix time of the last write of the queue's node, by the coordinator's clock; 0 without a node.
    written: float = 0.0
    # Number of the transaction that created the queue's node; 0 without a node. The number changes
    # if the queue is deleted and created again.
    created: int = 0
    # Unix time of the owner's last report, by the coordinator's clock; None if unknown.
    reported: float | None = None
    # The reason why the healthy owner runs no message of the queue now; None if the owner reports
    # no reason.
    in_line: str | None = None
    # Maximum time in seconds between two messages of the queue's job.
    rest_seconds: float = 0.0
    # The error for which the owner has paused the job of the queue, or None.
    paused_job: str | None = None

    def dump(self) -> dict[str, Any]:
        """Return the published facts for JSON, with positions as text, because they are large."""
        marks = None if self.marks is None else self.marks.dump()
        blocked = self.marks is not None and self.marks.blocked
        return {name: getattr(self, name) for name in _PUBLISHED} | {
            "last": str(self.last) if self.last else "",
            "last_time": format_last(self.last),
            "oldest": str(self.oldest) if self.oldest else None,
            "running": None if self.running is None else asdict(self.running),
            "failing": None if blocked else marks,
            "blocked": marks if blocked else None,
            "also_blocked": [other.dump() for other in self.also_blocking],
        }


_PUBLISHED = tuple(takewhile("marks".__ne__, (each.name for each in fields(QueueStatus))))


@dataclass(frozen=True, slots=True)
class Statuses:
    """The status of queues, by name."""

    queues: list[QueueStatus]
    # Number of backlogs that the reader did not request, to save requests.
    unasked: int = 0
    # The facts that could not be read, with the reasons.
    unread: Mapping[str, str] = field(default_factory=dict)
    # Unix time of the reading, by the reader's clock.
    at: float = 0.0
    # Number of registered workers, or None if unknown.
    workers: int | None = None
    # The numbers of requests, by pool.
    pools: Mapping[str, PoolCounts] = field(default_factory=dict)


def queue_statuses(
    client: Client | None,
    layout: Layout,
    broker: Broker | None,
    glob: str = "*",
    budget: int | None = None,
    fault: QdoError | None = None,
) -> Statuses:
    """Return the status of every matching queue.

    Include every queue that has a node or a message. Include a finished queue, or a queue that the
    broker has lost, only while it has dead letters. Without `client`, owners and positions are
    unknown. Without `broker`, messages are unknown. `Statuses.unread` names the facts that the
    account may not read.

    :param budget: maximum number of backlogs to request, beginning with the queues that probably
        need attention; None for the broker's own limit.
    :param fault: the reason why `broker` is None although messages were sent.
    :raises UnreachableError: the broker cannot be read.
    """
    snapshot = Snapshot(client, layout, broker, glob, budget, fault)
    return Statuses(
        queues=[_queue_status(name, snapshot) for name in snapshot.names],
        unasked=snapshot.unasked,
        unread=snapshot.unread,
        at=snapshot.at,
        workers=None if snapshot.workers is None else len(snapshot.workers),
        pools=snapshot.pools,
    )


def _queue_status(queue: str, snapshot: Snapshot) -> QueueStatus:
    node = snapshot.nodes.get(queue, NEW)
    read = snapshot.reads.get(queue)
    answer = snapshot.backlogs.get(queue)
    is_known = isinstance(answer, Backlog)
    backlog = answer if isinstance(answer, Backlog) else NO_BACKLOG
    age = _age(queue, backlog, is_known, snapshot)
    running = snapshot.long_runs.get(queue)
    report = snapshot.reports.get(node.owner, NO_REPORT)
    waits = running is None and (bool(age) or backlog.count > 0)
    wait = wait_of(queue, report) if waits else {}
    unusable = unusable_of(wait.get("limits", ()), report)
    pace = _pace(queue, report)
    return QueueStatus(
        queue=queue,
        owner=node.owner or None,
        owner_gone=_is_gone(node.owner, snapshot.workers),
        last=node.last,
        backlog=backlog.count if is_known and snapshot.countable else None,
        oldest=backlog.oldest,
        dead_letters=snapshot.count_dead(queue),
        fault=node.fault or backlog.fault or snapshot.faults.get(queue) or unusable,
        delayed=backlog.delayed,
        marks=node.failure,
        also_blocking=_others(node, blocked=True),
        also_failing=_others(node, blocked=False),
        untaken=why_untaken(queue, snapshot.filters),
        unclaimed=snapshot.unclaimed.get(queue),
        position=node.position,
        approximate=backlog.approximate,
        in_flight=backlog.in_flight,
        behind_seconds=age,
        waits_for=_pending_parents(queue, snapshot),
        error=str(answer) if isinstance(answer, QdoError) else None,
        retention_seconds=backlog.retention_seconds,
        held="; ".join(map(pause_text, pauses_of(queue, snapshot.pauses))) or None,
        missing=queue in snapshot.missing,
        deleted=node.deleted,
        lost=backlog.lost,
        seek=node.seek,
        written=read.written if read else 0.0,
        created=read.created if read else 0,
        reported=snapshot.reported.get(node.owner),
        sent_per_second=_sent_per_second(backlog, age),
        per_second=pace[0],
        message_seconds=pace[1],
        running=running,
        **wait,
    )


def _sent_per_second(backlog: Backlog, age: float | None) -> float | None:
    """Return the mean number of sent messages per second since the oldest waiting message."""
    if not backlog.count or age is None:
        return None
    return float(f"{backlog.count / max(1.0, age):.3g}")


def _others(node: QueueNode, *, blocked: bool) -> tuple[FailureRecord, ...]:
    others = () if node.out_of_order is None else node.out_of_order.other_failures
    return tuple(each for each in others if each.blocked is blocked)


def _pending_parents(queue: str, snapshot: Snapshot) -> tuple[str, ...]:
    found = snapshot.parents.get(queue, ())
    return tuple(name for name in found if _is_pending(name, snapshot))


def _age(queue: str, backlog: Backlog, is_known: bool, snapshot: Snapshot) -> float | None:
    lag = snapshot.lags.get(queue)
    if not is_known or lag is not None:
        return lag
    if backlog.behind_seconds is not None or not snapshot.timed:
        return backlog.behind_seconds
    if backlog.oldest is None:
        return None if backlog.count else 0.0
    return max(0.0, snapshot.at - time_of_position(backlog.oldest))


def _is_gone(owner: str, workers: Collection[str] | None) -> bool | None:
    if owner and workers is None:
        return None
    return bool(owner) and owner not in (workers or ())


def _is_pending(parent: str, snapshot: Snapshot) -> bool:
    """Return whether a queue exists and is unfinished."""
    exists = parent in snapshot.nodes or parent in snapshot.listed
    return exists and not snapshot.is_finished(snapshot.nodes.get(parent))


def wait_of(queue: str, report: WorkerReport) -> dict[str, Any]:
    """Return fields of `QueueStatus` that tell why a healthy owner runs no message of a queue."""
    # Thousands of queues may wait, so workers report jobs instead of queues. Therefore each queue
    # of a waiting job gets the reason.
    by_glob = report.waits or report.rests or report.paused_jobs
    filters = _most_specific_first(report.jobs) if by_glob else ()
    glob = next((each.jobs[0] for each in filters if each.takes(queue)), "")
    return {
        "limits": report.waits.get(glob, ()),
        "in_line": _in_line(report),
        "rest_seconds": report.rests.get(glob, 0.0),
        "paused_job": report.paused_jobs.get(glob),
    }


def unusable_of(limits: Iterable[str], report: WorkerReport) -> str | None:
    """Return the reason why one of these limits permits no job at all, or None."""
    return next((report.unusable[name] for name in limits if name in report.unusable), None)


def _pace(queue: str, report: WorkerReport) -> tuple[float | None, float | None]:
    pace = report.paces.get(queue)
    if pace is None or not all(0.0 < each < MOST_PACE for each in pace):
        return None, None
    return pace


@functools.lru_cache(maxsize=64)
def _most_specific_first(globs: tuple[str, ...]) -> tuple[QueueFilter, ...]:
    if sum(map(len, globs)) > MAX_GLOBS_CHARACTERS:
        return ()
    ordered = sorted(globs, key=literal_characters, reverse=True)
    return tuple(QueueFilter(jobs=(each,)) for each in ordered)


def _in_line(report: WorkerReport) -> str | None:
    busy = report.busy or 0
    places = report.concurrency or 0
    ready = report.ready or 0
    if ready > 0:
        count = f"{pluralize(ready, 'queue')} {'waits' if ready == 1 else 'wait'}"
        return f"waits for a free place: {min(busy, places)} of {places} jobs run, and {count}"
    if busy > len(report.long_runs) >= MOST_RUNS:
        return f"may run now, as one of {busy} queues"
    return None
