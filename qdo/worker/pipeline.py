"""One turn of a queue: fetch, decode, run, outcome, checkpoint.

========== ====================================================================================
step       what happens
========== ====================================================================================
fetch      take the rows that are left, or the batch fetched ahead, or ask the broker
decode     body and headers from JSON
run        call the job, while the claim is open, the lease runs and the turn lasts
outcome    done: ``claim.done`` moves to the message; retry: the queue waits, so that order is
           kept; dead letter: stored durably, only then is the message passed; skip: passed
checkpoint tell the member once a turn, or after every message where the app asks for it
========== ====================================================================================

Decode and run are one loop (`_run`), and only there is a message handled in line: everything
else happens once a turn or once a failure. A no-op job on 100-byte bodies is called at more than
half the rate of a bare loop that fetches, decodes and calls (`bench/throughput_profile.py`).
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from operator import length_hint
from types import FrameType
from typing import Any, TypeAlias

import gevent
import ujson

from qdo.app import App, Job
from qdo.brokers.base import Broker, DeadLetterRecord, Reader
from qdo.coordination.lease import clock as boot_clock
from qdo.coordination.slots import Claim
from qdo.errors import BodyDecodeError
from qdo.message import Message
from qdo.worker.counters import Counters
from qdo.worker.dispatcher import JobAborted, Registration, Slot, Turn
from qdo.worker.executors.base import Executor, JobCall
from qdo.worker.retry import (
    PassOver,
    Policy,
    RetryLater,
    SetAside,
    backoff,
    decide,
    describe,
    describe_traceback,
)

Row: TypeAlias = tuple[int, bytes, "str | None", "str | None"]
Rows: TypeAlias = Iterator[Row]

FIRST_LIMIT = 16
"""Rows of a queue's first fetch; it grows to `fetch` while turns get through whole batches, and
so stays small where jobs are slow: many such queues must not fill the memory with rows."""
AHEAD_WORTH_SECONDS = 0.002
"""Fetching ahead pays where a fetch takes longer than this. The embedded broker's takes less,
and would only be moved to another greenlet."""
BROKER_POLICY = Policy(backoff_seconds=0.1, backoff_max_seconds=5.0)
"""How long a queue waits after its broker failed; it is asked again for ever."""

_NO_HEADERS: Mapping[str, str] = {}
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Work:
    """A job as the pipeline runs it."""

    name: str
    call: JobCall
    every_message: bool
    """Record progress after every message, before the next one of the queue."""


class Ahead:
    """The next batch of a queue, fetched while the one before is processed."""

    def __init__(self, reader: Reader, limit: int, clock: Callable[[], float]) -> None:
        self._reader = reader
        self._error: Exception | None = None
        self._rows: Sequence[Row] = ()
        self.took_seconds = 0.0
        self._greenlet = gevent.spawn(self._fetch, limit, clock)

    def _fetch(self, limit: int, clock: Callable[[], float]) -> None:
        start = clock()
        try:
            self._rows = self._reader.fetch(limit)
        except Exception as error:  # noqa: BLE001 - raised in `get`
            self._error = error
        self.took_seconds = clock() - start

    def get(self) -> Sequence[Row]:
        """Return the rows, waiting for them; raise what the broker raised."""
        self._greenlet.join()
        if self._error is not None:
            raise self._error
        return self._rows

    def abandon(self) -> None:
        """Close the reader once the fetch has come back."""
        self._greenlet.rawlink(lambda _: _close(self._reader))


class Pipeline:
    """Runs turns; see the module's docstring for their steps.

    :ivar context: what jobs get as their second argument; set before the first turn.
    :ivar counters: what happened so far.
    """

    def __init__(
        self,
        app: App,
        broker: Broker,
        executor: Executor,
        *,
        policy: Policy,
        fetch: int,
        turn_seconds: float,
        clock: Callable[[], float] = boot_clock,
        chance: Callable[[], float] = random.random,
    ) -> None:
        self.context: Any = None
        self.counters = Counters()
        self._app = app
        self._broker = broker
        self._executor = executor
        self._policy = policy
        self._fetch_limit = fetch
        self._turn_seconds = turn_seconds
        self._clock = clock
        self._chance = chance
        self._works: dict[Job, Work] = {}
        self._jobless: set[str] = set()

    # --- a turn ------------------------------------------------------------------------

    def turn(self, slot: Slot, member: Registration, claim: Claim) -> Turn:
        """Process messages of a queue until its turn is over, and say how it ended."""
        if not claim.open:
            return Turn.ENDED
        now = self._clock()
        if now >= claim.lease.until:
            return Turn.PAUSED
        before = claim.done
        try:
            if slot.letter is not None:
                return self._bury(slot, claim, slot.letter)
            work = self._work(slot.queue)
            if work is None:
                return Turn.TIP
            return self._process(slot, member, claim, work)
        except JobAborted:
            return Turn.ENDED
        finally:
            if claim.done != before and slot.claim is claim:
                member.progress(claim)

    def _process(self, slot: Slot, member: Registration, claim: Claim, work: Work) -> Turn:
        try:
            rows = self._fetch(slot, claim)
        except Exception as error:  # noqa: BLE001 - brokers raise what their libraries raise
            return self._trouble(slot, "it cannot be read", error)
        waiting = length_hint(rows)
        if not waiting:
            return Turn.TIP
        # Looked at again: the fetch may have let others run, and taken its time.
        now = self._clock()
        until = min(claim.lease.until, now + self._turn_seconds)
        if not claim.open or now >= until:
            return Turn.MORE
        try:
            if work.every_message:
                turn = self._run_recording(slot, member, claim, rows, until, work)
            elif slot.failures:
                turn = self._run(slot, claim, islice(rows, 1), until, work, slot.failures + 1)
            else:
                turn = self._run(slot, claim, rows, until, work, 1)
        finally:
            self._count(slot, waiting, length_hint(rows))
        return turn

    def _count(self, slot: Slot, waiting: int, left: int) -> None:
        started = waiting - left
        self.counters.attempts += started
        if left:
            slot.limit = min(max(FIRST_LIMIT, 2 * started), self._fetch_limit)
        elif started >= slot.limit:
            slot.limit = min(4 * slot.limit, self._fetch_limit)

    # --- fetch -------------------------------------------------------------------------

    def _fetch(self, slot: Slot, claim: Claim) -> Rows:
        rows = slot.rows
        if rows is not None and length_hint(rows):
            return rows
        if not slot.limit:
            slot.limit = min(FIRST_LIMIT, self._fetch_limit)
        if slot.reader is None:
            slot.reader = self._broker.reader(slot.queue, claim.done)
        start = self._clock()
        ahead, slot.ahead = slot.ahead, None
        batch = slot.reader.fetch(slot.limit) if ahead is None else ahead.get()
        slot.troubles = 0
        took = self._clock() - start if ahead is None else ahead.took_seconds
        if batch and took >= AHEAD_WORTH_SECONDS and slot.claim is claim and claim.open:
            slot.ahead = Ahead(slot.reader, slot.limit, self._clock)
        slot.rows = rows = iter(batch)
        return rows

    def clear(self, slot: Slot) -> None:
        """Drop everything read; the next fetch begins after ``claim.done``."""
        reader, slot.reader = slot.reader, None
        ahead, slot.ahead = slot.ahead, None
        slot.rows = None
        if ahead is not None:
            ahead.abandon()
        elif reader is not None:
            _close(reader)

    def idle(self, slot: Slot) -> None:
        """Let go of the reader: thousands of queues are idle at a time."""
        self.clear(slot)

    # --- decode and run ----------------------------------------------------------------

    def _run(
        self, slot: Slot, claim: Claim, rows: Rows, until: float, work: Work, attempt: int
    ) -> Turn:
        """Run the job for one row after the other, until the turn or the claim is over.

        The test before each message stands behind the one before it, so that no row is
        taken from `rows` that is not started. One message costs about 0.6 us more than
        decoding its body and calling the job; two attribute accesses more in this loop cost
        2 % of the rate.
        """
        queue = slot.queue
        fence = claim.fence
        node = self._broker.id_node
        context = self.context
        call = work.call
        clock = self._clock
        loads = ujson.loads
        message: Message | None = None
        try:
            for position, body, key, headers in rows:
                slot.message = message = Message(
                    queue,
                    position,
                    loads(body),
                    key,
                    _NO_HEADERS if headers is None else loads(headers),
                    fence,
                    attempt,
                    node,
                )
                call(message, context)
                claim.done = position
                if not claim.open or clock() >= until:
                    break
        except JobAborted:
            self.counters.unsuccessful += 1
            raise
        except BaseException as error:  # noqa: BLE001 - SystemExit of a job ends no worker
            row = position, body, key, headers
            if message is None or message.position != position:
                message, error = self._undecoded(slot, claim, row, attempt, error)
            return self._failed(slot, claim, row, message, error)
        slot.failures = 0
        return Turn.MORE

    def _run_recording(
        self,
        slot: Slot,
        member: Registration,
        claim: Claim,
        rows: Rows,
        until: float,
        work: Work,
    ) -> Turn:
        """Run the job, with the progress recorded after every message."""
        while True:
            before = claim.done
            turn = self._run(slot, claim, islice(rows, 1), until, work, slot.failures + 1)
            if claim.done != before and slot.claim is claim:
                member.record(claim)
            over = not claim.open or self._clock() >= until or not length_hint(rows)
            if turn is not Turn.MORE or over:
                return turn

    def _undecoded(
        self, slot: Slot, claim: Claim, row: Row, attempt: int, error: BaseException
    ) -> tuple[Message, BaseException]:
        """Return a message with the body as it was sent, and the error to record."""
        position, body, key, _ = row
        message = Message(
            slot.queue,
            position,
            body,
            key,
            _NO_HEADERS,
            claim.fence,
            attempt,
            self._broker.id_node,
        )
        fault = BodyDecodeError(queue=slot.queue, id=message.id, reason=describe(error))
        fault.__cause__ = error
        return message, fault

    def _work(self, queue: str) -> Work | None:
        job = self._app.job_for(queue)
        if job is None:
            if queue not in self._jobless:
                self._jobless.add(queue)
                _log.error("queue %s: the app has no job for it; its messages wait", queue)
            return None
        work = self._works.get(job)
        if work is None:
            call = self._executor.bind(job.function)
            work = self._works[job] = Work(job.name, call, job.checkpoint == "message")
        return work

    # --- outcomes ----------------------------------------------------------------------

    def _failed(
        self, slot: Slot, claim: Claim, row: Row, message: Message, error: BaseException
    ) -> Turn:
        """Do what the policy says about an attempt that did not return."""
        self.counters.unsuccessful += 1
        decision = decide(message.attempt, error, self._policy, self._chance())
        if not isinstance(decision, PassOver):
            self._tell(message, error)
        given_up = isinstance(decision, RetryLater) and not claim.open
        if slot.claim is not claim or given_up:
            _log.warning(
                "%s: message %s failed while its queue was given up; the next owner of the"
                " queue runs it again: %s",
                _where(slot),
                message.id,
                describe(error),
            )
            return Turn.ENDED
        if isinstance(decision, RetryLater):
            return self._retry(slot, message, error, decision)
        if isinstance(decision, SetAside):
            return self._dead_letter(slot, claim, row, message, error, decision)
        return self._skip(slot, claim, message, decision)

    def _tell(self, message: Message, error: BaseException) -> None:
        try:
            self._app.job_failure(message, self.context, error)
        except JobAborted:
            raise
        except BaseException:  # noqa: BLE001 - a hook of the app must not end the worker
            _log.exception("queue %s: job_failure raised an error itself", message.queue)

    def _retry(
        self, slot: Slot, message: Message, error: BaseException, decision: RetryLater
    ) -> Turn:
        """Wait, and run the same message again: the queue's order is kept."""
        self.counters.retried += 1
        slot.failures = message.attempt
        slot.not_before = self._clock() + decision.after_seconds
        self.clear(slot)
        _log.warning(
            "%s: attempt %d of %d of message %s failed, the next one in %.2f s: %s",
            _where(slot),
            message.attempt,
            self._policy.attempts,
            message.id,
            decision.after_seconds,
            describe(error),
            exc_info=error if _log.isEnabledFor(logging.DEBUG) else None,
        )
        return Turn.WAIT

    def _skip(self, slot: Slot, claim: Claim, message: Message, decision: PassOver) -> Turn:
        """Pass a message over, as the job asked for."""
        self.counters.skipped += 1
        slot.failures = 0
        claim.done = message.position
        _log.info("%s: message %s skipped: %s", _where(slot), message.id, decision.reason)
        return Turn.MORE

    def _dead_letter(
        self,
        slot: Slot,
        claim: Claim,
        row: Row,
        message: Message,
        error: BaseException,
        decision: SetAside,
    ) -> Turn:
        """Set a message aside with its error."""
        slot.letter = DeadLetterRecord(
            queue=slot.queue,
            position=message.position,
            body=row[1],
            key=row[2],
            headers=row[3],
            error=decision.reason,
            traceback=describe_traceback(error),
            attempts=message.attempt,
            worker=slot.member.name if slot.member is not None else "",
            fence=claim.fence,
            dead_at=time.time(),
        )
        return self._bury(slot, claim, slot.letter)

    def _bury(self, slot: Slot, claim: Claim, letter: DeadLetterRecord) -> Turn:
        """Store a dead letter, and only then pass its message: nothing is ever lost."""
        try:
            self._broker.bury(letter)
        except Exception as error:  # noqa: BLE001 - see `_process`
            return self._trouble(slot, "its dead letter cannot be stored", error)
        if slot.claim is not claim:
            return Turn.ENDED
        slot.letter = None
        slot.failures = slot.troubles = 0
        claim.done = letter.position
        self.counters.dead_lettered += 1
        _log.error(
            "%s: message at %d is a dead letter after %d attempts: %s",
            _where(slot),
            letter.position,
            letter.attempts,
            letter.error,
        )
        return Turn.MORE

    def _trouble(self, slot: Slot, what: str, error: Exception) -> Turn:
        """Wait for a broker that failed; the queue goes on after ``claim.done``."""
        self.clear(slot)
        slot.troubles += 1
        pause = backoff(slot.troubles, BROKER_POLICY, self._chance())
        slot.not_before = self._clock() + pause
        _log.warning(
            "%s: %s, tried again in %.2f s: %s", _where(slot), what, pause, describe(error)
        )
        return Turn.WAIT


def running_in(frame: FrameType | None) -> tuple[Message, str] | None:
    """Return message and job name of the innermost turn in a stack, None without one.

    Read from the stack of the main thread while it is blocked, so that the turns themselves
    need not leave word of what runs: that would cost something for every message.
    """
    while frame is not None:
        if frame.f_code is Pipeline._run.__code__:
            message, work = frame.f_locals.get("message"), frame.f_locals.get("work")
            if isinstance(message, Message) and isinstance(work, Work):
                return message, work.name
        frame = frame.f_back
    return None


def _where(slot: Slot) -> str:
    worker = slot.member.name if slot.member is not None else "worker"
    return f"{worker}, queue {slot.queue}"


def _close(reader: Reader) -> None:
    try:
        reader.close()
    except Exception:  # noqa: BLE001 - nothing is read from it any more
        _log.warning("a reader of the broker cannot be closed", exc_info=True)
