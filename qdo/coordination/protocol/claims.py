"""The claims of a worker, and the state of each queue that it owns or should own.

States of a slot, and the next states:

============  ========================================================  =======================
state         meaning                                                   next
============  ========================================================  =======================
reading       assigned; its queue node is being read                    free, waiting, unusable
waiting       another live worker still has it; its node is watched     reading
unusable      no node, marked deleted, corrupt or refused; watched      reading
free          it has no owner, at the version read                      claiming
claiming      the claim is in flight                                    owned, reading
owned         messages may be started                                   releasing, lost
releasing     the message in flight is being finished                   finished
finished      no message runs any more                                  release sent
release sent  the release is in flight                                  (gone)
============  ========================================================  =======================

In the terms of the documentation, reading to claiming are *assigned*, owned is *claimed*, and
releasing to release sent are *releasing*. A slot that is gone was *released* or *lost*.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import Protocol

from qdo.coordination.protocol.lease import Lease
from qdo.coordination.znodes.queue_node import NEW, FailureRecord, OutOfOrderProgress, QueueNode
from qdo.positions import TIME_POSITIONS, Positions

# Why a claim ends: the leader assigned the queue elsewhere; the worker stops; the queue was deleted
# or finished; its node cannot be read or written; acknowledged writes of it have vanished; its node
# does not name the worker; the session has ended.
ENDINGS = REBALANCED, DRAINED, DELETED, REFUSED, UNDONE, LOST, SESSION = (
    "rebalanced",
    "drained",
    "deleted",
    "refused",
    "undone",
    "lost",
    "session",
)
# How many messages behind the recorded `last` may have begun under the owner before. If there are
# more, as of jobs that take less than 2 ms, each start at least records the progress of so many.
CAREFUL = 100


class QueueState(Enum):
    READING = "reading"
    WAITING = "waiting"
    UNUSABLE = "unusable"
    FREE = "free"
    CLAIMING = "claiming"
    OWNED = "owned"
    RELEASING = "releasing"
    FINISHED = "finished"
    RELEASE_SENT = "release sent"


@dataclass(slots=True, eq=False)
class Claim:
    """One ownership of one queue by this process, as the worker engine sees it."""

    queue: str
    # Number of the claim; grows with every claim of the queue by any worker.
    fence: int
    # Position up to which all messages are done. Starts at the recorded `last`; the engine sets it
    # after each message.
    done: int
    # The lease of the registration that made the claim, and no other.
    lease: Lease
    # Failure record of a message after `done`, as found in the queue node. The engine sets it after
    # a failed attempt, and it is recorded with `done`. It is ignored once `done` has reached its
    # message, so it need not be removed.
    failure: FailureRecord | None = None
    # Messages done or failed beyond `done`, if messages are not processed strictly in order.
    out_of_order: OutOfOrderProgress | None = None
    positions: Positions = TIME_POSITIONS
    # Names of messages that are done, see `QueueNode.unconfirmed`.
    unconfirmed: tuple[str, ...] = ()
    # Called before any of these is recorded, to bring them up to date; None if they always are.
    refresh: Callable[[], None] | None = None
    # The claim that this one continues, until it begins; see `take_over`.
    before: Claim | None = None
    # Whether messages may be started, while the lease is valid.
    open: bool = True
    # It is not open because its queue is paused; it opens again when the pause ends.
    paused: bool = False
    # Why the owner gives the queue up, one of `ENDINGS`; "" while it keeps it.
    ending: str = ""
    # The owner before if it was gone without a release, else "".
    former: str = ""
    # How many messages are still recorded before they begin, because of such an owner.
    careful: int = 0
    # Clock time until which a message that begins may have ended that owner; 0 before the first
    # one.
    suspects_until: float = 0.0

    @classmethod
    def of(
        cls, queue: str, fence: int, node: QueueNode, lease: Lease, positions: Positions
    ) -> Claim:
        """Continue from a queue node; raise ValueError if its `position` is invalid."""
        done = positions.resume_after(node.last, node.position)
        return cls(
            queue, fence, done, lease, node.failure, node.out_of_order, positions, node.unconfirmed
        )

    @property
    def whole(self) -> Claim:
        """The claim of the whole queue."""
        return self

    @property
    def over(self) -> bool:
        """Whether it has ended for good: it is being released, or is lost."""
        return not self.open and not self.paused

    def close(self) -> None:
        self.open = self.paused = False

    def pause(self) -> None:
        """Start no message until `resume` is called; nothing if it is over."""
        if self.open:
            self.open = False
            self.paused = True

    def resume(self) -> None:
        if self.paused:
            self.open = True
            self.paused = False

    def follow(self, former: str) -> None:
        """Be careful with the first messages: one may have ended the owner before."""
        self.former = former
        self.careful = CAREFUL

    def take_over(self) -> bool:
        """Continue with the progress of the claim `before`; return whether that was farther."""
        # An operator changed the node at a position that is older than this progress, and did not
        # move the queue back. So its messages are not repeated.
        before = self.before
        self.before = None
        if before is None:
            return False
        before.take_over()
        if before.refresh is not None:
            before.refresh()
        done = max(self.done, before.done)
        above = before.out_of_order
        own = self.out_of_order or OutOfOrderProgress()
        if above is not None:
            ranges = [(max(first, done + 1), newest) for first, newest in above.done_ranges]
            own = replace(
                own.with_cancelled(above.cancelled),
                done_ranges=tuple(each for each in ranges if each[1] > done),
            )
        cancelled = tuple(each for each in own.cancelled if each > done)
        own = replace(own, cancelled=cancelled) if own.cancelled else own
        farther = done != self.done or own != (self.out_of_order or OutOfOrderProgress())
        self.done = done
        self.out_of_order = own or None
        return farther

    def add_failure(self, failure: FailureRecord) -> None:
        """Set the failure record of the first message after `done`."""
        # The record of a later message is kept: its former owner had got farther than `done` says,
        # and died. Without that, a message that fails before another one kills its process each
        # time would hide the attempts of the other one forever.
        later = self.failure
        if later is not None and later.position > failure.position and self.positions.stable:
            above = self.out_of_order or OutOfOrderProgress()
            self.out_of_order = replace(above, other_failures=(*above.other_failures, later))
        self.failure = failure

    def __repr__(self) -> str:
        state = "open" if self.open else "closed"
        return f"<Claim of {self.queue!r} under {self.fence}, {state}, done {self.done}>"


@dataclass(slots=True, eq=False)
class OwnedQueue:
    """A queue that this worker owns or should own."""

    queue: str
    state: QueueState = QueueState.READING
    # The queue node as last read or written; `version` is the version of that node.
    node: QueueNode = NEW
    version: int = -1
    claim: Claim | None = None
    # Whether a transaction of this queue is in flight or in doubt, or its node is being read again.
    # Until the answer arrives no other request is sent for it.
    busy: bool = False
    # Whether to read the node again as soon as it is no longer busy.
    again: bool = False
    # Whether to release with the `last` found in the node, not the remembered one.
    as_found: bool = False
    # Whether operators changed the node during the release, but did not move the queue back: the
    # claim's progress counts, and for the rest the node.
    decided: bool = False
    # The worker that a waiting slot waits for.
    owner: str = ""
    # Why the queue cannot be processed although it is assigned, "" if it can.
    fault: str = ""
    # Version of the node at which its owner was found not to list the queue.
    unlisted: int = -1
    # Time from which such a queue counts as free.
    take_at: float = float("inf")

    def has_recorded(self, done: int) -> bool:
        """Return whether the node records all messages up to a position as done."""
        positions = TIME_POSITIONS if self.claim is None else self.claim.positions
        if self.claim is not None and not (
            self._has_cancelled(self.claim) and self._has_begun(self.claim)
        ):
            return False
        if positions is TIME_POSITIONS:
            return self.node.last >= done
        return _moved(self.node, done, positions) is self.node

    def _has_cancelled(self, claim: Claim) -> bool:
        """Return whether the node records every message that was cancelled under the claim."""
        own = claim.out_of_order
        recorded = self.node.out_of_order
        if own is None or not own.cancelled:
            return True
        return recorded is not None and set(own.cancelled) <= set(recorded.cancelled)

    def _has_begun(self, claim: Claim) -> bool:
        """Return whether the node records all messages that are to begin under an open claim."""
        if self.state is not QueueState.OWNED:
            return True  # none begins, and an operator's change may have replaced the records
        others = () if claim.out_of_order is None else claim.out_of_order.other_failures
        begun = {each for each in (claim.failure, *others) if each is not None and each.begun_by}
        return {each for each in begun if each.position > claim.done} <= set(self.node.failures)

    def final(self) -> QueueNode:
        """Return the node as a release leaves it."""
        return self.progressed().owned_by("")

    def progressed(self) -> QueueNode:
        """Return the node with the claim's progress; the same node if there is none."""
        claim = self.claim
        node = self.node
        if claim is None or self.as_found:
            return node
        if self.decided:
            before = claim
            claim = Claim.of(self.queue, claim.fence, node, claim.lease, claim.positions)
            claim.before = before
            claim.take_over()
        if claim.refresh is not None:
            claim.refresh()
        if claim.positions is not TIME_POSITIONS:
            node = _moved(node, claim.done, claim.positions)
        elif claim.done > node.last:
            node = node.moved_to(claim.done, node.position)
        if claim.out_of_order is not node.out_of_order and claim.out_of_order != node.out_of_order:
            node = replace(node, out_of_order=claim.out_of_order)
        if claim.unconfirmed != node.unconfirmed:
            node = replace(node, unconfirmed=claim.unconfirmed)
        failure = claim.failure
        if failure is not None and failure.position <= claim.done:
            failure = None
        return node if failure is node.failure else node.with_failure(failure)


