"""Which queues this worker handles: claims, releases, fences. A state machine without I/O.

A queue is owned by whoever its own node names, and that changes only in a transaction that
compares the queue node's version and rewrites the claimer's own ephemeral node. So no plan,
however stale, can give a queue a second owner. The rules, by the numbers of `docs/design`:

2.  What should be given up: finish the message in hand, wait for that queue's own outstanding
    transaction, then one transaction: final `last` and no owner in the queue nodes, the own
    node without them. Releases wait for nothing else.
3.  What should be taken: read the queue node and then, later in the same session, the owner's
    worker node. Owner empty, or its node gone (numbers are never reused, so gone is for ever):
    one transaction for the batch. Owner alive and still listing the queue: that worker's node
    is watched by the very read that found it so, and the queue is read again when it changes.
4.  Claims and releases are serial; of one queue one transaction of any kind is outstanding.
5.  A transaction without an answer: first a barrier, a write of the own node as it was read,
    so that no late request can follow and no lagging server can mislead; then the queues
    concerned are read again, and whatever names this worker is adopted.
6.  Processing starts from the `last` read with the version that the claim succeeded on.
10. A seek is noticed by a refused write, or by the ``reread`` list in the own node.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import replace

from qdo.coordination.checkpoints import BATCH, Checkpoints
from qdo.coordination.layout import (
    MAX_TRANSACTION_BYTES,
    MAX_VALUE_BYTES,
    Layout,
    QueueNode,
    WorkerNode,
    parse_assignment,
)
from qdo.coordination.lease import Lease
from qdo.coordination.machine import (
    Answer,
    Commit,
    Committed,
    Fault,
    Get,
    Machine,
    Node,
    NoNode,
    Refused,
    SetOp,
    Unanswered,
)
from qdo.coordination.slots import Claim, Listener, Slot, State
from qdo.errors import OversizeError

log = logging.getLogger(__name__)

INFINITY = float("inf")


class Ownership(Machine):
    """The queues of one registration, from its worker node's creation to its session's end."""

    def __init__(
        self,
        layout: Layout,
        name: str,
        lease: Lease,
        listener: Listener,
        *,
        clock: Callable[[], float],
        checkpoint_seconds: float,
        on_gone: Callable[[], None],
    ) -> None:
        super().__init__()
        self.name = name
        self.path = layout.worker(name)
        self.slots: dict[str, Slot] = {}
        self.ended = False
        self.draining = False
        self._layout = layout
        self._assignment_path = layout.assignment(name)
        self._lease = lease
        self._listener = listener
        self._clock = clock
        self._on_gone = on_gone
        self._up = False
        self._assigned: frozenset[str] = frozenset()
        self._known_assignment = False
        # The own node: what it lists, at the version last seen in an answer or a read.
        self._listed: dict[str, None] = {}
        self._version = 0
        # No write of the own node may start: one is under way or its version is being read.
        self._serial = False
        self._in_flight = False
        self._rewrite = False
        self._full = False
        # Slots by what they wait for, so that nothing is searched.
        self._reading = 0
        self._free: dict[str, Slot] = {}
        self._finished: dict[str, Slot] = {}
        self._waiting: dict[str, dict[str, Slot]] = {}
        self._to_check: dict[str, list[Slot]] = {}
        self._gone_workers: set[str] = set()
        self._doubtful: dict[str, Slot] = {}
        self._barrier_needed = False
        self._checkpoints = Checkpoints(
            layout, self, clock=clock, interval_seconds=checkpoint_seconds
        )

    # --- what the engine says ---------------------------------------------------------

    def progress(self, claim: Claim) -> bool:
        """Record ``claim.done`` with the next checkpoint; True if the driver must wake up."""
        slot = self.slots.get(claim.queue)
        if slot is None or slot.claim is not claim:
            return False
        return self._checkpoints.mark(slot)

    def hurry(self) -> None:
        """Send the next checkpoint at once."""
        self._checkpoints.hurry()

    def finished(self, claim: Claim) -> None:
        """Take note that nothing of a claim that is to be released runs any more."""
        slot = self.slots.get(claim.queue)
        if slot is not None and slot.claim is claim and slot.state is State.RELEASING:
            slot.state = State.FINISHED
            self._finished[slot.queue] = slot

    def drain(self) -> None:
        """Take nothing new and give everything back; the own node says so."""
        if not self.draining:
            self.draining = True
            self._rewrite = True
            self._compare()

    def recorded(self, claim: Claim) -> bool:
        """Return whether ``claim.done`` is recorded, or never will be by this claim."""
        slot = self.slots.get(claim.queue)
        return slot is None or slot.claim is not claim or slot.node.last >= claim.done

    def settled(self) -> bool:
        """Return whether exactly the assigned queues are owned and nothing is under way."""
        return (
            self._known_assignment
            and not self._serial
            and len(self.slots) == len(self._assigned)
            and all(slot.state in (State.OWNED, State.UNUSABLE) for slot in self.slots.values())
        )

    def empty(self) -> bool:
        """Return whether nothing is owned or being released any more."""
        return self.ended or (not self._serial and not self._listed and not self._claims())

    def unreleased(self) -> list[str]:
        """Return the names of the queues that are still owned."""
        return sorted(self._claims())

    def _claims(self) -> list[str]:
        return [slot.queue for slot in self.slots.values() if slot.claim is not None]

    # --- the session ------------------------------------------------------------------

    def connected(self) -> None:
        if self.ended:
            return
        self._up = True
        self._known_assignment = False
        self._serial = self._in_flight = False
        self._waiting.clear()
        self._to_check.clear()
        self._reading = 0
        self.ask(Get(self._assignment_path, watch=True), self._assignment_read)
        if self._barrier_needed or self._doubtful:
            self._barrier()
        else:
            self._read_own()
        for slot in self.slots.values():
            if slot.state in (State.READING, State.WAITING, State.UNUSABLE):
                self._read(slot)
            elif slot.claim is not None and slot.busy and slot.queue not in self._doubtful:
                self._reread(slot)

    def suspended(self) -> None:
        self._up = False

    def expire(self) -> None:
        """End everything: the session, and with it every claim, is gone for good."""
        if self.ended:
            return
        self.ended = True
        self._up = False
        self._lease.end()
        self._listed.clear()
        slots, self.slots = self.slots, {}
        for slot in slots.values():
            self._close(slot)

    def gone(self) -> None:
        """Take note that the own node does not exist: the session ended, or was evicted."""
        if not self.ended:
            self._lease.end()
            self._on_gone()

    def changed(self, path: str) -> None:
        if self.ended or not self._up:
            return
        if path == self._assignment_path:
            self.ask(Get(path, watch=True), self._assignment_read)
        elif path == self.path:
            self._read_own()
        elif path.startswith(f"{self._layout.workers}/"):
            self._owner_changed(path.rpartition("/")[2])
        else:
            slot = self.slots.get(path.rpartition("/")[2])
            if slot is not None and slot.state is State.UNUSABLE:
                self._read(slot)

    def due(self) -> float:
        return self._checkpoints.due() if self._up and not self.ended else INFINITY

    def flush(self) -> None:
        if self.ended or not self._up:
            return
        self._checkpoints.flush(self._clock())
        if not self._reading:
            self._check_owners()
        if not self._serial:
            self._write_own()

    # --- the assignment ---------------------------------------------------------------

    def _assignment_read(self, answer: Answer) -> None:
        if isinstance(answer, Node):
            self._assigned = parse_assignment(answer.data)
        elif isinstance(answer, NoNode):
            self._assigned = frozenset()
        else:
            return
        self._known_assignment = isinstance(answer, Node)
        self._compare()

    def _compare(self) -> None:
        """Begin to give up what is not granted, and to take what is."""
        wanted: frozenset[str] = frozenset() if self.draining else self._assigned
        for slot in [slot for queue, slot in self.slots.items() if queue not in wanted]:
            if slot.state is State.OWNED:
                self._begin_release(slot)
            elif slot.claim is None and slot.state is not State.CLAIMING:
                self._forget(slot)
        if self._up:
            for queue in wanted:
                if queue not in self.slots:
                    self._take(queue)

    def _wanted(self, queue: str) -> bool:
        return not self.draining and queue in self._assigned

    def _take(self, queue: str) -> None:
        slot = self.slots[queue] = Slot(queue)
        self._read(slot)

    def _forget(self, slot: Slot) -> None:
        self.slots.pop(slot.queue, None)
        self._free.pop(slot.queue, None)
        self._finished.pop(slot.queue, None)
        waiting = self._waiting.get(slot.owner)
        if waiting is not None:
            waiting.pop(slot.queue, None)

    # --- taking -----------------------------------------------------------------------

    def _read(self, slot: Slot) -> None:
        """Read the node of a queue that is granted and not owned."""
        slot.state = State.READING
        self._free.pop(slot.queue, None)
        self._reading += 1
        self.ask(
            Get(self._layout.queue(slot.queue)), lambda answer: self._queue_read(slot, answer)
        )

    def _queue_read(self, slot: Slot, answer: Answer) -> None:
        if isinstance(answer, Unanswered):
            return  # `connected` starts afresh
        self._reading -= 1
        if self.slots.get(slot.queue) is not slot or slot.state is not State.READING:
            return
        if not isinstance(answer, Node):
            self._unusable(slot, "it has no node")
            return
        slot.node = node = QueueNode.parse(answer.data)
        slot.version = answer.version
        if node.fault or node.deleted:
            self._unusable(slot, node.fault or "it is marked as deleted")
        elif not node.owner or node.owner == self.name or node.owner in self._gone_workers:
            self._offer(slot)
        else:
            self._to_check.setdefault(node.owner, []).append(slot)

    def _offer(self, slot: Slot) -> None:
        slot.state = State.FREE
        self._free[slot.queue] = slot

    def _unusable(self, slot: Slot, reason: str) -> None:
        """Leave a queue alone until its node changes; loses nothing."""
        slot.state = State.UNUSABLE
        log.warning(
            "%s: queue %s is not processed: %s; repair its node, it is watched",
            self.name,
            slot.queue,
            reason,
        )

        def armed(answer: Answer) -> None:
            changed = isinstance(answer, Node) and answer.version != slot.version
            if changed and slot.state is State.UNUSABLE:
                self._read(slot)

        self.ask(Get(self._layout.queue(slot.queue), watch=True), armed)

    def _check_owners(self) -> None:
        """Look whether the owners found in queue nodes live, after all those reads."""
        checks, self._to_check = self._to_check, {}
        for owner, slots in checks.items():
            self._watch_owner(owner, slots)

    def _watch_owner(self, owner: str, slots: list[Slot]) -> None:
        self.ask(
            Get(self._layout.worker(owner), watch=True),
            lambda answer: self._owner_read(owner, slots, answer),
        )

    def _owner_read(self, owner: str, slots: list[Slot], answer: Answer) -> None:
        if isinstance(answer, Unanswered):
            return
        current = [
            slot
            for slot in slots
            if self.slots.get(slot.queue) is slot and slot.state in (State.READING, State.WAITING)
        ]
        if isinstance(answer, NoNode):
            self._gone_workers.add(owner)
            for slot in current:
                if slot.state is State.READING:
                    self._offer(slot)
                elif slot.state is State.WAITING:
                    self._read(slot)  # its last checkpoint came after our read
        elif isinstance(answer, Node):
            listed = frozenset(WorkerNode.parse(answer.data).queues)
            for slot in current:
                if slot.queue in listed:
                    slot.state = State.WAITING
                    slot.owner = owner
                    self._waiting.setdefault(owner, {})[slot.queue] = slot
                else:
                    self._read(slot)

    def _owner_changed(self, owner: str) -> None:
        """Look again at a worker that has queues granted to this one."""
        waiting = self._waiting.pop(owner, None)
        if waiting:
            self._watch_owner(owner, list(waiting.values()))

    # --- writing the own node: claims, releases, the rest -----------------------------

    def _write_own(self) -> None:
        """Start the one transaction that may rewrite the own node; releases go first."""
        giving = [slot for slot in self._finished.values() if not slot.busy][:BATCH]
        if giving:
            self._give(giving)
        elif self._rewrite:
            self._rewrite = False
            self._commit([], self._own_op([], []), self._rewritten)
        elif self._free and (len(self._free) >= BATCH or not self._reading):
            self._claim(list(self._free.values())[:BATCH])

    def _own_op(self, plus: Iterable[Slot], minus: Iterable[Slot]) -> SetOp:
        listed = dict(self._listed)
        listed.update((slot.queue, None) for slot in plus)
        for slot in minus:
            listed.pop(slot.queue, None)
        node = WorkerNode(tuple(listed), draining=self.draining)
        return SetOp(self.path, node.encode(), self._version)

    def _commit(
        self, ops: list[SetOp], own: SetOp, then: Callable[[Answer], None]
    ) -> None:
        self._serial = self._in_flight = True
        self.ask(Commit((*ops, own)), then)

    def _claim(self, slots: list[Slot]) -> None:
        if self._full:
            return
        own = self._own_op(slots, ())
        ops = [
            SetOp(
                self._layout.queue(slot.queue), slot.node.owned_by(self.name).encode(), slot.version
            )
            for slot in slots
        ]
        size = len(own.data) + sum(len(op.path) + len(op.data) + 64 for op in ops)
        if len(own.data) > MAX_VALUE_BYTES or size > MAX_TRANSACTION_BYTES:
            self._full = True
            error = OversizeError(
                what=f"the node of {self.name} with {len(self._listed) + len(slots)} queues",
                size=size,
                limit=MAX_VALUE_BYTES,
            )
            log.error("%s: no further queue is claimed: %s", self.name, error)
            return
        for slot in slots:
            slot.state = State.CLAIMING
            slot.busy = True
            del self._free[slot.queue]
        self._commit(ops, own, lambda answer: self._claim_answered(slots, answer))

    def _claim_answered(self, slots: list[Slot], answer: Answer) -> None:
        if not self._own_answered(slots, answer):
            return
        for slot in slots:
            slot.busy = False
        if isinstance(answer, Committed):
            for slot, version in zip(slots, answer.versions, strict=False):
                self._claimed(slot, slot.node.owned_by(self.name), version, answer.zxid)
        elif isinstance(answer, Refused):
            for index, slot in enumerate(slots):
                if index == answer.index:
                    self._read(slot)
                else:
                    self._offer(slot)
            self._drop_unwanted(slots)

    def _claimed(self, slot: Slot, node: QueueNode, version: int, fence: int) -> None:
        slot.node = node
        slot.version = version
        slot.state = State.OWNED
        slot.claim = Claim(slot.queue, fence, node.last, self._lease)
        self._listed[slot.queue] = None
        if self._wanted(slot.queue):
            self._listener.claimed(slot.claim)
        else:
            # Nothing was started under this claim, so nothing must be finished.
            slot.claim.open = False
            slot.state = State.FINISHED
            self._finished[slot.queue] = slot

    def _drop_unwanted(self, slots: list[Slot]) -> None:
        for slot in slots:
            if not self._wanted(slot.queue) and slot.claim is None:
                self._forget(slot)

    def _begin_release(self, slot: Slot) -> None:
        if slot.claim is not None:
            slot.state = State.RELEASING
            slot.claim.open = False
            self._listener.releasing(slot.claim)

    def _give(self, slots: list[Slot]) -> None:
        own = self._own_op((), slots)
        self._rewrite = False
        written = [slot.final() for slot in slots]
        for slot in slots:
            slot.state = State.GIVING
            slot.busy = True
            del self._finished[slot.queue]
        self._commit(
            [
                SetOp(self._layout.queue(slot.queue), node.encode(), slot.version)
                for slot, node in zip(slots, written, strict=True)
            ],
            own,
            lambda answer: self._give_answered(slots, answer),
        )

    def _give_answered(self, slots: list[Slot], answer: Answer) -> None:
        if not self._own_answered(slots, answer):
            return
        for slot in slots:
            slot.busy = False
        if isinstance(answer, Committed):
            for slot in slots:
                self._released(slot)
        elif isinstance(answer, Refused):
            for index, slot in enumerate(slots):
                slot.state = State.FINISHED
                self._finished[slot.queue] = slot
                if index == answer.index or slot.again:
                    # Never the remembered `last` after a refusal: an operator moved it.
                    slot.as_found = slot.as_found or index == answer.index
                    self._reread(slot)

    def _released(self, slot: Slot) -> None:
        self._listed.pop(slot.queue, None)
        self._full = False
        slot.claim = None
        self._forget(slot)
        if self._wanted(slot.queue):
            self._take(slot.queue)

    def _rewritten(self, answer: Answer) -> None:
        if self._own_answered([], answer) and isinstance(answer, Refused):
            self._rewrite = True

    def _own_answered(self, slots: list[Slot], answer: Answer) -> bool:
        """Take in what an answer says of the own node; False when it says nothing."""
        if self.ended:
            return False
        if isinstance(answer, Unanswered):
            self._barrier_needed = True
            self.doubt(slots)
            return False
        self._serial = self._in_flight = False
        if isinstance(answer, Committed):
            self._version = answer.versions[-1]
        elif isinstance(answer, Refused) and answer.index == len(slots):
            if answer.fault is Fault.NO_NODE:
                self.gone()
            else:
                self._serial = True  # nothing is written before the new version is read
                self._read_own()
        return True

    # --- the own node, read -----------------------------------------------------------

    def _read_own(self) -> None:
        self.ask(Get(self.path, watch=True), self._own_read)

    def _own_read(self, answer: Answer) -> None:
        if isinstance(answer, NoNode):
            self.gone()
        elif isinstance(answer, Node):
            for queue in WorkerNode.parse(answer.data).reread:
                slot = self.slots.get(queue)
                if slot is not None and slot.claim is not None:
                    self.reread(slot)
            if not self._in_flight:  # else its answer says the version
                self._serial = False
                self._version = answer.version

    # --- queue nodes of owned queues, read again --------------------------------------

    def reread(self, slot: Slot) -> None:
        """Read the node of an owned queue again, as soon as its own transaction is answered."""
        if slot.busy:
            slot.again = True
        elif slot.claim is not None:
            self._reread(slot)

    def _reread(self, slot: Slot) -> None:
        slot.busy = True
        slot.again = False
        self.ask(
            Get(self._layout.queue(slot.queue)), lambda answer: self._reread_answered(slot, answer)
        )

    def _reread_answered(self, slot: Slot, answer: Answer) -> None:
        if isinstance(answer, Unanswered) or self.slots.get(slot.queue) is not slot:
            return
        slot.busy = False
        node = QueueNode.parse(answer.data) if isinstance(answer, Node) else QueueNode()
        if not isinstance(answer, Node) or node.owner != self.name:
            self._lost(slot)
            return
        if slot.again:
            self._reread(slot)
            return
        self._adopt(slot, node, answer.version)

    def _adopt(self, slot: Slot, node: QueueNode, version: int) -> None:
        """Go on with a node that still names this worker."""
        sought = node.seek != slot.node.seek or node.fault is not None
        slot.node = node
        slot.version = version
        claim = slot.claim
        if claim is None:
            return
        if slot.state is not State.OWNED:
            slot.as_found = slot.as_found or sought
        elif node.deleted:
            slot.as_found = sought
            self._begin_release(slot)
        elif sought:
            claim.open = False
            slot.claim = Claim(slot.queue, claim.fence, node.last, self._lease)
            self._listener.moved(claim, slot.claim)
        elif claim.done > node.last:
            # The own late write, or none: the position in hand stays.
            self._checkpoints.mark(slot)

    def _lost(self, slot: Slot) -> None:
        log.warning(
            "%s: queue %s names another owner; it is dropped here", self.name, slot.queue
        )
        if slot.queue in self._listed:
            del self._listed[slot.queue]
            self._rewrite = True
        self._forget(slot)
        self._close(slot)
        if self._wanted(slot.queue):
            self._take(slot.queue)

    def _close(self, slot: Slot) -> None:
        claim, slot.claim = slot.claim, None
        if claim is not None:
            claim.open = False
            self._listener.lost(claim)

    # --- transactions without an answer -----------------------------------------------

    def doubt(self, slots: list[Slot]) -> None:
        for slot in slots:
            if self.slots.get(slot.queue) is slot:
                self._doubtful[slot.queue] = slot

    def _barrier(self) -> None:
        """Write the own node as it is: what was sent before this can take effect no more."""
        self._serial = self._in_flight = True
        self._barrier_needed = True
        self.ask(Get(self.path, watch=True), self._barrier_read)

    def _barrier_read(self, answer: Answer) -> None:
        if isinstance(answer, NoNode):
            self.gone()
        elif isinstance(answer, Node):
            node = WorkerNode.parse(answer.data)
            # A seek's list is kept: the queues in it are read when this write is seen.
            own = replace(node, draining=self.draining)
            self.ask(
                Commit((SetOp(self.path, own.encode(), answer.version),)),
                lambda written: self._barrier_written(node, written),
            )

    def _barrier_written(self, node: WorkerNode, answer: Answer) -> None:
        if isinstance(answer, Refused):
            if answer.fault is Fault.NO_NODE:
                self.gone()
            else:
                self._barrier()
        elif isinstance(answer, Committed):
            self._version = answer.versions[0]
            self._listed = dict.fromkeys(node.queues)
            self._barrier_needed = False
            doubtful, self._doubtful = self._doubtful, {}
            for slot in doubtful.values():
                self._resolve(slot)
            for queue in node.reread:
                slot_ = self.slots.get(queue)
                if slot_ is not None and slot_.claim is not None:
                    self.reread(slot_)
            self._serial = self._in_flight = False

    def _resolve(self, slot: Slot) -> None:
        """Read what became of an unanswered transaction; nothing of it starts before."""
        if self.slots.get(slot.queue) is not slot:
            return
        if slot.state is State.CLAIMING:
            self.ask(
                Get(self._layout.queue(slot.queue)),
                lambda answer: self._claim_resolved(slot, answer),
            )
        elif slot.state is State.GIVING:
            slot.state = State.FINISHED
            self._finished[slot.queue] = slot
            self.ask(
                Get(self._layout.queue(slot.queue)),
                lambda answer: self._give_resolved(slot, answer),
            )
        else:
            self._reread(slot)

    def _claim_resolved(self, slot: Slot, answer: Answer) -> None:
        if isinstance(answer, Unanswered):
            self.doubt([slot])
            return
        if self.slots.get(slot.queue) is not slot:
            return
        slot.busy = False
        if isinstance(answer, Node):
            node = QueueNode.parse(answer.data)
            if node.owner == self.name and slot.queue in self._listed:
                # The claim's own zxid is not known; the one of this data is at least that
                # and below every later claim's, so fences keep growing.
                self._claimed(slot, node, answer.version, answer.mzxid)
                return
        self._read(slot)
        self._drop_unwanted([slot])

    def _give_resolved(self, slot: Slot, answer: Answer) -> None:
        if isinstance(answer, Unanswered):
            slot.state = State.GIVING
            self._finished.pop(slot.queue, None)
            self.doubt([slot])
            return
        if self.slots.get(slot.queue) is not slot:
            return
        slot.busy = False
        node = QueueNode.parse(answer.data) if isinstance(answer, Node) else QueueNode()
        if isinstance(answer, Node) and node.owner == self.name and slot.queue in self._listed:
            self._adopt(slot, node, answer.version)
        else:
            self._released(slot)
