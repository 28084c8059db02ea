"""The status of queues. Reads only, and returns frozen values."""

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

# A larger number was written by another program.
MOST_PACE = 1e12
NO_REPORT = WorkerReport()


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueStatus:
    """The owner and the progress of a queue.

    The fields before `marks` are published as they are named, see `dump`.
    """

    queue: str
    # Worker in its node, None if the queue is free.
    owner: str | None
    # That worker is no longer registered: the queue is free as well. None if it is unknown, because
    # the workers cannot be listed.
    owner_gone: bool | None
    # Why no registered worker takes this queue, None if one does.
    untaken: str | None = None
    # Which worker it is assigned to that has not claimed it, None if it has an owner or is not
    # assigned.
    unclaimed: str | None = None
    # Queues that must be finished before this one may begin.
    waits_for: tuple[str, ...] = ()
    # The limits for whose permits it waits.
    limits: tuple[str, ...] = ()
    # Position up to which everything is done, 0 before the first message.
    last: int
    # The broker's own position for it, None if its positions are times.
    position: str | None = None
    # Messages after `last`; None if the broker does not know the queue, cannot count or was not
    # asked, or if `last` cannot be read.
    backlog: int | None
    approximate: bool = False
    # Age of the next message, 0 at the tip; None if unknown.
    behind_seconds: float | None = None
    # Age at which the broker deletes messages, also unread ones; None if it does not, or if that is
    # unknown.
    retention_seconds: float | None = None
    # Position of the first message of the backlog.
    oldest: int | None
    # Messages that are not due yet; they are not in the backlog.
    delayed: int = 0
    # Number of dead letters; None if the broker did not return it.
    dead_letters: int | None
    # Why the queue is not processed: its node cannot be read, for instance.
    fault: str | None
    # Why the broker did not return the backlog.
    error: str | None = None
    # Why it is paused in the whole fleet, None if it is not.
    held: str | None = None
    # How many of its messages end in a second, as its owner has measured; None if it does not say.
    per_second: float | None = None
    # How many were sent in a second since its next message was, None if that is unknown.
    sent_per_second: float | None = None
    # How long one takes, as its owner has measured.
    message_seconds: float | None = None
    # The message that has run for longest, None if none runs for long.
    running: LongRun | None = None
    # Failure record of the failing message; it shows whether the queue is blocked.
    marks: FailureRecord | None = None
    # Failure records of further messages that wait for an operator.
    also_blocking: tuple[FailureRecord, ...] = ()
    # Those of further messages that do not.
    also_failing: tuple[FailureRecord, ...] = ()
    # Messages of the backlog that a consumer has received, as far as the broker hides these.
    in_flight: int = 0
    # The broker does not have the queue: nothing waits.
    missing: bool = False
    # It is marked as deleted, by `qdo delete` or because the broker lost it.
    deleted: bool = False
    # Messages were deleted before they were read; `fault` says which.
    lost: bool = False
    # How often operators moved `last`.
    seek: int = 0
    # When its node was last written, Unix time of the coordinator's clock; 0 if it has none.
    written: float = 0.0
    # Number of the transaction that created its node, 0 if it has none. A queue that was deleted
    # and created again has another.
    created: int = 0
    # When its owner last reported, by the same clock; None if that is unknown.
    reported: float | None = None
    # Why its owner runs none of its messages now, although it is healthy; None if the owner does
    # not say.
    in_line: str | None = None
    # Most time between two messages of its job.
    rest_seconds: float = 0.0
    # The error for which its owner has paused its job, None if it has not.
    paused_job: str | None = None

    def dump(self) -> dict[str, Any]:
        """Return the published facts, for JSON; positions are text, because they are large."""
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
    # How many backlogs were not requested from the broker, to save requests.
    unasked: int = 0
    # What could not be read about the queues, with the reason.
    unread: Mapping[str, str] = field(default_factory=dict)
    # When they were read, Unix time of the reader's clock.
    at: float = 0.0
    # Number of registered workers; None if it is unknown.
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
    """Return the status of every queue that matches.

    Includes every queue that has a node or a message. A queue that is finished, or that the
    broker no longer has, is included only while it has dead letters. Without `client` owners and
    positions are unknown, without `broker` messages are. So is what the account may not read: see
    `Statuses.unread`.

    :param budget: how many backlogs to request from the broker at most, beginning with the queues
        that are likely to need attention; None: the broker's own limit.
    :param fault: why there is no broker although messages were sent.
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
    """Return the mean since the next message was sent, or of the last second if that is less."""
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
    """Return whether a queue exists and is not finished yet."""
    exists = parent in snapshot.nodes or parent in snapshot.listed
    return exists and not snapshot.is_finished(snapshot.nodes.get(parent))


def wait_of(queue: str, report: WorkerReport) -> dict[str, Any]:
    """Return why a healthy owner runs none of a queue's messages now, as facts of `QueueStatus`."""
    # Workers report jobs and counts instead of names of queues: thousands may wait. So each queue
    # of a job that waits has the reason.
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
    """Return why one of these limits permits nothing, None if each may permit something."""
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
