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
from qdo.positions import TIMES

EARLIEST = "earliest"
LATEST = "latest"


@dataclass(frozen=True, slots=True)
class Place:
    """A place in a queue, as its node records it.

    :ivar last: UUIDv1 time; 0 before the first message.
    :ivar position: the broker's own position, None where it has none, or for a time.
    """

    last: int
    position: str | None = None


@dataclass(frozen=True, slots=True)
class Seek:
    """What a seek of one queue does.

    :ivar before: the recorded place, None where it is garbage.
    :ivar after: the place after which the queue goes on.
    :ivar waiting_before: messages behind `before`; more of them afterwards are processed again,
        fewer of them were passed over. None where the broker cannot count.
    :ivar behind_before: age in seconds of the first message behind `before`, None where the
        broker does not say it.
    :ivar fault: why the node could not be read before; a seek repairs it.
    :ivar finished: what the broker records of a queue that is done to its end.
    """

    queue: str
    before: Place | None
    after: Place
    waiting_before: int | None
    waiting_after: int | None
    fault: str | None
    behind_before: float | None = None
    behind_after: float | None = None
    finished: str | None = None


def check_seekable(broker: Broker) -> None:
    """Raise UnsupportedError for a broker that cannot seek."""
    if not broker.capabilities.seekable:
        raise UnsupportedError(
            broker="this broker",
            what="go back or forth in a queue",
            remedy="its messages are gone once they are done",
        )


def plan_seek(client: Client, layout: Layout, broker: Broker, queue: str, target: str) -> Seek:
    """Return what seeking `queue` to `target` would do; changes nothing.

    :param target: "earliest", "latest", a position as the broker has them, or a time in ISO 8601
        (UTC where it names no zone).
    :raises NotFoundError: the coordinator has no such queue.
    :raises UnsupportedError: the broker cannot seek.
    :raises UsageError: `target` is none of these, lies in the future, or is no place there.
    """
    check_seekable(broker)
    found = read_nodes(client, [layout.queue(queue)])
    if not found:
        raise NotFoundError(what="queue", name=queue)
    node = QueueNode.parse(found[0].data).checked(broker.positions)
    after = _place(target, broker, queue)
    if after.last > position_now() and after.last > _head(broker, queue):
        raise UsageError(
            reason=f"{target!r} lies ahead: messages sent until then would never run; "
            f"`{LATEST}` passes over those that are there"
        )
    before = None if node.fault else Place(node.last, node.position)
    waiting_before, behind_before = _waiting(broker, queue, before or Place(node.last))
    waiting_after, behind_after = _waiting(broker, queue, after)
    return Seek(
        queue=queue,
        before=before,
        after=after,
        waiting_before=waiting_before,
        waiting_after=waiting_after,
        fault=node.fault,
        behind_before=behind_before,
        behind_after=behind_after,
        finished=broker.finished_text,
    )


def execute(client: Client, layout: Layout, seek: Seek) -> None:
    """Do what was planned; a live owner goes on from there after the message in hand."""
    operator.seek(
        client, layout, seek.queue, seek.after.last, seek.after.position, seek.finished
    )


def _waiting(broker: Broker, queue: str, place: Place) -> tuple[int | None, float | None]:
    """Return how many messages wait behind a place, and the age of the first."""
    backlog = broker.backlog(queue, broker.positions.begin(place.last, place.position))
    countable = broker.capabilities.countable
    return backlog.count if countable else None, backlog.behind_seconds


def _place(target: str, broker: Broker, queue: str) -> Place:
    if target == EARLIEST:
        return Place(broker.positions.earliest)
    if target == LATEST:
        return Place(_head(broker, queue))
    if broker.positions is TIMES:
        if target.isascii() and target.isdigit():
            return Place(int(target))
    elif (own := _own_place(target, broker, queue)) is not None:
        return own
    try:
        moment = datetime.datetime.fromisoformat(target.replace("Z", "+00:00"))
    except ValueError as error:
        form = " such as 135471512647131000" if broker.positions is TIMES else " of the broker's"
        raise UsageError(
            reason=f"{target!r} is no place in a queue: write {EARLIEST}, {LATEST}, a position"
            f"{form}, or a time such as 2012-01-29T17:34:24Z"
        ) from error
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=datetime.timezone.utc)
    return Place(position_of_time(moment.timestamp()))


def _own_place(target: str, broker: Broker, queue: str) -> Place | None:
    """Return the place of a position in the broker's own form, None for what is none.

    `last` is recorded beside it: the time of the message behind it, less the smallest there is.
    """
    if target == broker.finished_text:
        if broker.goes_on(queue):
            raise UsageError(
                reason=f"{target!r} lies ahead, for queue {queue!r} still gets messages: they would"
                f" never run; `{LATEST}` passes over those that are there"
            )
        return Place(position_now(), target)
    try:
        position = broker.positions.begin(position_now(), target)
    except ValueError:
        return None
    if not broker.has_place(queue, position):
        raise UsageError(
            reason=f"queue {queue!r} has no message {target!r}: it is no position of this queue, or"
            f" lies ahead, where messages sent until then would never run; write a position that"
            f" was seen there, {EARLIEST}, {LATEST} or a time"
        )
    reader = broker.reader(queue, position)
    try:
        rows = list(reader.fetch(1))
    finally:
        reader.close()
    following = broker.positions.last(rows[0][0]) if rows else position_now()
    return Place(max(0, following - 1), target)


def _head(broker: Broker, queue: str) -> int:
    """Return `last` of a queue of which everything is done."""
    return broker.positions.last(broker.backlog(queue, broker.positions.begin(0, None)).head)