def _moved(node: QueueNode, done: int, positions: Positions) -> QueueNode:
    """Return a node that records `done`, a position that is not a time."""
    if done <= positions.resume_after(node.last, node.position):
        return node
    last = max(node.last, positions.to_time(done))
    text = positions.to_text(done)
    if last == node.last and text == node.position:
        return node
    return node.moved_to(last, text, done)


class ClaimListener(Protocol):
    """The worker engine's callbacks. They must return at once and must not raise."""

    def claimed(self, claim: Claim) -> None:
        """Start processing right after ``claim.done``."""

    def releasing(self, claim: Claim) -> None:
        """Finish the message in flight, start no other, then call `finished`."""

    def released(self, claim: Claim) -> None:
        """Note that the release is recorded; nothing is left to do."""

    def undone(self, claim: Claim) -> None:
        """Count that acknowledged writes of the queue's node have vanished; a release follows."""

    def lost(self, claim: Claim) -> None:
        """Drop all work of this claim; later calls for it are ignored."""

    def decided(self, claim: Claim, decisions: Mapping[int, FailureRecord | None]) -> bool:
        """End the attempts of messages that are to be skipped, or to become dead letters.

        Return whether the decisions apply under this claim; otherwise `repositioned` follows.
        """

    def repositioned(self, old: Claim, new: Claim) -> None:
        """Continue with `new` once the message in flight has ended: an operator moved `last`."""

    def expired(self) -> None:
        """Register again: this registration is over, and every claim was reported lost before."""
