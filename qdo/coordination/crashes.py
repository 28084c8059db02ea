"""Counting an attempt for each message that a dead process had in hand.

Done in the dead process's own session, before it is closed: its queues have no other owner until
then, so nobody else writes what is written here. What stands in each queue node is compared
all the same: the queue must still name the dead worker, and the version must be the one read, for
a last checkpoint may arrive late.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

from kazoo.exceptions import BadVersionError, KazooException, NoNodeError, RolledBackError

from qdo.coordination.client import Client
from qdo.coordination.layout import Above, Layout, Marks, QueueNode
from qdo.coordination.reads import Read, read_nodes
from qdo.errors import CoordinatorUnreachableError
from qdo.positions import TIMES, Positions

TRIES = 3
"""A late checkpoint of the dead can get in between at most a few times."""
BATCH = 250

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class InHand:
    """A message that a process had in hand when it died.

    :ivar in_line: its queue has one message in hand at a time.
    """

    queue: str
    worker: str
    position: int
    in_line: bool = True


def count_crash(
    client: Client,
    layout: Layout,
    in_hand: Sequence[InHand],
    reason: str,
    positions: Positions = TIMES,
) -> int:
    """Add an attempt to the marks of each message; return for how many that was done.

    :param client: in the session of the dead process.
    :param positions: what the positions of the broker mean.
    :raises CoordinatorUnreachableError: the connection is lost, or something else than a late
        checkpoint is in the way.
    """
    counted = 0
    for start in range(0, len(in_hand), BATCH):
        left = list(in_hand[start : start + BATCH])
        for _ in range(TRIES):
            left, done = _count(client, layout, left, reason, positions)
            counted += done
            if not left:
                break
        if left:
            names = ", ".join(each.queue for each in left)
            _log.warning("the attempt that ended with its process is not counted for %s", names)
    return counted


def _count(
    client: Client,
    layout: Layout,
    in_hand: Sequence[InHand],
    reason: str,
    positions: Positions,
) -> tuple[list[InHand], int]:
    """Try once; return what is to be tried again, and how many were counted."""
    workers = sorted({each.worker for each in in_hand})
    paths = [layout.worker(name) for name in workers]
    found = {
        read.path: read
        for read in read_nodes(client, [*paths, *(layout.queue(each.queue) for each in in_hand)])
    }
    session = client.client_id[0] if client.client_id is not None else 0
    own = {name for name in workers if _is_of(found.get(layout.worker(name)), session)}
    changed: dict[str, QueueNode] = {}
    counted = []
    for each in in_hand:
        path = layout.queue(each.queue)
        if each.worker in own and path in found:
            # A queue may have had several messages in hand.
            node = changed.get(path) or QueueNode.parse(found[path].data)
            marked = marked_node(node, each, reason, positions)
            if marked is not None:
                changed[path] = marked
                counted.append(each)
    if not changed:
        return [], 0
    transaction = client.transaction()
    for name in sorted(own):
        transaction.check(layout.worker(name), -1)
    for path, marked in changed.items():
        transaction.set_data(path, marked.encode(), found[path].version)
    try:
        late = _is_late(transaction.commit())
    except KazooException as error:
        raise CoordinatorUnreachableError(
            url=client.address.url, reason=f"{type(error).__name__} {error}".strip()
        ) from error
    return (counted, 0) if late else ([], len(counted))


def _is_of(read: Read | None, session: int) -> bool:
    return read is not None and read.session == session


def _is_late(results: Sequence[object]) -> bool:
    for result in results:
        if isinstance(result, (BadVersionError, NoNodeError)):
            return True
        if isinstance(result, KazooException) and not isinstance(result, RolledBackError):
            raise result
    return False


def marked_node(
    node: QueueNode, in_hand: InHand, reason: str, positions: Positions = TIMES
) -> QueueNode | None:
    """Return a queue node with one attempt more for a message; None where there is no need.

    There is none if the queue is another's, the message is recorded as done, or it waits for an
    operator. In a queue that is processed in line marks of another message give way, for it has
    marks of one: that one has ended since, or lies ahead and was reached before `last` was
    recorded.
    """
    position = in_hand.position
    name = positions.name(position)
    if node.owner != in_hand.worker or node.fault or _is_done(node, position):
        return None
    above = node.above or Above()
    for at, marks in enumerate(above.marks):
        if positions.name(marks.position) == name:
            rest = (*above.marks[:at], _counted(marks, reason), *above.marks[at + 1 :])
            return _unless_same(node, replace(node, above=replace(above, marks=rest)))
    known = node.marks
    same = known is not None and positions.name(known.position) == name
    if known is None or same or in_hand.in_line:
        known = known if same else None
        counted = _counted(known or Marks(position, 0), reason)
        return _unless_same(node, replace(node, marks=counted))
    first = _counted(Marks(position, 0), reason)
    return replace(node, above=replace(above, marks=(*above.marks, first)))


def _unless_same(node: QueueNode, marked: QueueNode) -> QueueNode | None:
    return None if marked == node else marked


def _is_done(node: QueueNode, position: int) -> bool:
    runs = () if node.above is None else node.above.runs
    return position <= node.last or any(first <= position <= newest for first, newest in runs)


def _counted(marks: Marks, reason: str) -> Marks:
    """Return marks with one attempt more, as they are where an operator is to decide, or did."""
    if marks.blocked or marks.verdict:
        return marks
    attempts = marks.attempts + 1
    return replace(marks, attempts=attempts, error=reason, crashed=True, due=0.0, pause=0.0)
