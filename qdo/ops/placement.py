"""Moves a queue to a worker that an operator names, and shows the changes that the leader plans.

The operator's command only writes a wish into the value of the assignments folder. The leader
watches this value, includes it in its plan, and writes the assignments under its fence. Then the
usual handover follows: the owner finishes its message and releases the queue, and the named worker
claims it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from qdo.coordination.bulk_reads import read_children, read_nodes
from qdo.coordination.client import Client
from qdo.coordination.protocol.assignments import present_shares
from qdo.coordination.protocol.machine import CheckOp, CreateOp, NodeRead, Op, SetOp
from qdo.coordination.protocol.planner import plan_filtered
from qdo.coordination.transactions import Node, change, make_folder, read
from qdo.coordination.znodes.layout import Layout, is_worker_name
from qdo.coordination.znodes.worker_node import (
    MAX_MOVES,
    WorkerNode,
    parse_assignment,
    parse_moves,
    with_moves,
)
from qdo.errors import MoveRefusedError, MoveUnfinishedError, NotFoundError
from qdo.fleet.actions import list_workers
from qdo.fleet.audit import AuditTrail
from qdo.ops.fleet import read_queue, read_queues
from qdo.system.clock import polls
from qdo.text import pluralize


@dataclass(frozen=True, slots=True)
class QueueMove:
    """A queue and its new worker."""

    queue: str
    owner: str | None
    worker: str
    # The worker to which an operator has already moved the queue, or None.
    assigned: str | None

    @property
    def changes(self) -> bool:
        """Whether no operator has requested this move yet."""
        return self.assigned != self.worker


def plan_move(client: Client, layout: Layout, queue: str, worker: str) -> QueueMove:
    """Plan a move, without changing anything.

    :raises MoveRefusedError: the queue is deleted, or the worker is draining or does not take the
        queue.
    """
    node = read_queue(client, layout, queue)
    if node.deleted:
        raise MoveRefusedError(queue=queue, worker=worker, reason="the queue is marked as deleted")
    _check_worker(client, layout, queue, worker)
    folder = read(client, layout.assignments)
    moves = parse_moves(folder.data) if isinstance(folder, NodeRead) else {}
    return QueueMove(queue, node.owner or None, worker, moves.get(queue))


def execute_move(client: Client, layout: Layout, move: QueueMove, reason: str = "") -> None:
    """Write the wish and an entry in the action log. Delete wishes for lost workers.

    :raises MoveRefusedError: the worker is draining now, or the limit of moves is reached.
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


def wait_for_owner(client: Client, layout: Layout, move: QueueMove, timeout_seconds: float) -> None:
    """Wait until the worker owns the queue.

    :raises NotFoundError: the worker has gone. The leader assigns the queue to another worker.
    :raises MoveRefusedError: another operator has moved the queue elsewhere.
    :raises MoveUnfinishedError: the time has passed. The handover will still happen.
    """
    owner = ""
    for _ in polls(timeout_seconds, client.handler.sleep_func):
        owner = read_queue(client, layout, move.queue).owner
        if owner == move.worker:
            return
        folder = read(client, layout.assignments)
        wish = parse_moves(folder.data).get(move.queue) if isinstance(folder, NodeRead) else None
        if wish != move.worker:
            reason = f"another operator has moved it to {wish}"
            raise MoveRefusedError(queue=move.queue, worker=move.worker, reason=reason)
        if not isinstance(read(client, layout.worker(move.worker)), NodeRead):
            raise NotFoundError(what="worker", name=move.worker)
    raise MoveUnfinishedError(
        queue=move.queue,
        worker=move.worker,
        state=f"still belongs to {owner}" if owner else "has no owner",
        seconds=timeout_seconds,
    )


def _check_worker(client: Client, layout: Layout, queue: str, worker: str) -> None:
    if not is_worker_name(worker):
        raise NotFoundError(what="worker", name=worker)
    node = read(client, layout.worker(worker))
    if not isinstance(node, NodeRead) or not node.ephemeral_owner:
        raise NotFoundError(what="worker", name=worker)
    value = WorkerNode.parse(node.data)
    if value.draining:
        raise MoveRefusedError(queue=queue, worker=worker, reason="the worker is draining")
    if not value.filter.takes(queue):
        reason = "the worker does not take it: no job, --queues or --exclude"
        raise MoveRefusedError(queue=queue, worker=worker, reason=reason)


