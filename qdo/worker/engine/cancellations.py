"""Cancel messages of owned queues. Only the owner knows which messages have started.

The owner records a cancelled message in the queue's node, so the next owner does not start the
message, either. The queue runs in lanes until the message is before `last`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from operator import itemgetter

from qdo.coordination.protocol.claims import Claim
from qdo.coordination.znodes.queue_node import (
    MAX_CANCELLED,
    CancelOutcome,
    OutOfOrderProgress,
    cancel_outcome,
)
from qdo.errors import UnreachableError
from qdo.worker.engine.context import Engine
from qdo.worker.engine.lanes import Lanes
from qdo.worker.engine.slot import Slot, SlotState

_POSITION = itemgetter(0)

# Maximum seconds for recording a cancellation. An operator's command waits for the record.
RECORD_SECONDS = 5.0


class CannotCancelError(Exception):
    """This process cannot cancel the messages now; the text gives the reason."""


class Cancellations:
    def __init__(self, engine: Engine, slots: Mapping[str, Slot]) -> None:
        self._engine = engine
        self._slots = slots

    def cancel(self, queue: str, positions: Iterable[int]) -> dict[int, CancelOutcome]:
        """Cancel messages and record the cancellations; return the outcome of each message.

        :raises CannotCancelError: this process cannot cancel messages of the queue, or cannot
          confirm the record of the cancellation. In the second case the outcome is unknown.
        """
        slot = self._slots.get(queue)
        claim, member = (None, None) if slot is None else (slot.claim, slot.member)
        if slot is None or claim is None or member is None or claim.over:
            raise CannotCancelError("this worker does not own the queue")
        if not claim.positions.stable:
            raise CannotCancelError("the messages of this broker have no fixed positions")
        if slot.pending_dead_letter is not None:
            raise CannotCancelError("a dead letter of the queue is being stored")
        outcomes = self._decide(slot, claim, list(positions))
        # `record` also records earlier cancellations that are not yet recorded.
        recorded = member.record(claim, RECORD_SECONDS)
        # The claim may have ended while `record` waited for the coordinator.
        if not recorded or slot.claim is not claim or claim.over:
            raise CannotCancelError("the worker could not record it")
        return outcomes

    def _decide(self, slot: Slot, claim: Claim, positions: list[int]) -> dict[int, CancelOutcome]:
        """Cancel messages in memory; return their outcomes."""
        # No other greenlet runs during this method, so no message can start.
        if claim.refresh is not None:
            claim.refresh()
        earlier = 0 if claim.out_of_order is None else len(claim.out_of_order.cancelled)
        if earlier + len(positions) > MAX_CANCELLED:
            raise CannotCancelError(f"a queue may have at most {MAX_CANCELLED} cancelled messages")
        if isinstance(slot.lanes, Lanes) and slot.lanes.claim is claim:
            lanes = slot.lanes
            outcomes = {position: lanes.progress.cancel(position) for position in positions}
            lanes.publish()
            lanes.notify()
            return outcomes
        return self._decide_serial(slot, claim, positions)

    def _decide_serial(
        self, slot: Slot, claim: Claim, positions: list[int]
    ) -> dict[int, CancelOutcome]:
        progress = claim.out_of_order or OutOfOrderProgress()
        failures = progress.other_failures
        failures += () if claim.failure is None else (claim.failure,)
        taken = self._taken(slot) if slot.state is SlotState.RUNNING else set()
        outcomes = {}
        for position in positions:
            outcome = cancel_outcome(progress, failures, claim.done, position)
            if outcome is CancelOutcome.CANCELLED and position in taken:
                outcome = CancelOutcome.STARTED
            outcomes[position] = outcome
        cancelled = [
            position for position, outcome in outcomes.items() if outcome is CancelOutcome.CANCELLED
        ]
        if cancelled:
            claim.out_of_order = progress.with_cancelled(cancelled)
            if slot.state is not SlotState.RUNNING:
                self._engine.fetcher.clear(slot)  # a running turn clears at its end
        return outcomes

    def _taken(self, slot: Slot) -> range | set[int]:
        """Stop a turn from taking more rows; return positions that may have been taken."""
        if slot.gathered is not None:
            return set(map(_POSITION, slot.gathered[: self._batch_of(slot)]))
        # Interrupt first, because an interruption replaces the iterator of the slot.
        self._engine.limits.streaks.interrupt()
        # The list exhausts the iterator of the turn's loop, so the loop ends after the message in
        # flight. The next turn takes the remaining rows. If any row was cancelled, this turn drops
        # all remaining rows at its end.
        remaining = list(slot.rows or ())
        slot.rows = iter(remaining)
        slot.withheld = len(remaining)
        return range(remaining[0][0] if remaining else slot.fetched + 1)

    def _batch_of(self, slot: Slot) -> int:
        try:
            return self._engine.jobs.find(slot.queue).batch
        except UnreachableError:
            return len(slot.gathered or ())
