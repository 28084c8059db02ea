"""Run turns of a queue whose job takes many messages at once, ``@app.job(batch=500)``.

The end of a call decides about its messages:

===========================  ==============================================================
it returns                   every message of the batch is done
it raises ``FailedAt(i)``    the messages before `i` are done; message `i` has failed, and
                             is treated as if the job had been called for it alone
it raises something else     no message is done, because the failing one is unknown. After a
                             backoff each message of the batch runs in a batch of its own,
                             with attempts, policy and dead letter of its own
===========================  ==============================================================

A bad message makes its batch run a second time, but uses up only its own attempts. No other message
fails, and later messages wait only for these runs. A message with counted attempts also runs alone.
After a message has killed its process, as many messages as a batch holds run alone.
"""

from __future__ import annotations

import logging
from bisect import bisect_right
from dataclasses import replace
from operator import itemgetter, length_hint

import ujson

from qdo.coordination.protocol.claims import Claim
from qdo.jobs.retry import only_waits
from qdo.message import Batch, Message
from qdo.outcomes import FailedAt, Retry, Stop
from qdo.sending.once import free_key
from qdo.text import describe
from qdo.worker.engine.context import Engine
from qdo.worker.engine.decoder import NO_HEADERS
from qdo.worker.engine.ends import traceback_for_log
from qdo.worker.engine.jobs import BoundJob, Turn
from qdo.worker.engine.outcomes import Outcomes
from qdo.worker.engine.slot import UNREADABLE, Row, Slot, TurnResult, where
from qdo.worker.engine.subscriptions import FailureResumer
from qdo.worker.executors.base import JobAborted, MessageExpired, NotStarted

_POSITION = itemgetter(0)

_log = logging.getLogger(__name__)


