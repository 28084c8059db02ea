"""Run queues with any order but ``order="queue"``, so that not all messages wait in one line.

A *lane* is a queue within a queue: the messages of one key, in their order. With ``order="none"``
each message is a separate lane. With ``order="priority"`` each priority is a lane (`priorities`).
Lanes and queues end their messages by the same rules (`pipeline`, `outcomes`). A backoff, a block
or a dead letter that the broker cannot store holds up only its own lane.

=========  =========================================================  =======================
a lane is  meaning                                                    next
=========  =========================================================  =======================
ready      its first message may be started                           running
running    a greenlet of its own runs its messages                    ready, parked, blocked,
                                                                      (gone, when it is empty)
parked     until a time: the backoff of a message or of the broker    ready
blocked    its first message waits for an operator                    (a new claim)
=========  =========================================================  =======================

The turn of a queue with lanes lasts while any lane runs. The turn reads ahead, starts lanes while
permits are free, and waits for a lane to end. The turn has at most `WINDOW` pending messages and
`HELD_BYTES` of bodies in memory. If the messages of one key fill the window, the queue waits until
that key makes progress. With fewer messages, a key does not hold up other keys.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import count
from operator import itemgetter
from typing import Any

import gevent
from gevent.event import Event

from qdo.coordination.protocol.claims import Claim
from qdo.coordination.znodes.queue_node import FailureRecord
from qdo.encoding import parsed
from qdo.jobs.options import Order
from qdo.message import priority_of
from qdo.worker.engine.context import Engine
from qdo.worker.engine.jobs import Turn, in_batches
from qdo.worker.engine.lane import Lane, LaneClaim, LaneProgress, LaneSlot, LaneSpec
from qdo.worker.engine.limits import Grant
from qdo.worker.engine.outcomes import Outcomes
from qdo.worker.engine.priorities import SLICE_SECONDS, Priorities
from qdo.worker.engine.row_runner import RowRunner
from qdo.worker.engine.slot import UNREADABLE, Row, Rows, Slot, TurnResult, end_attempt
from qdo.worker.engine.subscriptions import advance_to_end, refresher
from qdo.worker.executors.base import AttemptEnded, JobAborted, MessageExpired

# Maximum number of pending messages of one queue. A turn has read these messages, and they are not
# done.
WINDOW = 10_000
# Maximum bytes of one queue's pending messages. A few large messages must not fill the memory.
HELD_BYTES = 32 << 20
# Maximum bytes for all queues of a process. A queue without pending messages may always read a
# message.
HELD_BYTES_IN_ALL = 128 << 20
# Seconds between a turn's checks whether the lease is valid again or other queues hold fewer bytes.
LOOK_SECONDS = 0.05
# Bytes of a row without its body, including its entries in the window and the lane.
_ROW_BYTES = 400

# Functions that return the key of a row's lane.
_LANE_OF: Mapping[Order, Callable[[Row], object]] = {
    "queue": lambda row: None,
    "key": itemgetter(2),
    "none": itemgetter(0),
    "priority": lambda row: priority_of(parsed(row[3]) or {}),
}


class Lanes:
    """The lanes of one claim of one queue.

    :ivar claim: the queue's claim; `publish` updates the claim before the owner records it.
    :ivar progress: the done, pending and cancelled messages.
    :ivar admitted_at: clock time at which the queue's own rate lets the next lane start.
    :ivar grant: the permits for the next lane to start; see `limits`.
    :param turn: the turn that creates the lanes; the lanes use its slot, claim and job.
    """

    def __init__(self, engine: Engine, turn: Turn, spec: LaneSpec, runner: LaneTurns) -> None:
        slot = turn.slot
        claim = turn.claim
        self.claim = claim
        self.counters = engine.counters
        self._engine = engine
        self._clock = engine.clock
        self._permits = engine.permits
        self._turn = turn
        self._slot = slot
        self._spec = spec
        self._runner = runner
        self._subscription = slot.subscription
        self._lanes: dict[object, Lane] = {}
        self.progress = LaneProgress(
            claim, self._lanes.values(), slot.subscription, spec.hold_seconds, engine.clock
        )
        by_priority = turn.job.order == "priority"
        self._priorities = Priorities(self.progress, self._lanes.values()) if by_priority else None
        # Reading runs ahead of processing, so the reader has its own slot and claim.
        self._source = Slot(slot.queue, slot.durations)
        self._source.subscription = slot.subscription
        self._source.member = slot.member
        self._source.claim = self._cursor = Claim(slot.queue, claim.fence, claim.done, claim.lease)
        self._ready: deque[Lane] = deque()
        self._running: dict[Lane, Any] = {}
        self._parked: list[tuple[float, int, Lane]] = []
        self._order = count()
        self._bytes = 0
        self._tip = False
        self._wakes = 0
        self._turning = False
        self._stopping = False
        self._gate = turn.job.gate
        self.admitted_at = 0.0
        self.queue = slot.queue
        self.grant: Grant | None = None
        self.awaits_permit = False
        self._error: BaseException | None = None
        self._news = Event()
        claim.refresh = self.publish

    def turn(self) -> TurnResult:
        """Run lanes until all are idle or the claim or the lease ends; return the result."""
        self._tip = False
        self._turning = True
        try:
            while True:
                # Clear first, because news during `_advance` must end the wait below.
                self._news.clear()
                result = self._advance()
                # `LanePermits` notified only this queue of a free permit. If the permit is still
                # free, notify the next queue.
                self._permits.notify_next()
                if not self._running and result is not None:
                    break
                self._news.wait(self._pause(result))
        finally:
            self._turning = False
            if self._gate is not None:
                self._gate.limits.leave(self)
            # Thousands of queues may be idle at once, so an idle queue keeps no reader.
            self._engine.fetcher.clear(self._source)
        if self._error is not None:
            raise self._error
        return result

    def _advance(self) -> TurnResult | None:
        """Start lanes; return the result of the turn, or None while the turn continues."""
        claim = self.claim
        now = self._clock()
        # The claim or the lease may have ended while the turn waited for a lane.
        if self._slot.claim is not claim or claim.over:
            return TurnResult.ENDED
        if claim.paused:
            return TurnResult.STILL
        if self._stopping or (self._spec.single and self._is_blocked()):
            return TurnResult.HELD
        if now >= claim.lease.until:
            return TurnResult.PAUSED
        while self._parked and self._parked[0][0] <= now:
            self._ready.append(heapq.heappop(self._parked)[2])
        # With priorities, read all messages before a lane starts, because the last may be the most
        # urgent.
        while self._priorities is not None and not self._running and self._wants_more():
            self._read()
        while self._start_ready() and self._wants_more():
            self._read()
        if self._running or (self._ready and self.admitted_at <= now):
            return None
        due = [self._source.not_before] if self._source.not_before > now else []
        due += [self.admitted_at] if self._ready else []
        due += [self._parked[0][0]] if self._parked else []
        if not self._tip and self._permits.held_bytes >= HELD_BYTES_IN_ALL:
            # Queues do not notify each other when they hold fewer bytes.
            due.append(now + LOOK_SECONDS)
        if due:
            self._slot.not_before = min(due)
            return TurnResult.WAIT
        return TurnResult.TIP

    def _is_blocked(self) -> bool:
        return any(lane.is_blocked for lane in self._lanes.values())

    def _start_ready(self) -> bool:
        """Start ready lanes while permits are free; return whether more lanes could start."""
        while len(self._running) < self._spec.limit:
            if not self._ready:
                return True
            if not self._permits.acquire(self):
                return False
            if self._gate is not None and not self._gate.enter_lane(self, self.claim.fence):
                # A queue that waits for a limit must not keep a permit from the lanes of other
                # queues.
                self._permits.release()
                return False
            choice = self._priorities
            lane = self._ready[0] if choice is None else choice.first_of(self._ready)
            self._ready.remove(lane)
            lane.slot.grant = self.grant
            self.grant = None
            self._running[lane] = gevent.spawn(self._run, lane)
        return False

    def admits(self, lane: Lane) -> bool:
        """Return whether a running lane may start its next message before the ready lanes."""
        if self._priorities is None:
            return True
        return not self._wants_more() and self._priorities.first_of((lane, *self._ready)) is lane

    def _wants_more(self) -> bool:
        if self._tip or self._source.not_before > self._clock():
            return False
        if not self.progress:
            return True
        full = len(self.progress) >= WINDOW or self._bytes >= HELD_BYTES
        return not full and self._permits.held_bytes < HELD_BYTES_IN_ALL

    def _pause(self, result: TurnResult | None) -> float | None:
        """Return the seconds for which the turn may wait for news; None for no limit."""
        if result is not None:
            return LOOK_SECONDS if result is TurnResult.PAUSED else None
        now = self._clock()
        waits = (self._source.not_before, self.admitted_at if self._ready else 0.0)
        due = [self.claim.lease.until, *(at for at in waits if at > now)]
        if self._parked and len(self._running) < self._spec.limit:
            due.append(self._parked[0][0])
        return max(0.0, min(due) - now)

    def wake(self) -> None:
        """Check again, because there may be new messages."""
        self._tip = False
        self._wakes += 1
        self._news.set()

    def notify(self) -> None:
        """Check again, because a permit is free or the claim has changed."""
        self._news.set()

    @property
    def takes_more(self) -> bool:
        """Whether new messages may start while all earlier messages wait."""
        return not self._spec.single and self._source.not_before <= self._clock()

    @property
    def wants_permit(self) -> bool:
        """Whether a lane needs only a permit to start."""
        return self._turning and bool(self._ready) and len(self._running) < self._spec.limit

    def decide(self, decisions: Mapping[int, FailureRecord | None]) -> None:
        """Apply operators' decisions about messages, without an effect on other lanes."""
        for position, failure in decisions.items():
            lane = self.progress.decide(position, failure)
            if lane is None:
                continue
            if lane in self._running:
                # The lane's next run applies the decision. A decision to skip or dead-letter ends a
                # running attempt.
                if failure is not None:
                    end_attempt(lane.slot)
            elif lane not in self._ready:
                self._parked = [entry for entry in self._parked if entry[2] is not lane]
                heapq.heapify(self._parked)
                self._ready.append(lane)
        self._news.set()

    def stop(self) -> None:
        """Start no more messages, even if the claim is open."""
        self._stopping = True
        self._news.set()

    def in_flight(self) -> list[Slot]:
        return [lane.slot for lane in self._running if lane.slot.message is not None]

    def is_finished(self) -> bool:
        """Update the claim; return whether no message is pending."""
        return self.progress.is_finished()

    def publish(self, changed: bool = False) -> None:
        """Update the claim; `changed` means that a lane's failure may have changed."""
        if changed:
            self.progress.lane_ended()
        self.progress.publish()

    def discard(self) -> None:
        """Stop counting the memory of the queue's messages."""
        self._count_bytes(-self._bytes)

    def _read(self) -> None:
        if self._permits.held_bytes >= HELD_BYTES_IN_ALL:
            # This queue has no pending messages, and must read one to make progress.
            self._source.limit = 1
        wakes = self._wakes
        try:
            rows: Rows = self._engine.fetcher.fetch(self._source, self._cursor)
        except Exception as error:  # noqa: BLE001 - brokers raise what their libraries raise
            self._runner.broker_failed(self._source, UNREADABLE, error)
            return
        taken = 0
        for row in rows:
            taken += 1
            self._cursor.done = row[0]
            if self.progress.add(row[0]):
                self._add(row)
        self._engine.fetcher.learn(self._source, taken, 0)
        # A wake during the fetch may concern a message that the fetch has missed.
        self._tip = not taken and wakes == self._wakes

    def _add(self, row: Row) -> None:
        key = self._spec.key_of(row)
        lane = self._lanes.get(key)
        if lane is None:
            claim = LaneClaim(self.claim, row[0] - 1)
            lane = Lane(self, key, LaneSlot(self._slot, self.claim, claim), claim)
            lane.slot.origin = self._source.origin
            self._lanes[key] = lane
            self._ready.append(lane)
        failure = self.progress.take_failure(row[0])
        if failure is None and self._subscription is not None:
            failure = self._subscription.failure(row[0])
        if failure is not None:
            lane.failures.append(failure)
        lane.rows.append(row)
        self._count_bytes(len(row[1]) + _ROW_BYTES)

    def _count_bytes(self, change: int) -> None:
        self._bytes += change
        self._permits.held_bytes += change

    def _run(self, lane: Lane) -> None:
        """Run a lane until it is idle or other lanes wait, as the body of its greenlet."""
        slot = lane.slot
        slot.in_flight_index = self._engine.in_flight.take(self._slot.label)
        slot.greenlet = gevent.getcurrent()
        slot.started_at = self._clock()
        result = TurnResult.ENDED
        try:
            result = self._run_on(lane)
        except (AttemptEnded, MessageExpired):
            # The job had already ended. The lane continues with the operator's decision, or without
            # the expired message.
            result = TurnResult.MORE
        except JobAborted:
            self._stopping = True
        except BaseException as error:  # noqa: BLE001 - raised where the turn ends
            self._error = error
            self._stopping = True
        finally:
            in_doubt = self._clock() >= self.claim.lease.until
            self._engine.in_flight.give_back(slot.in_flight_index, in_doubt=in_doubt)
            slot.greenlet = slot.message = None
            # Delete the lane before `release`, which asks each queue, including this queue, for its
            # running lanes.
            del self._running[lane]
            self._permits.release()
            if slot.grant is not None and self._gate is not None:
                self._gate.limits.leave(slot)
            self._place(lane, result)
            self._news.set()

    def _run_on(self, lane: Lane) -> TurnResult:
        claim = self.claim
        while True:
            now = self._clock()
            # Check before each run, because other greenlets have run after the check of the turn.
            if not claim.open or now >= claim.lease.until or self._stopping:
                return TurnResult.MORE
            sliced = self._priorities is not None
            seconds = SLICE_SECONDS if sliced else self._engine.settings.now.turn_seconds
            until = min(claim.lease.until, now + seconds)
            lane.take_over()
            self.settle(lane)
            self.drop_expired(lane)
            lane.take_failure()
            result = self._runner.run_lane(self._turn, lane, until)
            self.settle(lane)
            if result is not TurnResult.MORE or not lane.rows or self._ready or sliced:
                return result
            if self._gate is not None and lane.slot.grant is None:
                return result  # the lane has no permit for its next message
            # Even a single busy lane must let heartbeats and checkpoints run.
            gevent.sleep(0)

    def settle(self, lane: Lane) -> None:
        """Drop the done messages of a lane."""
        rows = lane.rows
        done = lane.claim.done
        while rows and rows[0][0] <= done:
            position, body, _, _ = rows.popleft()
            self.progress.done(position)
            if self._priorities is not None:
                self._priorities.count(position, self._ready)
            self._count_bytes(-len(body) - _ROW_BYTES)

    def drop_expired(self, lane: Lane) -> None:
        """Drop cancelled messages, and messages that the broker took back and will redeliver."""
        subscription = self._subscription
        slot = lane.slot
        self.progress.drop_cancelled(lane, self.settle)
        if subscription is None:
            return
        while lane.rows and not subscription.is_held(lane.rows[0][0]):
            position = lane.rows[0][0]
            self._runner.note_expired(self._slot, position)
            pending = slot.pending_dead_letter
            if pending is not None and pending.position == position:
                # Otherwise the worker would store the dead letter twice.
                slot.pending_dead_letter = slot.dead_letter_message = None
            lane.claim.done = position
            self.settle(lane)
            self.progress.drop_cancelled(lane, self.settle)

    def _place(self, lane: Lane, result: TurnResult) -> None:
        """Delete, park or requeue a lane after it ran."""
        # The run may have changed the lane's failure, which the queue's claim includes.
        self.progress.lane_ended()
        if not lane.rows:
            del self._lanes[lane.key]
        elif result is TurnResult.WAIT:
            heapq.heappush(self._parked, (lane.slot.not_before, next(self._order), lane))
        elif result is not TurnResult.HELD:
            self._ready.append(lane)
        elif not lane.is_blocked:
            self._stopping = True  # the job asked to stop


