"""What a worker keeps for each queue that it owns or should own.

States of a slot, and what moves it on:

=========  ========================================================  ==================
state      meaning                                                   next
=========  ========================================================  ==================
reading    granted; its queue node is being read                     free, waiting, unusable
waiting    another worker, alive, still has it; its node is watched  reading
unusable   no node, marked deleted or garbage; the node is watched   reading
free       nobody has it, at the version read                        claiming
claiming   the claim is under way                                    owned, reading
owned      messages may be started                                   releasing, lost
releasing  the message in hand is being finished                     finished
finished   nothing runs any more                                     giving
giving     the release is under way                                  (gone)
=========  ========================================================  ==================

In the words of the documentation reading to claiming are *assigned*, owned is *claimed*,
releasing to giving are *releasing*; a slot that is gone was *released* or *lost*.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from enum import Enum
from typing import Protocol

from qdo.coordination.layout import Above, Marks, QueueNode
from qdo.coordination.lease import Lease
from qdo.positions import TIMES, Positions


class State(Enum):
    READING = "reading"
    WAITING = "waiting"
    UNUSABLE = "unusable"
    FREE = "free"
    CLAIMING = "claiming"
    OWNED = "owned"
    RELEASING = "releasing"
    FINISHED = "finished"
    GIVING = "giving"


class Claim:
    """One ownership of one queue by this process, as the worker engine sees it.

    :ivar queue: name of the queue.
    :ivar fence: number of the claim; grows with every claim of the queue, whoever makes it.
    :ivar done: position up to which everything is done. Starts at the recorded `last`; the
        engine sets it after each message.
    :ivar marks: of the message behind `done` that fails, as found in the queue node; the engine
        sets them after a failed attempt, and they are recorded with `done`. They count for
        nothing once `done` has reached their message, so nobody need take them away.
    :ivar above: what is done or fails beyond `done`, where messages are not done in line.
    :ivar unconfirmed: names of messages that are done, see `QueueNode.unconfirmed`.
    :ivar look: called before anything of these is recorded, to bring it up to date; None where
        it always is.
    :ivar positions: what the positions of the broker mean.
    :ivar open: messages may be started, while the lease runs.
    :ivar lease: of the registration that made the claim, and of no other.
    """

    __slots__ = (
        "above",
        "done",
        "fence",
        "lease",
        "look",
        "marks",
        "open",
        "positions",
        "queue",
        "unconfirmed",
    )

    def __init__(
        self,
        queue: str,
        fence: int,
        done: int,
        lease: Lease,
        marks: Marks | None = None,
        above: Above | None = None,
        positions: Positions = TIMES,
        unconfirmed: tuple[str, ...] = (),
    ) -> None:
        self.queue = queue
        self.fence = fence
        self.done = done
        self.marks = marks
        self.above = above
        self.look: Callable[[], None] | None = None
        self.open = True
        self.lease = lease
        self.positions = positions
        self.unconfirmed = unconfirmed

    @classmethod
    def of(
        cls, queue: str, fence: int, node: QueueNode, lease: Lease, positions: Positions
    ) -> Claim:
        """Return the claim that goes on from a queue node.

        :raises ValueError: the node's `position` is none of this broker's.
        """
        done = positions.begin(node.last, node.position)
        return cls(
            queue, fence, done, lease, node.marks, node.above, positions, node.unconfirmed
        )

    def __repr__(self) -> str:
        state = "open" if self.open else "closed"
        return f"<Claim of {self.queue!r} under {self.fence}, {state}, done {self.done}>"


class Slot:
    """A queue that this worker owns or should own.

    :ivar node: the queue node as last read or written, and `version` of exactly that.
    :ivar busy: a transaction of this queue is under way or in doubt, or its node is being
        read again; until that is answered nothing else is sent for it.
    :ivar again: read the node again as soon as it is no longer busy.
    :ivar as_found: release with the `last` found in the node, not with the remembered one.
    :ivar owner: the worker that a waiting slot waits for.
    """

    __slots__ = ("again", "as_found", "busy", "claim", "node", "owner", "queue", "state", "version")

    def __init__(self, queue: str) -> None:
        self.queue = queue
        self.state = State.READING
        self.node = QueueNode()
        self.version = -1
        self.claim: Claim | None = None
        self.busy = False
        self.again = False
        self.as_found = False
        self.owner = ""

    def has_recorded(self, done: int) -> bool:
        """Return whether the node says that everything up to a position is done."""
        positions = TIMES if self.claim is None else self.claim.positions
        if positions is TIMES:
            return self.node.last >= done
        return _moved(self.node, done, positions) is self.node

    def final(self) -> QueueNode:
        """Return the node as a release leaves it."""
        return self.progressed().owned_by("")

    def progressed(self) -> QueueNode:
        """Return the node as the claim's progress makes it: the same where there is none."""
        claim, node = self.claim, self.node
        if claim is None or self.as_found:
            return node
        if claim.look is not None:
            claim.look()
        if claim.positions is not TIMES:
            node = _moved(node, claim.done, claim.positions)
        elif claim.done > node.last:
            node = node.moved_to(claim.done, node.position)
        if claim.above is not node.above and claim.above != node.above:
            node = replace(node, above=claim.above)
        if claim.unconfirmed != node.unconfirmed:
            node = replace(node, unconfirmed=claim.unconfirmed)
        marks = claim.marks
        if marks is not None and marks.position <= claim.done:
            marks = None
        return node if marks is node.marks else node.marked(marks)


def _moved(node: QueueNode, done: int, positions: Positions) -> QueueNode:
    """Return a node that records `done`, a position that is no time."""
    if done <= positions.begin(node.last, node.position):
        return node
    last, text = max(node.last, positions.last(done)), positions.text(done)
    if last == node.last and text == node.position:
        return node
    return node.moved_to(last, text, done)


class Listener(Protocol):
    """What the worker engine is told. It must return at once and raise nothing."""

    def claimed(self, claim: Claim) -> None:
        """Start processing right after ``claim.done``."""

    def releasing(self, claim: Claim) -> None:
        """Finish the message in hand, start no other, then say `finished`."""

    def lost(self, claim: Claim) -> None:
        """Drop everything of this claim; whatever is said about it later is passed over."""

    def moved(self, old: Claim, new: Claim) -> None:
        """An operator moved `last`: go on with `new` once the message in hand has ended."""
