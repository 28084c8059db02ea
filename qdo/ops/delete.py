"""Deletes queues: at the broker, and their nodes."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass

from qdo.brokers.base import Broker
from qdo.coordination import queue_admin
from qdo.coordination.bulk_reads import read_nodes
from qdo.coordination.client import Client
from qdo.coordination.protocol.machine import CreateOp
from qdo.coordination.znodes.layout import Layout
from qdo.coordination.znodes.queue_node import QueueNode
from qdo.errors import CorruptNodeError, NotFoundError, QueueNotEmptyError, QueueOwnedError
from qdo.fleet.audit import AuditTrail
from qdo.fleet.protocol.audit_entries import Values
from qdo.queues import check_path_part

_log = logging.getLogger(__name__)

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
    reason: str = "",
) -> None:
    """Delete a queue: let its owner release it, delete it at the broker, then delete its node.

    Repeated after an interruption, it completes the deletion. A queue that receives a message in
    between is restored. Messages sent later create the queue again.

    The action log gets an entry before messages are deleted, and another one if the queue is
    restored. A repetition has its own.

    :param timeout_seconds: how long the owner may take to finish its running jobs.
    :param reason: for the action log.
    :raises QueueNotEmptyError: it has messages that are not done, and `with_messages` is not set.
    :raises QueueOwnedError: its owner did not release it in time.
    :raises UnsupportedError: the broker has the queue, and cannot delete queues.
    """
    queue = deletion.queue
    if not with_messages:
        deletion.check_empty()
    if client is None:
        if deletion.stored:
            broker.delete_queue(queue, _last(broker, QueueNode()), with_messages=with_messages)
        return
    audit = _DeletionAudit(client, layout, deletion, reason)
    node = QueueNode()
    if _node(client, layout, queue) is not None:
        audit.marked()
        node = _released(client, layout, queue, time.monotonic() + timeout_seconds)
    if deletion.stored:
        try:
            broker.delete_queue(queue, _last(broker, node), with_messages=with_messages)
        except BaseException:
            audit.restored()
            raise
    owner = audit.removed()
    if owner:
        raise QueueOwnedError(queue=queue, owner=owner)


class _DeletionAudit:
    """Changes the node of a queue, with an entry in the action log for its deletion."""

    def __init__(self, client: Client, layout: Layout, deletion: Deletion, reason: str) -> None:
        self._nodes = client, layout, deletion.queue
        self._audit = AuditTrail(client, layout, "delete", reason)
        self._deletion = deletion
        self._logged = False

    def marked(self) -> None:
        """Mark the queue as deleted."""
        with self._audit.change(self._deletion.queue) as entry:

            def record(before: QueueNode, after: QueueNode) -> CreateOp:
                self._logged = True
                return entry(self._content(), {"deleted": True})

            queue_admin.retire(*self._nodes, record=record)

    def restored(self) -> None:
        """Undo `marked`."""
        with self._audit.change(self._deletion.queue) as entry:

            def record(before: QueueNode, after: QueueNode) -> CreateOp:
                return entry({"deleted": True}, {"deleted": False})

            queue_admin.restore(*self._nodes, record=record)

    def removed(self) -> str:
        """Delete the node; return its owner if it has one, see `queue_admin.remove`."""
        with self._audit.change(self._deletion.queue) as entry:

            def removal() -> CreateOp:
                self._logged = True
                return entry(self._content(), {"deleted": True})

            owner = queue_admin.remove(*self._nodes, entry=None if self._logged else removal)
        if not self._logged and not owner:  # the coordinator had no node of it
            fault = self._audit.note(self._deletion.queue, self._content(), {"deleted": True})
            if fault is not None:
                _log.warning(
                    "queue %s: deleted, without an entry in the action log: %s",
                    self._deletion.queue,
                    fault,
                )
        return owner

    def _content(self) -> Values:
        left = self._deletion
        counts = {"waiting": left.waiting, "delayed": left.delayed}
        return {**counts, "dead_letters": left.dead_letters, "owner": left.owner}


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
