"""The claims of a worker, and the state of each queue that the worker owns or should own.

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

The documentation calls the states from reading to claiming *assigned*, owned *claimed*, and the
states from releasing to release sent *releasing*. A slot that is gone was *released* or *lost*.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import Protocol

from qdo.coordination.protocol.lease import Lease
from qdo.coordination.znodes.queue_node import NEW, FailureRecord, OutOfOrderProgress, QueueNode
from qdo.positions import TIME_POSITIONS, Positions

# The reasons for the end of a claim. Rebalanced: the leader assigned the queue to another worker.
# Drained: the worker stops. Deleted: the queue is deleted or finished. Refused: the worker cannot
# read or write the queue node. Undone: acknowledged writes of the node have vanished. Lost: the
# node does not name the worker. Session: the session has ended.
ENDINGS = REBALANCED, DRAINED, DELETED, REFUSED, UNDONE, LOST, SESSION = (
    "rebalanced",
    "drained",
    "deleted",
    "refused",
    "undone",
    "lost",
    "session",
)
# The assumed maximum number of messages after the recorded `last` that began under the former
# owner. With jobs under 2 ms there may be more. Even then, each start records the progress of this
# number of messages.
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
    """The ownership of a queue by this process, for the worker engine."""

    queue: str
    # The number of the claim. Every later claim of the queue, by any worker, has a higher number.
    fence: int
    # The position up to which all messages are done, at first the recorded `last`. The engine
    # advances this position after each message.
    done: int
    # The lease of the registration that made the claim. A later registration has another lease.
    lease: Lease
    # The failure record of a message after `done`, from the queue node. The engine sets the record
    # after a failed attempt, and checkpoints write the record with `done`. Once `done` has reached
    # the message, the record has no effect.
    failure: FailureRecord | None = None
    # The messages after `done` that are done or failed, if processing is not strictly in order.
    out_of_order: OutOfOrderProgress | None = None
    positions: Positions = TIME_POSITIONS
    # The names of processed messages; see `QueueNode.unconfirmed`.
    unconfirmed: tuple[str, ...] = ()
    # A function that updates these fields before a checkpoint; None if they are always up to date.
    refresh: Callable[[], None] | None = None
    # The former claim. This claim takes over its progress when it begins; see `take_over`.
    before: Claim | None = None
    # Whether messages may start while the lease is valid; see `paused`.
    open: bool = True
    # Whether a pause of the queue has closed the claim. The end of the pause reopens the claim.
    paused: bool = False
    # The reason why the owner gives up the queue, from `ENDINGS`; "" while the owner keeps the
    # queue.
    ending: str = ""
    # The former owner if it is gone without a release; else "".
    former: str = ""
    # The number of further messages to record before they begin, because of `former`.
    careful: int = 0
    # The clock time until which a starting message may be the message that killed the former owner;
    # 0 before the first message.
    suspects_until: float = 0.0

    @classmethod
    def of(
        cls, queue: str, fence: int, node: QueueNode, lease: Lease, positions: Positions
    ) -> Claim:
        """Make a claim from a queue node; raise ValueError if the node's `position` is invalid."""
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
        """Whether the claim has ended, because its queue is being released or is lost."""
        return not self.open and not self.paused

    def close(self) -> None:
        self.open = self.paused = False

    def pause(self) -> None:
        """Let no message start until a call of `resume`; do nothing if the claim has ended."""
        if self.open:
            self.open = False
            self.paused = True

    def resume(self) -> None:
        if self.paused:
            self.open = True
            self.paused = False

    def follow(self, former: str) -> None:
        """Record the first messages before they begin, because one may have killed `former`."""
        self.former = former
        self.careful = CAREFUL

    def take_over(self) -> bool:
        """Adopt the progress of the claim `before`; return whether it was farther."""
        # An operator changed the node at a position before the progress of `before`, but did not
        # move the queue back. So do not repeat the messages in between.
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
        # The former owner may have died at a later message. Keep the record of the later message.
        # Otherwise a failing message would always replace the record of a later message that kills
        # the process, and the attempts of that message would never count.
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
    # The last read or written value of the queue node; `version` is its version.
    node: QueueNode = NEW
    version: int = -1
    claim: Claim | None = None
    # Whether a transaction of this queue is in flight or in doubt, or a read of its node is open.
    # The worker sends no other request for the queue until the answer arrives.
    busy: bool = False
    # Whether to read the node again as soon as the queue is not `busy`.
    again: bool = False
    # Whether to keep the node's `last` on release instead of recording the claim's progress.
    as_found: bool = False
    # Whether an operator changed the node during the release without moving the queue back. The
    # worker then records the claim's progress, and keeps all other values of the node.
    decided: bool = False
    # The worker that must release the queue of a waiting slot.
    owner: str = ""
    # The reason why the worker cannot process the assigned queue; "" if it can.
    fault: str = ""
    # The version of the queue node at which the owner did not list the queue.
    unlisted: int = -1
    # The time from which the queue counts as free because its owner does not list it.
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
        """Return whether the node records all messages that will begin under an open claim."""
        if self.state is not QueueState.OWNED:
            return True  # no message begins, and an operator may have replaced the records
        others = () if claim.out_of_order is None else claim.out_of_order.other_failures
        begun = {each for each in (claim.failure, *others) if each is not None and each.begun_by}
        return {each for each in begun if each.position > claim.done} <= set(self.node.failures)

    def final(self) -> QueueNode:
        """Return the value of the node after a release."""
        return self.progressed().owned_by("")

    def progressed(self) -> QueueNode:
        """Return the node with the claim's progress; the same object if there is no progress."""
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
    """Return a node that records `done`, for positions that are not times."""
    if done <= positions.resume_after(node.last, node.position):
        return node
    last = max(node.last, positions.to_time(done))
    text = positions.to_text(done)
    if last == node.last and text == node.position:
        return node
    return node.moved_to(last, text, done)


class ClaimListener(Protocol):
    """The worker engine's callbacks, which must return at once and not raise errors."""

    def claimed(self, claim: Claim) -> None:
        """Start processing after the position ``claim.done``."""

    def releasing(self, claim: Claim) -> None:
        """Finish the message in flight, start no other message, then call `finished`."""

    def released(self, claim: Claim) -> None:
        """Note that the coordinator has recorded the release, so that no work remains."""

    def undone(self, claim: Claim) -> None:
        """Count the loss of acknowledged writes of the queue node; a release follows."""

    def lost(self, claim: Claim) -> None:
        """Drop all work of this claim; later calls for the claim have no effect."""

    def decided(self, claim: Claim, decisions: Mapping[int, FailureRecord | None]) -> bool:
        """End the attempts of messages that an operator skips or makes dead letters.

        Return whether the decisions apply under this claim; otherwise, a call of `repositioned`
        follows.
        """

    def repositioned(self, old: Claim, new: Claim) -> None:
        """Continue with `new` after the message in flight, because an operator moved `last`."""

    def expired(self) -> None:
        """Register again, because this registration has ended and reported every claim as lost."""
