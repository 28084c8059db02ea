"""One turn of a queue: fetch, decode, run, outcome, checkpoint.

========== ====================================================================================
step       what happens
========== ====================================================================================
fetch      take the rows that are left, or the batch fetched ahead, or ask the broker
decode     headers and body from JSON; the body stays bytes where the headers say so
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
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import islice
from operator import length_hint
from types import FrameType
from typing import Any

import ujson

from qdo.app import App, Job
from qdo.brokers.base import Broker
from qdo.coordination.lease import clock as boot_clock
from qdo.coordination.slots import Claim
from qdo.errors import BodyDecodeError
from qdo.headers import is_raw
from qdo.message import Message
from qdo.worker.counters import Counters
from qdo.worker.executors.base import Executor, JobCall, NotStarted
from qdo.worker.fetching import Fetcher, Row, Rows
from qdo.worker.outcome import Outcomes
from qdo.worker.retry import Policy, describe
from qdo.worker.slot import JobAborted, Registration, Slot, Turn

_NO_HEADERS: Mapping[str, str] = {}
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Work:
    """A job as the pipeline runs it."""

    name: str
    call: JobCall
    every_message: bool
    """Record progress after every message, before the next one of the queue."""


class Pipeline:
    """Runs turns; see the module's docstring for their steps.

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
        self.counters = Counters()
        self._app = app
        self._broker = broker
        self._executor = executor
        self._turn_seconds = turn_seconds
        self._clock = clock
        self._fetcher = Fetcher(broker, fetch, clock)
        self._outcomes = Outcomes(app, broker, self._fetcher, self.counters, policy, clock, chance)
        self._works: dict[Job, Work] = {}
        self._jobless: set[str] = set()

    @property
    def context(self) -> Any:
        """What jobs get as their second argument; set it before the first turn."""
        return self._outcomes.context

    @context.setter
    def context(self, context: Any) -> None:
        self._outcomes.context = context

    def clear(self, slot: Slot) -> None:
        """Drop everything read; the next fetch begins after ``claim.done``."""
        self._fetcher.clear(slot)

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
                return self._outcomes.bury(slot, claim, slot.letter)
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
            rows = self._fetcher.fetch(slot, claim)
        except Exception as error:  # noqa: BLE001 - brokers raise what their libraries raise
            return self._outcomes.trouble(slot, "it cannot be read", error)
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
            left = length_hint(rows)
            self.counters.attempts += waiting - left
            self._fetcher.learn(slot, waiting - left, left)
        return turn

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
                given = _NO_HEADERS if headers is None else loads(headers)
                slot.message = message = Message(
                    queue,
                    position,
                    body if given and is_raw(given) else loads(body),
                    key,
                    given,
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
        except NotStarted:
            # Nothing of this row was run. It is read again, once the queue may be worked on.
            self.counters.attempts -= 1
            self._fetcher.clear(slot)
            return Turn.MORE
        except BaseException as error:  # noqa: BLE001 - SystemExit of a job ends no worker
            row = position, body, key, headers
            if message is None or message.position != position:
                message, error = self._undecoded(slot, claim, row, attempt, error)
            return self._outcomes.failed(slot, claim, row, message, error)
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
            call = self._executor.bind(job)
            work = self._works[job] = Work(job.name, call, job.checkpoint == "message")
        return work


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
