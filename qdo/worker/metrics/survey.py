"""The states of owned queues, and the age of their oldest message, as their owner knows them."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Sequence
from heapq import nsmallest
from typing import TYPE_CHECKING

from qdo.brokers.base import Broker
from qdo.errors import QdoError
from qdo.positions import time_of_position
from qdo.worker.engine.slot import Slot, SlotState

if TYPE_CHECKING:
    from qdo.coordination.protocol.claims import Claim

ASKED = 3
"""At most this many queues are looked up at the broker, those that are farthest behind."""
CHUNK = 5000
"""After this many queues, which take 4 ms, others get their turn. On a busy worker that may take a
second."""
STATES = (
    *("idle", "ready", "running", "waiting", "limited", "failing", "unreadable"),
    *("blocked", "paused", "lease-expired"),
)
_STATES = {
    SlotState.READY: "ready",
    SlotState.RUNNING: "running",
    SlotState.WAITING: "waiting",
    SlotState.LIMITED: "limited",
    SlotState.PAUSED: "lease-expired",
    SlotState.STILL: "paused",
    SlotState.HELD: "waiting",
}


class QueueSurvey:
    """The queues of one worker process at one time.

    :ivar states: number of queues by their state.
    :ivar jobs: number of messages in flight.
    :ivar oldest: Unix time of the oldest waiting message known; None if none waits.
    """

    def __init__(self) -> None:
        self.states: Counter[str] = Counter(dict.fromkeys(STATES, 0))
        self.jobs = 0
        self.oldest: float | None = None
        self._unknown: list[Slot] = []

    def take(self, slots: Sequence[Slot], now: float, breathe: Callable[[], None]) -> None:
        """Look at queues.

        :param now: Unix time.
        :param breathe: lets other greenlets run.
        """
        for number, slot in enumerate(slots, start=1):
            state = state_of(slot)
            self.states[state] += 1
            if slot.state is SlotState.RUNNING:
                self.jobs += 1 if slot.lanes is None else len(slot.lanes.in_flight())
            if state not in ("idle", "blocked", "paused"):
                self._note_age(slot, now)
            if number % CHUNK == 0:
                breathe()

    def ask(self, broker: Broker) -> None:
        """Look up at the broker what the owner does not know."""
        if broker.capabilities.subscriptions:
            return  # each subscription knows it
        known = [(slot, slot.claim) for slot in self._unknown if slot.claim is not None]
        for slot, claim in nsmallest(ASKED, known, key=lambda each: each[1].done):
            try:
                oldest = broker.catalog.backlog(slot.queue, claim.done).oldest
            except QdoError:
                return  # the turn of the queue reports it
            if oldest is not None:
                self._note(time_of_position(broker.positions.to_time(oldest)))

    def _note_age(self, slot: Slot, now: float) -> None:
        if slot.subscription is not None:
            behind = slot.subscription.behind_seconds()
            if behind is not None and behind > 0:
                self._note(now - behind)
            return
        sent = _next_sent(slot)
        if sent is None:
            self._unknown.append(slot)
        else:
            self._note(sent)

    def _note(self, sent: float) -> None:
        self.oldest = sent if self.oldest is None else min(self.oldest, sent)


def state_of(slot: Slot) -> str:
    """Return the state of a queue, one of `STATES`."""
    claim = slot.claim
    if claim is None:
        return "running"  # it was lost, and its message in flight is being finished
    if claim.held:
        return "paused"
    if slot.state is SlotState.PAUSED:
        return "lease-expired"
    failure = claim.failure
    if failure is not None and failure.position > claim.done:
        return "blocked" if failure.blocked else "failing"
    if slot.broker_failures:
        return "unreadable"
    return _STATES.get(slot.state, "idle")


def _next_sent(slot: Slot) -> float | None:
    """Return the Unix time of the next message of a queue, None if its owner does not know it."""
    message, claim = slot.message, slot.claim
    if message is not None:
        return message.due or message.time
    if claim is None:
        return None
    if claim.failure is not None and claim.failure.position > claim.done:
        return _time(claim, claim.failure.position)
    if slot.gathered:
        return _time(claim, slot.gathered[0][0])
    if slot.rows is not None:
        row = next(copy.copy(slot.rows), None)
        return None if row is None else _time(claim, row[0])
    return None


def _time(claim: Claim, position: int) -> float:
    return time_of_position(claim.positions.to_time(position))


def age(oldest: float | None, now: float) -> float:
    """Return the age of a message in seconds, 0 without one."""
    return 0.0 if oldest is None else max(0.0, now - oldest)
