"""Count an attempt for each message that was in flight when its process or its session ended.

A parent counts for its dead child in the child's own session, before it closes that session. The
queues have no other owner until then. A worker whose session expired counts in its next session,
and so does the parent of a worker that died after its session. The queues may have other owners by
then. An owner that finds a record of an attempt that it does not know keeps it
(`qdo.coordination.protocol.owned_queues`).

If the parent has died, too, the next owners count (`QueueNode.claimed_by`).

Each node is compared all the same: the version must be the one read, because a checkpoint may
arrive late. In the worker's own session the queue must also still name the worker.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from kazoo.exceptions import BadVersionError, KazooException, NoNodeError, RolledBackError

from qdo.coordination.bulk_reads import connection_lost, is_refusal, read_nodes, refusal_reason
from qdo.coordination.client import Client
from qdo.coordination.znodes.layout import Layout
from qdo.coordination.znodes.queue_node import FailureRecord, OutOfOrderProgress, QueueNode
from qdo.positions import TIME_POSITIONS, Positions

TRIES = 3
"""A late checkpoint of the dead process can interfere at most a few times."""
BATCH = 250

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class InFlight:
    """A message that was in flight.

    :ivar queue: "" for a request: the broker counts its attempts.
    :ivar in_line: whether its queue has one message in flight at a time.
    """

    queue: str
    worker: str
    position: int
    in_line: bool = True


def count_interrupted(
    client: Client,
    layout: Layout,
    in_flight: Sequence[InFlight],
    reason: str,
    positions: Positions = TIME_POSITIONS,
) -> list[InFlight]:
    """Add an attempt to the failure record of each message; return the messages that got one.

    A message of a worker that lives in another session is not counted.

    :param client: in the session of the worker, or in any session once that one has ended.
    :raises CoordinatorUnreachableError: the connection is lost, or the transaction failed for
        another reason than a late checkpoint.
    """
    counted: list[InFlight] = []
    in_flight = [each for each in in_flight if each.queue]
    for start in range(0, len(in_flight), BATCH):
        left = list(in_flight[start : start + BATCH])
        for _ in range(TRIES):
            left, done = _count(client, layout, left, reason, positions)
            counted += done
            if not left:
                break
        if left:
            names = ", ".join(each.queue for each in left)
            _log.warning(
                "queues %s: cannot count the interrupted attempts of messages in flight; these "
                "messages may get one attempt more than their policy allows",
                names,
            )
    return counted


def _count(
    client: Client, layout: Layout, in_flight: Sequence[InFlight], reason: str, positions: Positions
) -> tuple[list[InFlight], list[InFlight]]:
    """Try once; return the messages to retry, and those that were counted."""
    workers = sorted({each.worker for each in in_flight})
    paths = [layout.worker(name) for name in workers]
    found = {
        read.path: read
        for read in read_nodes(client, [*paths, *(layout.queue(each.queue) for each in in_flight)])
    }
    session = client.client_id[0] if client.client_id is not None else 0
    own, gone = set(), set()
    for name in workers:
        read = found.get(layout.worker(name))
        if read is None:
            gone.add(name)
        elif read.session == session:
            own.add(name)
    changed: dict[str, QueueNode] = {}
    counted = []
    for each in in_flight:
        path = layout.queue(each.queue)
        if path not in found:
            continue
        # A queue may have had several messages in flight.
        node = changed.get(path) or QueueNode.parse(found[path].data, found[path].refused)
        if each.worker in gone or (each.worker in own and node.owner == each.worker):
            marked = marked_node(node, each, reason, positions)
            if marked is not None:
                changed[path] = marked
                counted.append(each)
    if not changed:
        return [], []
    transaction = client.transaction()
    for name in sorted(own):
        transaction.check(layout.worker(name), -1)
    for path, marked in changed.items():
        transaction.set_data(path, marked.encode(), found[path].version)
    written = [*map(layout.worker, sorted(own)), *changed]
    late, refused = _commit(client, transaction, written)
    if refused is not None:
        return [each for each in counted if layout.queue(each.queue) != refused], []
    return (counted, []) if late else ([], counted)


def _commit(client: Client, transaction: Any, paths: Sequence[str]) -> tuple[bool, str | None]:
    """Commit; return whether a node changed before, and the path of a refused node."""
    try:
        results = transaction.commit()
        for path, result in zip(paths, results, strict=True):
            if is_refusal(result):
                reason = refusal_reason(result, "written")
                _log.warning(
                    "%s: cannot count an attempt of a message, which may get one more: %s",
                    path,
                    reason,
                )
                return True, path
        return _is_late(results), None
    except KazooException as error:
        raise connection_lost(client, error) from error


def _is_late(results: Sequence[object]) -> bool:
    for result in results:
        if isinstance(result, (BadVersionError, NoNodeError)):
            return True
        if isinstance(result, KazooException) and not isinstance(result, RolledBackError):
            raise result
    return False


def marked_node(
    node: QueueNode, in_flight: InFlight, reason: str, positions: Positions = TIME_POSITIONS
) -> QueueNode | None:
    """Return a queue node with one more attempt for a message; None if that is not needed.

    It is not needed if the message is recorded as done, or if it waits for an operator. Records of
    other messages are kept: several messages that kill their process may follow each other before
    `last` is recorded, and each needs its own count. Where positions are not stable and one message
    is in flight at a time, only the newest record is kept.
    """
    position = in_flight.position
    name = positions.identity(position)
    if node.fault or _is_done(node, position):
        return None
    if node.owner != in_flight.worker and any(
        in_flight.worker in each.begun_by and positions.identity(each.position) == name
        for each in node.failures
    ):
        return None  # the next owner counts the attempt, or has counted it
    progress = node.out_of_order or OutOfOrderProgress()
    others = progress.other_failures
    for at, failure in enumerate(others):
        if positions.identity(failure.position) == name:
            rest = (*others[:at], failure.interrupted(reason), *others[at + 1 :])
            after = replace(progress, other_failures=rest)
            return _unless_same(node, replace(node, out_of_order=after))
    known = node.failure
    same = known is not None and positions.identity(known.position) == name
    if known is None or same or (in_flight.in_line and not positions.stable):
        known = known if same else None
        counted = (known or FailureRecord(position, 0)).interrupted(reason)
        return _unless_same(node, replace(node, failure=counted))
    first = FailureRecord(position, 0).interrupted(reason)
    return replace(node, out_of_order=replace(progress, other_failures=(*others, first)))


def _unless_same(node: QueueNode, marked: QueueNode) -> QueueNode | None:
    return None if marked == node else marked


def _is_done(node: QueueNode, position: int) -> bool:
    progress = node.out_of_order
    return position <= node.last or (progress is not None and progress.is_done(position))
