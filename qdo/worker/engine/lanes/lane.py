"""The parts of lanes: one lane, with a claim and a slot of its own, and shared permits."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

from qdo.coordination.protocol.claims import Claim
from qdo.coordination.znodes.progress import FailureRecord
from qdo.worker.engine.counters import Counters
from qdo.worker.engine.prefetch import Row
from qdo.worker.engine.slot import ClaimSink, Slot, TurnResult
from qdo.worker.engine.turn import Turn


class LaneOwner(Protocol):
    """The lanes of the whole queue, as one lane and the permits see them; see `lanes.Lanes`."""

    counters: Counters

    @property
    def wants_permit(self) -> bool: ...

    def notify(self) -> None: ...

    def settle(self, lane: Lane) -> None: ...

    def drop_expired(self, lane: Lane) -> None: ...

    def publish(self) -> None: ...


class LanePermits:
    """Limits the lanes of all queues of a worker process.

    At most `count` of them run at once.

    :ivar held_bytes: approximate size of the messages that the lanes have read.
    """

    def __init__(self, count: int) -> None:
        self.held_bytes = 0
        self._free = count
        self._waiting: dict[LaneOwner, None] = {}

    def acquire(self, lanes: LaneOwner) -> bool:
        """Take a permit. If none is free, return False and notify `lanes` when one is."""
        if not self._free:
            self._waiting[lanes] = None
            return False
        self._free -= 1
        return True

    def release(self) -> None:
        """Return the permit of a lane that stopped running, and notify the next queue."""
        self._free += 1
        self.notify_next()

    def notify_next(self) -> None:
        """Notify the queue that has waited longest for a permit, if one is free."""
        while self._free and self._waiting:
            lanes = next(iter(self._waiting))
            del self._waiting[lanes]
            if lanes.wants_permit:
                lanes.notify()
                return


class LaneClaim(Claim):
    """The queue's claim as one lane sees it, with its own `done` and `failure`."""

    __slots__ = ("_whole",)

    def __init__(self, whole: Claim, done: int) -> None:
        self._whole = whole
        super().__init__(whole.queue, whole.fence, done, whole.lease)

    @property
    def open(self) -> bool:
        """Whether messages may be started: only the whole claim is ever closed."""
        return self._whole.open

    @open.setter
    def open(self, value: bool) -> None:
        pass


class LaneSlot(Slot):
    """The queue's slot as one lane sees it, with its own message, backoff and dead letter."""

    in_lane = True

    __slots__ = ("_lane_claim", "_whole", "_whole_claim")

    def __init__(self, whole: Slot, whole_claim: Claim, lane_claim: LaneClaim) -> None:
        self._whole = whole
        self._whole_claim = whole_claim
        self._lane_claim = lane_claim
        super().__init__(whole.queue, whole.durations)

    @property
    def claim(self) -> Claim | None:
        """The lane's claim while the queue's is in force."""
        return self._lane_claim if self._whole.claim is self._whole_claim else None

    @claim.setter
    def claim(self, value: Claim | None) -> None:
        pass

    @property
    def member(self) -> ClaimSink | None:
        """The registration that made the queue's claim."""
        return self._whole.member

    @member.setter
    def member(self, value: ClaimSink | None) -> None:
        pass


class Lane:
    """The messages of one key that are read and not done: an iterator over them.

    Before it returns the next message it drops those that are done. A returned message stays the
    first one until ``claim.done`` has reached it.

    :ivar started: number of messages that were returned to be started.
    :ivar failures: of messages that failed under other owners, in message order. Each one becomes
        the claim's failure when its message comes next.
    """

    __slots__ = ("_owner", "claim", "failures", "key", "rows", "slot", "started")

    def __init__(self, owner: LaneOwner, key: object, slot: LaneSlot, claim: LaneClaim) -> None:
        self._owner = owner
        self.key = key
        self.slot = slot
        self.claim = claim
        self.rows: deque[Row] = deque()
        self.started = 0
        self.failures: deque[FailureRecord] = deque()

    def __iter__(self) -> Iterator[Row]:
        return self

    def __next__(self) -> Row:
        self._owner.settle(self)
        self._owner.drop_expired(self)
        if not self.rows or self._first_has_failure():
            raise StopIteration
        self._owner.counters.attempts += 1
        self.started += 1
        return self.rows[0]

    def _first_has_failure(self) -> bool:
        """Whether the first message failed elsewhere and its failure is not in the claim yet.

        The message may be read while the lane runs; the next run handles the failure.
        """
        return bool(self.failures) and self.failures[0].position == self.rows[0][0]

    @property
    def is_blocked(self) -> bool:
        """Whether a message waits for an operator."""
        return self.claim.failure is not None and self.claim.failure.held

    def is_failing(self, position: int) -> bool:
        """Return whether an attempt of a message has failed, here or elsewhere."""
        known, pending = self.claim.failure, self.slot.pending_dead_letter
        return (
            (known is not None and known.position == position)
            or (pending is not None and pending.position == position)
            or any(each.position == position for each in self.failures)
        )

    def take_failure(self) -> None:
        """Set the claim's failure to that of the next message, if it failed elsewhere."""
        claim, failures = self.claim, self.failures
        if not failures or not self.rows or failures[0].position > self.rows[0][0]:
            return
        if claim.failure is None or claim.failure.position <= claim.done:
            claim.failure = failures.popleft()
            self.slot.waited = False

    def settle(self) -> None:
        """Drop messages that are done, and update the queue's claim."""
        self._owner.settle(self)
        self._owner.publish()


class LaneRunner(Protocol):
    """Runs the messages of lanes; see `lane_turns.LaneTurns`."""

    def run_lane(self, turn: Turn, lane: Lane, until: float) -> TurnResult:
        """Run messages of a lane until a time; return how that ended."""

    def broker_failed(self, slot: Slot, what: str, error: Exception) -> TurnResult:
        """Let a slot wait for its broker, which failed."""

    def note_expired(self, slot: Slot, position: int) -> None:
        """Count a message that the broker took back."""


@dataclass(frozen=True, slots=True)
class LaneSpec:
    """How a queue is divided into lanes.

    :ivar limit: maximum lanes that run at once.
    :ivar single: there is one lane only, because the queue is processed in order: nothing is
        read while it is blocked.
    :ivar key_of: returns the lane of a row.
    :ivar hold_seconds: maximum time for which the broker hides a message; None if it never does.
    """

    limit: int
    single: bool
    key_of: Callable[[Row], object]
    hold_seconds: float | None
