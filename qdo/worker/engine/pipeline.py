"""Run one turn of a queue: start, fetch, decode, run, outcome, checkpoint.

========== ====================================================================================
step       what happens
========== ====================================================================================
start      find the job, and subscribe to the queue at a polled broker
fetch      take the remaining rows, or the prefetched batch, or fetch from the broker
decode     headers and body from JSON; the body stays bytes if the headers say so
run        call the job, while the claim is open, the lease is valid and the turn lasts
outcome    done: ``claim.done`` advances to the message; for the others see `outcomes`
checkpoint notify the member once a turn, or after every message if the app asks for it
========== ====================================================================================

The loop in `RowRunner.run_rows` decodes and runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from operator import length_hint
from types import FrameType
from typing import Any

from qdo.coordination.protocol.claims import Claim
from qdo.coordination.znodes.queue_node import FailureRecord
from qdo.errors import UnreachableError
from qdo.message import Message
from qdo.worker.engine.batches import Batches
from qdo.worker.engine.cancellations import Cancellations
from qdo.worker.engine.context import Engine
from qdo.worker.engine.jobs import NO_JOB, BoundJob, Turn
from qdo.worker.engine.lanes import LaneTurns
from qdo.worker.engine.outcomes import Outcomes
from qdo.worker.engine.row_runner import HOT_LOOP, RowRunner
from qdo.worker.engine.slot import UNREADABLE, ClaimReports, Rows, Slot, TurnResult
from qdo.worker.engine.subscriptions import FailureResumer, Subscriptions, advance_to_end
from qdo.worker.executors.base import JobAborted, MessageExpired
from qdo.worker.shared_memory import encode_label

_RUNNING = (HOT_LOOP, Batches._run.__code__)


class Pipeline:
    """Runs turns in the steps that the module's docstring lists."""

    def __init__(self, engine: Engine) -> None:
        self.counters = engine.counters
        self.limits = engine.limits
        self.permits = engine.permits
        self.history = engine.observers.history
        self.meters = engine.observers.meters
        self._engine = engine
        self._fetcher = engine.fetcher
        self._outcomes = Outcomes(engine)
        resumer = FailureResumer(engine, self._outcomes)
        self._rows = RowRunner(engine, self._outcomes, resumer)
        self._batches = Batches(engine, self._outcomes, resumer)
        self._lanes = LaneTurns(engine, self._outcomes, self._rows)
        self._subscriptions = Subscriptions(engine.broker, engine.clock)

    def report_to(
        self, lane_turns_changed: Callable[[int], None], resume: Callable[[Any], None]
    ) -> None:
        """Set the function that gets 1 when a turn begins to wait for lanes, and -1 at its end.

        :param resume: called with a queue, or the lanes of a queue, that got permits after a wait.
        """
        self._lanes.report_to(lane_turns_changed)
        self.limits.report_to(resume)

    def cancellations(self, slots: Mapping[str, Slot]) -> Cancellations:
        """Return an object that cancels messages of these queues."""
        return Cancellations(self._engine, slots)

    def paused_globs(self) -> dict[str, str]:
        """Return the globs of paused jobs, each with the error; see `breakers`."""
        return self._engine.jobs.paused_globs()

    def clear(self, slot: Slot) -> None:
        """Drop all replaceable data of a slot, because thousands of queues may be idle at once.

        The next fetch begins after ``claim.done``.
        """
        self._fetcher.clear(slot)
        slot.label = b""
        if slot.lanes is not None and slot.claim is not slot.lanes.claim:
            slot.lanes.discard()
            slot.lanes = None

    def end(self, slot: Slot) -> None:
        """Drop all data of the slot's claim, and release the messages held under the claim."""
        self.clear(slot)
        self._subscriptions.end(slot)
        self._engine.observers.workers.pop(slot.queue, None)
        if slot.awaits_permit or slot.grant is not None:
            self.limits.leave(slot)
        self.limits.forget(slot.queue)

    def turn(self, slot: Slot, member: ClaimReports, claim: Claim) -> TurnResult:
        """Run one turn of a queue; return the result."""
        self._fetcher.begin(slot)
        turn = self._start(slot, member, claim)
        result = turn if isinstance(turn, TurnResult) else self._run(turn)
        if result is TurnResult.TIP and slot.subscription is None:
            claim.careful = 0  # the previous owner had not begun a later message
        self._fetcher.rest(slot)
        if slot.grant is not None:
            self.limits.leave(slot)
        return result

    def _start(self, slot: Slot, member: ClaimReports, claim: Claim) -> Turn | TurnResult:
        """Return the turn with its job, or the result if no message may start."""
        if not claim.open:
            return TurnResult.ENDED if claim.over else TurnResult.STILL
        if self._engine.clock() >= claim.lease.until:
            return TurnResult.PAUSED
        try:
            turn = Turn(slot, member, claim, self._engine.jobs.find(slot.queue))
        except UnreachableError as error:
            return self._outcomes.broker_failed(slot, "no message is started", error)
        if not self._subscriptions.needed(turn):
            return turn
        try:
            self._subscriptions.begin(turn)
        except Exception as error:  # noqa: BLE001 - brokers raise what their libraries raise
            return self._outcomes.broker_failed(slot, UNREADABLE, error)
        return turn

    def _run(self, turn: Turn) -> TurnResult:
        if self._uses_lanes(turn):
            return self._run_lanes(turn)
        done = turn.claim.done
        failure = turn.claim.failure
        try:
            return self._run_serial(turn)
        except MessageExpired:
            # The job had already ended. The next fetch rereads held messages.
            self._fetcher.clear(turn.slot)
            return TurnResult.MORE
        except JobAborted:
            return TurnResult.ENDED
        finally:
            self._settle(turn, done, failure)

    def _settle(self, turn: Turn, done: int, failure: FailureRecord | None) -> None:
        """Report the progress of a turn at its end."""
        slot = turn.slot
        claim = turn.claim
        if self._runs_out_of_order(claim):
            # Lanes must read the next rows again, because an operator may have cancelled some.
            self._fetcher.clear(slot)
        if claim.done != done and slot.subscription is not None:
            slot.subscription.done_through(claim.done)
        if (claim.done != done or claim.failure is not failure) and turn.in_force:
            turn.member.progress(claim)

    def _runs_out_of_order(self, claim: Claim) -> bool:
        """Return whether messages after ``claim.done`` are done, failing or cancelled."""
        return claim.out_of_order is not None and claim.positions.stable

    def _uses_lanes(self, turn: Turn) -> bool:
        """Return whether messages may finish out of order."""
        claim = turn.claim
        job = turn.job
        lanes = turn.slot.lanes
        if job is NO_JOB:
            return False
        if self._runs_out_of_order(claim):
            return True
        if lanes is not None and lanes.claim is claim:
            return True  # only the lanes know the progress after the last checkpoint
        return not job.batch and (job.order != "queue" or not claim.positions.stable)

    def _run_lanes(self, turn: Turn) -> TurnResult:
        if turn.job.order == "queue" and turn.is_blocked:
            return TurnResult.HELD  # without reading a message
        self._label(turn, in_line=False)
        return self._lanes.run(turn)

    def _run_serial(self, turn: Turn) -> TurnResult:
        result = self._rows.finish_pending(turn)
        if result is not None:
            return result
        if turn.job is NO_JOB:
            return TurnResult.TIP
        if (left := turn.admit()) > 0:
            return self._outcomes.wait(turn.slot, left)
        result = self._run_batch(turn) if turn.job.batch else self._run_rows(turn)
        if result is TurnResult.TIP:
            advance_to_end(turn.slot, turn.claim)
        return result

    def _run_batch(self, turn: Turn) -> TurnResult:
        self._label(turn, in_line=True)
        claim = turn.claim
        before = claim.done
        result = self._batches.process(turn)
        if turn.must_record(before):
            turn.member.record(claim)  # waits until the record is stored, or the claim ends
        return result

    def _run_rows(self, turn: Turn) -> TurnResult:
        rows = self._fetch(turn)
        if isinstance(rows, TurnResult):
            return rows
        slot = turn.slot
        claim = turn.claim
        engine = self._engine
        # Check again, because other greenlets may have run during the fetch.
        began = engine.clock()
        until = min(claim.lease.until, began + engine.settings.now.turn_seconds)
        if not claim.open or began >= until:
            return TurnResult.MORE
        self._label(turn, in_line=True)
        slot.in_flight_index = engine.in_flight.take(slot.label)
        slot.unreturned = slot.unstarted = 0
        waiting = length_hint(rows)
        try:
            if turn.job.every_message or turn.has_failure or claim.careful:
                return self._rows.run_checked(turn, rows, until)
            return self._rows.run_rows(turn, rows, until, 1)
        finally:
            # A cancellation during the turn may have taken rows from the iterator.
            left = length_hint(rows) + slot.withheld
            self._count(turn, waiting - left, left, began, until)

    def _fetch(self, turn: Turn) -> Rows | TurnResult:
        """Return rows that may start, or the result of a turn without rows."""
        slot = turn.slot
        claim = turn.claim
        gate = turn.job.gate
        slot.withheld = 0
        try:
            rows = self._fetcher.read(slot, claim)
        except Exception as error:  # noqa: BLE001 - brokers raise what their libraries raise
            return self._outcomes.broker_failed(slot, UNREADABLE, error)
        if rows is None or self._runs_out_of_order(claim):
            return TurnResult.MORE  # the claim ended, or an operator cancelled a message
        if not length_hint(rows):
            return TurnResult.TIP
        if gate is None:
            return rows
        return gate.enter(slot, claim.fence) or gate.fetched(slot, rows, claim.fence)

    def _count(self, turn: Turn, taken: int, left: int, began: float, until: float) -> None:
        """Count the messages of a turn, and record their durations."""
        slot = turn.slot
        claim = turn.claim
        engine = self._engine
        ended = engine.clock()
        engine.in_flight.give_back(slot.in_flight_index, in_doubt=ended >= claim.lease.until)
        if not slot.unreturned:
            slot.durations.learn(taken - slot.unstarted, ended - began, ended - until)
        turn.note_successes(taken)
        self.counters.attempts += taken
        self._fetcher.learn(slot, taken, left)
        if (meter := turn.job.meter) is not None:
            meter.turn(slot, taken, began, until)

    def _label(self, turn: Turn, in_line: bool) -> None:
        slot = turn.slot
        if not slot.label:
            queue = "" if slot.is_pool else slot.queue
            slot.label = encode_label(queue, turn.member.name, in_line)
            if self._engine.observers:
                self._engine.observers.workers[slot.queue] = turn.member.name


@dataclass(frozen=True, slots=True)
class RunningJob:
    """A job on a stack, its message, and the index of its entry among the messages in flight."""

    message: Message
    job: BoundJob
    entry: int


def running_in(frame: FrameType | None) -> RunningJob | None:
    """Return the job of the innermost turn in a stack; None without a turn."""
    # Read the job from the stack of the main thread, because recording jobs would cost time for
    # every message.
    while frame is not None:
        if frame.f_code in _RUNNING:
            values = frame.f_locals
            message = values.get("message")
            job = values.get("job")
            if isinstance(message, Message) and isinstance(job, BoundJob):
                return RunningJob(message, job, values["slot"].in_flight_index)
        frame = frame.f_back
    return None
