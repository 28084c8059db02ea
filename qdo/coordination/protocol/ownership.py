"""Decide which queues this worker handles: claims, releases, fences. A state machine without I/O.

A queue's node names its owner. The owner changes only in a transaction that compares the queue
node's version and rewrites the claimer's own ephemeral node. So even a stale plan cannot give a
queue a second owner. The rules, with their numbers in `docs/design`:

2. To release queues, finish each message in flight, and wait for the open transaction of its queue.
   Then send one transaction that writes the final `last` and no owner into the queue nodes, and
   removes the queues from the own node. Releases have no other conditions.
3. To claim queues, read the queue node and then, later in the same session, the owner's worker
   node. If the queue has no owner, or the owner's node is gone, send one transaction for the batch.
   (The coordinator never reuses numbers, so a node that is gone stays gone.) If the owner lives and
   still lists the queue, the same read watches the owner's node. When the owner's node changes,
   read the queue again.
4. Claims and releases are serial. Each queue has at most one open transaction of any kind.
5. After an unanswered transaction, send a barrier: write the own node with the value just read.
   After the barrier, no late request can take effect, and no lagging server can return old data.
   Then read the affected queues again, and adopt each queue that names this worker.
6. Processing starts from the `last` in the version of the node that the claim compared.
10. A worker notices a seek from a rejected write, or from the ``reread`` list in its own node.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from qdo.coordination.protocol import machine as m
from qdo.coordination.protocol.acquisition import Acquisition
from qdo.coordination.protocol.assignments import AssignmentReader
from qdo.coordination.protocol.checkpoints import BATCH, OP_BYTES, Checkpoints, CheckpointTotals
from qdo.coordination.protocol.claims import Claim, ClaimListener, OwnedQueue, QueueState
from qdo.coordination.protocol.lease import Lease
from qdo.coordination.protocol.owned_queues import OwnedQueues, Recovery
from qdo.coordination.protocol.worker_node_writer import WorkerNodeWriter
from qdo.coordination.znodes.layout import Layout
from qdo.coordination.znodes.queue_node import QueueNode
from qdo.coordination.znodes.values import MAX_TRANSACTION_BYTES, MAX_VALUE_BYTES
from qdo.positions import TIME_POSITIONS, Positions
from qdo.queues import EVERYTHING, QueueFilter


@dataclass(frozen=True, slots=True)
class MemberOptions:
    """The options for taking queues and recording progress."""

    # The minimum time between two checkpoints.
    checkpoint_seconds: float = 0.2
    # The queues that the leader may assign to the worker.
    filter: QueueFilter = EVERYTHING
    # The host, process and parent process of the worker, for operators. `zone` and `address` are
    # settings of the worker.
    process: str = ""
    zone: str = ""
    address: str = ""
    # Whether a leading worker assigns no new queue until it knows the queues marked as deleted; see
    # `rebalancer.Rebalancer`.
    wait_for_deleted: bool = False
    positions: Positions = TIME_POSITIONS
    # The counters of checkpoints; None: do not count.
    totals: CheckpointTotals | None = None

    @property
    def about(self) -> dict[str, Any]:
        """The facts about the process in the worker's node."""
        return {"process": self.process, "zone": self.zone, "address": self.address}


