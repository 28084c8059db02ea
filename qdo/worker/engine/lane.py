"""The parts of lanes: one lane with a claim and a slot of its own, and the progress of their queue.

`WatermarkTracker` tracks the progress of a queue whose messages finish out of order. A message is
*pending* from the time it is read until it is done. Everything up to the *low watermark* is done:
the watermark is recorded as ``last``. Messages done above it are kept as runs: a run ``(first,
newest)`` means that every message of the queue from the position `first` to the position `newest`
is done. Messages are only ever appended behind all others. Nothing can appear within a run, and
there is at most one run more than there are pending messages.

Kafka's Parallel Consumer and Pulsar's individual acknowledgements record the same, with bits
in place of runs: https://pulsar.apache.org/docs/concepts-messaging/#acknowledgment.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from math import inf
from operator import attrgetter
from typing import Protocol, TypeAlias

from qdo.brokers.base import Subscription
from qdo.coordination.protocol.claims import Claim
from qdo.coordination.znodes.queue_node import CancelOutcome, FailureRecord, OutOfOrderProgress
from qdo.coordination.znodes.values import encode
from qdo.worker.engine.slot import ClaimReports, Counters, Row, Slot

# Maximum runs of done messages recorded above the watermark: about 10 KB of JSON in the queue node.
# Messages done beyond them are repeated after a handover.
RUNS = 500
# Maximum JSON of recorded failing and blocked messages, the blocked ones first: a node must not
# grow with the keys that fail. Messages beyond it count attempts from 1 after a handover.
FAILURE_RECORDS_BYTES = 64 << 10


class LaneOwner(Protocol):
    """The lanes of the whole queue, as one lane and the permits see them; see `lanes.Lanes`."""

    counters: Counters

    @property
    def wants_permit(self) -> bool: ...

    def notify(self) -> None: ...

    def settle(self, lane: Lane) -> None: ...

    def drop_expired(self, lane: Lane) -> None: ...

    def admits(self, lane: Lane) -> bool: ...

    def publish(self, changed: bool = False) -> None: ...


class LanePermits:
    """Limits the lanes of all queues of a worker process: at most `count` of them run at once.

    :ivar held_bytes: approximate size of the messages that the lanes have read.
    """

    def __init__(self, count: int) -> None:
        self.held_bytes = 0
        self._free = count
        self._waiting: dict[LaneOwner, None] = {}

    @property
    def free(self) -> int:
        """Return how many lanes may still start."""
        return self._free

    @property
    def waiting(self) -> int:
        """Return how many queues wait for a permit."""
        return sum(lanes.wants_permit for lanes in self._waiting)

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
            # Since it asked, its turn may have ended, or its lanes may have got other permits.
            if lanes.wants_permit:
                lanes.notify()
                return


class LaneClaim(Claim):
    """The queue's claim as one lane sees it, with its own `done` and `failure`.

    A decision of an operator replaces it: it closes, and its lane continues with another one.
    """

    __slots__ = ("_own", "_whole")

    def __init__(self, whole: Claim, done: int) -> None:
        self._whole = whole
        super().__init__(whole.queue, whole.fence, done, whole.lease)

    @property
    def whole(self) -> Claim:
        return self._whole

    @property
    def open(self) -> bool:
        """Whether messages may be started."""
        return self._own and self._whole.open

    @open.setter
    def open(self, value: bool) -> None:
        self._own = value

    def replaced(self) -> LaneClaim:
        """Close it, and return the claim that continues it."""
        self.close()
        new = LaneClaim(self._whole, self.done)
        new.before = self
        return new


class LaneSlot(Slot):
    """The queue's slot as one lane sees it, with its own message, backoff and dead letter."""

    in_lane = True

    __slots__ = ("_whole", "_whole_claim", "lane_claim")

    def __init__(self, whole: Slot, whole_claim: Claim, lane_claim: LaneClaim) -> None:
        self._whole = whole
        self._whole_claim = whole_claim
        self.lane_claim = lane_claim
        super().__init__(whole.queue, whole.durations)

    @property
    def claim(self) -> Claim | None:
        """Return the lane's claim while the queue's is in force."""
        return self.lane_claim if self._whole.claim is self._whole_claim else None

    @claim.setter
    def claim(self, value: Claim | None) -> None:
        pass  # the constructor of `Slot` sets it; the queue's slot has it

    @property
    def member(self) -> ClaimReports | None:
        return self._whole.member

    @member.setter
    def member(self, value: ClaimReports | None) -> None:
        pass  # as above


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
        # The row that was returned before is still the first one: drop it if its message is done.
        self._owner.settle(self)
        self._owner.drop_expired(self)
        if not self.rows or self._first_has_failure() or not self._owner.admits(self):
            raise StopIteration
        self._owner.counters.attempts += 1
        self.started += 1
        return self.rows[0]

    def _first_has_failure(self) -> bool:
        # The message was read while the lane ran: only the next run handles its failure.
        return bool(self.failures) and self.failures[0].position == self.rows[0][0]

    @property
    def is_blocked(self) -> bool:
        """Whether a message waits for an operator."""
        return self.claim.failure is not None and self.claim.failure.held

    def is_failing(self, position: int) -> bool:
        """Return whether an attempt of a message has failed, here or elsewhere."""
        own = self.claim.failure
        pending = self.slot.pending_dead_letter
        return (
            (own is not None and own.position == position)
            or (pending is not None and pending.position == position)
            or any(failure.position == position for failure in self.failures)
        )

    def decide(self, position: int, failure: FailureRecord | None) -> bool:
        """Apply an operator's decision about one of its messages; return whether it is the first.

        The first one may be running: that attempt ends under the claim so far, and the next run of
        the lane applies the decision.
        """
        failures = [record for record in self.failures if record.position != position]
        if failure is not None:
            failures.append(replace(failure, position=position))
        self.failures = deque(sorted(failures, key=attrgetter("position")))
        if self.rows[0][0] != position:
            return False
        self.claim = self.slot.lane_claim = self.claim.replaced()
        return True

    def take_over(self) -> bool:
        """Continue after an operator's decision during a run; return whether there was one."""
        if self.claim.before is None:
            return False
        self.claim.take_over()
        self.slot.waited = False
        # A dead letter that was not stored yet is decided about anew.
        self.slot.pending_dead_letter = self.slot.dead_letter_message = None
        return True

    def take_failure(self) -> None:
        """Set the claim's failure to that of the next message, if it failed elsewhere."""
        claim = self.claim
        failures = self.failures
        if not failures or not self.rows or failures[0].position > self.rows[0][0]:
            return
        if claim.failure is None or claim.failure.position <= claim.done:
            claim.failure = failures.popleft()
            self.slot.waited = False

    def settle(self) -> None:
        """Drop messages that are done, and update the queue's claim."""
        self._owner.settle(self)
        self._owner.publish(changed=True)


