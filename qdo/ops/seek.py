"""Moving a queue to another position: what it would mean, and doing it."""

from __future__ import annotations

import datetime
from dataclasses import dataclass

from qdo.brokers.base import Broker
from qdo.coordination import operator
from qdo.coordination.client import Client
from qdo.coordination.layout import Layout, QueueNode
from qdo.coordination.reads import read_nodes
from qdo.errors import NotFoundError, UnsupportedError, UsageError
from qdo.message import position_now, position_of_time

EARLIEST = "earliest"
LATEST = "latest"


@dataclass(frozen=True, slots=True)
class Seek:
    """What a seek of one queue does.

    :ivar before: recorded position, 0 before the first message, None where it is garbage.
    :ivar after: position after which the queue goes on.
    :ivar waiting_before: messages behind `before`; more of them afterwards are processed again,
        fewer of them were passed over.
    :ivar fault: why the node could not be read before; a seek repairs it.
    """

    queue: str
    before: int | None
    after: int
    waiting_before: int
    waiting_after: int
    fault: str | None


def plan_seek(client: Client, layout: Layout, broker: Broker, queue: str, target: str) -> Seek:
    """Return what seeking `queue` to `target` would do; changes nothing.

    :param target: "earliest", "latest", a position as a decimal number, or a time in ISO 8601
        (UTC where it names no zone).
    :raises NotFoundError: the coordinator has no such queue.
    :raises UnsupportedError: the broker cannot seek.
    :raises UsageError: `target` is none of these, or lies in the future.
    """
    if not broker.capabilities.seekable:
        raise UnsupportedError(
            broker="this broker",
            what="go back or forth in a queue",
            remedy="its messages are gone once they are done",
        )
    found = read_nodes(client, [layout.queue(queue)])
    if not found:
        raise NotFoundError(what="queue", name=queue)
    node = QueueNode.parse(found[0].data)
    after = _position(target, broker, queue)
    head = broker.backlog(queue, 0).head
    if after > max(head, position_now()):
        raise UsageError(
            reason=f"{target!r} lies ahead: messages sent until then would never run; "
            f"`{LATEST}` passes over those that are there"
        )
    return Seek(
        queue=queue,
        before=None if node.fault else node.last,
        after=after,
        waiting_before=broker.backlog(queue, node.last).count,
        waiting_after=broker.backlog(queue, after).count,
        fault=node.fault,
    )


def execute(client: Client, layout: Layout, seek: Seek) -> None:
    """Do what was planned; a live owner goes on from there after the message in hand."""
    operator.seek(client, layout, seek.queue, seek.after)


def _position(target: str, broker: Broker, queue: str) -> int:
    if target == EARLIEST:
        return 0
    if target == LATEST:
        return broker.backlog(queue, 0).head
    if target.isascii() and target.isdigit():
        return int(target)
    try:
        moment = datetime.datetime.fromisoformat(target.replace("Z", "+00:00"))
    except ValueError as error:
        raise UsageError(
            reason=f"{target!r} is no place in a queue: write {EARLIEST}, {LATEST}, a position "
            "such as 135471512647131000, or a time such as 2012-01-29T17:34:24Z"
        ) from error
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=datetime.timezone.utc)
    return position_of_time(moment.timestamp())
