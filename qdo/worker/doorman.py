"""Listens at the doorbells of queues that rest, and has the broker asked when one is rung."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from qdo.worker.slot import Slot, State

LOOK_SECONDS = 1.0
"""How often queues are looked for that came to rest; a ring in between is found by its count."""
AT_ONCE = 1000
SOON_SECONDS = 0.1
"""Of many queues so many are asked for at once, so that checkpoints need not wait for all."""


class BellMember(Protocol):
    """What the doorman needs of a member."""

    def attend_bells(self, queues: Sequence[str]) -> None: ...

    def leave_bells(self, queues: Sequence[str]) -> None: ...


class Doorman:
    """The doorbells of one worker process.

    :param slots: its queues by name, as the dispatcher has them.
    """

    def __init__(self, slots: Mapping[str, Slot]) -> None:
        self._slots = slots
        self._member: BellMember | None = None
        self._attended: set[str] = set()
        self._known: set[str] = set()

    def step(self, member: BellMember | None) -> float:
        """Listen for queues that came to rest; return after how many seconds to look again."""
        if member is not self._member:
            self._member = member
            self._attended.clear()
            self._known.clear()
        if member is None:
            return LOOK_SECONDS
        gone = self._known.difference(self._slots)
        if gone:
            member.leave_bells(sorted(gone))
            self._known -= gone
            self._attended -= gone
        resting = [
            queue
            for queue, slot in self._slots.items()
            if slot.state is State.IDLE
            and slot.subscription is not None
            and queue not in self._attended
        ]
        some = resting[:AT_ONCE]
        if some:
            member.attend_bells(some)
            self._attended.update(some)
            self._known.update(some)
        return LOOK_SECONDS if len(some) == len(resting) else SOON_SECONDS

    def rang(self, queue: str) -> None:
        """Have the broker asked for messages of a queue; returns at once."""
        self._attended.discard(queue)
        slot = self._slots.get(queue)
        if slot is not None and slot.subscription is not None:
            slot.subscription.ring()
