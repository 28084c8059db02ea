"""Actions of operators on queues while workers run; see rule 10 of the protocol."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from qdo.coordination.protocol.machine import CreateOp, DeleteOp, Op, Rejected, SetOp
from qdo.coordination.znodes.queue_node import QueueNode
from qdo.coordination.znodes.worker_node import WorkerNode, parse_moves, with_moves
from tests.simulation.invariants import OPERATOR
from tests.simulation.world import TIMEOUT, World


def _sought(node: QueueNode, target: int) -> QueueNode:
    return replace(node, last=target, position=None, seek=node.seek + 1, fault=None, failure=None)


def seek(world: World) -> None:
    """Move a queue's `last` according to rule 10 of the protocol."""
    queue = world.random.choice(world.queues())
    end = world.broker.end(queue) // 10
    target = 10 * world.random.randint(0, end)
    _operate(world, queue, lambda node: _sought(node, target))


def mark_deleted(world: World) -> None:
    """Mark a queue as deleted; some are created again later, in place."""
    queue = world.random.choice(world.queues())
    counted = world.random.random() < 0.5
    _operate(world, queue, lambda node: replace(node, deleted=True, seek=node.seek + counted))
    if world.random.random() < 0.6:
        world.schedule.after(
            world.random.random() * TIMEOUT,
            _operate,
            world,
            queue,
            lambda node: replace(_sought(node, 0), deleted=False),
        )


def delete(world: World) -> None:
    """Delete a queue for good, node and all; most are created again soon."""
    if len(world.queues()) > 1:
        queue = world.random.choice(world.queues())
        _operate(world, queue, lambda node: replace(node, deleted=True))
        world.schedule.after(world.random.random(), world.befall, partial(_remove, queue=queue))


def _remove(world: World, queue: str) -> None:
    """Delete the node once no worker owns it, together with a write of its folder."""
    coordinator, random = world.coordinator, world.random
    path, folder = world.layout.queue(queue), coordinator.node(world.layout.queues)
    node = coordinator.node(path)
    if node is None or folder is None:
        return
    before = QueueNode.parse(node.data)
    owned = before.owner and coordinator.node(world.layout.worker(before.owner)) is not None
    if coordinator.down or owned or not before.deleted:
        world.schedule.after(0.5, world.befall, partial(_remove, queue=queue))
        return
    ops: tuple[Op, ...] = (
        SetOp(world.layout.queues, b"", folder.version),
        DeleteOp(path, node.version),
    )
    answer = coordinator.commit(OPERATOR, ops)
    world.schedule.note("an operator deletes %s: %s", queue, answer)
    if random.random() < 0.8:
        last = 10 * random.randint(0, world.broker.end(queue) // 10)
        create = CreateOp(path, QueueNode(last=last).encode())
        world.schedule.after(random.random() * 0.3, coordinator.commit, OPERATOR, (create,))


def move(world: World) -> None:
    """Hand a queue to a worker, which may be gone by then, or not take it."""
    workers = world.coordinator.names(world.layout.workers)
    folder = world.coordinator.node(world.layout.assignments)
    if not workers or folder is None or world.coordinator.down:
        return
    queue, worker = world.random.choice(world.queues()), world.random.choice(sorted(workers))
    moves = {**parse_moves(folder.data), queue: worker}
    data = with_moves(folder.data, moves)
    world.schedule.note("an operator moves %s to %s", queue, worker)
    world.coordinator.commit(OPERATOR, (SetOp(world.layout.assignments, data, folder.version),))


def spoil(world: World) -> None:
    """Write garbage where `last` should be, and move the queue to somewhere later on."""
    queue = world.random.choice(world.queues())
    path = world.layout.queue(queue)
    node = world.coordinator.node(path)
    if node is None or world.coordinator.down:
        return
    value = json.loads(node.data or b"{}")
    value["last"] = "spoilt"
    world.schedule.note("an operator spoils %s", queue)
    world.coordinator.commit(OPERATOR, (SetOp(path, json.dumps(value).encode(), node.version),))
    target = 10 * world.random.randint(0, world.broker.end(queue) // 10)
    world.schedule.after(
        world.random.random() * TIMEOUT,
        _operate,
        world,
        queue,
        lambda node: _sought(node, target),
    )


def seek_hastily(world: World) -> None:
    """Move a queue's `last` without telling its owner, who will write and find out."""
    queue = world.random.choice(world.queues())
    target = 10 * world.random.randint(0, world.broker.end(queue) // 10)
    _operate(
        world,
        queue,
        lambda node: _sought(node, target),
        telling=False,
    )


def _operate(
    world: World, queue: str, change: Callable[[QueueNode], QueueNode], *, telling: bool = True
) -> None:
    """Read a queue node and its owner's, perhaps stale; write both at those versions."""
    random, coordinator = world.random, world.coordinator
    head = coordinator.zxid
    view = head - random.randint(0, min(3, head - 1)) if random.random() < 0.3 else head
    # A server so far behind that it knows nothing of the queue is asked again.
    path = world.layout.queue(queue)
    node = coordinator.node(path, view) or coordinator.node(path)
    if node is None:
        return
    before = QueueNode.parse(node.data)
    after = change(before)
    if after.fault:
        return  # unreadable content cannot be written back
    ops: list[Op] = [SetOp(world.layout.queue(queue), after.encode(), node.version)]
    path = world.layout.worker(before.owner)
    owner = coordinator.node(path, view) if before.owner else None
    if owner is not None and telling:
        value = WorkerNode.parse(owner.data)
        told = replace(value, reread=(*dict.fromkeys((*value.reread, queue)),))
        ops.append(SetOp(path, told.encode(), owner.version))
    delay = random.random() * 0.05
    world.schedule.after(delay, _commit_operation, world, queue, change, ops, telling)


def _commit_operation(
    world: World,
    queue: str,
    change: Callable[[QueueNode], QueueNode],
    ops: list[Op],
    telling: bool,
) -> None:
    if world.checks.peaceful:
        return
    again = partial(_operate, world, queue, change, telling=telling)
    if world.coordinator.down:
        world.schedule.after(0.5, again)
        return
    answer = world.coordinator.commit(OPERATOR, tuple(ops))
    world.schedule.note("an operator changes %s: %s", queue, answer)
    if isinstance(answer, Rejected):
        again()
    elif not telling:
        world.send(queue)