class Ownership(m.Machine):
    """The claims and releases of one registration."""

    def __init__(
        self,
        layout: Layout,
        name: str,
        lease: Lease,
        listener: ClaimListener,
        *,
        clock: Callable[[], float],
        on_gone: Callable[[], None],
        options: MemberOptions,
    ) -> None:
        super().__init__()
        self.name = name
        self.path = layout.worker(name)
        self.slots: dict[str, OwnedQueue] = {}
        self.ended = False
        self._layout = layout
        self._lease = lease
        self._clock = clock
        self._on_gone = on_gone
        self._assignment = AssignmentReader(
            layout.assignment(name), self, clock=clock, on_read=self._assignment_read
        )
        positions = options.positions
        self._own_node = WorkerNodeWriter(
            self.path, self, on_gone=self.gone, on_reread=self._reread_requested
        )
        self._own_node.filter = options.filter
        self._own_node.about = options.about
        self.obey = self._own_node.obey
        self._acquisition = Acquisition(
            layout, name, self, self.slots, positions, clock=clock, lease=lease
        )
        self._queues = OwnedQueues(
            name, self._own_node, self._acquisition, self.slots, listener, lease, positions
        )
        self._recovery = Recovery(
            self, layout, name, self._queues, self._own_node, positions, self._mark
        )
        self.checkpoints = Checkpoints(
            layout,
            self,
            self._own_node,
            self._recovery,
            clock=clock,
            interval_seconds=options.checkpoint_seconds,
            totals=options.totals,
        )

    def _mark(self, slot: OwnedQueue) -> None:
        self.checkpoints.mark(slot)

    # --- called by the engine ---------------------------------------------------------

    def progress(self, claim: Claim) -> None:
        """Let the next checkpoint record ``claim.done``."""
        slot = self.slots.get(claim.queue)
        if slot is not None and slot.claim is claim:
            self.checkpoints.mark(slot)

    def finished(self, claim: Claim) -> None:
        slot = self.slots.get(claim.queue)
        if slot is not None and slot.claim is claim and slot.state is QueueState.RELEASING:
            self._queues.finish(slot)

    def drain(self) -> None:
        """Release all queues and take no new queues; show this in the own node."""
        if not self.draining:
            self._own_node.draining = True
            self._own_node.rewrite = True
            self._queues.compare()

    def recorded(self, claim: Claim) -> bool:
        """Return whether ``claim.done`` is recorded, or the claim can no longer record it."""
        slot = self.slots.get(claim.queue)
        return slot is None or slot.claim is not claim or slot.has_recorded(claim.done)

    @property
    def draining(self) -> bool:
        return self._own_node.draining

    def settled(self) -> bool:
        """Return whether the owned queues equal the assigned queues and no request is in flight."""
        if not self._assignment.known or not self._own_node.free:
            return False
        states = {slot.state for slot in self.slots.values()}
        complete = len(self.slots) == len(self._queues.assigned)
        return complete and states <= {QueueState.OWNED, QueueState.UNUSABLE}

    def empty(self) -> bool:
        """Return whether this worker owns no queues and has no releases in flight."""
        listed = not self._own_node.free or self._own_node.listed
        return self.ended or not (listed or self.unreleased())

    def unreleased(self) -> list[str]:
        return sorted(slot.queue for slot in self.slots.values() if slot.claim is not None)

    # --- the session ------------------------------------------------------------------

    def connected(self) -> None:
        if self.ended:
            return
        self._assignment.connected()
        self._own_node.connected()
        if self._own_node.in_doubt or self._recovery.doubtful:
            self._own_node.barrier(self._resolve)
        else:
            self._own_node.read()
        self._acquisition.connected()
        self._recovery.connected()

    def _resolve(self) -> None:
        """After the barrier, list all owned queues, and read the queues in doubt."""
        for slot in self.slots.values():
            certain = slot.claim is not None and slot.queue not in self._recovery.doubtful
            if certain and slot.queue not in self._own_node.listed:
                self._own_node.listed[slot.queue] = None  # another program removed the queue
                self._own_node.rewrite = True
        self._recovery.resolve()

    def suspended(self) -> None:
        self._own_node.up = False

    def expire(self) -> None:
        """End all claims permanently, because the session has ended."""
        if not self.ended:
            self.ended = True
            self._own_node.up = False
            self._lease.end()
            self._queues.lose_all()

    def gone(self) -> None:
        """Handle the loss of this worker's node, because its session ended or it was evicted."""
        if not self.ended:
            self._lease.end()
            self._on_gone()

    def changed(self, path: str) -> None:
        if not self._own_node.up:
            return
        folder, _, name = path.rpartition("/")
        if path == self._assignment.path:
            self._assignment.read()
        elif path == self.path:
            self._own_node.read()
        elif folder == self._layout.workers:
            self._acquisition.worker_changed(name)
        else:
            self._acquisition.queue_changed(name)

    def due(self) -> float:
        due = min(self.checkpoints.due(), self._acquisition.due(), self._assignment.due())
        return due if self._own_node.up else float("inf")

    def flush(self) -> None:
        if self._own_node.up:
            self._assignment.flush()
            self.checkpoints.flush(self._clock())
            self._acquisition.flush()
            self._write_own_node()

    def _assignment_read(self, assigned: frozenset[str]) -> None:
        # Apply the filter, because a leader of an older version ignores the filters of workers.
        self._queues.assign(filter(self._own_node.filter.matcher(), assigned))

    # --- the one transaction that may rewrite the own node; releases go first ---------

    def _write_own_node(self) -> None:
        if not self._own_node.free:
            return
        finished = self._queues.finished.values()
        releasable = [slot for slot in finished if not slot.busy][:BATCH]
        free = self._acquisition.free
        if releasable:
            self._release(self._fitting(releasable, OwnedQueue.final))
        elif self._own_node.rewrite:
            self._own_node.rewrite = False
            self._own_node.commit([], self._own_node.value((), ()), self._rewritten)
        elif self._may_claim():
            self._claim(self._fitting(list(free.values())[:BATCH], attrgetter("node")))

    def _may_claim(self) -> bool:
        taking = self._acquisition
        ready = bool(taking.free) and taking.deletions.known and not self._queues.full
        return ready and (len(taking.free) >= BATCH or not taking.reading)

    def _rewritten(self, answer: m.Response) -> None:
        if self._answered([], answer) and isinstance(answer, m.Rejected):
            self._own_node.rewrite = True

    def _answered(self, slots: list[OwnedQueue], answer: m.Response) -> bool:
        """Handle the answer to a write of the own node; return False if the outcome is unknown."""
        if self.ended:
            return False
        if not self._own_node.answered(answer):
            self._recovery.doubt(slots)
            return False
        for slot in slots:
            slot.busy = False
        if isinstance(answer, m.Rejected) and answer.index == len(slots):
            self._own_node.rejected(answer)
        return True

    def _fitting(
        self, slots: list[OwnedQueue], node_of: Callable[[OwnedQueue], QueueNode]
    ) -> list[OwnedQueue]:
        """Return the first slots with nodes that fit into one transaction with the own node."""
        room = MAX_TRANSACTION_BYTES - MAX_VALUE_BYTES
        for count, slot in enumerate(slots):
            room -= len(self._layout.queue(slot.queue)) + len(node_of(slot).encode()) + OP_BYTES
            if room < 0 and count:
                return slots[:count]
        return slots

    def _sets(self, slots: Iterable[OwnedQueue], nodes: Iterable[QueueNode]) -> list[m.SetOp]:
        return [
            m.SetOp(self._layout.queue(slot.queue), node.encode(), slot.version)
            for slot, node in zip(slots, nodes, strict=True)
        ]

    # --- claims -----------------------------------------------------------------------

    def _claim(self, slots: list[OwnedQueue]) -> None:
        value = self._own_node.value([slot.queue for slot in slots], ())
        ops = self._sets(slots, [slot.node.claimed_by(self.name) for slot in slots])
        size = len(value) + sum(len(op.path) + len(op.data) + 64 for op in ops)
        if len(value) > MAX_VALUE_BYTES or size > MAX_TRANSACTION_BYTES:
            self._queues.stop_claiming(len(slots), size)
            return
        for slot in slots:
            slot.state = QueueState.CLAIMING
            slot.busy = True
            del self._acquisition.free[slot.queue]
        if not self._acquisition.free:
            self._acquisition.free.clear()  # releases memory; dicts never shrink by themselves
        self._own_node.commit(
            ops,
            value,
            lambda answer: self._claim_answered(slots, answer),
            self._acquisition.deletions.checks(),
        )

    def _claim_answered(self, slots: list[OwnedQueue], answer: m.Response) -> None:
        if not self._answered(slots, answer):
            return
        if isinstance(answer, m.Committed):
            for slot, version in zip(slots, answer.versions, strict=False):
                self._queues.claimed(slot, slot.node.claimed_by(self.name), version, answer.zxid)
        elif isinstance(answer, m.Rejected):
            for index, slot in enumerate(slots):
                if answer.refuses(index):
                    self._acquisition.refuse(slot, answer.reason)
                    self._queues.drop_unwanted(slot)
                elif index == answer.index:
                    self._queues.not_claimed(slot)
                else:
                    self._acquisition.offer(slot)
                    self._queues.drop_unwanted(slot)
            if answer.index > len(slots):
                self._acquisition.start_over(answer)

    # --- releases ---------------------------------------------------------------------

    def _release(self, slots: list[OwnedQueue]) -> None:
        for slot in slots:
            slot.state = QueueState.RELEASE_SENT
            slot.busy = True
            del self._queues.finished[slot.queue]
        self._own_node.rewrite = False
        self._own_node.commit(
            self._sets(slots, [slot.final() for slot in slots]),
            self._own_node.value((), [slot.queue for slot in slots]),
            lambda answer: self._release_answered(slots, answer),
        )

    def _release_answered(self, slots: list[OwnedQueue], answer: m.Response) -> None:
        if not self._answered(slots, answer):
            return
        if isinstance(answer, m.Committed):
            for slot in slots:
                self._queues.released(slot)
        elif isinstance(answer, m.Rejected):
            for index, slot in enumerate(slots):
                self._queues.finish(slot)
                if answer.refuses(index):
                    self._queues.lost(slot, answer.reason)
                elif index == answer.index or slot.again:
                    # `Recovery` decides whether to release with the `last` in the node.
                    self._recovery.read(slot)

    # --- recovery ---------------------------------------------------------------------

    def _reread_requested(self, queues: Iterable[str]) -> None:
        """Read again the queues that an operator's seek listed in the own node."""
        for queue in queues:
            slot = self.slots.get(queue)
            if slot is not None and slot.claim is not None:
                self._recovery.reread(slot)
