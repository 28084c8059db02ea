"""The parts of lanes: a lane, its claim and slot, and the progress of its queue.

`WatermarkTracker` tracks the progress of a queue whose messages finish out of order. A message is
*pending* from its read until it is done. All messages up to the *low watermark* are done. The
worker records the watermark as ``last``. Done messages above the watermark form runs. A run
``(first, newest)`` means that every message from the position `first` to the position `newest` is
done. Brokers append new messages after all others, so no message can appear within a run. The
number of runs exceeds the number of pending messages by at most one.

Kafka's Parallel Consumer and Pulsar's individual acknowledgements record the same progress as bits
instead of runs: https://pulsar.apache.org/docs/concepts-messaging/#acknowledgment.
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

# Maximum number of recorded runs above the watermark, about 10 KB of JSON in the queue node. The
# next owner repeats done messages that are not in a recorded run.
RUNS = 500
# Maximum bytes of JSON for recorded failures. Blocked messages come first. Without a limit, a node
# would grow with each key that fails. Messages beyond the limit count attempts from 1 after a
# handover.
FAILURE_RECORDS_BYTES = 64 << 10


class LaneOwner(Protocol):
    """The interface of `lanes.Lanes` for one lane and for the permits."""

    counters: Counters

    @property
    def wants_permit(self) -> bool: ...

    def notify(self) -> None: ...

    def settle(self, lane: Lane) -> None: ...

    def drop_expired(self, lane: Lane) -> None: ...

    def admits(self, lane: Lane) -> bool: ...

    def publish(self, changed: bool = False) -> None: ...


class LanePermits:
    """Limits the running lanes of all queues of a worker process to `count`.

    :ivar held_bytes: approximate bytes of the messages that the lanes have read.
    """

    def __init__(self, count: int) -> None:
        self.held_bytes = 0
        self._free = count
        self._waiting: dict[LaneOwner, None] = {}

    @property
    def free(self) -> int:
        """The number of lanes that may still start."""
        return self._free

    @property
    def waiting(self) -> int:
        """The number of queues that wait for a permit."""
        return sum(lanes.wants_permit for lanes in self._waiting)

    def acquire(self, lanes: LaneOwner) -> bool:
        """Take a permit; if none is free, return False and notify `lanes` of a later permit."""
        if not self._free:
            self._waiting[lanes] = None
            return False
        self._free -= 1
        return True

    def release(self) -> None:
        """Take back the permit of a lane that stopped running, and notify the next queue."""
        self._free += 1
        self.notify_next()

    def notify_next(self) -> None:
        """If a permit is free, notify the queue that has waited longest."""
        while self._free and self._waiting:
            lanes = next(iter(self._waiting))
            del self._waiting[lanes]
            # The queue may no longer want the permit: its turn may have ended, or its lanes may
            # have got other permits.
            if lanes.wants_permit:
                lanes.notify()
                return


class LaneClaim(Claim):
    """The queue's claim for one lane, with its own `done` and `failure`.

    An operator's decision closes this claim, and the lane continues with a new claim.
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
        """Whether the lane may start messages."""
        return self._own and self._whole.open

    @open.setter
    def open(self, value: bool) -> None:
        self._own = value

    def replaced(self) -> LaneClaim:
        """Close this claim and return its successor."""
        self.close()
        new = LaneClaim(self._whole, self.done)
        new.before = self
        return new


class LaneSlot(Slot):
    """The queue's slot for one lane, with its own message, backoff and dead letter."""

    in_lane = True

    __slots__ = ("_whole", "_whole_claim", "lane_claim")

    def __init__(self, whole: Slot, whole_claim: Claim, lane_claim: LaneClaim) -> None:
        self._whole = whole
        self._whole_claim = whole_claim
        self.lane_claim = lane_claim
        super().__init__(whole.queue, whole.durations)

    @property
    def claim(self) -> Claim | None:
        """Return the lane's claim while the queue's claim is in force."""
        return self.lane_claim if self._whole.claim is self._whole_claim else None

    @claim.setter
    def claim(self, value: Claim | None) -> None:
        pass  # ignore the constructor of `Slot`; the queue's slot holds the value

    @property
    def member(self) -> ClaimReports | None:
        return self._whole.member

    @member.setter
    def member(self, value: ClaimReports | None) -> None:
        pass  # ignore the constructor of `Slot`; the queue's slot holds the value


