"""Hands a queue to a worker that an operator names.

The operator only writes a wish, into the value of the folder of assignments. The leader watches it,
plans with it, and writes the assignments under its fence. Then the queue changes hands as always:
its owner finishes its message and releases it, and the named worker claims it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from qdo.coordination.client import Client
from qdo.coordination.protocol.machine import CheckOp, CreateOp, NodeRead, Op, SetOp
from qdo.coordination.transactions import Node, change, make_folder, read
from qdo.coordination.znodes.layout import Layout, is_worker_name
from qdo.coordination.znodes.queue_node import QueueNode
from qdo.coordination.znodes.worker_node import MAX_MOVES, WorkerNode, parse_moves, with_moves
from qdo.errors import NotFoundError
from qdo.fleet.actions import list_workers
from qdo.fleet.audit import AuditTrail
from qdo.fleet_errors import MoveRefusedError, MoveUnfinishedError
from qdo.queues import check_path_part

_FIRST_PAUSE_SECONDS, _LAST_PAUSE_SECONDS = 0.01, 0.2


@dataclass(frozen=True, slots=True)
class QueueMove:
    """A queue, and the worker that it shall have.

    :ivar owner: its owner before, None if it was free.
    :ivar assigned: the worker that an operator had moved it to before, None for none.
    """

    queue: str
    owner: str | None
    worker: str
    assigned: str | None

    @property
    def changes(self) -> bool:
        """Whether the leader does not know this wish yet."""
        return self.assigned != self.worker


def plan_move(client: Client, layout: Layout, queue: str, worker: str) -> QueueMove:
    """Return a move, without changing anything.

    :raises NotFoundError: there is no such queue, or no such worker is registered.
    :raises MoveRefusedError: the queue is deleted, or the worker is draining or does not take it.
    :raises NodeRefusedError: this account may not read one of the nodes.
    """
    node = _queue_node(client, layout, queue)
    if node.deleted:
        raise MoveRefusedError(queue=queue, worker=worker, reason="the queue is marked as deleted")
    _check_worker(client, layout, queue, worker)
    folder = read(client, layout.assignments)
    moves = parse_moves(folder.data) if isinstance(folder, NodeRead) else {}
    return QueueMove(queue, node.owner or None, worker, moves.get(queue))


def execute_move(client: Client, layout: Layout, move: QueueMove, reason: str = "") -> None:
    """Write the wish, with its entry in the action log; forget those for workers that are gone.

    :raises NotFoundError: the worker is gone.
    :raises MoveRefusedError: it is draining now, or the limit of moves is reached.
    :raises AuditRefusedError: this account may not write to the action log.
    """
    make_folder(client, layout.assignments)
    entry: CreateOp | None = None
    with AuditTrail(client, layout, "move", reason).change(move.queue) as made:

        def decide(folder: Node) -> list[Op] | None:
            nonlocal entry
            if not isinstance(folder, NodeRead):
                raise NotFoundError(what="folder", name=layout.assignments)
            _check_worker(client, layout, move.queue, move.worker)
            known = parse_moves(folder.data)
            if known.get(move.queue) == move.worker:
                return None
            present = set(list_workers(client, layout))
            moves = {queue: name for queue, name in known.items() if name in present}
            moves[move.queue] = move.worker
            if len(moves) > MAX_MOVES:
                reason = f"{MAX_MOVES} queues are moved already, until their workers stop"
                raise MoveRefusedError(queue=move.queue, worker=move.worker, reason=reason)
            entry = made({"owner": move.owner}, {"owner": move.worker})
            written = SetOp(layout.assignments, with_moves(folder.data, moves), folder.version)
            return [written, CheckOp(layout.worker(move.worker)), entry]

        def is_mine(folder: NodeRead) -> bool:
            return entry is not None and isinstance(read(client, entry.path), NodeRead)

        change(client, layout.assignments, decide, root=layout.root, is_mine=is_mine)


def wait_for_owner(
    client: Client,
    layout: Layout,
    move: QueueMove,
    timeout_seconds: float,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Wait until the worker owns the queue.

    :raises NotFoundError: the worker is gone: the leader assigns the queue to another one.
    :raises MoveRefusedError: another operator has moved the queue elsewhere.
    :raises MoveUnfinishedError: not in time; the queue still changes hands later.
    """
    deadline, pause = clock() + timeout_seconds, _FIRST_PAUSE_SECONDS
    while True:
        owner = _queue_node(client, layout, move.queue).owner
        if owner == move.worker:
            return
        folder = read(client, layout.assignments)
        wish = parse_moves(folder.data).get(move.queue) if isinstance(folder, NodeRead) else None
        if wish != move.worker:
            reason = f"another operator has moved it to {wish}"
            raise MoveRefusedError(queue=move.queue, worker=move.worker, reason=reason)
        if not isinstance(read(client, layout.worker(move.worker)), NodeRead):
            raise NotFoundError(what="worker", name=move.worker)
        if clock() > deadline:
            raise MoveUnfinishedError(
                queue=move.queue,
                worker=move.worker,
                state=f"still belongs to {owner}" if owner else "has no owner",
                seconds=timeout_seconds,
            )
        client.handler.sleep_func(pause)
        pause = min(1.5 * pause, _LAST_PAUSE_SECONDS)


def _queue_node(client: Client, layout: Layout, queue: str) -> QueueNode:
    node = read(client, layout.queue(check_path_part(queue)))
    if not isinstance(node, NodeRead):
        raise NotFoundError(what="queue", name=queue)
    return QueueNode.parse(node.data)


def _check_worker(client: Client, layout: Layout, queue: str, worker: str) -> None:
    if not is_worker_name(worker):
        raise NotFoundError(what="worker", name=worker)
    node = read(client, layout.worker(worker))
    if not isinstance(node, NodeRead) or not node.ephemeral_owner:
        raise NotFoundError(what="worker", name=worker)
    found = WorkerNode.parse(node.data)
    if found.draining:
        raise MoveRefusedError(queue=queue, worker=worker, reason="the worker is draining")
    if not found.filter.takes(queue):
        reason = "the worker does not take it: no job, --queues or --exclude"
        raise MoveRefusedError(queue=queue, worker=worker, reason=reason)
