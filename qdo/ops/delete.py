"""Deletes queues at the broker, and their nodes."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from qdo.brokers.base import Broker
from qdo.brokers.streams import check_deletable
from qdo.coordination import queue_admin
from qdo.coordination.bulk_reads import read_nodes
from qdo.coordination.client import Client
from qdo.coordination.protocol.machine import CreateOp
from qdo.coordination.znodes.layout import Layout
from qdo.coordination.znodes.queue_node import NEW, QueueNode
from qdo.errors import NotFoundError, QueueNotEmptyError, QueueOwnedError
from qdo.fleet.audit import AuditTrail
from qdo.fleet.audit_entries import Values
from qdo.ops.fleet import Fleet
from qdo.ops.peek import done_of
from qdo.ops.seek import discard_delayed
from qdo.ops.snapshot import backlog_of
from qdo.system.clock import polls

_log = logging.getLogger(__name__)

# Maximum number of dead letters that one transaction deletes.
_AT_ONCE = 1000


@dataclass(frozen=True, slots=True)
class QueueContents:
    """The messages of a queue at one time. A deletion does not delete later messages."""

    # Position of the newest waiting message.
    newest: int
    delayed: Sequence[int]
    dead: Sequence[int]


@dataclass(frozen=True, slots=True)
class Deletion:
    """The parts of one queue that a deletion removes."""

    queue: str
    # The worker that must release the queue first, or None.
    owner: str | None
    # Number of waiting messages. `delayed` and `dead_letters` are also numbers of messages.
    waiting: int
    delayed: int
    dead_letters: int
    stored: bool
    # The messages that the operator allows to delete with the queue, or None.
    contents: QueueContents | None = None

    def check_empty(self) -> None:
        """Raise QueueNotEmptyError if the queue has unfinished messages."""
        if self.waiting or self.delayed or self.dead_letters:
            raise QueueNotEmptyError(
                queue=self.queue,
                waiting=self.waiting,
                delayed=self.delayed,
                dead_letters=self.dead_letters,
            )


def plan_deletion(fleet: Fleet, queue: str, *, with_messages: bool = False) -> Deletion:
    """Plan a deletion, without changing anything.

    :param with_messages: True: delete the queue with its current messages.
    :raises QueueNotEmptyError: the queue has unfinished messages, and `with_messages` is False.
    :raises ShardStateError: the queue is a shard that still receives messages, or other shards wait
        for the end of the queue.
    """
    broker = fleet.broker
    node = fleet.node(queue)
    stored = queue in broker.catalog.names_to_show()
    if node is None and not stored:
        raise NotFoundError(what="queue", name=queue)
    if broker.capabilities.streams:
        check_deletable(queue, broker.streams)
    owner = node.owner or None if node is not None else None
    if not stored:
        return Deletion(queue, owner, 0, 0, 0, stored=False)
    # Read the contents before counting. Otherwise an operator might confirm numbers that are too
    # small.
    contents = _contents(broker, queue) if with_messages else None
    node = node or NEW
    backlog = backlog_of(broker, queue, node, done_of(broker, node))
    dead = broker.dead_letters.counts().get(queue, 0)
    plan = Deletion(queue, owner, backlog.count, backlog.delayed, dead, True, contents)
    if not with_messages:
        plan.check_empty()
    return plan


def _contents(broker: Broker, queue: str) -> QueueContents:
    return QueueContents(
        broker.catalog.head(queue),
        broker.delayed.numbers(queue),
        [entry.position for entry in broker.dead_letters.find(queue)],
    )


def delete(
    fleet: Fleet, deletion: Deletion, *, timeout_seconds: float = 30.0, reason: str = ""
) -> None:
    """Let the owner release a queue, then delete the queue at the broker, then delete its node.

    A second call completes an interrupted deletion. If the queue has received a message since the
    plan, the call restores the queue with this message. Later messages create the queue again.

    :param timeout_seconds: maximum time for the owner to finish its running jobs.
    :raises QueueNotEmptyError: the queue has messages that are not part of the plan.
    :raises QueueOwnedError: the owner did not release the queue before the timeout.
    :raises UnsupportedError: the broker has the queue, and cannot delete queues.
    """
    queue = deletion.queue
    client = fleet.client
    if client is None:
        _delete_stored(fleet.broker, deletion, NEW)
        return
    # Write an entry to the action log before the broker deletes messages, and another entry if the
    # queue is restored. A second call writes its own entries.
    audit = _DeletionAudit(client, fleet.layout, deletion, reason)
    node = NEW
    if fleet.node(queue) is not None:
        audit.marked()
        node = _released(fleet, queue, timeout_seconds)
    try:
        _delete_stored(fleet.broker, deletion, node)
    except BaseException:
        audit.restored()
        raise
    owner = audit.removed()
    if owner:
        raise QueueOwnedError(queue=queue, owner=owner)


def _delete_stored(broker: Broker, deletion: Deletion, node: QueueNode) -> None:
    """Delete a queue at the broker, with no contents other than those in the plan."""
    queue = deletion.queue
    contents = deletion.contents
    if not deletion.stored:
        return
    last = _end(broker, queue, node)
    if contents is not None:
        last = max(last, contents.newest)
        try:
            broker.delete_queue(queue, last)
        except QueueNotEmptyError as error:
            if error.details["waiting"]:
                raise
        discard_delayed(broker, queue, contents.delayed)
        for start in range(0, len(contents.dead), _AT_ONCE):
            keys = [(queue, position) for position in contents.dead[start : start + _AT_ONCE]]
            broker.dead_letters.discard(keys)
    broker.delete_queue(queue, last)


class _DeletionAudit:
    """Changes the node of a queue, and writes entries about its deletion to the action log."""

    def __init__(self, client: Client, layout: Layout, deletion: Deletion, reason: str) -> None:
        self._client = client
        self._layout = layout
        self._queue = deletion.queue
        self._audit = AuditTrail(client, layout, "delete", reason)
        self._deletion = deletion
        self._logged = False

    def marked(self) -> None:
        with self._audit.change(self._queue) as entry:

            def record(before: QueueNode, after: QueueNode) -> CreateOp:
                self._logged = True
                return entry(self._content(), {"deleted": True})

            queue_admin.retire(self._client, self._layout, self._queue, record=record)

    def restored(self) -> None:
        with self._audit.change(self._queue) as entry:

            def record(before: QueueNode, after: QueueNode) -> CreateOp:
                return entry({"deleted": True}, {"deleted": False})

            queue_admin.restore(self._client, self._layout, self._queue, record=record)

    def removed(self) -> str:
        """Delete the node; return the owner that must release the queue first, or ""."""
        with self._audit.change(self._queue) as entry:

            def removal() -> CreateOp:
                self._logged = True
                return entry(self._content(), {"deleted": True})

            chosen = None if self._logged else removal
            owner = queue_admin.remove(self._client, self._layout, self._queue, entry=chosen)
        if not self._logged and not owner:  # the coordinator had no node of the queue
            fault = self._audit.note(self._queue, self._content(), {"deleted": True})
            if fault is not None:
                _log.warning(
                    "queue %s: deleted, without an entry in the action log: %s",
                    self._queue,
                    fault,
                )
        return owner

    def _content(self) -> Values:
        names = ("waiting", "delayed", "dead_letters", "owner")
        return {name: getattr(self._deletion, name) for name in names}


def _released(fleet: Fleet, queue: str, timeout_seconds: float) -> QueueNode:
    client = fleet.connected(queue)
    node = NEW
    for _ in polls(timeout_seconds, client.handler.sleep_func):
        node = fleet.node(queue) or NEW
        if not node.owner or not read_nodes(client, [fleet.layout.worker(node.owner)]):
            return node
    raise QueueOwnedError(queue=queue, owner=node.owner)


def _end(broker: Broker, queue: str, node: QueueNode) -> int:
    """Return the position up to which all messages are done or cancelled."""
    last = done_of(broker, node)
    cancelled = () if node.out_of_order is None else node.out_of_order.cancelled
    if cancelled and not backlog_of(broker, queue, node, last).count:
        return cancelled[-1]
    return last