@dataclass(frozen=True, slots=True)
class LaneSpec:
    """How a queue is divided into lanes."""

    # Maximum lanes that run at once.
    limit: int
    # There is one lane only, because the queue is processed in order: nothing is read while it is
    # blocked.
    single: bool
    # Returns the lane of a row.
    key_of: Callable[[Row], object]
    # Maximum time for which the broker hides a message; None if it never does.
    hold_seconds: float | None


Run: TypeAlias = tuple[int, int]


class _Pending:
    """A pending message, and the run of done ones directly behind it (`first` 0: no run)."""

    __slots__ = ("after", "before", "first", "newest")

    def __init__(self, before: _Pending | None) -> None:
        self.before = before
        self.after: _Pending | None = None
        self.first = 0
        self.newest = 0


class WatermarkTracker:
    """The messages of one queue from the watermark to the newest one read.

    Adding and finishing a message take constant time, whatever the order. Memory grows with the
    number of pending messages, not with the number of done ones.

    :param last: the watermark to begin with.
    :param runs: recorded runs of done messages above it, in ascending order.
    """

    def __init__(self, last: int, runs: Iterable[Run] = ()) -> None:
        self._known = [run for run in runs if run[1] > last]
        # The lowest one last: `add` removes it in constant time.
        self._known.reverse()
        self._head = _Pending(None)
        self._head.newest = last
        self._tail = self._head
        self._pending: dict[int, _Pending] = {}
        self._ranges = 0

    @property
    def last(self) -> int:
        """Return the watermark: everything up to this position is done."""
        return self._head.newest

    def __len__(self) -> int:
        return len(self._pending)

    @property
    def ranges(self) -> int:
        """Return how many runs are above the watermark, the recorded ones included."""
        return self._ranges + len(self._known)

    def __contains__(self, position: int) -> bool:
        return position in self._pending

    def add(self, position: int) -> bool:
        """Add the next message that was read; return False if it is already done."""
        while self._known and self._known[-1][1] < position:
            self._known.pop()
        if self._known and self._known[-1][0] <= position:
            # Done under an earlier claim: it joins the run behind the last pending message.
            tail = self._tail
            if not tail.first:
                tail.first = position
                self._ranges += tail is not self._head
            tail.newest = position
            if self._known[-1][1] == position:
                self._known.pop()
            return False
        node = _Pending(self._tail)
        self._tail.after = self._tail = self._pending[position] = node
        return True

    def done(self, position: int) -> None:
        """Mark a pending message as done; raise KeyError for one that is not pending."""
        node = self._pending.pop(position)
        before = node.before
        after = node.after
        if before is None:
            raise KeyError(position)
        # The message, and the run behind it, join the run behind the pending one before it. A run
        # behind the head only raises the watermark: it is not counted.
        if node.first:
            self._ranges -= 1
        if not before.first:
            before.first = position
            self._ranges += before is not self._head
        before.newest = node.newest or position
        before.after = after
        if after is None:
            self._tail = before
        else:
            after.before = before

    def runs(self, most: int) -> tuple[Run, ...]:
        """Return the lowest runs above the watermark, at most `most`."""
        runs: list[Run] = []
        node = self._head.after
        while node is not None and len(runs) < most:
            if node.first:
                runs.append((node.first, node.newest))
            node = node.after
        # Recorded runs that were not read to their end are above all others.
        for first, newest in reversed(self._known):
            if len(runs) == most:
                break
            if runs and first <= runs[-1][1]:
                runs[-1] = (runs[-1][0], newest)
            elif newest > self.last:
                runs.append((max(first, self.last + 1), newest))
        return tuple(runs)


