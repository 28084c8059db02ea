"""Decode rows and run their job in the hot loop of the worker.

Only `run_rows` handles messages inline. All other code runs once per turn or once per failure. For
a no-op job and bodies of 100 bytes, the worker has more than half the rate of a bare loop that
fetches, decodes and calls (`bench/throughput_profile.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from types import CodeType

import ujson

from qdo.encoding import is_raw
from qdo.encryption.marks import OpenedRows
from qdo.message import Message
from qdo.sending.once import UNIQUE, free_key
from qdo.worker.engine.context import Engine
from qdo.worker.engine.decoder import NO_HEADERS
from qdo.worker.engine.jobs import Turn
from qdo.worker.engine.outcomes import Outcomes
from qdo.worker.engine.slot import Row, Rows, TurnResult
from qdo.worker.engine.subscriptions import FailureResumer
from qdo.worker.executors.base import JobAborted, MessageExpired, NotStarted


class RowRunner:
    """Runs the rows of a queue or of a lane."""

    def __init__(self, engine: Engine, outcomes: Outcomes, resumer: FailureResumer) -> None:
        self._engine = engine
        self._outcomes = outcomes
        self._resumer = resumer
        self._counters = engine.counters
        self._opener = engine.decoder.opener
        self._positions_in_flight = engine.in_flight.notes(engine.broker.positions)

    def finish_pending(self, turn: Turn) -> TurnResult | None:
        """Store a pending dead letter; return None if messages may run, or the turn's result."""
        slot = turn.slot
        if slot.pending_dead_letter is not None:
            subscription = slot.subscription
            if subscription is None or subscription.is_held(slot.pending_dead_letter.position):
                return self._outcomes.store_dead_letter(turn, slot.pending_dead_letter)
            # The broker redelivers the message.
            slot.pending_dead_letter = slot.dead_letter_message = None
        return TurnResult.HELD if turn.is_blocked else None

    def run_rows(self, turn: Turn, rows: Rows, until: float, attempt: int) -> TurnResult:
        """Run the job for each row until the turn or the claim ends.

        The loop checks for the end after each message, so it starts every row that it takes from
        `rows`. Each message costs about 0.6 us, in addition to decoding its body and calling the
        job. Two more attribute accesses in this loop would cost 2 % of the rate.
        """
        slot = turn.slot
        claim = turn.claim
        job = turn.job
        in_flight = self._positions_in_flight
        index = slot.in_flight_index
        queue = slot.queue
        fence = claim.fence
        origin = slot.origin
        context = self._engine.context
        call = job.call
        clock = self._engine.clock
        loads = ujson.loads
        large = self._engine.decoder.large
        large_bytes = self._engine.decoder.large_bytes
        message: Message | None = None
        opened = None
        if self._opener is not None:
            rows = opened = OpenedRows(self._opener, queue, rows)
        try:
            for position, body, key, raw_headers in rows:
                in_flight[index] = position
                headers = NO_HEADERS if raw_headers is None else loads(raw_headers)
                slot.message = message = Message(
                    queue,
                    position,
                    body
                    if headers and is_raw(headers)
                    else loads(body)
                    if len(body) < large_bytes
                    else large(turn, position, body),
                    key,
                    headers,
                    fence,
                    attempt,
                    origin,
                )
                result = call(message, context)
                if result is not None:
                    turn.returned(position, result)
                if headers and UNIQUE in headers:  # 15 ns for each message with headers
                    free_key(self._engine.broker, queue, key, headers, message.id)
                claim.done = position
                if not claim.open or clock() >= until:
                    break
        except MessageExpired:
            slot.unreturned += 1
            return TurnResult.MORE if message is None else self._outcomes.expired(turn, message)
        except JobAborted:
            slot.unreturned += 1
            self._counters.unsuccessful += 1
            raise
        except NotStarted:
            # The job did not run. The worker rereads the row when the queue may run.
            slot.unstarted += 1
            self._counters.attempts -= 1
            self._engine.fetcher.clear(slot)
            return TurnResult.MORE
        except BaseException as error:  # noqa: BLE001 - a job's SystemExit must not end the worker
            slot.unreturned += 1
            row = position, body, key, raw_headers
            if opened is not None:  # a dead letter keeps the ciphertext
                row = opened.row
                error = opened.fault or error
            if message is None or message.position != position:
                message, error = self._engine.decoder.undecodable(turn, row, attempt, error)
            return self._outcomes.failed(turn, row, message, error)
        return TurnResult.MORE

    def run_checked(self, turn: Turn, rows: Rows, until: float) -> TurnResult:
        """Run rows one at a time, to record each row or to handle a failed message."""
        claim = turn.claim
        job = turn.job
        result = TurnResult.MORE
        for row in rows:
            before = claim.done
            result = self.run_one(turn, row, until)
            if turn.must_record(before):
                turn.member.record(claim)
            over = not claim.open or self._engine.clock() >= until
            if result is not TurnResult.MORE or over or claim.out_of_order is not None:
                break
            if not (job.every_message or turn.has_failure):
                break
        return result

    def run_one(
        self, turn: Turn, row: Row, until: float, settle: Callable[[], None] = lambda: None
    ) -> TurnResult:
        """Handle the recorded failure of a row, then run it; `settle` updates the queue's claim."""
        failure = turn.claim.failure
        result = None
        attempt = 1
        if failure is not None and failure.position == row[0]:
            result = self._resumer.resume(turn, row, failure)
            attempt = failure.attempts + 1
        if result is None and not self._resumer.may_begin(turn, row[0], settle):
            self._engine.fetcher.clear(turn.slot)
            result = TurnResult.MORE
        if result is not None:
            turn.slot.unstarted += 1
            self._counters.attempts -= 1  # the job did not run
            return result
        return self.run_rows(turn, iter((row,)), until, attempt)


# The code whose frames have the local variables `message` and `job`.
HOT_LOOP: CodeType = RowRunner.run_rows.__code__
