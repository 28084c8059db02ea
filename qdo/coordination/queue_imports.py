"""Positions that an operator imports from a file: each is a seek that leaves a mark.

The mark is a key of the queue node, which owners keep. With it the same file moves a queue once.
"""

from __future__ import annotations

from dataclasses import replace

from qdo.coordination.client import Client
from qdo.coordination.protocol.machine import CreateOp, NodeRead, Op
from qdo.coordination.queue_admin import Record, change_node, without_marks
from qdo.coordination.queue_admin import with_seek as sought
from qdo.coordination.transactions import Node, change, make_folder, read
from qdo.coordination.znodes.layout import Layout
from qdo.coordination.znodes.queue_node import QueueNode

KEY = "imported"
"""Key of a queue node: the id of the file that moved it last."""


def is_imported(node: QueueNode, id: str) -> bool:
    """Return whether the file with this id has moved a queue."""
    return (KEY, id) in node.extra


def place(
    client: Client,
    layout: Layout,
    queue: str,
    wanted: QueueNode,
    id: str,
    finished: str | None,
    record: Record,
) -> None:
    """Continue a queue after the position in `wanted`, once for each file; create a missing node.

    :param finished: see `queue_admin.seek`.
    :raises NodeRefusedError: the coordinator does not let this client read or write the node.
    """
    make_folder(client, layout.queues)
    if _created(client, layout, queue, _marked(wanted, id), record):
        return

    def move(node: QueueNode) -> QueueNode:
        if is_imported(node, id):
            return node
        if finished is not None and node.position == finished:
            node = without_marks(node)
        return _marked(sought(node, wanted.last, wanted.position), id)

    change_node(client, layout, queue, move, record=record)


def mark(client: Client, layout: Layout, queue: str, id: str, record: Record) -> None:
    """Mark a queue that is at the position of a file; its owner and its progress stay."""

    def unmoved(node: QueueNode) -> QueueNode:
        return node if is_imported(node, id) else _marked(node, id)

    change_node(client, layout, queue, unmoved, sought=0, record=record)


def _marked(node: QueueNode, id: str) -> QueueNode:
    others = tuple(each for each in node.extra if each[0] != KEY)
    return replace(node, extra=(*others, (KEY, id)))


def _created(client: Client, layout: Layout, queue: str, wanted: QueueNode, record: Record) -> bool:
    """Create the node of a queue; return False if there is one."""
    entry: CreateOp | None = None

    def decide(found: Node) -> list[Op] | None:
        nonlocal entry
        if isinstance(found, NodeRead):
            return None
        entry = record(QueueNode(), wanted)
        return [CreateOp(layout.queue(queue), wanted.encode()), entry]

    def is_mine(found: NodeRead) -> bool:
        return entry is not None and isinstance(read(client, entry.path), NodeRead)

    path = layout.queue(queue)
    return change(client, path, decide, root=layout.root, is_mine=is_mine) is not None
