"""Turns of queues with lanes, and the runs of single lanes; see `lanes`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from operator import itemgetter

from qdo.jobs.options import Order
from qdo.worker.engine.bound_jobs import in_batches
from qdo.worker.engine.context import Engine
from qdo.worker.engine.lanes.lane import Lane, LaneSpec
from qdo.worker.engine.lanes.lanes import Lanes
from qdo.worker.engine.outcomes import Outcomes
from qdo.worker.engine.prefetch import Row
from qdo.worker.engine.row_runner import RowRunner
from qdo.worker.engine.slot import TurnResult
from qdo.worker.engine.subscriptions import advance_to_end, refresher
from qdo.worker.engine.turn import Turn

_LANE_OF: Mapping[Order, Callable[[Row], object]] = {
    "queue": lambda row: None,
    "key": itemgetter(2),
    "none": itemgetter(0),
}
"""The value that the messages of a lane have in common."""


class LaneTurns:
    """Runs turns of queues with lanes: the `lane.LaneRunner` of all of them.

    :ivar on_turn: called with 1 when a turn begins to wait for lanes, with -1 at its end.
    """

    def __init__(self, engine: Engine, outcomes: Outcomes, rows: RowRunner) -> None:
        self.on_turn: Callable[[int], None] = lambda change: None
        self._engine = engine
        self._rows = rows
        self.broker_failed = outcomes.broker_failed
        self.note_expired = outcomes.note_expired

    def run(self, turn: Turn) -> TurnResult:
        """Run the lanes of a queue until all are idle; return how the turn ended."""
        slot, claim = turn.slot, turn.claim
        lanes = slot.lanes
        if lanes is None or lanes.claim is not claim:
            lanes = slot.lanes = self._make_lanes(turn)
        self.on_turn(1)
        try:
            result = lanes.turn()
        finally:
            self.on_turn(-1)
        finished = result is TurnResult.TIP and lanes.is_finished()
        if turn.in_force:
            if finished:  # thousands of queues are idle at a time
                subscription = slot.subscription
                slot.lanes = None
                claim.refresh = None if subscription is None else refresher(claim, subscription)
                advance_to_end(slot, claim)
            turn.member.progress(claim)
        return result

    def _make_lanes(self, turn: Turn) -> Lanes:
        job, engine = turn.job, self._engine
        # Messages done above the watermark may come from a job with another order. A job that
        # takes batches gets each message up to there in a batch of its own.
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
        """Run messages of a lane until a time; return how that ended."""
        slot, before, began = lane.slot, lane.started, self._engine.clock()
        slot.unreturned = slot.unstarted = 0
        try:
            return self._run_lane(turn, lane, until)
        finally:
            ended, taken = self._engine.clock(), lane.started - before
            if not slot.unreturned:
                slot.durations.learn(taken - slot.unstarted, ended - began, ended - until)
            if (meter := turn.job.meter) is not None:
                meter.turn(slot, taken, began, until)

    def _run_lane(self, turn: Turn, lane: Lane, until: float) -> TurnResult:
        job = turn.job
        lane_turn = Turn(lane.slot, turn.member, lane.claim, job)
        result = self._rows.finish_pending(lane_turn)
        if result is not None:
            return result
        rows = lane if job.gate is None else job.gate.rows(lane.slot, lane, turn.claim.fence)
        if not job.every_message and not lane_turn.has_failure:
            return self._rows.run_rows(lane_turn, rows, until, 1)
        row = next(rows, None)
        if row is None:  # the broker took back the lane's messages
            return TurnResult.MORE
        result = self._rows.run_one(lane_turn, row, until)
        if job.every_message and result is TurnResult.MORE and lane_turn.in_force:
            lane.settle()
            turn.member.record(turn.claim)
        return result
