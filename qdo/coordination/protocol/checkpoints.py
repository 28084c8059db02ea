"""Record many `last` values in few transactions.

Each transaction checks that the worker's own node exists, and writes queue nodes only at the
versions that this worker last saw. So the writes of a worker fail after the end of its session, and
never overwrite a `last` that an operator moved. Several transactions may be in flight, but at most
one for each queue.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TypeAlias

from qdo.coordination.protocol import machine as m
from qdo.coordination.protocol.claims import OwnedQueue, QueueState
from qdo.coordination.protocol.owned_queues import Recovery
from qdo.coordination.protocol.worker_node_writer import WorkerNodeWriter
from qdo.coordination.znodes.layout import Layout
from qdo.coordination.znodes.queue_node import QueueNode
from qdo.coordination.znodes.values import MAX_TRANSACTION_BYTES
from qdo.system.clock import Histogram

# The maximum number of queues per transaction. Measurements were best between 100 and 250.
BATCH = 250
# The maximum number of transactions in flight.
IN_FLIGHT = 4
MAX_STRETCH_SECONDS = 5.0
# The maximum size of an operation without its path and data, in bytes.
OP_BYTES = 64
# The upper bounds of the response time buckets, in seconds.
LATENCY_BOUNDS = (0.001, 0.005, 0.025, 0.1, 0.5, 2.5, 10.0)
Recorded: TypeAlias = tuple[OwnedQueue, QueueNode, m.SetOp]


@dataclass(slots=True)
class CheckpointTotals:
    """The results of one process's checkpoints in all its registrations."""

    # The number of transactions by result: "recorded", "rejected" or "unanswered".
    results: Counter[str] = field(default_factory=Counter)
    # The number of recorded progress values of all queues.
    queues: int = 0
    latency: Histogram = field(default_factory=lambda: Histogram(LATENCY_BOUNDS))


class Checkpoints:
    """Records the progress of queues; `recovery` reads nodes in an unknown state again."""

    def __init__(
        self,
        layout: Layout,
        machine: m.Machine,
        own_node: WorkerNodeWriter,
        recovery: Recovery,
        *,
        clock: Callable[[], float],
        interval_seconds: float,
        totals: CheckpointTotals | None = None,
    ) -> None:
        self._layout = layout
        self._machine = machine
        self._own_node = own_node
        self._recovery = recovery
        self._clock = clock
        self._interval = interval_seconds
        self._round_trip = 0.0
        self._totals = CheckpointTotals() if totals is None else totals
        self._dirty: dict[str, OwnedQueue] = {}
        self._next = 0.0
        self._hurried = False
        self.in_flight = 0

    def mark(self, slot: OwnedQueue) -> None:
        self._dirty[slot.queue] = slot

    def due(self) -> float:
        """Return the time of the next checkpoint; `inf` without progress to record."""
        idle = not self._dirty or self.in_flight >= IN_FLIGHT
        return float("inf") if idle else self._next

    def hurry(self) -> None:
        """Send the progress at the next flush, regardless of the interval."""
        self._hurried = True

    def flush(self, now: float) -> None:
        """Send due progress in transactions, each for different queues."""
        is_due = self._hurried or now >= self._next
        if not self._dirty or not is_due or self.in_flight >= IN_FLIGHT:
            return
        room = (IN_FLIGHT - self.in_flight) * BATCH
        chosen = self._choose(room)
        for batch in self._batches(chosen):
            self._send(batch, now)
        # The choice omits queues with an open request. Their progress follows after the answer.
        self._hurried = self._hurried and bool(self._dirty)
        # If the coordinator is slow, use a longer interval, so that no transaction is in flight
        # half of the time.
        pause = max(self._interval, min(2 * self._round_trip, MAX_STRETCH_SECONDS))
        self._next = now if len(chosen) == room else now + pause

    def _choose(self, room: int) -> list[tuple[OwnedQueue, QueueNode]]:
        """Take at most `room` queues with progress to record; take the longest waiting first."""
        chosen: list[tuple[OwnedQueue, QueueNode]] = []
        settled = []
        for queue, slot in self._dirty.items():
            if len(chosen) == room:
                break
            if slot.busy:
                continue
            settled.append(queue)
            claim = slot.claim
            if claim is None or slot.state not in (QueueState.OWNED, QueueState.RELEASING):
                continue  # a release records the progress, or the queue is lost
            if (node := slot.progressed()) is not slot.node:
                chosen.append((slot, node))
        for queue in settled:
            del self._dirty[queue]
        return chosen

    def _batches(self, chosen: list[tuple[OwnedQueue, QueueNode]]) -> Iterator[list[Recorded]]:
        """Split queues into transactions with a size limit, because nodes may be large."""
        batch: list[Recorded] = []
        size = 0
        for slot, node in chosen:
            op = m.SetOp(self._layout.queue(slot.queue), node.encode(), slot.version)
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
        self._machine.ask(
            m.Commit((m.CheckOp(self._own_node.path), *ops)),
            lambda answer: self._answered(batch, now, answer),
        )

    def _answered(
        self, batch: list[tuple[OwnedQueue, QueueNode]], sent_at: float, answer: m.Response
    ) -> None:
        self.in_flight -= 1
        if isinstance(answer, m.NoResponse):
            self._totals.results["unanswered"] += 1
            self._recovery.doubt([slot for slot, _ in batch])
            return
        self._round_trip = self._clock() - sent_at
        self._totals.latency.observe(self._round_trip)
        for slot, _ in batch:
            slot.busy = False
        if isinstance(answer, m.Committed):
            self._totals.results["recorded"] += 1
            self._totals.queues += len(batch)
            self._recorded(batch, answer.versions)
        elif isinstance(answer, m.Rejected):
            self._totals.results["rejected"] += 1
            self._rejected(batch, answer)

    def _recorded(
        self, batch: list[tuple[OwnedQueue, QueueNode]], versions: tuple[int, ...]
    ) -> None:
        for (slot, node), version in zip(batch, versions[1:], strict=True):
            slot.node = node
            slot.version = version
            if slot.again:
                self._recovery.reread(slot)
            elif slot.progressed() is not node:
                self._dirty[slot.queue] = slot

    def _rejected(self, batch: list[tuple[OwnedQueue, QueueNode]], answer: m.Rejected) -> None:
        """Read the rejected queue's node again, and resend the other progress at once."""
        if answer.refuses(0) or (answer.index == 0 and answer.fault is m.CommitError.NO_NODE):
            self._own_node.gone()
            return
        for index, (slot, _) in enumerate(batch, start=1):
            if answer.refuses(index):
                self._recovery.refused(slot, answer.reason)
                continue
            self._dirty[slot.queue] = slot
            if index == answer.index or slot.again:
                self._recovery.reread(slot)
        self.hurry()
