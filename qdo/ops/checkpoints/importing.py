"""Moves queues to the positions of a file: plans it first, then executes it queue by queue.

Each queue is moved in a transaction of its own, like a seek. Its node then has the id of the file.
So an import that was interrupted can be repeated: it leaves alone the queues that it has moved,
however far their workers are since.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from qdo.brokers.base import Broker
from qdo.coordination import queue_imports
from qdo.coordination.bulk_reads import read_nodes
from qdo.coordination.client import Client
from qdo.coordination.protocol.machine import CreateOp
from qdo.coordination.znodes.layout import Layout
from qdo.coordination.znodes.queue_node import QueueNode
from qdo.errors import QdoError, UnreachableError
from qdo.fleet.audit import AuditTrail
from qdo.fleet_errors import AuditRefusedError
from qdo.ops.checkpoints.lines import Checkpoint
from qdo.ops.seek import QueuePosition, recorded

MOVE, CREATE, SAME, IMPORTED, SKIPPED = "move", "create", "same", "imported", "skipped"
"""What an import does with a queue: moves it; creates its node, because the coordinator has none;
nothing, because it is there, or because this file has moved it before; nothing, because it has no
such position."""


@dataclass(frozen=True, slots=True)
class ImportStep:
    """The effect of an import on one queue.

    :ivar before: the recorded position, None without a node, or if it cannot be read.
    :ivar after: the position after which the queue resumes, None if it is skipped.
    :ivar note: why it is skipped, or why it gets another position than that in the file.
    :ivar error: why it could not be moved.
    """

    queue: str
    outcome: str
    before: QueuePosition | None
    after: QueuePosition | None
    note: str | None = None
    error: str | None = None
    done: bool = False


def plan_import(
    client: Client | None,
    layout: Layout,
    broker: Broker,
    checkpoints: Sequence[Checkpoint],
    id: str,
) -> list[ImportStep]:
    """Return the effect of an import, without changing anything.

    :param client: None if the coordinator is a file that does not exist yet.
    :param id: the id of the file.
    :raises CoordinatorUnreachableError: the connection is lost.
    :raises UnreachableError: the broker does not answer.
    """
    listed = frozenset(broker.catalog.names())
    paths = [layout.queue(each.queue) for each in checkpoints]
    reads = read_nodes(client, paths) if client is not None else []
    nodes = {
        read.path.rpartition("/")[2]: QueueNode.parse(read.data, read.refused) for read in reads
    }
    return [_step(broker, each, nodes.get(each.queue), listed, id) for each in checkpoints]


def _step(
    broker: Broker,
    checkpoint: Checkpoint,
    node: QueueNode | None,
    listed: frozenset[str],
    id: str,
) -> ImportStep:
    queue = checkpoint.queue
    readable = node is not None and node.fault is None
    before = QueuePosition(node.last, node.position) if node is not None and readable else None
    if node is not None and queue_imports.is_imported(node, id):
        return ImportStep(queue, IMPORTED, before, before, "this file has moved it before")
    if queue not in listed:
        return ImportStep(queue, SKIPPED, before, None, "the broker has no such queue")
    try:
        after, note = _placed(broker, checkpoint)
    except UnreachableError:
        raise
    except QdoError as error:  # one shard that cannot be read hides no other
        return ImportStep(queue, SKIPPED, before, None, str(error))
    if after is None:
        return ImportStep(queue, SKIPPED, before, None, note)
    if node is None:
        return ImportStep(queue, CREATE, before, after, note)
    return ImportStep(queue, SAME if before == after else MOVE, before, after, note)


def _placed(broker: Broker, checkpoint: Checkpoint) -> tuple[QueuePosition | None, str | None]:
    """Return the position that a queue gets, None for none, and a note about it."""
    queue, last, position = checkpoint.queue, checkpoint.last, checkpoint.position
    end = broker.capabilities.end_position_text
    if position is not None and position == end:
        if broker.catalog.is_reopened(queue):
            return None, "it was finished, but a queue of the same name was created"
        return QueuePosition(last, position), None
    try:
        done = broker.positions.resume_after(last, position)
    except ValueError as error:
        return None, str(error)
    if broker.positions.to_text(done) is not None and not broker.catalog.has_position(queue, done):
        return None, f"it has no message at {position}"
    backlog = broker.catalog.backlog(queue, done)
    head = broker.positions.to_time(backlog.head)
    if position is None and last > head:
        return QueuePosition(head), "the file has a position after its last message"
    note = "messages after this position have expired" if backlog.lost else None
    return QueuePosition(last, position), note


def execute_step(
    client: Client, layout: Layout, broker: Broker, step: ImportStep, id: str, reason: str = ""
) -> ImportStep:
    """Move one queue; its owner finishes its message in flight and resumes from there.

    :returns: the step, done; or with the error of a node that this account may not write.
    :raises CoordinatorUnreachableError: no answer in time; the queue may have been moved.
    :raises AuditRefusedError: this account may not write to the action log.
    """
    if step.after is None or step.outcome == IMPORTED:
        return step
    last, position = step.after.last, step.after.position
    finished = broker.capabilities.end_position_text
    try:
        with AuditTrail(client, layout, "checkpoints import", reason).change(step.queue) as entry:

            def record(before: QueueNode, after: QueueNode) -> CreateOp:
                return entry(recorded(before), {**recorded(after), "file": id})

            if step.outcome == SAME:
                queue_imports.mark(client, layout, step.queue, id, record)
            else:
                node = QueueNode(last, position=position)
                queue_imports.place(client, layout, step.queue, node, id, finished, record)
    except (UnreachableError, AuditRefusedError):
        raise
    except QdoError as error:
        return replace(step, error=str(error))
    return replace(step, done=True)
