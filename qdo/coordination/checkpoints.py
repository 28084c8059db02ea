"""Recording many `last` values in few transactions.

Each transaction checks that the worker's own node exists and sets queue nodes at the versions
this worker last saw. So a worker whose session has ended can write nothing, and a `last` that
an operator moved is not overwritten. Several transactions may be under way, of different
queues; of one queue there is at most one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol, TypeAlias

from qdo.coordination.layout import MAX_TRANSACTION_BYTES, Layout, QueueNode
from qdo.coordination.machine import (
    Answer,
    CheckOp,
    Commit,
    Committed,
    Fault,
    Refused,
    Request,
    SetOp,
    Then,
    Unanswered,
)
from qdo.coordination.slots import Slot, State

BATCH = 250
"""Queues in a transaction: measured best between 100 and 250."""
IN_FLIGHT = 4
"""Transactions under way at once."""
MAX_STRETCH_SECONDS = 5.0
OP_BYTES = 64
"""What a request takes for an operation beside its path and data, at most."""

Recorded: TypeAlias = tuple[Slot, QueueNode, SetOp]


class Owner(Protocol):
    """What checkpoints need of the ownership that they belong to."""

    path: str

    def ask(self, request: Request, then: Then) -> None: ...

    def reread(self, slot: Slot) -> None:
        """Find out why the queue's node is not as remembered."""

    def doubt(self, slots: list[Slot]) -> None:
        """Take note that a transaction of these queues was not answered."""

    def gone(self) -> None:
        """Take note that the worker's own node does not exist."""


class Checkpoints:
    """Which queues have progressed, and the transactions that record it."""

    def __init__(
        self, layout: Layout, owner: Owner, *, clock: Callable[[], float], interval_seconds: float
    ) -> None:
        self._layout = layout
        self._owner = owner
        self._clock = clock
        self._interval = interval_seconds
        self._round_trip = 0.0
        self._dirty: dict[str, Slot] = {}
        self._next = 0.0
        self.in_flight = 0

    def mark(self, slot: Slot) -> None:
        """Take note that a queue progressed."""
        self._dirty[slot.queue] = slot

    def due(self) -> float:
        """Return when the next checkpoint should be sent, `inf` with nothing to record."""
        idle = not self._dirty or self.in_flight >= IN_FLIGHT
        return float("inf") if idle else self._next

    def hurry(self) -> None:
        """Send at the next flush, whatever the interval."""
        self._next = 0.0

    def flush(self, now: float) -> None:
        """Send what is due, in transactions of different queues."""
        if not self._dirty or now < self._next or self.in_flight >= IN_FLIGHT:
            return
        room = (IN_FLIGHT - self.in_flight) * BATCH
        chosen = self._choose(room)
        for batch in self._batches(chosen):
            self._send(batch, now)
        # Stretch when the coordinator is slow: never more than half of the time in flight.
        pause = max(self._interval, min(2 * self._round_trip, MAX_STRETCH_SECONDS))
        self._next = now if len(chosen) == room else now + pause

    def _choose(self, room: int) -> list[tuple[Slot, QueueNode]]:
        """Take at most `room` queues that have something to record, the longest waiting first."""
        chosen: list[tuple[Slot, QueueNode]] = []
        settled = []
        for queue, slot in self._dirty.items():
            if len(chosen) == room:
                break
            if slot.busy:
                continue
            settled.append(queue)
            claim = slot.claim
            if claim is None or slot.state not in (State.OWNED, State.RELEASING):
                continue  # its release records the rest, or it is no longer ours
            if (node := slot.progressed()) is not slot.node:
                chosen.append((slot, node))
        for queue in settled:
            del self._dirty[queue]
        return chosen

    def _batches(self, chosen: list[tuple[Slot, QueueNode]]) -> Iterator[list[Recorded]]:
        """Divide queues up: a transaction has a limit, and nodes with lanes may be large."""
        batch: list[Recorded] = []
        size = 0
        for slot, node in chosen:
            op = SetOp(self._layout.queue(slot.queue), node.encode(), slot.version)
            size += len(op.path) + len(op.data) + OP_BYTES
            if batch and (len(batch) == BATCH or size > MAX_TRANSACTION_BYTES):
                yield batch
                batch = []
                size = len(op.path) + len(op.data) + OP_BYTES
            batch.append((slot, node, op))
        if batch:
            yield batch

    def _send(self, recorded: list[Recorded], now: float) -> None:
        batch = [(slot, node) for slot, node, _ in recorded]
        ops = [op for _, _, op in recorded]
        for slot, _ in batch:
            slot.busy = True
        self.in_flight += 1
        self._owner.ask(
            Commit((CheckOp(self._owner.path), *ops)),
            lambda answer: self._answered(batch, now, answer),
        )

    def _answered(
        self, batch: list[tuple[Slot, QueueNode]], sent_at: float, answer: Answer
    ) -> None:
        self.in_flight -= 1
        if isinstance(answer, Unanswered):
            self._owner.doubt([slot for slot, _ in batch])
            return
        self._round_trip = self._clock() - sent_at
        for slot, _ in batch:
            slot.busy = False
        if isinstance(answer, Committed):
            self._recorded(batch, answer.versions)
        elif isinstance(answer, Refused):
            self._refused(batch, answer)

    def _recorded(self, batch: list[tuple[Slot, QueueNode]], versions: tuple[int, ...]) -> None:
        for (slot, node), version in zip(batch, versions[1:], strict=True):
            slot.node = node
            slot.version = version
            if slot.again:
                self._owner.reread(slot)
            elif slot.progressed() is not node:
                self._dirty[slot.queue] = slot

    def _refused(self, batch: list[tuple[Slot, QueueNode]], answer: Refused) -> None:
        """Drop the queue that was refused, and send the others again at once."""
        if answer.index == 0 and answer.fault is Fault.NO_NODE:
            self._owner.gone()
            return
        for index, (slot, _) in enumerate(batch, start=1):
            self._dirty[slot.queue] = slot
            if index == answer.index or slot.again:
                self._owner.reread(slot)
        self.hurry()
