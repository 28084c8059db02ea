"""The queues that a worker owns or should own, their state changes, and their recovery.

`Ownership` sends the transactions of claims and releases. `Recovery` finds the outcome of
unanswered transactions. Both report the results to `OwnedQueues`.

After a rejected write, an unanswered transaction, or an operator's request in the worker node,
`Recovery` reads the node of a queue again. Then `Recovery` updates the claim to match the node.
After an unanswered transaction, the read follows the barrier (rule 5).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import replace

from qdo.coordination.protocol import machine as m
from qdo.coordination.protocol.acquisition import Acquisition
from qdo.coordination.protocol.claims import (
    DELETED,
    DRAINED,
    LOST,
    REBALANCED,
    REFUSED,
    SESSION,
    UNDONE,
    Claim,
    ClaimListener,
    OwnedQueue,
    QueueState,
)
from qdo.coordination.protocol.lease import Lease
from qdo.coordination.protocol.worker_node_writer import WorkerNodeWriter
from qdo.coordination.znodes.layout import Layout
from qdo.coordination.znodes.queue_node import QueueNode
from qdo.coordination.znodes.values import MAX_VALUE_BYTES
from qdo.positions import Positions

log = logging.getLogger(__name__)


class OwnedQueues:
    """The queues of one registration; `slots` contains all assigned and all owned queues."""

    def __init__(
        self,
        name: str,
        own_node: WorkerNodeWriter,
        acquisition: Acquisition,
        slots: dict[str, OwnedQueue],
        listener: ClaimListener,
        lease: Lease,
        positions: Positions,
    ) -> None:
        self.slots = slots
        self.assigned: frozenset[str] = frozenset()
        # The queues that are ready for release.
        self.finished: dict[str, OwnedQueue] = {}
        # Whether the worker node is full.
        self.full = False
        self._name = name
        self._own_node = own_node
        self._acquisition = acquisition
        self._listener = listener
        self._lease = lease
        self._positions = positions

    # --- the assignment ---------------------------------------------------------------

    def assign(self, assigned: Iterable[str]) -> None:
        self.assigned = frozenset(assigned)
        self.compare()

    def _wanted(self, queue: str) -> bool:
        return not self._own_node.draining and queue in self.assigned

    def compare(self) -> None:
        """Start to release queues that are not assigned, and to take assigned queues."""
        for slot in [slot for queue, slot in self.slots.items() if not self._wanted(queue)]:
            if slot.state is QueueState.OWNED:
                self.begin_release(slot, DRAINED if self._own_node.draining else REBALANCED)
            else:
                self.drop_unwanted(slot)
        if self._own_node.accepting:
            for queue in sorted(self.assigned.difference(self.slots)):
                self._take(queue)

    def _take(self, queue: str) -> None:
        slot = self.slots[queue] = OwnedQueue(queue)
        self._acquisition.read(slot)

    def drop_unwanted(self, slot: OwnedQueue) -> None:
        """Forget a queue that is not assigned, unless the worker owns or claims the queue."""
        claiming = slot.claim is not None or slot.state is QueueState.CLAIMING
        if not claiming and not self._wanted(slot.queue):
            self._forget(slot)

    def _forget(self, slot: OwnedQueue) -> None:
        self.slots.pop(slot.queue, None)
        self.finished.pop(slot.queue, None)
        self._acquisition.forget(slot)

    # --- claims -----------------------------------------------------------------------

    def claimed(self, slot: OwnedQueue, node: QueueNode, version: int, fence: int) -> None:
        """Start from the `last` in the version of the node that the claim compared."""
        former = slot.node.owner
        slot.node = node
        slot.version = version
        slot.state = QueueState.OWNED
        slot.fault = ""
        slot.take_at = float("inf")
        slot.claim = Claim.of(slot.queue, fence, node, self._lease, self._positions)
        self._own_node.listed[slot.queue] = None
        if former not in ("", self._name):
            slot.claim.follow(former)
        # While the outcome was in doubt, an operator may have marked the queue as deleted.
        if self._wanted(slot.queue) and not node.deleted:
            self._listener.claimed(slot.claim)
        else:
            slot.claim.close()
            self.finish(slot)  # no message started under this claim

    def stop_claiming(self, count: int, size: int) -> None:
        """Claim no further queues, because the worker node would exceed ZooKeeper's limit."""
        self.full = True
        queues = len(self._own_node.listed) + count
        reason = (
            f"the node of {self._name} with {queues} queues must be at most "
            f"{MAX_VALUE_BYTES} bytes for ZooKeeper, and would have {size}; run more workers, or "
            "spread the queues over more apps"
        )
        log.error(
            "%s: cannot claim more queues; start more worker processes: %s",
            self._name,
            reason,
        )

    def not_claimed(self, slot: OwnedQueue) -> None:
        """Read a queue again after a failed claim, if the queue is still assigned."""
        self._acquisition.read(slot)
        self.drop_unwanted(slot)

    def repositioned(self, slot: OwnedQueue, node: QueueNode, before: QueueNode) -> None:
        """Apply an operator's change since the node `before`, unless the engine applies it."""
        old = slot.claim
        decisions = node.decisions_since(before)
        if old is None or (decisions and self._listener.decided(old, decisions)):
            return
        # Do not repeat messages that have ended meanwhile, unless a change moved the queue back.
        continues = self._positions.stable and node.continues(before)
        if slot.state is not QueueState.OWNED:
            slot.decided = slot.decided or continues
            slot.as_found = slot.as_found or not continues
            return
        old.close()
        new = Claim.of(slot.queue, old.fence, node, self._lease, self._positions)
        slot.claim = new
        if continues:
            new.before = old
        self._listener.repositioned(old, new)

    # --- releases ---------------------------------------------------------------------

    def begin_release(self, slot: OwnedQueue, ending: str) -> None:
        """Ask the engine to finish the message in flight and to start no other message."""
        if slot.claim is not None:
            slot.state = QueueState.RELEASING
            slot.claim.ending = ending
            slot.claim.close()
            self._listener.releasing(slot.claim)

    def finish(self, slot: OwnedQueue) -> None:
        slot.state = QueueState.FINISHED
        self.finished[slot.queue] = slot

    def released(self, slot: OwnedQueue) -> None:
        """Forget a released queue, or take it if it was assigned again."""
        self._own_node.listed.pop(slot.queue, None)
        self.full = False
        if slot.claim is not None:
            self._listener.released(slot.claim)
        slot.claim = None
        self._forget(slot)
        if self._wanted(slot.queue):
            self._take(slot.queue)

    # --- losses -----------------------------------------------------------------------

    def refused(self, slot: OwnedQueue, reason: str) -> None:
        """Give up a queue with an unreadable or unwritable node, after its message in flight."""
        if slot.state is QueueState.OWNED:
            log.error(
                "%s: queue %s is released: %s; messages since the last checkpoint will be repeated",
                self._name,
                slot.queue,
                reason,
            )
            self.begin_release(slot, REFUSED)
        elif slot.state is not QueueState.RELEASING:
            self.lost(slot, reason)

    def undone(self, slot: OwnedQueue, version: int) -> None:
        """Release a queue if its node has an older version than the last acknowledged write."""
        log.error(
            "%s: queue %s is released: version %d of its node was acknowledged, and now it has "
            "version %d: another program has replaced the node, or the servers have lost "
            "acknowledged writes; check their version",
            self._name,
            slot.queue,
            slot.version,
            version,
        )
        if slot.claim is not None:
            self._listener.undone(slot.claim)
        if slot.state is QueueState.OWNED:
            self.begin_release(slot, UNDONE)

    def lost(
        self, slot: OwnedQueue, reason: str = "its node does not name this worker as owner"
    ) -> None:
        """Drop a queue if its node does not name this worker as owner, or is unwritable."""
        log.warning(
            "%s: lost queue %s: %s; the next owner resumes after the recorded `last`",
            self._name,
            slot.queue,
            reason,
        )
        self.delist(slot)
        self._forget(slot)
        self._close(slot, LOST)
        if self._wanted(slot.queue):
            self._take(slot.queue)

    def delist(self, slot: OwnedQueue) -> None:
        if slot.queue in self._own_node.listed:
            del self._own_node.listed[slot.queue]
            self._own_node.rewrite = True

    def lose_all(self) -> None:
        """Report every claim as lost, because the session has ended."""
        slots = list(self.slots.values())
        self.slots.clear()
        for slot in slots:
            self._close(slot, SESSION)

    def _close(self, slot: OwnedQueue, ending: str) -> None:
        claim = slot.claim
        slot.claim = None
        if claim is not None:
            claim.ending = ending
            claim.close()
            self._listener.lost(claim)


