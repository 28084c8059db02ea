"""Drops the messages of a queue without running them.

Those that wait are dropped by a seek to the end of the queue, as it was when the purge was planned.
Delayed messages are deleted at the broker.
"""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase

from qdo.brokers.base import Broker
from qdo.coordination.bulk_reads import read_children
from qdo.coordination.client import Client
from qdo.coordination.znodes.layout import Layout
from qdo.errors import UnsupportedError
from qdo.fleet.audit import AuditTrail
from qdo.ops.seek import LATEST, SeekPlan, execute, plan_seek
from qdo.positions import TIME_POSITIONS

_AT_ONCE = 1000
"""Delayed messages that one transaction deletes."""


@dataclass(frozen=True, slots=True)
class PurgePlan:
    """What a purge drops.

    :ivar seek: the seek that drops the messages that wait.
    :ivar delayed: numbers of delayed messages to delete, None: they stay.
    """

    seek: SeekPlan
    delayed: tuple[int, ...] | None

    @property
    def queue(self) -> str:
        """The name of the queue."""
        return self.seek.queue

    @property
    def waiting(self) -> int | None:
        """How many messages wait; None if the broker cannot count."""
        return self.seek.waiting_before


def check_purging(broker: Broker) -> None:
    """Raise UnsupportedError for a broker that cannot move past messages."""
    if not broker.capabilities.seekable:
        raise UnsupportedError(
            broker="SQS",
            what="drop the messages that wait",
            remedy="purge the queue at the service: aws sqs purge-queue --queue-url URL",
        )


def queues_to_purge(client: Client, layout: Layout, glob: str) -> list[str]:
    """Return the queue of this name, or else the queues that match a glob."""
    names = read_children(client, [layout.queues]).get(layout.queues, [])
    return [glob] if glob in names else sorted(name for name in names if fnmatchcase(name, glob))


def plan_purge(
    client: Client, layout: Layout, broker: Broker, queue: str, *, delayed: bool = False
) -> PurgePlan:
    """Return what a purge drops, without changing anything.

    What arrives later is not part of it.

    :param delayed: also the delayed messages.
    :raises NotFoundError: the coordinator has no such queue.
    :raises UnsupportedError: see `check_purging`.
    """
    check_purging(broker)
    numbers = tuple(broker.delayed.numbers(queue)) if delayed else None
    return PurgePlan(plan_seek(client, layout, broker, queue, LATEST), numbers)


def purge(client: Client, layout: Layout, broker: Broker, plan: PurgePlan, reason: str = "") -> int:
    """Drop messages as planned; return the number of delayed ones.

    A message in flight ends; if it fails, it is not retried. A delayed message that became due
    meanwhile is not dropped. Repeated after an interruption, it completes the purge.

    :param reason: for the action log.
    :raises AuditRefusedError: this account may not write to the action log.
    """
    onward = broker.positions is TIME_POSITIONS
    execute(client, layout, plan.seek, reason, command="purge", onward=onward)
    dropped, numbers = 0, plan.delayed or ()
    for start in range(0, len(numbers), _AT_ONCE):
        chunk = numbers[start : start + _AT_ONCE]
        dropped += len(broker.delayed.discard(plan.queue, chunk))
    if dropped:
        trail = AuditTrail(client, layout, "purge", reason)
        trail.note(plan.queue, {"delayed": len(plan.delayed or ())}, {"dropped": dropped})
    return dropped
