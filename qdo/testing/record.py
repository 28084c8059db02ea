"""What a coordinator would hold of the queues: `last`, owner, marks, fences.

No second set of rules: what is recorded is the value of a queue node, made and read by
`qdo.coordination.layout`; what a crash adds to it comes from `qdo.coordination.crashes`, what an
operator changes from `qdo.coordination.operator`. Only the transactions are missing, for there
is one thread, and each change is one step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from qdo.coordination.crashes import InHand, marked_node
from qdo.coordination.layout import QueueNode
from qdo.errors import NotFoundError


class Record:
    """The queue nodes of an app, as bytes."""

    def __init__(self) -> None:
        self._nodes: dict[str, bytes] = {}
        self._transactions = 0

    def queues(self) -> list[str]:
        """Return the names of the queues that were ever claimed."""
        return sorted(self._nodes)

    def node(self, queue: str) -> QueueNode:
        """Return the node of a queue; an empty one where there is none."""
        return QueueNode.parse(self._nodes.get(queue, b""))

    def claim(self, queue: str, worker: str) -> tuple[int, QueueNode]:
        """Make a worker the owner of a queue; return the fence, and the node."""
        return self._write(queue, self.node(queue).owned_by(worker)), self.node(queue)

    def write(self, queue: str, node: QueueNode, worker: str) -> bool:
        """Write a node for its owner; False if the queue is another's by now."""
        if self.node(queue).owner != worker:
            return False
        self._write(queue, node)
        return True

    def free(self, worker: str) -> None:
        """Take note that a worker node is gone: what it owned is anybody's."""
        for queue in self.queues():
            node = self.node(queue)
            if node.owner == worker:
                self._write(queue, node.owned_by(""))

    def count_crash(self, in_hand: Iterable[InHand], reason: str) -> None:
        """Add an attempt to each message that a dead process had in hand."""
        for each in in_hand:
            node = marked_node(self.node(each.queue), each, reason)
            if node is not None:
                self._write(each.queue, node)

    def change(self, queue: str, change: Callable[[QueueNode], QueueNode]) -> QueueNode:
        """Change a node as an operator does; return it as it is then.

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