class LaneTurns:
    def __init__(self, engine: Engine, outcomes: Outcomes, rows: RowRunner) -> None:
        self._turns_changed: Callable[[int], None] = lambda change: None
        self._engine = engine
        self._rows = rows
        self.broker_failed = outcomes.broker_failed
        self.note_expired = outcomes.note_expired

    def report_to(self, turns_changed: Callable[[int], None]) -> None:
        """Set the function that gets 1 when a turn begins to wait for lanes, and -1 at its end."""
        self._turns_changed = turns_changed

    def run(self, turn: Turn) -> TurnResult:
        """Run the lanes of a queue; return the result of the turn."""
        slot = turn.slot
        claim = turn.claim
        lanes = slot.lanes
        if lanes is None or lanes.claim is not claim:
            lanes = slot.lanes = self._make_lanes(turn)
        # The turn lasts as long as its lanes, so another queue may take its place among running
        # queues.
        self._turns_changed(1)
        try:
            result = lanes.turn()
        finally:
            self._turns_changed(-1)
        finished = result is TurnResult.TIP and lanes.is_finished()
        if turn.in_force:
            if finished:  # save memory, because thousands of queues may be idle at once
                subscription = slot.subscription
                slot.lanes = None
                claim.refresh = None if subscription is None else refresher(claim, subscription)
                advance_to_end(slot, claim)
            turn.member.progress(claim)
        return result

    def _make_lanes(self, turn: Turn) -> Lanes:
        job = turn.job
        engine = self._engine
        # If an earlier job with another order has left done messages above the watermark, a batch
        # job also runs in lanes. The job then gets each message in a separate batch.
        if job.batch:
            call = engine.observers.bind(in_batches(job.call))
            turn = replace(turn, job=replace(job, call=call, batch=0))
        spec = LaneSpec(
            limit=job.lanes,
            single=job.order == "queue",
            key_of=_LANE_OF[job.order],
            hold_seconds=engine.broker.capabilities.hold_seconds,
        )
        return Lanes(engine, turn, spec, self)

    def run_lane(self, turn: Turn, lane: Lane, until: float) -> TurnResult:
        """Run messages of a lane until a clock time; return the result."""
        slot = lane.slot
        before = lane.started
        began = self._engine.clock()
        slot.unreturned = slot.unstarted = 0
        try:
            result = self._run_lane(turn, lane, until)
        finally:
            ended = self._engine.clock()
            taken = lane.started - before
            if not slot.unreturned:
                slot.durations.learn(taken - slot.unstarted, ended - began, ended - until)
            turn.note_successes(taken, slot)
            if (meter := turn.job.meter) is not None:
                meter.turn(slot, taken, began, until)
            # The lane continues with the claim that replaced its claim, even after AttemptEnded.
            decided = lane.take_over()
        return TurnResult.MORE if decided else result

    def _run_lane(self, turn: Turn, lane: Lane, until: float) -> TurnResult:
        job = turn.job
        lane_turn = Turn(lane.slot, turn.member, lane.claim, job)
        result = self._rows.finish_pending(lane_turn)
        if result is not None:
            return result
        if (left := turn.admit()) > 0:
            lane.slot.not_before = self._engine.clock() + left
            return TurnResult.WAIT
        rows = lane if job.gate is None else job.gate.rows(lane.slot, lane, turn.claim.fence)
        if not (job.every_message or lane_turn.has_failure or turn.claim.careful):
            return self._rows.run_rows(lane_turn, rows, until, 1)
        row = next(rows, None)
        if row is None:  # the broker took back all messages of the lane
            return TurnResult.MORE
        before = lane.claim.done
        result = self._rows.run_one(lane_turn, row, until, lane.settle)
        if lane_turn.must_record(before):
            # Settle first, because the queue's claim does not yet count this message as done.
            lane.settle()
            turn.member.record(turn.claim)
        return result
