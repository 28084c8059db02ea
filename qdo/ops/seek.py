"""Moves a queue to another position, or drops its messages. First plans, then executes.

A purge drops the messages of a queue without running them. A seek to the end that the queue had at
the time of the plan drops the waiting messages. The broker deletes the delayed messages.
"""

from __future__ import annotations

import datetime
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from qdo.brokers.base import Broker
from qdo.brokers.catalog import Backlog
from qdo.coordination import queue_admin as operator
from qdo.coordination.bulk_reads import names_below
from qdo.coordination.client import Client
from qdo.coordination.protocol.machine import CreateOp
from qdo.coordination.znodes.layout import Layout
from qdo.coordination.znodes.queue_node import QueueNode
from qdo.errors import NotFoundError, UnreachableError, UnsupportedError, UsageError
from qdo.fleet.audit import AuditTrail
from qdo.fleet.audit_entries import Values
from qdo.ops.fleet import Fleet, read_queues
from qdo.ops.snapshot import ask, backlog_of
from qdo.positions import (
    MOST_DIGITS,
    TIME_POSITIONS,
    format_last,
    position_now,
    position_of_time,
)
from qdo.queues import check_path_part
from qdo.system.native import run_parallel
from qdo.text import describe

_log = logging.getLogger(__name__)

EARLIEST = "earliest"
LATEST = "latest"
# Maximum number of delayed messages that one transaction deletes.
_AT_ONCE = 1000


@dataclass(frozen=True, slots=True)
class QueuePosition:
    """A position in a queue, as recorded in its node."""

    # UUIDv1 time; 0 before the first message.
    last: int
    # The position in the broker's own form; None if the broker's positions are times.
    position: str | None = None


@dataclass(frozen=True, slots=True)
class SeekPlan:
    """The effect of a seek on one queue."""

    queue: str
    before: QueuePosition | None
    # The position after which the queue resumes.
    after: QueuePosition
    # Number of messages after `before`; None if the broker cannot count. If `waiting_after` is
    # larger, workers process messages again. If `waiting_after` is smaller, workers skip messages.
    waiting_before: int | None
    waiting_after: int | None
    # The reason why the node could not be read, or None. A seek repairs the node.
    fault: str | None
    # Age in seconds of the first message after `before`; None if the broker does not report the
    # age.
    behind_before: float | None = None
    behind_after: float | None = None
    # The recorded position of a finished queue, in the broker's own form.
    finished: str | None = None


def check_seekable(broker: Broker) -> None:
    """Raise UnsupportedError for a broker that cannot seek."""
    if not broker.capabilities.seekable:
        raise UnsupportedError(
            broker="this broker",
            what="move a queue to another position",
            remedy="it deletes messages when they are done",
        )


def plan_seek(fleet: Fleet, queue: str, target: str) -> SeekPlan:
    """Return the effect of seeking `queue` to `target`, without changing anything.

    :param target: "earliest", "latest", a position in the broker's form, or a time in ISO 8601
        (UTC if it has no zone).
    :raises UsageError: `target` has another form, is in the future, or does not exist at the
        broker.
    """
    broker = fleet.broker
    check_seekable(broker)
    node = read_queues(fleet.client, fleet.layout, [check_path_part(queue)]).get(queue)
    if node is None:
        raise NotFoundError(what="queue", name=queue)
    node = node.checked(broker.positions)
    after = _place(target, broker, queue)
    if after.last > position_now() and after.last > _head(broker, queue):
        raise UsageError(
            reason=f"{target!r} is in the future: messages sent before then would never run; use "
            f"`{LATEST}` to skip the present messages"
        )
    before = None if node.fault else QueuePosition(node.last, node.position)
    waiting_before, behind_before = _waiting(
        broker, queue, node, before or QueuePosition(node.last)
    )
    waiting_after, behind_after = _waiting(broker, queue, node, after)
    return SeekPlan(
        queue=queue,
        before=before,
        after=after,
        waiting_before=waiting_before,
        waiting_after=waiting_after,
        fault=node.fault,
        behind_before=behind_before,
        behind_after=behind_after,
        finished=broker.capabilities.end_position_text,
    )


def execute(
    client: Client,
    layout: Layout,
    seek: SeekPlan,
    reason: str = "",
    *,
    command: str = "seek",
    onward: bool = False,
) -> None:
    """Execute a plan. A live owner first finishes its message in flight.

    :param onward: only skip messages. A queue that has passed the target repeats no message. If
        positions are not times, the queue may repeat the latest messages.
    """
    with AuditTrail(client, layout, command, reason).change(seek.queue) as entry:

        def record(before: QueueNode, after: QueueNode) -> CreateOp:
            return entry(recorded(before), recorded(after))

        operator.seek(
            client,
            layout,
            seek.queue,
            seek.after.last,
            seek.after.position,
            seek.finished,
            onward=onward,
            record=record,
        )


