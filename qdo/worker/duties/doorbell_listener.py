"""The duty "doorbell": watches the doorbells of idle queues and polls a queue when notified."""

from __future__ import annotations

from collections.abc import Mapping

import gevent

from qdo.worker.duties.member_api import CurrentMember, DoorbellApi
from qdo.worker.duties.runner import Duty
from qdo.worker.engine.slot import Slot, SlotState

LOOK_SECONDS = 1.0
"""How often the listener looks for new idle queues. The doorbell's count shows a notification
in between."""
AT_ONCE = 1000
"""At most this many watches are requested in one step, so that checkpoints need not wait."""
SOON_SECONDS = 0.1
"""Pause between two such steps."""


class DoorbellListener(Duty):
    """The doorbells of one worker process.

    :param slots: its queues by name, as the dispatcher keeps them.
    :param current: the member that `run` uses.
    """

    name = "doorbell"

    def __init__(self, slots: Mapping[str, Slot], current: CurrentMember | None = None) -> None:
        self._slots = slots
        self._current = current if current is not None else CurrentMember()
        self._member: DoorbellApi | None = None
        self._watched: set[str] = set()
        """Queues with a watch in force; a notification ends it."""
        self._known: set[str] = set()
        """Queues that the member was asked to watch at any time."""

    def run(self) -> None:
        while True:
            member = self._current.member
            gevent.sleep(self.step(member.doorbells if member else None))

    def step(self, member: DoorbellApi | None) -> float:
        """Watch queues that became idle; return the seconds until the next step."""
        if member is not self._member:
            self._member = member
            self._watched.clear()
            self._known.clear()
        if member is None:
            return LOOK_SECONDS
        gone = self._known.difference(self._slots)
        if gone:
            member.unwatch(sorted(gone))
            self._known -= gone
            self._watched -= gone
        idle = [
            queue
            for queue, slot in self._slots.items()
            if slot.state is SlotState.IDLE
            and slot.subscription is not None
            and queue not in self._watched
        ]
        some = idle[:AT_ONCE]
        if some:
            member.watch(some)
            self._watched.update(some)
            self._known.update(some)
        return LOOK_SECONDS if len(some) == len(idle) else SOON_SECONDS

    def rang(self, queue: str) -> None:
        """Poll the broker for messages of a queue; returns at once."""
        self._watched.discard(queue)
        slot = self._slots.get(queue)
        if slot is not None and slot.subscription is not None:
            slot.subscription.poll_now()
