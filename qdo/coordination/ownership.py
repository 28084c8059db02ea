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

from qdo.coordination.checkpoints import BATCH, OP_BYTES, Checkpoints
from qdo.coordination.layout import (
    MAX_TRANSACTION_BYTES,
    MAX_VALUE_BYTES,
    Layout,
    QueueNode,
    parse_assignment,
)
from qdo.coordination.lease import Lease
from qdo.coordination.machine import (
    Answer,
    Committed,
    Get,
    Machine,
    Node,
    Refused,
    SetOp,
    Unanswered,
)
from qdo.coordination.ownnode import OwnNode
from qdo.coordination.search import Search
from qdo.coordination.slots import Claim, Listener, Slot, State
from qdo.errors import OversizeError
from qdo.filters import EVERYTHING, QueueFilter
from qdo.positions import TIMES, Positions

log = logging.getLogger(__name__)


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
        takes: QueueFilter = EVERYTHING,
        positions: Positions = TIMES,
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
        self._positions = positions
        self._up = False
        self._full = False
        self._assigned: frozenset[str] = frozenset()
        self._known_assignment = False
        self._finished: dict[str, Slot] = {}
        self._doubtful: dict[str, Slot] = {}
        self._own = OwnNode(self.path, self, on_gone=self.gone, on_reread=self._asked_to_reread)
        self._own.takes = takes
        self._search = Search(layout, name, self, self.slots, positions)
        self._checkpoints = Checkpoints(
            layout, self, clock=clock, interval_seconds=checkpoint_seconds
        )

    # --- what the engine says ---------------------------------------------------------

    def progress(self, claim: Claim) -> None:
        """Record ``claim.done`` with the next checkpoint."""
        slot = self.slots.get(claim.queue)
        if slot is not None and slot.claim is claim:
            self._checkpoints.mark(slot)

    def hurry(self) -> None:
        """Send the next checkpoint at once."""
        self._checkpoints.hurry()

    def finished(self, claim: Claim) -> None:
        """Take note that nothing of a claim that is to be released runs any more."""
        slot = self.slots.get(claim.queue)
        if slot is not None and slot.claim is claim and slot.state is State.RELEASING:
            self._finish(slot)

    def drain(self) -> None:
        """Take nothing new and give everything back; the own node says so."""
        if not self.draining:
            self.draining = self._own.draining = self._own.rewrite = True
            self._compare()

    # --- what the engine asks ---------------------------------------------------------

    def recorded(self, claim: Claim) -> bool:
        """Return whether ``claim.done`` is recorded, or never will be by this claim."""
        slot = self.slots.get(claim.queue)
        return slot is None or slot.claim is not claim or slot.has_recorded(claim.done)

    def settled(self) -> bool:
        """Return whether exactly the assigned queues are owned and nothing is under way."""
        return (
            self._known_assignment
            and self._own.free
            and len(self.slots) == len(self._assigned)
            and all(slot.state in (State.OWNED, State.UNUSABLE) for slot in self.slots.values())
        )

    def empty(self) -> bool:
        """Return whether nothing is owned or being released any more."""
        return self.ended or (self._own.free and not self._own.listed and not self.unreleased())

    def unreleased(self) -> list[str]:
        """Return the names of the queues that are still owned."""
        return sorted(slot.queue for slot in self.slots.values() if slot.claim is not None)

    # --- the session ------------------------------------------------------------------

    def connected(self) -> None:
        if self.ended:
            return
        self._up = True
        self._known_assignment = False
        self.ask(Get(self._assignment_path, watch=True), self._assignment_read)
        self._own.connected()
        if self._own.in_doubt or self._doubtful:
            self._own.barrier(self._resolve)
        else:
            self._own.read()
        self._search.connected()
        for slot in self.slots.values():
            if slot.claim is not None and slot.busy and slot.queue not in self._doubtful:
                self._reread(slot)

    def suspended(self) -> None:
        self._up = False

    def expire(self) -> None:
        """End everything: the session, and with it every claim, is gone for good."""
        if not self.ended:
            self.ended = True
            self._up = False
            self._lease.end()
            slots = list(self.slots.values())
            self.slots.clear()
            for slot in slots:
                self._close(slot)

    def gone(self) -> None:
        """Take note that the own node does not exist: the session ended, or was evicted."""
        if not self.ended:
            self._lease.end()
            self._on_gone()

    def changed(self, path: str) -> None:
        if self.ended or not self._up:
            return
        folder, _, name = path.rpartition("/")
        if path == self._assignment_path:
            self.ask(Get(path, watch=True), self._assignment_read)
        elif path == self.path:
            self._own.read()
        elif folder == self._layout.workers:
            self._search.worker_changed(name)
        else:
            self._search.queue_changed(name)

    def due(self) -> float:
        return self._checkpoints.due() if self._up and not self.ended else float("inf")

    def flush(self) -> None:
        if not self.ended and self._up:
            self._checkpoints.flush(self._clock())
            self._search.flush()
            self._write_own()

    # --- the assignment ---------------------------------------------------------------

    def _assignment_read(self, answer: Answer) -> None:
        if isinstance(answer, Unanswered):
            return
        self._known_assignment = isinstance(answer, Node)
        granted = parse_assignment(answer.data) if isinstance(answer, Node) else frozenset()
        # A rebalancer of an older version knows nothing of what workers take.
        self._assigned = frozenset(filter(self._own.takes.matcher(), granted))
        self._compare()

    def _wanted(self, queue: str) -> bool:
        return not self.draining and queue in self._assigned

    def _compare(self) -> None:
        """Begin to give up what is not granted, and to take what is."""
        for slot in [slot for queue, slot in self.slots.items() if not self._wanted(queue)]:
            if slot.state is State.OWNED:
                self._begin_release(slot)
            else:
                self._drop_unwanted(slot)
        if self._up and not self.draining:
            for queue in sorted(self._assigned.difference(self.slots)):
                self._take(queue)

    def _take(self, queue: str) -> None:
        slot = self.slots[queue] = Slot(queue)
        self._search.read(slot)

    def _drop_unwanted(self, slot: Slot) -> None:
        """Forget a queue that is neither granted nor owned nor being claimed."""
        claiming = slot.claim is not None or slot.state is State.CLAIMING
        if not claiming and not self._wanted(slot.queue):
            self._forget(slot)

    def _forget(self, slot: Slot) -> None:
        self.slots.pop(slot.queue, None)
        self._finished.pop(slot.queue, None)
        self._search.forget(slot)

    # --- the one transaction that may rewrite the own node; releases go first ---------

    def _write_own(self) -> None:
        if not self._own.free:
            return
        giving = [slot for slot in self._finished.values() if not slot.busy][:BATCH]
        free = self._search.free
        if giving:
            self._give(self._fitting(giving, Slot.final))
        elif self._own.rewrite:
            self._own.rewrite = False
            self._own.commit([], self._own.value((), ()), self._rewritten)
        elif free and not self._full and (len(free) >= BATCH or not self._search.reading):
            self._claim(self._fitting(list(free.values())[:BATCH], _found))

    def _rewritten(self, answer: Answer) -> None:
        if self._answered([], answer) and isinstance(answer, Refused):
            self._own.rewrite = True

    def _answered(self, slots: list[Slot], answer: Answer) -> bool:
        """Take in an answer to a write of the own node; False when nothing is known."""
        if self.ended:
            return False
        if not self._own.answered(answer):
            self.doubt(slots)
            return False
        for slot in slots:
            slot.busy = False
        if isinstance(answer, Refused) and answer.index == len(slots):
            self._own.refused(answer)
        return True

    def _fitting(self, slots: list[Slot], node_of: Callable[[Slot], QueueNode]) -> list[Slot]:
        """Return the first slots whose nodes fit into a transaction beside the own node."""
        room = MAX_TRANSACTION_BYTES - MAX_VALUE_BYTES
        for count, slot in enumerate(slots):
            room -= len(self._layout.queue(slot.queue)) + len(node_of(slot).encode()) + OP_BYTES
            if room < 0 and count:
                return slots[:count]
        return slots

    def _sets(self, slots: Iterable[Slot], nodes: Iterable[QueueNode]) -> list[SetOp]:
        queue_path = self._layout.queue
        return [
            SetOp(queue_path(slot.queue), node.encode(), slot.version)
            for slot, node in zip(slots, nodes, strict=True)
        ]

    # --- claims -----------------------------------------------------------------------

    def _claim(self, slots: list[Slot]) -> None:
        value = self._own.value([slot.queue for slot in slots], ())
        ops = self._sets(slots, [slot.node.owned_by(self.name) for slot in slots])
        size = len(value) + sum(len(op.path) + len(op.data) + 64 for op in ops)
        if len(value) > MAX_VALUE_BYTES or size > MAX_TRANSACTION_BYTES:
            self._refuse_more(len(slots), size)
            return
        for slot in slots:
            slot.state = State.CLAIMING
            slot.busy = True
            del self._search.free[slot.queue]
        if not self._search.free:
            self._search.free.clear()  # a dict does not become smaller by itself
        self._own.commit(ops, value, lambda answer: self._claim_answered(slots, answer))

    def _refuse_more(self, count: int, size: int) -> None:
        """Claim no further queue: ZooKeeper would drop the connection, again and again."""
        self._full = True
        error = OversizeError(
            what=f"the node of {self.name} with {len(self._own.listed) + count} queues",
            size=size,
            limit=MAX_VALUE_BYTES,
        )
        log.error("%s: no further queue is claimed: %s", self.name, error)

    def _claim_answered(self, slots: list[Slot], answer: Answer) -> None:
        if not self._answered(slots, answer):
            return
        if isinstance(answer, Committed):
            for slot, version in zip(slots, answer.versions, strict=False):
                self._claimed(slot, slot.node.owned_by(self.name), version, answer.zxid)
        elif isinstance(answer, Refused):
            for index, slot in enumerate(slots):
                if index == answer.index:
                    self._search.read(slot)
                else:
                    self._search.offer(slot)
                self._drop_unwanted(slot)

    def _claimed(self, slot: Slot, node: QueueNode, version: int, fence: int) -> None:
        """Start from the `last` that was read with the version the claim succeeded on."""
        slot.node = node
        slot.version = version
        slot.state = State.OWNED
        slot.claim = Claim.of(slot.queue, fence, node, self._lease, self._positions)
        self._own.listed[slot.queue] = None
        # When the outcome was in doubt the node may have been marked as deleted since.
        if self._wanted(slot.queue) and not node.deleted:
            self._listener.claimed(slot.claim)
        else:
            slot.claim.open = False
            self._finish(slot)  # nothing was started under it

    # --- releases ---------------------------------------------------------------------

    def _begin_release(self, slot: Slot) -> None:
        if slot.claim is not None:
            slot.state = State.RELEASING
            slot.claim.open = False
            self._listener.releasing(slot.claim)

    def _finish(self, slot: Slot) -> None:
        slot.state = State.FINISHED
        self._finished[slot.queue] = slot

    def _give(self, slots: list[Slot]) -> None:
        for slot in slots:
            slot.state = State.GIVING
            slot.busy = True
            del self._finished[slot.queue]
        self._own.rewrite = False
        self._own.commit(
            self._sets(slots, [slot.final() for slot in slots]),
            self._own.value((), [slot.queue for slot in slots]),
            lambda answer: self._give_answered(slots, answer),
        )

    def _give_answered(self, slots: list[Slot], answer: Answer) -> None:
        if not self._answered(slots, answer):
            return
        if isinstance(answer, Committed):
            for slot in slots:
                self._released(slot)
        elif isinstance(answer, Refused):
            for index, slot in enumerate(slots):
                self._finish(slot)
                if index == answer.index or slot.again:
                    # Whether to release with the `last` found there is seen in `_adopt`.
                    self._reread(slot)

    def _released(self, slot: Slot) -> None:
        self._own.listed.pop(slot.queue, None)
        self._full = False
        slot.claim = None
        self._forget(slot)
        if self._wanted(slot.queue):
            self._take(slot.queue)

    # --- queue nodes of owned queues, read again --------------------------------------

    def _asked_to_reread(self, queues: Iterable[str]) -> None:
        """Do what an operator's seek asks in the own node."""
        for queue in queues:
            slot = self.slots.get(queue)
            if slot is not None and slot.claim is not None:
                self.reread(slot)

    def reread(self, slot: Slot) -> None:
        """Read the node of an owned queue again, as soon as its own transaction is answered."""
        if slot.busy:
            slot.again = True
        elif slot.claim is not None:
            self._reread(slot)

    def _reread(self, slot: Slot) -> None:
        slot.busy = True
        slot.again = False
        path = self._layout.queue(slot.queue)
        self.ask(Get(path), lambda answer: self._reread_done(slot, answer))

    def _reread_done(self, slot: Slot, answer: Answer) -> None:
        if isinstance(answer, Unanswered) or self.slots.get(slot.queue) is not slot:
            return  # if it is unanswered `connected` reads it again
        slot.busy = False
        node = self._named(answer)
        if node is None:
            self._lost(slot)
        elif slot.again:
            self._reread(slot)
        elif isinstance(answer, Node):
            self._adopt(slot, node, answer.version)

    def _named(self, answer: Answer) -> QueueNode | None:
        """Return the queue node that was read, if it names this worker as owner."""
        if not isinstance(answer, Node):
            return None
        node = QueueNode.parse(answer.data).checked(self._positions)
        return node if node.owner == self.name else None

    def _adopt(self, slot: Slot, node: QueueNode, version: int) -> None:
        """Go on with a node that still names this worker."""
        sought = node.seek != slot.node.seek and node.fault is None
        slot.node = node = _mended(node, slot.node)
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
            slot.claim = Claim.of(slot.queue, claim.fence, node, self._lease, self._positions)
            self._listener.moved(claim, slot.claim)
        elif slot.progressed() is not node:
            # It was the own late write, or somebody's who left `last` alone: we stay here.
            self._checkpoints.mark(slot)

    def _lost(self, slot: Slot) -> None:
        log.warning("%s: queue %s names this worker no more; it is dropped", self.name, slot.queue)
        if slot.queue in self._own.listed:
            del self._own.listed[slot.queue]
            self._own.rewrite = True
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
        """Take note that a transaction of these queues was not answered."""
        for slot in slots:
            if self.slots.get(slot.queue) is slot:
                self._doubtful[slot.queue] = slot

    def _resolve(self) -> None:
        """Behind the barrier, read what became of the queues in doubt."""
        doubtful, self._doubtful = self._doubtful, {}
        for slot in doubtful.values():
            if self.slots.get(slot.queue) is not slot:
                continue
            if slot.state in (State.CLAIMING, State.GIVING):
                self._read_outcome(slot)
            else:
                self._reread(slot)

    def _read_outcome(self, slot: Slot) -> None:
        path = self._layout.queue(slot.queue)
        self.ask(Get(path), lambda answer: self._outcome(slot, answer))

    def _outcome(self, slot: Slot, answer: Answer) -> None:
        """Adopt whatever names this worker; nothing of the queue was started before."""
        if isinstance(answer, Unanswered):
            self.doubt([slot])
            return
        if self.slots.get(slot.queue) is not slot:
            return
        slot.busy = False
        node = self._named(answer) if slot.queue in self._own.listed else None
        if slot.state is State.CLAIMING:
            if node is not None and isinstance(answer, Node):
                # The claim's own zxid is not known. The one of this data is no smaller, and
                # smaller than that of every later claim: fences keep growing.
                node = _mended(node, slot.node)
                self._claimed(slot, node, answer.version, answer.mzxid)
            else:
                self._search.read(slot)
                self._drop_unwanted(slot)
        elif node is not None and isinstance(answer, Node):
            self._finish(slot)
            self._adopt(slot, node, answer.version)
        else:
            self._released(slot)


def _mended(node: QueueNode, known: QueueNode) -> QueueNode:
    """Return the node of an owned queue with a readable `last`: its owner knows where it is.

    Going by the garbage would process the whole queue again.
    """
    if node.fault is None:
        return node
    return replace(node, last=known.last, position=known.position, fault=None)


def _found(slot: Slot) -> QueueNode:
    return slot.node