def recorded(node: QueueNode) -> Values:
    """Return a node's position for the action log."""
    if node.fault is not None:
        return {"fault": node.fault}
    return {"last": format_last(node.last) or EARLIEST, "position": node.position}


def _waiting(
    broker: Broker, queue: str, node: QueueNode, place: QueuePosition
) -> tuple[int | None, float | None]:
    """Return the number of messages after a position, and the age of the first message."""
    try:
        after = broker.positions.resume_after(place.last, place.position)
        backlog = backlog_of(broker, queue, node, after)
    except UnreachableError:
        raise
    except Exception as error:  # noqa: BLE001 - a seek is the way to skip unreadable messages
        _log.warning("queue %s: its backlog is unknown: %s", queue, describe(error))
        return None, None
    countable = broker.capabilities.countable
    return backlog.count if countable else None, backlog.behind_seconds


def _place(target: str, broker: Broker, queue: str) -> QueuePosition:
    if target == EARLIEST:
        return QueuePosition(broker.positions.earliest)
    if target == LATEST:
        return QueuePosition(_head(broker, queue))
    if broker.positions is TIME_POSITIONS:
        if target.isascii() and target.isdigit() and len(target) <= MOST_DIGITS:
            return QueuePosition(int(target))
    elif (own := _own_place(target, broker, queue)) is not None:
        return own
    try:
        moment = datetime.datetime.fromisoformat(target.replace("Z", "+00:00"))
    except ValueError as error:
        form = (
            " such as 135471512647131000"
            if broker.positions is TIME_POSITIONS
            else " of the broker"
        )
        raise UsageError(
            reason=f"the target must be {EARLIEST}, {LATEST}, a position{form}, or a time such as "
            f"2012-01-29T17:34:24Z, got {target!r}"
        ) from error
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=datetime.UTC)
    return QueuePosition(position_of_time(moment.timestamp()))


def _own_place(target: str, broker: Broker, queue: str) -> QueuePosition | None:
    """Return the position for a text in the broker's own form, or None for other texts."""
    if target == broker.capabilities.end_position_text:
        if broker.catalog.is_reopened(queue):
            raise UsageError(
                reason=f"queue {queue!r} still receives messages, which would never run after "
                f"{target!r}; use `{LATEST}` to skip the present messages"
            )
        return QueuePosition(position_now(), target)
    try:
        position = broker.positions.resume_after(position_now(), target)
    except ValueError:
        return None
    if not broker.catalog.has_position(queue, position):
        raise UsageError(
            reason=f"queue {queue!r} has no message at {target!r}: it is not a position of this "
            "queue, or is in the future, and messages sent before then would never run; use a "
            f"position that has occurred in this queue, {EARLIEST}, {LATEST} or a time"
        )
    following = _following(broker, queue, position)
    # Set `last` to just before the time of the next message.
    time = position_now() if following is None else broker.positions.to_time(following)
    return QueuePosition(max(0, time - 1), target)


def _following(broker: Broker, queue: str, position: int) -> int | None:
    """Return the position of the next message; None if there is none, or if the read fails."""
    try:
        rows = list(broker.reader(queue, position).fetch(1))
    except UnreachableError:
        raise
    except Exception as error:  # noqa: BLE001 - see `_waiting`
        _log.warning("queue %s: its next message is unknown: %s", queue, describe(error))
        return None
    return rows[0][0] if rows else None


def _head(broker: Broker, queue: str) -> int:
    """Return the value of `last` after all messages of a queue."""
    return broker.positions.to_time(broker.catalog.head(queue))


@dataclass(frozen=True, slots=True)
class PurgePlan:
    """The messages that a purge drops."""

    # The seek that drops the waiting messages.
    seek: SeekPlan
    # Numbers of the delayed messages to delete; None to keep all delayed messages.
    delayed: tuple[int, ...] | None

    @property
    def queue(self) -> str:
        return self.seek.queue

    @property
    def waiting(self) -> int | None:
        """Number of waiting messages; None if the broker cannot count."""
        return self.seek.waiting_before


def check_purging(broker: Broker) -> None:
    """Raise UnsupportedError for a broker that cannot move past messages."""
    if not broker.capabilities.seekable:
        raise UnsupportedError(
            broker="SQS",
            what="drop the messages that wait",
            remedy="purge the queue at the service: aws sqs purge-queue --queue-url URL",
        )