class Lane:
    """An iterator over the pending messages of one key.

    Before the lane returns the next message, it drops the done messages. A returned message stays
    first until ``claim.done`` reaches its position.

    :ivar started: number of messages that the lane has returned.
    :ivar failures: the failures that other owners recorded, in message order. A failure becomes the
      claim's failure when its message comes next.
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
        # The last returned row is still the first row. Drop the row if its message is done.
        self._owner.settle(self)
        self._owner.drop_expired(self)
        if not self.rows or self._first_has_failure() or not self._owner.admits(self):
            raise StopIteration
        self._owner.counters.attempts += 1
        self.started += 1
        return self.rows[0]

    def _first_has_failure(self) -> bool:
        # The lane read the message during this run. The next run handles its failure.
        return bool(self.failures) and self.failures[0].position == self.rows[0][0]

    @property
    def is_blocked(self) -> bool:
        """Whether the lane's first message waits for an operator."""
        return self.claim.failure is not None and self.claim.failure.held

    def is_failing(self, position: int) -> bool:
        """Return whether an attempt of a message has failed under any owner."""
        own = self.claim.failure
        pending = self.slot.pending_dead_letter
        return (
            (own is not None and own.position == position)
            or (pending is not None and pending.position == position)
            or any(failure.position == position for failure in self.failures)
        )

    def decide(self, position: int, failure: FailureRecord | None) -> bool:
        """Apply an operator's decision; return whether the message is the lane's first.

        If the first message is running, its attempt ends under the old claim. The next run of the
        lane then applies the decision.
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
        """Continue after an operator's decision; return whether there was a decision."""
        if self.claim.before is None:
            return False
        self.claim.take_over()
        self.slot.waited = False
        # The decision also replaces a dead letter that the broker has not stored yet.
        self.slot.pending_dead_letter = self.slot.dead_letter_message = None
        return True

    def take_failure(self) -> None:
        """Set the claim's failure to the next message's failure, if another owner recorded any."""
        claim = self.claim
        failures = self.failures
        if not failures or not self.rows or failures[0].position > self.rows[0][0]:
            return
        if claim.failure is None or claim.failure.position <= claim.done:
            claim.failure = failures.popleft()
            self.slot.waited = False

    def settle(self) -> None:
        """Drop done messages, and update the queue's claim."""
        self._owner.settle(self)
        self._owner.publish(changed=True)


@dataclass(frozen=True, slots=True)
class LaneSpec:
    """The rules for dividing a queue into lanes."""

    # Maximum number of lanes that run at once.
    limit: int
    # Whether the queue runs in order, as one lane. Such a queue reads no messages while blocked.
    single: bool
    # Returns the key of the lane of a row.
    key_of: Callable[[Row], object]
    # Maximum seconds for which the broker hides a message; None if it never hides messages.
    hold_seconds: float | None


Run: TypeAlias = tuple[int, int]


class _Pending:
    """A pending message and the following run of done messages (`first` 0: no run)."""

    __slots__ = ("after", "before", "first", "newest")

    def __init__(self, before: _Pending | None) -> None:
        self.before = before
        self.after: _Pending | None = None
        self.first = 0
        self.newest = 0


class WatermarkTracker:
    """The messages of one queue from the watermark to the newest read message.

    Adding and finishing a message take constant time in any order. Memory grows with the number of
    pending messages, not with the number of done messages.

    :param last: the initial watermark.
    :param runs: recorded runs of done messages above the watermark, in ascending order.
    """

    def __init__(self, last: int, runs: Iterable[Run] = ()) -> None:
        self._known = [run for run in runs if run[1] > last]
        # Put the lowest run last, so that `add` can remove the run in constant time.
        self._known.reverse()
        self._head = _Pending(None)
        self._head.newest = last
        self._tail = self._head
        self._pending: dict[int, _Pending] = {}
        self._ranges = 0

    @property
    def last(self) -> int:
        """The watermark, up to which all messages are done."""
        return self._head.newest

    def __len__(self) -> int:
        return len(self._pending)

    @property
    def ranges(self) -> int:
        """The number of runs above the watermark, including recorded runs."""
        return self._ranges + len(self._known)

    def __contains__(self, position: int) -> bool:
        return position in self._pending

    def add(self, position: int) -> bool:
        """Add the next read message; return False if the message is already done."""
        while self._known and self._known[-1][1] < position:
            self._known.pop()
        if self._known and self._known[-1][0] <= position:
            # The message is done under an earlier claim. The message joins the run after the last
            # pending message.
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
        """Mark a message as done; raise KeyError if the message is not pending."""
        node = self._pending.pop(position)
        before = node.before
        after = node.after
        if before is None:
            raise KeyError(position)
        # The message and its following run join the run of the previous pending message. A run
        # after the head does not count, because it only raises the watermark.
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
        # Recorded runs that the worker has not fully read are above all other runs.
        for first, newest in reversed(self._known):
            if len(runs) == most:
                break
            if runs and first <= runs[-1][1]:
                runs[-1] = (runs[-1][0], newest)
            elif newest > self.last:
                runs.append((max(first, self.last + 1), newest))
        return tuple(runs)


