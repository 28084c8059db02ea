"""Recovers the state of a queue: its node is read again, and the claim is updated to match it.

A node is read again after a rejected write, on an operator's request in the worker node, and after
a transaction without an answer. In that last case the read follows the barrier (rule 5).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from qdo.coordination.protocol.claims import DELETED, OwnedQueue, QueueState
from qdo.coordination.protocol.machine import (
    Get,
    Machine,
    NodeRead,
    NoResponse,
    Refused,
    Response,
)
from qdo.coordination.protocol.owned_queues import OwnedQueues
from qdo.coordination.protocol.worker_node_writer import WorkerNodeWriter
from qdo.coordination.znodes.layout import Layout
from qdo.coordination.znodes.queue_node import QueueNode
from qdo.positions import Positions


class Recovery:
    """Reads queue nodes again, for one registration.

    :ivar doubtful: the queues with an unanswered transaction, by name.
    :param mark: called with a queue whose progress must be recorded again.
    """

    def __init__(
        self,
        machine: Machine,
        layout: Layout,
        name: str,
        queues: OwnedQueues,
        own_node: WorkerNodeWriter,
        positions: Positions,
        mark: Callable[[OwnedQueue], None],
    ) -> None:
        self.doubtful: dict[str, OwnedQueue] = {}
        self._machine = machine
        self._layout = layout
        self._name = name
        self._queues = queues
        self._slots = queues.slots
        self._own_node = own_node
        self._positions = positions
        self._mark = mark

    # --- queue nodes of owned queues --------------------------------------------------

    def connected(self) -> None:
        """Repeat the reads that were not answered."""
        for slot in self._slots.values():
            if slot.claim is not None and slot.busy and slot.queue not in self.doubtful:
                self.read(slot)

    def reread(self, slot: OwnedQueue) -> None:
        """Read the node of an owned queue as soon as its own transaction is answered."""
        if slot.busy:
            slot.again = True
        elif slot.claim is not None:
            self.read(slot)

    def read(self, slot: OwnedQueue) -> None:
        """Read the node of an owned queue now."""
        slot.busy = True
        slot.again = False
        path = self._layout.queue(slot.queue)
        self._machine.ask(Get(path), lambda answer: self._read_answered(slot, answer))

    def _read_answered(self, slot: OwnedQueue, answer: Response) -> None:
        if isinstance(answer, NoResponse) or self._slots.get(slot.queue) is not slot:
            return  # without an answer `connected` reads it again
        slot.busy = False
        if isinstance(answer, Refused):
            self.refused(slot, answer.reason)
            return
        node = self._owned_node(answer)
        if node is None:
            self._queues.lost(slot)
        elif slot.again:
            self.read(slot)
        elif isinstance(answer, NodeRead):
            self._adopt(slot, node, answer.version)

    def refused(self, slot: OwnedQueue, reason: str) -> None:
        """Give up an owned queue whose node cannot be read or written."""
        slot.again = False
        self._queues.refused(slot, reason)

    def _owned_node(self, answer: Response) -> QueueNode | None:
        """Return the queue node that was read, if it names this worker as owner."""
        if not isinstance(answer, NodeRead):
            return None
        node = QueueNode.parse(answer.data).checked(self._positions)
        return node if node.owner == self._name else None

    def _adopt(self, slot: OwnedQueue, node: QueueNode, version: int) -> None:
        """Continue with a node that still names this worker."""
        undone = version < slot.version
        if undone:
            self._queues.undone(slot, version)
        sought = node.seek != slot.node.seek and node.fault is None and not undone
        before = slot.node
        slot.node = node = _repaired(node, slot.node)
        slot.version = version
        if slot.claim is None:
            return
        if slot.state is not QueueState.OWNED:
            if sought and self._positions.stable and node.continues(before):
                slot.decided = True
            else:
                slot.as_found = slot.as_found or sought
        elif node.deleted:
            slot.as_found = sought
            self._queues.begin_release(slot, DELETED)
        elif sought:
            self._queues.repositioned(slot, node, before)
        else:
            # An own late write, or a foreign one that left `last` alone: keep the position.
            claim = slot.claim
            if claim.failure is None and claim.refresh is None:
                # An interrupted attempt of a former owner, which was counted after the claim. A
                # claim that is refreshed may know better: its messages end out of order.
                claim.failure = node.failure
            if slot.progressed() is not node:
                self._mark(slot)

    # --- transactions without an answer -----------------------------------------------

    def doubt(self, slots: list[OwnedQueue]) -> None:
        """Record that a transaction of these queues was not answered."""
        for slot in slots:
            if self._slots.get(slot.queue) is slot:
                self.doubtful[slot.queue] = slot

    def resolve(self) -> None:
        """After the barrier, read the queues in doubt."""
        doubtful, self.doubtful = self.doubtful, {}
        for slot in doubtful.values():
            if self._slots.get(slot.queue) is not slot:
                continue
            if slot.state in (QueueState.CLAIMING, QueueState.RELEASE_SENT):
                self._read_outcome(slot)
            else:
                self.read(slot)

    def _read_outcome(self, slot: OwnedQueue) -> None:
        path = self._layout.queue(slot.queue)
        self._machine.ask(Get(path), lambda answer: self._outcome(slot, answer))

    def _outcome(self, slot: OwnedQueue, answer: Response) -> None:
        """Adopt a node that names this worker; no message of the queue was started before."""
        if isinstance(answer, NoResponse):
            self.doubt([slot])
            return
        if self._slots.get(slot.queue) is not slot:
            return
        slot.busy = False
        if isinstance(answer, Refused):
            self._queues.delist(slot)
        node = self._owned_node(answer) if slot.queue in self._own_node.listed else None
        if slot.state is QueueState.CLAIMING:
            if node is not None and isinstance(answer, NodeRead):
                # The claim's own zxid is unknown. The zxid of this data is not smaller, and it is
                # smaller than that of every later claim: fences keep growing.
                node = _repaired(node, slot.node)
                self._queues.claimed(slot, node, answer.version, answer.mzxid)
            else:
                self._queues.not_claimed(slot)
        elif node is not None and isinstance(answer, NodeRead):
            self._queues.finish(slot)
            self._adopt(slot, node, answer.version)
        else:
            self._queues.released(slot)


def _repaired(node: QueueNode, known: QueueNode) -> QueueNode:
    """Return the node of an owned queue with a readable `last`, the one the owner remembers.

    Starting from a corrupt `last` would process the whole queue again.
    """
    if node.fault is None:
        return node
    return replace(node, last=known.last, position=known.position, fault=None)