def queues_to_purge(fleet: Fleet, glob: str) -> list[str]:
    names = names_below(fleet.connected(glob), fleet.layout.queues)
    return [glob] if glob in names else sorted(name for name in names if fnmatchcase(name, glob))


def plan_purge(fleet: Fleet, queue: str, *, delayed: bool = False) -> PurgePlan:
    """Plan the purge of a queue, without changing anything. The purge will not drop later messages.

    :param delayed: also drop the delayed messages.
    """
    check_purging(fleet.broker)
    numbers = tuple(fleet.broker.delayed.numbers(queue)) if delayed else None
    return PurgePlan(plan_seek(fleet, queue, LATEST), numbers)


def plan_purges(fleet: Fleet, queues: Sequence[str], *, delayed: bool = False) -> list[PurgePlan]:
    """Plan the purge of many queues, like `plan_purge` for one queue."""
    broker = fleet.broker
    check_purging(broker)
    if broker.capabilities.backlog_budget is not None:
        return run_parallel(lambda queue: plan_purge(fleet, queue, delayed=delayed), queues)
    read = read_queues(fleet.client, fleet.layout, map(check_path_part, queues))
    nodes = {queue: node.checked(broker.positions) for queue, node in read.items()}
    backlogs = ask(broker, list(nodes), nodes, (), None)
    numbers = run_parallel(broker.delayed.numbers, list(nodes)) if delayed else [None] * len(nodes)
    plans = []
    for (queue, node), deleted in zip(nodes.items(), numbers, strict=True):
        found = backlogs[queue]
        if isinstance(found, Backlog):
            seek = SeekPlan(
                queue=queue,
                before=None if node.fault else QueuePosition(node.last, node.position),
                after=QueuePosition(broker.positions.to_time(found.head)),
                waiting_before=found.count if broker.capabilities.countable else None,
                waiting_after=0,
                fault=node.fault,
            )
            plans.append(PurgePlan(seek, None if deleted is None else tuple(deleted)))
    return plans


def purge_all(
    fleet: Fleet, plans: Sequence[PurgePlan], glob: str, reason: str = ""
) -> Iterator[int]:
    """Drop messages as planned. Yield the number of dropped delayed messages for each queue."""
    if len(plans) == 1:
        yield purge(fleet, plans[0], reason)
        return
    # Write one entry before dropping the first message. In a large app, an entry for each queue
    # would displace all other entries. If this account may not write the entry, change nothing.
    client = fleet.connected(glob)
    waiting = sum(plan.waiting or 0 for plan in plans)
    delayed = sum(len(plan.delayed or ()) for plan in plans)
    counts = {"queues": len(plans), "waiting": waiting, "delayed": delayed}
    AuditTrail(client, fleet.layout, "purge", reason).announce(glob, counts, {"last": LATEST})
    onward = fleet.broker.positions is TIME_POSITIONS
    for start in range(0, len(plans), operator.AT_ONCE):
        chunk = plans[start : start + operator.AT_ONCE]
        places = {each.queue: (each.seek.after.last, each.seek.after.position) for each in chunk}
        operator.seek_many(client, fleet.layout, places, chunk[0].seek.finished, onward=onward)
        yield from run_parallel(
            lambda plan: discard_delayed(fleet.broker, plan.queue, plan.delayed or ()), chunk
        )


def discard_delayed(broker: Broker, queue: str, numbers: Sequence[int]) -> int:
    """Delete delayed messages; return the number of messages that still existed."""
    chunks = (numbers[start : start + _AT_ONCE] for start in range(0, len(numbers), _AT_ONCE))
    return sum(len(broker.delayed.discard(queue, chunk)) for chunk in chunks)


def purge(fleet: Fleet, plan: PurgePlan, reason: str = "") -> int:
    """Drop messages as planned; return the number of dropped delayed messages.

    A message in flight ends. After a failure, the worker does not retry the message. The purge
    keeps a delayed message that has become due since the plan. A second call completes an
    interrupted purge.
    """
    client = fleet.connected(plan.queue)
    onward = fleet.broker.positions is TIME_POSITIONS
    execute(client, fleet.layout, plan.seek, reason, command="purge", onward=onward)
    dropped = discard_delayed(fleet.broker, plan.queue, plan.delayed or ())
    if dropped:
        trail = AuditTrail(client, fleet.layout, "purge", reason)
        trail.note(plan.queue, {"delayed": len(plan.delayed or ())}, {"dropped": dropped})
    return dropped