@dataclass(frozen=True, slots=True)
class PlanInput:
    """The part of the leader's input that this account can read."""

    # The queues that are not marked as deleted.
    queues: Sequence[str]
    workers: Mapping[str, WorkerNode]
    # The reason why each of these workers gets no queues.
    unable: Mapping[str, str]
    current: Mapping[str, list[str]]
    # The lost worker of each queue that is still assigned to a lost worker.
    left: Mapping[str, str]
    # The worker of each queue that an operator moved.
    moves: Mapping[str, str]


def read_plan_input(client: Client, layout: Layout) -> PlanInput:
    folders = [layout.workers, layout.assignments, layout.queues]
    names = read_children(client, folders)
    workers: dict[str, WorkerNode] = {}
    unable: dict[str, str] = {}
    listed = [name for name in names.get(layout.workers, []) if is_worker_name(name)]
    for node in read_nodes(client, [layout.worker(name) for name in listed]):
        name = node.path.rpartition("/")[2]
        workers[name] = WorkerNode.parse(node.data)
        if node.refused is not None:
            unable[name] = f"its node cannot be read: {node.refused}"
        elif not node.session:
            unable[name] = "its node has no session"
            del workers[name]
        elif workers[name].draining:
            unable[name] = "it is draining"
    granted = [name for name in names.get(layout.assignments, []) if is_worker_name(name)]
    assigned: dict[str, frozenset[str]] = {}
    for node in read_nodes(client, [layout.assignment(name) for name in granted]):
        share = parse_assignment(node.data) if node.refused is None else None
        if share is not None:
            assigned[node.path.rpartition("/")[2]] = share
    folder = read_nodes(client, [layout.assignments])
    return PlanInput(
        queues=_live(client, layout, names.get(layout.queues, [])),
        workers=workers,
        unable=unable,
        current=present_shares(assigned, workers),
        left={
            queue: name
            for name, share in assigned.items()
            if name not in workers
            for queue in share
        },
        moves=parse_moves(folder[0].data) if folder else {},
    )


def _live(client: Client, layout: Layout, names: Sequence[str]) -> list[str]:
    nodes = read_queues(client, layout, names)
    return [name for name in names if name not in nodes or not nodes[name].deleted]


@dataclass(frozen=True, slots=True)
class Reassignment:
    """A queue that the leader would assign to another worker."""

    queue: str
    # The worker to which the queue is assigned, or None.
    before: str | None
    # The next worker, or None if no worker takes the queue.
    after: str | None
    why: str


def planned_changes(facts: PlanInput) -> list[Reassignment]:
    """Return the queues that a new plan would assign differently, sorted by name. Pure function."""
    able = {name: node.filter for name, node in facts.workers.items() if name not in facts.unable}
    if not able:
        return []  # the leader does not change assignments
    planned, _ = plan_filtered(facts.queues, able, facts.current, facts.moves)
    # Like the plan, count a queue of several workers for the worker with the first name.
    before = {
        queue: name for name in sorted(facts.current, reverse=True) for queue in facts.current[name]
    }
    after = {queue: name for name, share in planned.items() for queue in share}
    return [
        Reassignment(
            queue,
            before.get(queue) or facts.left.get(queue),
            after.get(queue),
            _why(facts, queue, before.get(queue), after.get(queue)),
        )
        for queue in sorted(facts.queues)
        if before.get(queue) != after.get(queue)
    ]


def _why(facts: PlanInput, queue: str, before: str | None, after: str | None) -> str:
    if after is None:
        return "no worker takes it: no job, --queues or --exclude"
    if before is None:
        gone = facts.left.get(queue)
        return f"{gone} is gone" if gone is not None else "it is new"
    if before in facts.unable:
        return f"{before} gets no queues: {facts.unable[before]}"
    if not facts.workers[before].filter.takes(queue):
        return f"{before} does not take it: its jobs, --queues or --exclude have changed"
    if facts.moves.get(queue) == after:
        return "an operator moved it"
    loads = [len(facts.current.get(name, ())) for name in (before, after)]
    return f"balance: {before} has {pluralize(loads[0], 'queue')}, {after} has {loads[1]}"
