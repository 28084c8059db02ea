"""Keep paused queues still; see `qdo.fleet.pause_machine`.

A paused queue keeps its owner and its position, but its claim is closed. Pauses cost nothing per
message, because turns check the claim after every message anyway.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from qdo.coordination.protocol.claims import Claim
from qdo.fleet.pause_machine import Pause, paused_queues
from qdo.system.processes import SIGN
from qdo.worker.engine.dispatcher import Dispatcher
from qdo.worker.engine.slot import Slot, SlotState


class PauseGate:
    """The pauses that this worker obeys. Until `shut` or `apply`, no queue is paused."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher
        self._is_paused: Callable[[str], bool] | None = None
        self._in_flight: set[Slot] = set()

    def shut(self) -> None:
        """Keep the queues of new claims still until the next `apply`."""
        self._is_paused = _always

    def admit(self, claim: Claim) -> None:
        """Keep the queue of a new claim still if it is paused."""
        if self._is_paused is not None and self._is_paused(claim.queue):
            claim.pause()

    def apply(self, pauses: Sequence[Pause]) -> None:
        """Pause the queues that match these pauses; let all other queues continue."""
        # Without earlier or new pauses, skip the check of slots, because there may be thousands.
        before = self._is_paused
        self._is_paused = paused_queues(pauses)
        self._in_flight.clear()
        if before is None and self._is_paused is None:
            return
        for slot in list(self._dispatcher.slots.values()):
            self._apply_to(slot, self._is_paused is not None and self._is_paused(slot.queue))

    def _apply_to(self, slot: Slot, paused: bool) -> None:
        # Also pause the next claim, which begins after the message in flight.
        for claim in (slot.claim, slot.next_claim[1] if slot.next_claim else None):
            if claim is not None and paused:
                claim.pause()
            elif claim is not None:
                claim.resume()
        if paused and slot.state is SlotState.RUNNING:
            self._in_flight.add(slot)
        if slot.claim is not None and slot.state is SlotState.RUNNING and not slot.claim.over:
            show = SIGN.end_claim if paused else SIGN.forget_claim
            show(slot.queue, slot.claim.fence)
        if slot.lanes is not None:
            slot.lanes.notify()
        if not paused and slot.state is SlotState.STILL:
            self._dispatcher.resume(slot)

    def in_flight(self) -> bool:
        """Return whether a message of a paused queue is in flight, even if its claim is lost."""
        running = [slot for slot in self._in_flight if slot.state is SlotState.RUNNING]
        self._in_flight.intersection_update(running)
        return bool(running)


def _always(queue: str) -> bool:
    return True
