"""One turn of a queue: everything that its steps need, as one record."""

from __future__ import annotations

from dataclasses import dataclass

from qdo.coordination.protocol.claims import Claim
from qdo.worker.engine.bound_jobs import BoundJob
from qdo.worker.engine.slot import ClaimSink, Slot


@dataclass(frozen=True, slots=True)
class Turn:
    """A queue's turn, or the run of one of its lanes.

    :ivar slot: the queue's slot, or the lane's.
    :ivar member: the registration that made the claim.
    :ivar claim: the queue's claim, or the lane's view of it. ``slot.claim`` is another one, or
        None, once the queue was lost.
    :ivar job: the queue's job; `NO_JOB` if the app has none for it.
    """

    slot: Slot
    member: ClaimSink
    claim: Claim
    job: BoundJob

    @property
    def in_force(self) -> bool:
        """Whether the queue is still owned under this claim."""
        return self.slot.claim is self.claim

    @property
    def has_failure(self) -> bool:
        """Whether a message that failed before comes next or later."""
        claim = self.claim
        return claim.failure is not None and claim.failure.position > claim.done

    @property
    def is_blocked(self) -> bool:
        """Whether a message that comes next or later waits for an operator."""
        failure = self.claim.failure
        return failure is not None and failure.position > self.claim.done and failure.held
