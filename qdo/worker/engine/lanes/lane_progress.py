"""The progress of a queue with lanes: its watermark, runs above it, and failures."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import replace
from math import inf

from qdo.brokers.subscription import Subscription
from qdo.coordination.protocol.claims import Claim
from qdo.coordination.znodes.progress import (
    CancelOutcome,
    FailureRecord,
    OutOfOrderProgress,
)
from qdo.coordination.znodes.values import encode
from qdo.worker.engine.lanes.lane import Lane
from qdo.worker.engine.lanes.watermark import WatermarkTracker

RUNS = 500
"""Maximum runs of done messages recorded above the watermark: about 10 KB of JSON in the queue
node. Messages done beyond them are repeated after a handover."""
FAILURE_RECORDS_BYTES = 64 << 10
"""Maximum JSON of recorded failing and blocked messages, the blocked ones first: a node must not
grow with the keys that fail. Messages beyond it count attempts from 1 after a handover."""


class LaneProgress:
    """Progress of one claim.

    :param lanes: the lanes as they are now, for instance the view of a dict.
    :param subscription: notified of every message that is done.
    :param hold_seconds: maximum time for which the broker hides a message; None if it never does.
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
            self._positions.identity(each.position): each
            for each in failures
            if each.position > claim.done
        }
        self._hidden_until = inf if hold_seconds is None else clock() + hold_seconds
        self._changed = False

    def __len__(self) -> int:
        """Return the number of messages that are read and not done."""
        return len(self._window)

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
            if lane.slot.greenlet is not None and lane.rows[0][0] == position:
                return CancelOutcome.STARTED
        self._cancelled.add(position)
        self._changed = True
        return CancelOutcome.CANCELLED

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
        claim.done = self._window.last
        failures = _most_important(self._failures())
        # An operator sees the first one, and decides about it.
        claim.failure = failures[0] if failures else None
        runs = self._window.runs(RUNS) if self._positions.stable else ()
        self._cancelled = {each for each in self._cancelled if each > claim.done}
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
    for failure in sorted(failures, key=lambda each: (not each.blocked, each.position)):
        size += len(encode(failure.dump()))
        if chosen and size > FAILURE_RECORDS_BYTES:
            break
        chosen.append(failure)
    return chosen