class Recovery:
    """Reads queue nodes again, for one registration."""

    def __init__(
        self,
        machine: m.Machine,
        layout: Layout,
        name: str,
        queues: OwnedQueues,
        own_node: WorkerNodeWriter,
        positions: Positions,
        mark: Callable[[OwnedQueue], None],
    ) -> None:
        # The queues with an unanswered transaction, by name.
        self.doubtful: dict[str, OwnedQueue] = {}
        self._machine = machine
        self._layout = layout
        self._name = name
        self._queues = queues
        self._slots = queues.slots
        self._own_node = own_node
        self._positions = positions
        # A function that marks a queue, so that `Checkpoints` records its progress again.
        self._mark = mark

    # --- queue nodes of owned queues --------------------------------------------------

    def connected(self) -> None:
        """Repeat the unanswered reads."""
        for slot in self._slots.values():
            if slot.claim is not None and slot.busy and slot.queue not in self.doubtful:
                self.read(slot)

    def reread(self, slot: OwnedQueue) -> None:
        """Read the node of an owned queue, after the answer to an open transaction of the queue."""
        if slot.busy:
            slot.again = True
        elif slot.claim is not None:
            self.read(slot)

    def read(self, slot: OwnedQueue) -> None:
        slot.busy = True
        slot.again = False
        path = self._layout.queue(slot.queue)
        self._machine.ask(m.Get(path), lambda answer: self._read_answered(slot, answer))

    def _read_answered(self, slot: OwnedQueue, answer: m.Response) -> None:
        if isinstance(answer, m.NoResponse) or self._slots.get(slot.queue) is not slot:
            return  # after a lost answer, `connected` reads again
        slot.busy = False
        if isinstance(answer, m.Refused):
            self.refused(slot, answer.reason)
            return
        node = self._owned_node(answer)
        if node is None:
            self._queues.lost(slot)
        elif slot.again:
            self.read(slot)
        elif isinstance(answer, m.NodeRead):
            self._adopt(slot, node, answer.version)

    def refused(self, slot: OwnedQueue, reason: str) -> None:
        """Give up an owned queue because its node is unreadable or unwritable."""
        slot.again = False
        self._queues.refused(slot, reason)

    def _owned_node(self, answer: m.Response) -> QueueNode | None:
        """Return the queue node in an answer, if the node names this worker as owner."""
        if not isinstance(answer, m.NodeRead):
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
        claim = slot.claim
        owned = slot.state is QueueState.OWNED
        if claim is None:
            return
        if owned and node.deleted:
            slot.as_found = sought
            self._queues.begin_release(slot, DELETED)
        elif sought:
            self._queues.repositioned(slot, node, before)
        elif owned and claim.failure is None and claim.refresh is None:
            # This worker wrote the node late, or another program wrote it without changing `last`.
            # So keep the position, but take the failure record, because a write after the claim may
            # count a former owner's interrupted attempt. If the claim has `refresh`, its own
            # records are newer, because its messages end out of order.
            claim.failure = node.failure
        if slot.state is QueueState.OWNED and slot.claim is claim and slot.progressed() is not node:
            self._mark(slot)

    # --- transactions without an answer -----------------------------------------------

    def doubt(self, slots: list[OwnedQueue]) -> None:
        """Record that a transaction of these queues has no answer."""
        for slot in slots:
            if self._slots.get(slot.queue) is slot:
                self.doubtful[slot.queue] = slot

    def resolve(self) -> None:
        """Read the nodes of the queues in doubt, after the barrier."""
        doubtful = self.doubtful
        self.doubtful = {}
        for slot in doubtful.values():
            if self._slots.get(slot.queue) is not slot:
                continue
            if slot.state in (QueueState.CLAIMING, QueueState.RELEASE_SENT):
                self._read_outcome(slot)
            else:
                self.read(slot)

    def _read_outcome(self, slot: OwnedQueue) -> None:
        path = self._layout.queue(slot.queue)
        self._machine.ask(m.Get(path), lambda answer: self._outcome(slot, answer))

    def _outcome(self, slot: OwnedQueue, answer: m.Response) -> None:
        """Adopt a queue if its node names this worker, before the worker starts any message."""
        if isinstance(answer, m.NoResponse):
            self.doubt([slot])
            return
        if self._slots.get(slot.queue) is not slot:
            return
        slot.busy = False
        if isinstance(answer, m.Refused):
            self._queues.delist(slot)
        node = self._owned_node(answer) if slot.queue in self._own_node.listed else None
        if slot.state is QueueState.CLAIMING:
            if node is not None and isinstance(answer, m.NodeRead):
                # The zxid of the claim is unknown. The zxid of this data is at least as large, and
                # smaller than the zxid of every later claim. So fences still increase.
                node = _repaired(node, slot.node)
                self._queues.claimed(slot, node, answer.version, answer.mzxid)
            else:
                self._queues.not_claimed(slot)
        elif node is not None and isinstance(answer, m.NodeRead):
            self._queues.finish(slot)
            self._adopt(slot, node, answer.version)
        else:
            self._queues.released(slot)


def _repaired(node: QueueNode, known: QueueNode) -> QueueNode:
    """Return the node of an owned queue; replace a corrupt `last` by the remembered one."""
    if node.fault is None:
        return node
    # With a corrupt `last`, the worker would process the whole queue again.
    return replace(node, last=known.last, position=known.position, fault=None)