class LaneProgress:
    """The progress of a queue that runs in lanes, under one claim.

    :param lanes: a live view of the current lanes.
    :param subscription: the subscription to notify of every done message; None if the broker is not
      polled.
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
        # The ranges record positions. Positions of an earlier owner are useless if they are not
        # stable.
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
        """Return the number of pending messages."""
        return len(self._window)

    @property
    def ranges(self) -> int:
        """The number of runs of done messages above the watermark."""
        return self._window.ranges

    def add(self, position: int) -> bool:
        """Add the next read message; return False if the message is done or cancelled."""
        self._read = position
        if self._window.add(position):
            if position not in self._cancelled:
                return True
            self.done(position)
        # Drop the recorded failure of a message that has ended.
        self._not_received.pop(self._positions.identity(position), None)
        self._changed = True
        return False

    def cancel(self, position: int) -> CancelOutcome:
        """Keep all lanes from starting a message; return the outcome of the cancellation."""
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
            # A lane without a greenlet waits, or has not run since its start.
            if lane.slot.greenlet is not None and lane.rows[0][0] == position:
                return CancelOutcome.STARTED
        self._cancelled.add(position)
        self._changed = True
        return CancelOutcome.CANCELLED

    def decide(self, position: int, failure: FailureRecord | None) -> Lane | None:
        """Apply an operator's decision; return the lane if the message is its first."""
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
        """Drop the cancelled messages at the beginning of a lane."""
        while self._cancelled and lane.rows and lane.rows[0][0] in self._cancelled:
            lane.claim.done = lane.rows[0][0]
            settle(lane)

    def take_failure(self, position: int) -> FailureRecord | None:
        """Remove and return the recorded failure of a received message, if any."""
        if not self._not_received:
            return None
        failure = self._not_received.pop(self._positions.identity(position), None)
        return None if failure is None else replace(failure, position=position)

    def done(self, position: int) -> None:
        """Record a message as done, and acknowledge the message at a polled broker."""
        self._window.done(position)
        if self._subscription is not None:
            self._subscription.done(position)
        self._changed = True

    def lane_ended(self) -> None:
        """Record that a lane ran, because its failure may have changed."""
        self._changed = True

    def is_finished(self) -> bool:
        """Update the claim; return whether no message is pending."""
        self.publish()
        if self._not_received and not self._window and self._clock() >= self._hidden_until:
            self._not_received.clear()  # no broker hides messages longer
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
        # The code below does not switch greenlets, so the recorded values are consistent.
        claim.done = self._window.last
        failures = _most_important(self._failures())
        # An operator sees the first failure and decides about its message.
        claim.failure = failures[0] if failures else None
        runs = self._window.runs(RUNS) if self._positions.stable else ()
        self._cancelled = {position for position in self._cancelled if position > claim.done}
        cancelled = tuple(sorted(self._cancelled))
        claim.out_of_order = OutOfOrderProgress(runs, tuple(failures[1:]), cancelled) or None

    def _failures(self) -> Iterator[FailureRecord]:
        for failure in self._not_received.values():
            # The watermark may have passed the recorded position of the failure.
            yield replace(
                failure, position=self._positions.not_before(failure.position, self._window.last)
            )
        for lane in self._lanes:
            yield from lane.failures
            current = lane.claim.failure
            if current is not None and current.position > lane.claim.done:
                yield current


def _most_important(failures: Iterable[FailureRecord]) -> list[FailureRecord]:
    """Return as many failures as fit into a node, with blocked messages first."""
    chosen: list[FailureRecord] = []
    size = 0
    for failure in sorted(failures, key=lambda failure: (not failure.blocked, failure.position)):
        size += len(encode(failure.dump()))
        # Always keep the first failure, because an operator decides about its message.
        if chosen and size > FAILURE_RECORDS_BYTES:
            break
        chosen.append(failure)
    return chosen
