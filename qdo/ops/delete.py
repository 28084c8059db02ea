"""Deletes queues: at the broker, and their nodes."""

from __future__ import annotations

import time
from dataclasses import dataclass

from qdo.brokers.base import Broker
from qdo.coordination import queue_admin
from qdo.coordination.bulk_reads import read_nodes
from qdo.coordination.client import Client
from qdo.coordination.znodes.layout import Layout
from qdo.coordination.znodes.queue_node import QueueNode
from qdo.errors import CorruptNodeError, NotFoundError, QueueNotEmptyError, QueueOwnedError
from qdo.queues import check_path_part

_LOOK_SECONDS = 0.05


@dataclass(frozen=True, slots=True)
class Deletion:
    """What the deletion of one queue removes.

    :ivar owner: the worker that must release it first, None if there is none.
    :ivar stored: whether the broker has the queue.
    """

    queue: str
    owner: str | None
    waiting: int
    delayed: int
    dead_letters: int
    stored: bool

    def check_empty(self) -> None:
        """Raise QueueNotEmptyError for a queue with messages that are not done."""
        if self.waiting or self.delayed or self.dead_letters:
            raise QueueNotEmptyError(
                queue=self.queue,
                waiting=self.waiting,
                delayed=self.delayed,
                dead_letters=self.dead_letters,
            )


def plan_deletion(client: Client | None, layout: Layout, broker: Broker, queue: str) -> Deletion:
    """Return what a deletion removes, without changing anything.

    :raises NotFoundError: neither broker nor coordinator has the queue.
    :raises CorruptNodeError: its progress cannot be read.
    """
    node = _node(client, layout, queue)
    stored = queue in broker.catalog.names()
    if node is None and not stored:
        raise NotFoundError(what="queue", name=queue)
    owner = node.owner or None if node is not None else None
    if not stored:
        return Deletion(queue, owner, 0, 0, 0, stored=False)
    backlog = broker.catalog.backlog(queue, _last(broker, node or QueueNode()))
    dead = broker.dead_letters.counts().get(queue, 0)
    return Deletion(queue, owner, backlog.count, backlog.delayed, dead, stored=True)


def delete(
    client: Client | None,
    layout: Layout,
    broker: Broker,
    deletion: Deletion,
    *,
    with_messages: bool = False,
    timeout_seconds: float = 30.0,
) -> None:
    """Delete a queue: let its owner release it, delete it at the broker, then delete its node.

    Repeated after an interruption, it completes the deletion. A queue that receives a message in
    between is restored. Messages sent later create the queue again.

    :param timeout_seconds: how long the owner may take to finish its running jobs.
    :raises QueueNotEmptyError: it has messages that are not done, and `with_messages` is not set.
    :raises QueueOwnedError: its owner did not release it in time.
    :raises UnsupportedError: the broker has the queue, and cannot delete queues.
    """
    queue = deletion.queue
    if not with_messages:
        deletion.check_empty()
    node = QueueNode()
    if client is not None and _node(client, layout, queue) is not None:
        queue_admin.retire(client, layout, queue)
        node = _released(client, layout, queue, time.monotonic() + timeout_seconds)
    if deletion.stored:
        try:
            broker.delete_queue(queue, _last(broker, node), with_messages=with_messages)
        except BaseException:
            if client is not None:
                queue_admin.restore(client, layout, queue)
            raise
    owner = "" if client is None else queue_admin.remove(client, layout, queue)
    if owner:
        raise QueueOwnedError(queue=queue, owner=owner)


def _released(client: Client, layout: Layout, queue: str, deadline: float) -> QueueNode:
    """Return the node of a queue once no worker owns it."""
    while True:
        node = _node(client, layout, queue) or QueueNode()
        if not node.owner or client.exists(layout.worker(node.owner)) is None:
            return node
        if time.monotonic() > deadline:
            raise QueueOwnedError(queue=queue, owner=node.owner)
        time.sleep(_LOOK_SECONDS)


def _node(client: Client | None, layout: Layout, queue: str) -> QueueNode | None:
    found = [] if client is None else read_nodes(client, [layout.queue(check_path_part(queue))])
    if not found:
        return None
    node = QueueNode.parse(found[0].data, found[0].refused)
    if node.fault is not None:
        raise CorruptNodeError(queue=queue, reason=node.fault)
    return node


def _last(broker: Broker, node: QueueNode) -> int:
    """Return the recorded progress of a queue as a position of its broker."""
    return broker.positions.resume_after(node.last, node.position)