class LaneProgress:
    """Progress of one claim.

    :param lanes: the lanes as they are now, for instance the view of a dict.
    :param subscription: notified of every message that is done.
    """

    def __init__(
        self,
        claim: Claim,
        lanes: Collection[Lane],
        subscription: Subscription | None,
        hold_seconds: float | None,
        clock: Callable[[], float],
    ) -> None:
        self._claim = claim
        self._lanes = lanes
        self._subscription = subscription
        self._positions = claim.positions
        self._clock = clock
        above = claim.out_of_order or OutOfOrderProgress()
        failures = (
            above.other_failures
            if claim.failure is None
            else (claim.failure, *above.other_failures)
        )
        self._cancelled = set(above.cancelled)
        self._read = claim.done
        # Unstable positions were not recorded in order to be skipped.
        self._window = WatermarkTracker(
            claim.done, above.done_ranges if self._positions.stable else ()
        )
        self._not_received = {
            self._positions.identity(failure.position): failure
            for failure in failures
            if failure.position > claim.done
        }
        self._hidden_until = inf if hold_seconds is None else clock() + hold_seconds
        self._changed = False

    def __len__(self) -> int:
        """Return the number of messages that are read and not done."""
        return len(self._window)

    @property
    def ranges(self) -> int:
        """Return how many ranges of done messages are above the watermark."""
        return self._window.ranges

    def add(self, position: int) -> bool:
        """Add the next message that was read; return False if it is done, or cancelled."""
        self._read = position
        if self._window.add(position):
            if position not in self._cancelled:
                return True
            self.done(position)
        # An operator decided about it while the attempt ran that was its last: it is over.
        self._not_received.pop(self._positions.identity(position), None)
        self._changed = True
        return False

    def cancel(self, position: int) -> CancelOutcome:
        """Let no lane start a message; return whether that was still possible."""
        if position in self._cancelled:
            return CancelOutcome.ALREADY
        if self._positions.identity(position) in self._not_received:
            return CancelOutcome.FAILING
        if position <= self._read:
            if position not in self._window:
                return CancelOutcome.DONE
            lane = self._lane_of(position)
            if lane is None or lane.claim.done >= position:
                return CancelOutcome.DONE
            if lane.is_failing(position):
                return CancelOutcome.FAILING
            # Without a greenlet, the lane waits, or was started and did not run yet.
            if lane.slot.greenlet is not None and lane.rows[0][0] == position:
                return CancelOutcome.STARTED
        self._cancelled.add(position)
        self._changed = True
        return CancelOutcome.CANCELLED

    def decide(self, position: int, failure: FailureRecord | None) -> Lane | None:
        """Apply an operator's decision; return the lane if the message is the first one there."""
        self._changed = True
        same = self._positions.identity(position)
        stable = self._positions.stable
        for lane in self._lanes:
            for row in lane.rows:
                if self._positions.identity(row[0]) == same:
                    pending = row[0] > lane.claim.done
                    return lane if pending and lane.decide(row[0], failure) else None
        if failure is None:
            self._not_received.pop(same, None)
        elif position > self._read or not stable:
            self._not_received[same] = failure
        return None

    def _lane_of(self, position: int) -> Lane | None:
        return next(
            (lane for lane in self._lanes if any(row[0] == position for row in lane.rows)), None
        )

    def drop_cancelled(self, lane: Lane, settle: Callable[[Lane], None]) -> None:
        """Drop the first messages of a lane if they are cancelled."""
        while self._cancelled and lane.rows and lane.rows[0][0] in self._cancelled:
            lane.claim.done = lane.rows[0][0]
            settle(lane)

    def take_failure(self, position: int) -> FailureRecord | None:
        """Return the recorded failure of a message that is received again, and forget it."""
        if not self._not_received:
            return None
        failure = self._not_received.pop(self._positions.identity(position), None)
        return None if failure is None else replace(failure, position=position)

    def done(self, position: int) -> None:
        """Record that a message is done, and acknowledge it at a polled broker."""
        self._window.done(position)
        if self._subscription is not None:
            self._subscription.done(position)
        self._changed = True

    def lane_ended(self) -> None:
        """Record that a lane ran: its failure may have changed."""
        self._changed = True

    def is_finished(self) -> bool:
        """Update the claim; return whether nothing is pending."""
        self.publish()
        if self._not_received and not self._window and self._clock() >= self._hidden_until:
            self._not_received.clear()  # no message can be hidden this long: they are gone
            self._changed = True
            self.publish()
        return not self._window and not self._not_received

    def publish(self) -> None:
        """Update the claim's `done`, `failure` and `out_of_order`."""
        claim = self._claim
        if self._subscription is not None:
            claim.unconfirmed = self._subscription.unconfirmed()
        if not self._changed:
            return
        self._changed = False
        # Nothing below switches greenlets: what is recorded fits together.
        claim.done = self._window.last
        failures = _most_important(self._failures())
        # An operator sees the first one, and decides about it.
        claim.failure = failures[0] if failures else None
        runs = self._window.runs(RUNS) if self._positions.stable else ()
        self._cancelled = {position for position in self._cancelled if position > claim.done}
        cancelled = tuple(sorted(self._cancelled))
        claim.out_of_order = OutOfOrderProgress(runs, tuple(failures[1:]), cancelled) or None

    def _failures(self) -> Iterator[FailureRecord]:
        for failure in self._not_received.values():
            # The watermark may have passed its position since it was recorded.
            yield replace(
                failure, position=self._positions.not_before(failure.position, self._window.last)
            )
        for lane in self._lanes:
            yield from lane.failures
            current = lane.claim.failure
            if current is not None and current.position > lane.claim.done:
                yield current


def _most_important(failures: Iterable[FailureRecord]) -> list[FailureRecord]:
    """Return the failures to record, blocked ones first: as many as fit into a node."""
    chosen: list[FailureRecord] = []
    size = 0
    for failure in sorted(failures, key=lambda failure: (not failure.blocked, failure.position)):
        size += len(encode(failure.dump()))
        # The first one is kept whatever its size: an operator decides about it.
        if chosen and size > FAILURE_RECORDS_BYTES:
            break
        chosen.append(failure)
    return chosen
