"""The queue nodes of a coordinator, in memory: `last`, owner, failure records, fences.

It has no rules of its own. `qdo.coordination.znodes.queue_node` makes and reads the values of
nodes, `qdo.coordination.interrupted_attempts` adds the attempts of a crash, and
`qdo.coordination.queue_admin` makes the changes of operators. It needs no transactions: there is
one thread, and each change is one step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from qdo.coordination.interrupted_attempts import InFlight, marked_node
from qdo.coordination.znodes.queue_node import QueueNode
from qdo.errors import NotFoundError


class MemoryCoordinator:
    """The queue nodes of an app, as bytes."""

    def __init__(self) -> None:
        self._nodes: dict[str, bytes] = {}
        self._transactions = 0

    def queues(self) -> list[str]:
        """Return the names of the queues that were ever claimed."""
        return sorted(self._nodes)

    def node(self, queue: str) -> QueueNode:
        """Return the node of a queue; an empty one if it has none."""
        return QueueNode.parse(self._nodes.get(queue, b""))

    def claim(self, queue: str, worker: str) -> tuple[int, QueueNode]:
        """Make a worker the owner of a queue; return the fence, and the node."""
        return self._write(queue, self.node(queue).owned_by(worker)), self.node(queue)

    def write(self, queue: str, node: QueueNode, worker: str) -> bool:
        """Write a node for its owner; return False if another worker owns the queue now."""
        if self.node(queue).owner != worker:
            return False
        self._write(queue, node)
        return True

    def free(self, worker: str) -> None:
        """Remove a worker: its queues become free."""
        for queue in self.queues():
            node = self.node(queue)
            if node.owner == worker:
                self._write(queue, node.owned_by(""))

    def count_crash(self, in_flight: Iterable[InFlight], reason: str) -> None:
        """Add an attempt to each message that was in flight in a dead process."""
        for each in in_flight:
            node = self.node(each.queue)
            marked = marked_node(node, each, reason) if node.owner == each.worker else None
            if marked is not None:
                self._write(each.queue, marked)

    def change(self, queue: str, change: Callable[[QueueNode], QueueNode]) -> QueueNode:
        """Change a node like an operator; return the changed node.

        :raises NotFoundError: no worker has ever claimed the queue.
        """
        if queue not in self._nodes:
            raise NotFoundError(what="queue", name=queue)
        node = self.node(queue)
        self._write(queue, replace(change(node), seek=node.seek + 1))
        return self.node(queue)

    def _write(self, queue: str, node: QueueNode) -> int:
        self._nodes[queue] = node.encode()
        self._transactions += 1
        return self._transactions
