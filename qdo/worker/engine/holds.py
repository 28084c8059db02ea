"""Keep queues still while they are held: see `qdo.fleet.hold_machine`.

A held queue keeps its owner and its position. Its claim is closed during the hold. Turns check the
claim after every message anyway, so holds cost nothing per message.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from qdo.coordination.protocol.claims import Claim
from qdo.fleet.hold_machine import Hold, held_queues
from qdo.system.processes import SIGN
from qdo.worker.engine.dispatcher import Dispatcher
from qdo.worker.engine.slot import Slot, SlotState


class HoldGate:
    """The holds that this worker obeys; before `shut` is called, none."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher
        self._is_held: Callable[[str], bool] | None = None
        self._in_flight: set[Slot] = set()

    def shut(self) -> None:
        """Keep the queues of later claims still until `apply` is called."""
        self._is_held = _always

    def admit(self, claim: Claim) -> None:
        """Keep the queue of a new claim still if it is held."""
        if self._is_held is not None and self._is_held(claim.queue):
            claim.hold()

    def apply(self, holds: Sequence[Hold]) -> None:
        """Start no message of queues that match these holds; let all others continue."""
        before, self._is_held = self._is_held, held_queues(holds)
        self._in_flight.clear()
        if before is None and self._is_held is None:
            return
        for slot in list(self._dispatcher.slots.values()):
            self._apply_to(slot, self._is_held is not None and self._is_held(slot.queue))

    def _apply_to(self, slot: Slot, held: bool) -> None:
        for claim in (slot.claim, slot.next_claim[1] if slot.next_claim else None):
            if claim is not None and held:
                claim.hold()
            elif claim is not None:
                claim.lift()
        if held and slot.state is SlotState.RUNNING:
            self._in_flight.add(slot)
        if slot.claim is not None and slot.state is SlotState.RUNNING and not slot.claim.over:
            show = SIGN.end_claim if held else SIGN.forget_claim
            show(slot.queue, slot.claim.fence)
        if slot.lanes is not None:
            slot.lanes.notify()
        if not held and slot.state is SlotState.STILL:
            self._dispatcher.resume(slot)

    def in_flight(self) -> bool:
        """Return whether a message of a held queue is in flight, even if its claim is lost."""
        running = [slot for slot in self._in_flight if slot.state is SlotState.RUNNING]
        self._in_flight.intersection_update(running)
        return bool(running)


def _always(queue: str) -> bool:
    return True