class Batches:
    def __init__(self, engine: Engine, outcomes: Outcomes, resumer: FailureResumer) -> None:
        self._engine = engine
        self._outcomes = outcomes
        self._resumer = resumer
        self._fetcher = engine.fetcher
        self._counters = engine.counters
        self._in_flight = engine.in_flight
        self._positions_in_flight = engine.in_flight.notes(engine.broker.positions)

    def process(self, turn: Turn) -> TurnResult:
        """Run one batch, or wait for more messages; return the result of the turn."""
        slot = turn.slot
        claim = turn.claim
        job = turn.job
        single = slot.singles > 0 or turn.has_failure
        try:
            rows = self._gather(turn, 1 if single else job.batch)
        except Exception as error:  # noqa: BLE001 - brokers raise what their libraries raise
            return self._outcomes.broker_failed(slot, UNREADABLE, error)
        if claim.out_of_order is not None and claim.positions.stable:
            return TurnResult.MORE  # after a cancellation during the fetch, lanes run the rest
        now = self._engine.clock()
        # The claim or the lease may have ended during the fetch.
        if not claim.open or now >= claim.lease.until:
            return TurnResult.MORE
        if not rows:
            return TurnResult.TIP
        if not single and len(rows) < job.batch and _is_worth_waiting(turn):
            # Set the time only once, so that new messages do not prolong the wait.
            slot.gathering_until = slot.gathering_until or now + job.batch_wait_seconds
            if now < slot.gathering_until:
                slot.not_before = slot.gathering_until
                return TurnResult.WAIT
        slot.gathering_until = 0.0
        if job.gate is not None:
            result = job.gate.enter(slot, claim.fence)
            if result is not None:
                return result
            job.gate.start(slot, claim.fence)
        slot.in_flight_index = self._in_flight.take(slot.label)
        try:
            if single:
                return self._run_single(turn, rows[0])
            return self._run(turn, rows[: job.batch])
        finally:
            # If the lease has expired, the session may have ended while the message was in flight.
            in_doubt = self._engine.clock() >= claim.lease.until
            self._in_flight.give_back(slot.in_flight_index, in_doubt=in_doubt)

    def _gather(self, turn: Turn, count: int) -> list[Row]:
        """Return at least `count` rows; fewer if the queue has no more or its claim ends."""
        slot = turn.slot
        claim = turn.claim
        rows = slot.gathered
        if rows is None:
            rows = slot.gathered = []
        # The broker may have taken back rows that an earlier turn has kept for a full batch.
        self._drop_expired(slot, rows)
        while len(rows) < count:
            slot.limit = min(max(slot.limit, 2 * count), self._fetcher.most)
            batch = self._fetcher.read(slot, claim)
            if batch is None:
                break
            # Count the rows before `extend` exhausts the iterator.
            fetched = length_hint(batch)
            rows.extend(batch)
            if not claim.positions.stable:
                _update_failure_position(claim, rows)
            if not fetched:
                break
        return rows

    def _drop_expired(self, slot: Slot, rows: list[Row]) -> None:
        subscription = slot.subscription
        if subscription is None:
            return
        for row in [row for row in rows if not subscription.is_held(row[0])]:
            rows.remove(row)
            self._outcomes.note_expired(slot, row[0])

    def _run_single(self, turn: Turn, row: Row) -> TurnResult:
        slot = turn.slot
        claim = turn.claim
        failure = claim.failure
        attempt = 1
        if failure is not None and failure.position == row[0]:
            # Any message of the batch may have ended the process, so each message runs alone.
            if failure.crashed and slot.singles < turn.job.batch:
                slot.singles = turn.job.batch
            result = self._resumer.resume(turn, row, failure)
            if result is not None:
                self._drop_done(turn)
                return result
            attempt = failure.attempts + 1
        result = self._run(turn, [row], attempt)
        if slot.singles and claim.done >= row[0]:
            slot.singles -= 1
        return result

    def _run(self, turn: Turn, rows: list[Row], attempt: int = 1) -> TurnResult:
        slot = turn.slot
        job = turn.job
        batch, failure = self._decode(turn, rows, attempt)
        if failure is not None and len(batch) == 1:
            self._counters.attempts += 1
            return self._failed(turn, rows[0], batch[0], failure)
        if failure is not None:
            batch.pop()  # the next turn runs the undecodable message
        if not self._resumer.may_begin(turn, batch[0].position, alone=len(batch) == 1):
            self._fetcher.clear(slot)
            return TurnResult.MORE
        self._positions_in_flight[slot.in_flight_index] = batch[0].position
        slot.message = message = batch[0]
        counters = self._counters
        began = self._engine.clock()
        try:
            self._call(job, batch)
        except MessageExpired:
            self._fetcher.clear(slot)  # the next fetch rereads held messages
            return TurnResult.MORE
        except JobAborted:
            counters.attempts += 1
            counters.unsuccessful += 1
            raise
        except NotStarted:
            self._fetcher.clear(slot)
            return TurnResult.MORE
        except FailedAt as error:
            index = error.index
            if 0 <= index < len(batch):
                self._done(turn, batch[:index])
                counters.attempts += 1
                cause = error.__cause__ or error
                return self._failed(turn, rows[index], batch[index], cause)
            return self._failed_whole(turn, rows, batch, error)
        except BaseException as error:  # noqa: BLE001 - a job's SystemExit must not end the worker
            return self._failed_whole(turn, rows, batch, error)
        del message  # no job runs now, and `running_in` looks for `message` in this frame
        slot.durations.learn(1, self._engine.clock() - began, batch=len(batch))
        self._done(turn, batch)
        return TurnResult.MORE

    def _call(self, job: BoundJob, batch: Batch) -> None:
        try:
            job.call(batch, self._engine.context)  # type: ignore[arg-type]
        except FailedAt as error:
            self._free(batch, max(0, error.index))
            raise
        self._free(batch, len(batch))

    def _free(self, batch: Batch, count: int) -> None:
        """Free the keys of the first messages, which are done."""
        if batch.has_headers:  # few batches do, and a look at each message takes 30 ns
            for message in batch[:count]:
                broker = self._engine.broker
                free_key(broker, message.queue, message.key, message.headers, message.id)

    def _decode(
        self, turn: Turn, rows: list[Row], attempt: int
    ) -> tuple[Batch, BaseException | None]:
        """Return the messages through the first undecodable message, and its error."""
        if self._engine.decoder.opener is not None:
            return self._decode_each(turn, rows, attempt)
        queue = turn.slot.queue
        fence = turn.claim.fence
        loads = ujson.loads
        origin = turn.slot.origin
        large_bytes = self._engine.decoder.large_bytes
        try:
            # Decode all messages of the batch here, which nearly always works. A call for each
            # message would double the time.
            return Batch(
                [
                    Message(queue, position, loads(body), key, NO_HEADERS, fence, attempt, origin)
                    if headers is None and len(body) < large_bytes
                    else _raise_not_plain()
                    for position, body, key, headers in rows
                ]
            ), None
        except (ValueError, _NotPlain):
            return self._decode_each(turn, rows, attempt)

    def _decode_each(
        self, turn: Turn, rows: list[Row], attempt: int
    ) -> tuple[Batch, BaseException | None]:
        batch = Batch()
        batch.has_headers = True
        for row in rows:
            message, failure = self._engine.decoder.decode(turn, row, attempt)
            batch.append(message)
            if failure is not None:
                return batch, failure
        return batch, None

    def _done(self, turn: Turn, batch: list[Message]) -> None:
        self._counters.attempts += len(batch)
        # If the first message failed, the batch is empty, and no message has succeeded.
        if batch:
            turn.note_successes(len(batch))
            turn.claim.done = batch[-1].position
            self._drop_done(turn)
            self._engine.observers.batch_done(batch)

    def _failed(self, turn: Turn, row: Row, message: Message, error: BaseException) -> TurnResult:
        result = self._outcomes.failed(turn, row, message, error)
        self._drop_done(turn)
        return result

    def _failed_whole(
        self, turn: Turn, rows: list[Row], batch: Batch, error: BaseException
    ) -> TurnResult:
        if len(batch) == 1 or isinstance(error, Stop):
            self._counters.attempts += 1
            return self._failed(turn, rows[0], batch[0], error)
        slot = turn.slot
        engine = self._engine
        excused = self._outcomes.excused(turn, batch[0], error)
        if isinstance(excused, TurnResult):
            return excused
        alone = excused is None and not only_waits(error, engine.policy_of(slot.queue))
        if alone:
            slot.singles = len(batch)
        delay = error.after if isinstance(error, Retry) else None
        if excused is not None:
            delay = excused.after_seconds
        if delay is None:
            backoff = engine.policy_of(slot.queue).terms(error).backoff
            delay = backoff.delay(1, engine.jitter())
        if alone:
            _log.warning(
                "%s: a batch of %d messages failed as a whole; retrying each alone in %.2f s; raise"
                " qdo.FailedAt to retry only one: %s",
                where(slot),
                len(batch),
                delay,
                describe(error),
                exc_info=traceback_for_log(error),
            )
        slot.not_before = engine.clock() + max(0.0, delay)
        return TurnResult.WAIT

    def _drop_done(self, turn: Turn) -> None:
        rows = turn.slot.gathered
        if rows:
            del rows[: bisect_right(rows, turn.claim.done, key=_POSITION)]


def _is_worth_waiting(turn: Turn) -> bool:
    """Return whether an incomplete batch should wait for more messages."""
    subscription = turn.slot.subscription
    return bool(turn.job.batch_wait_seconds) and not (subscription and subscription.has_followers())


def _update_failure_position(claim: Claim, rows: list[Row]) -> None:
    """Update the position of the claim's failed message if the broker has redelivered it."""
    failure = claim.failure
    if failure is None:
        return
    identity = claim.positions.identity(failure.position)
    for position, _, _, _ in rows:
        if claim.positions.identity(position) == identity:
            claim.failure = replace(failure, position=position)
            return


class _NotPlain(Exception):
    """A row has headers or a large body, so the fast decoding does not apply."""


def _raise_not_plain() -> Message:
    raise _NotPlain
