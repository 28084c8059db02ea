"""Slots that wait for a time, or for the lease to be valid again."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from itertools import count

from qdo.worker.engine.slot import Slot, SlotState

PAUSE_CHECK_SECONDS = 0.05
"""How often the lease of paused queues is checked; only while there are any."""


class SlotTimers:
    """Waiting and paused slots.

    The generators yield each slot once. The caller makes it ready before it takes the next one.

    :ivar expirations: how often a lease expired while queues were ready.
    """

    def __init__(self) -> None:
        self._waiting: list[tuple[float, int, Slot]] = []
        self._paused: list[Slot] = []
        self._pause_check_at = float("inf")
        self._order = count()
        self.expirations = 0

    def wait(self, slot: Slot) -> None:
        """Set the alarm of a waiting slot; once, however often it is woken before."""
        if slot.not_before < slot.alarm:
            slot.alarm = slot.not_before
            heapq.heappush(self._waiting, (slot.alarm, next(self._order), slot))

    def pause(self, slot: Slot, now: float) -> bool:
        """Add a slot whose lease expired; return whether it is the first one."""
        first = not self._paused
        if first:
            self.expirations += 1
            self._pause_check_at = now + PAUSE_CHECK_SECONDS
        self._paused.append(slot)
        return first

    def due(self) -> float:
        """Return the clock time of the next check, `inf` for never."""
        check = self._pause_check_at if self._paused else float("inf")
        return min(check, self._waiting[0][0]) if self._waiting else check

    def take_due(self, now: float) -> Iterator[Slot]:
        """Yield waiting slots whose time has come."""
        while self._waiting and self._waiting[0][0] <= now:
            due, _, slot = heapq.heappop(self._waiting)
            slot.alarm = float("inf")
            # The slot may have run since then, and may wait again, until a later time.
            if slot.state is SlotState.WAITING and slot.not_before <= due:
                yield slot
            elif slot.state is SlotState.WAITING:
                self.wait(slot)

    def take_resumed(self, now: float) -> Iterator[Slot]:
        """Yield paused slots whose lease is valid again."""
        if not self._paused or now < self._pause_check_at:
            return
        paused, self._paused = self._paused, []
        for slot in paused:
            if slot.state is not SlotState.PAUSED or slot.claim is None:
                continue
            if slot.claim.open and now < slot.claim.lease.until:
                yield slot
            else:
                self._paused.append(slot)
        self._pause_check_at = now + PAUSE_CHECK_SECONDS

    @property
    def any_paused(self) -> bool:
        """Whether a slot is paused."""
        return bool(self._paused)
