"""Count an attempt for each message that was in flight when its process or its session ended.

After the death of a worker process, its parent counts in the worker's session, and then closes this
session. Until then, the queues have no other owner. After the end of its session, a living worker
counts in its next session. The parent of a worker that died after its session had ended also counts
in another session. In these two cases, the queues may already have other owners. An owner keeps the
records of attempts that it does not know (`qdo.coordination.protocol.owned_queues`).

If the parent has also died, the next owners count (`QueueNode.claimed_by`).

A checkpoint may arrive late, so each write requires the version that the process has read. In the
worker's session, the queue node must also still name the worker.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

from qdo.coordination.bulk_reads import connection_lost, read_nodes
from qdo.coordination.client import Client
from qdo.coordination.protocol import machine as m
from qdo.coordination.transactions import commit
from qdo.coordination.znodes.layout import Layout
from qdo.coordination.znodes.queue_node import FailureRecord, OutOfOrderProgress, QueueNode
from qdo.positions import TIME_POSITIONS, Positions

# The maximum number of tries. Late checkpoints of the dead process can interfere only a few times.
TRIES = 3
BATCH = 250
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class InFlight:
    """A message with a running job at the end of the job's process or session."""

    queue: str  # "" for a request, because the broker counts its attempts
    worker: str
    position: int
    in_line: bool = True  # whether its queue runs one message at a time


def count_interrupted(
    client: Client,
    layout: Layout,
    in_flight: Sequence[InFlight],
    reason: str,
    positions: Positions = TIME_POSITIONS,
) -> list[InFlight]:
    """Add an attempt to the failure record of each message; return the counted messages.

    :param client: a client in the worker's session; if this session has ended, any client.
    :raises CoordinatorUnreachableError: the connection was lost; some attempts may be counted.
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
    """Try once; return the messages to retry, and the counted messages."""
    workers = sorted({each.worker for each in in_flight})
    paths = [layout.worker(name) for name in workers]
    found = {
        read.path: read
        for read in read_nodes(client, [*paths, *(layout.queue(each.queue) for each in in_flight)])
    }
    session = client.client_id[0] if client.client_id is not None else 0
    own = set()
    gone = set()
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
        # If the worker lives in another session, it counts its attempts.
        if each.worker in gone or (each.worker in own and node.owner == each.worker):
            marked = marked_node(node, each, reason, positions)
            if marked is not None:
                changed[path] = marked
                counted.append(each)
    if not changed:
        return [], []
    ops: list[m.Op] = [m.CheckOp(layout.worker(name)) for name in sorted(own)]
    for path, marked in changed.items():
        ops.append(m.SetOp(path, marked.encode(), found[path].version))
    return _commit(client, layout, ops, counted)


def _commit(
    client: Client, layout: Layout, ops: Sequence[m.Op], counted: list[InFlight]
) -> tuple[list[InFlight], list[InFlight]]:
    answer = commit(client, ops)
    if isinstance(answer, m.NoResponse):
        raise connection_lost(client, TimeoutError("no answer"))
    if isinstance(answer, m.Committed):
        return [], counted
    if not answer.refuses(answer.index):
        return counted, []  # a late checkpoint changed a node
    refused = ops[answer.index].path
    _log.warning(
        "%s: cannot count an attempt of a message, which may get one more: %s",
        refused,
        answer.reason,
    )
    return [each for each in counted if layout.queue(each.queue) != refused], []


def marked_node(
    node: QueueNode, in_flight: InFlight, reason: str, positions: Positions = TIME_POSITIONS
) -> QueueNode | None:
    """Return a node with one more attempt for a message; None if the message is done or blocked."""
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
    # Several consecutive messages may kill their process before a checkpoint records `last`. Each
    # of these messages needs a separate count.
    others = progress.other_failures
    for at, failure in enumerate(others):
        if positions.identity(failure.position) == name:
            rest = (*others[:at], failure.interrupted(reason), *others[at + 1 :])
            after = replace(progress, other_failures=rest)
            return _unless_same(node, replace(node, out_of_order=after))
    known = node.failure
    same = known is not None and positions.identity(known.position) == name
    # If positions are not stable and the queue runs one message at a time, keep the newest record.
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
