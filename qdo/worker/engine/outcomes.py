"""End attempts that did not return: one function per outcome.

===========  ===========================================================================
outcome      what happens
===========  ===========================================================================
retry        the queue waits and runs the same message again, which keeps its order
dead-letter  the message is stored durably, and only then marked as done
wait         likewise, but the attempt does not count as a failed one
skip         the message is marked as done, as the job, the policy or an operator decided
block        the queue waits for an operator, or for a key, which keeps its order
stop         the worker drains; the attempt does not count
lost         nothing: the queue has another owner, which runs the message again
===========  ===========================================================================

State that must outlive this worker is kept in ``claim.failure``. It is recorded with the next
checkpoint, or with the release.
"""

from __future__ import annotations

import logging
import time

from qdo.backoff import Backoff
from qdo.brokers.dead_letters import DeadLetterRecord
from qdo.brokers.requests import FAILED
from qdo.callables import check_done
from qdo.coordination.znodes.queue_node import FAILURE_ERROR_CHARACTERS, FailureRecord
from qdo.errors import BodyDecodeError, FailureKind, KeyMissingError, UnsupportedError
from qdo.jobs.retry import (
    BlockQueue,
    DeadLetterMessage,
    Decision,
    RetryMessage,
    SkipMessage,
    StopWorker,
    decide,
    lacks_resource,
    only_waits,
)
from qdo.message import Message
from qdo.outcomes import Outcome, OutcomeName, Skip, Stop
from qdo.refusals import failure_kind
from qdo.text import describe, describe_traceback, pluralize
from qdo.worker.engine.context import Engine
from qdo.worker.engine.jobs import Turn
from qdo.worker.engine.slot import UNREADABLE, Row, Slot, TurnResult, where
from qdo.worker.executors.base import JobAborted

_log = logging.getLogger(__name__)


def own_traceback(error: BaseException) -> str:
    """Return the traceback of an error; nothing for an error that was never raised."""
    raised = error.__traceback__ is not None or error.__cause__ is not None
    return describe_traceback(error) if raised else ""


def traceback_for_log(error: BaseException | None, important: bool = True) -> BaseException | None:
    """Return an error whose traceback belongs in the log, None if it does not.

    A message is logged with it at its first failure and at its last, and each time at level debug.
    The traceback of an outcome that the job chose says nothing, unless it has a cause.
    """
    if error is None or not (important or _log.isEnabledFor(logging.DEBUG)):
        return None
    chosen = isinstance(error, Outcome) and error.__cause__ is None
    return None if chosen or error.__traceback__ is None else error


BROKER_BACKOFF = Backoff(0.1, 5.0)
"""How long a queue waits after its broker failed; the worker retries forever."""
KEY_SECONDS = 2.0
"""How often a queue that is blocked by a missing key looks for it."""
EXPIRED_REASON = "the broker took it back; it runs when it is received again"

_broker_log = logging.getLogger(f"{__name__}.broker")
"""Its lines are limited for all queues together, see `qdo.worker.line_limit`."""
_stop_log = logging.getLogger(f"{__name__}.stop")
"""Not limited: the last line of a worker must say why it stops."""


class Outcomes:
    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._broker = engine.broker
        self._fetcher = engine.fetcher
        self._observers = engine.observers
        self._counters = engine.counters

    def failed(self, turn: Turn, row: Row, message: Message, error: BaseException) -> TurnResult:
        """Apply the policy to an attempt that did not return."""
        if KeyMissingError in type(error).__mro__:  # an error may lie about its class
            return self._wait_for_key(turn, row, message, error)
        excused = self.excused(turn, message, error)
        if isinstance(excused, TurnResult):
            return excused
        policy = self._engine.policy_of(turn.slot.queue)
        kinds = type(error).__mro__
        waits = excused is not None or only_waits(error, policy)
        if waits:
            self._counters.attempts -= 1
        elif Stop not in kinds:
            self._counters.unsuccessful += 1
        decision = excused or decide(message.attempt, error, policy, self._engine.jitter())
        if Skip not in kinds and Stop not in kinds and not waits:
            self.call_failure_hook(message, error)
        return self.apply(turn, row, message, error, decision)

    def excused(
        self, turn: Turn, message: Message, error: BaseException
    ) -> TurnResult | RetryMessage | None:
        """Return the end of a turn, or the decision, after a failure that is not the message's.

        The broker is away, or the job is paused: see `breakers`. None for any other failure.
        """
        policy = self._engine.policy_of(turn.slot.queue)
        chosen = not {Outcome, BodyDecodeError}.isdisjoint(type(error).__mro__)
        if chosen or not turn.in_force or only_waits(error, policy):
            return None
        if self._broker.was_away(turn.slot.started_at or self._engine.clock()):
            self._counters.attempts -= 1
            self._observers.report(message, "wait", describe(error))
            what = f"message {message.id} failed meanwhile, which does not count"
            return self.broker_failed(turn.slot, what, error)
        breaker = turn.job.breaker
        is_outage = failure_kind(error) is FailureKind.UNREACHABLE
        if breaker is None or not is_outage or policy.rule(error) is not None:
            return None
        line = message.key or message.position if turn.slot.in_lane else None
        if not breaker.failed((turn.slot.queue, line), error):
            return None
        return RetryMessage(breaker.left_seconds(), counts=False, waits_for="its paused job")

    def expired(self, turn: Turn, message: Message) -> TurnResult:
        """Leave a message that the broker took back while it was in flight."""
        slot = turn.slot
        self._counters.attempts -= 1
        if slot.subscription is None or slot.subscription.is_held(message.position):
            # Another message was meant, which has ended since: run this one again.
            self._fetcher.clear(slot)
            return TurnResult.MORE
        turn.claim.done = message.position
        self.note_expired(slot, message.position)
        self._observers.report(message, "lost", EXPIRED_REASON)
        return TurnResult.MORE

    def note_expired(self, slot: Slot, position: int) -> None:
        """Count a message that the broker took back."""
        if slot.is_pool:
            return  # it was cancelled
        self._counters.expired += 1
        _log.warning(
            "%s: message %s is no longer held: %s",
            where(slot),
            self._message_id(position),
            EXPIRED_REASON,
        )

    def _message_id(self, position: int) -> str:
        return self._broker.positions.message_id(position, self._broker.id_node)

    def call_failure_hook(self, message: Message, error: BaseException) -> None:
        """Call the app's `job_failure`; its own errors are only logged."""
        try:
            hook = self._engine.app.hooks.job_failure
            check_done(hook(message, self._engine.context, error), hook, "job_failure")
        except JobAborted:
            raise
        except BaseException:  # noqa: BLE001 - an app's hook must not end the worker
            _log.exception(
                "queue %s: job_failure raised an error; its message is not affected", message.queue
            )

    def apply(
        self, turn: Turn, row: Row, message: Message, error: BaseException, decision: Decision
    ) -> TurnResult:
        """Carry out a decision about a failed attempt, unless the queue was lost."""
        if not turn.in_force:
            return self._lost(turn.slot, message, error)
        if turn.job.pool:
            return self._apply_in_pool(turn, message, error, decision)
        match decision:
            case RetryMessage():
                return self._retry(turn, message, error, decision)
            case DeadLetterMessage():
                return self._dead_letter(turn, row, message, error, decision)
            case SkipMessage():
                return self._skip(turn, message, error, decision)
            case BlockQueue():
                return self._block(turn, message, error, decision)
            case StopWorker():
                return self._stop(turn.slot, message, decision)

    def _apply_in_pool(
        self, turn: Turn, message: Message, error: BaseException, decision: Decision
    ) -> TurnResult:
        """Record how an attempt of a request ended: any worker may run the next one."""
        pool, reason, position = turn.pool, describe(error), message.position
        kind: OutcomeName = "dead-letter"
        level = logging.ERROR
        match decision:
            case RetryMessage():
                kind, level = ("retry" if decision.counts else "wait"), logging.WARNING
                failed = message.attempt - (not decision.counts)
                pool.put_back(position, failed, decision.after_seconds, reason)
                self._counters.retried += decision.counts
            case StopWorker():
                pool.put_back(position, message.attempt - 1, 0.0, reason)
                return self._stop(turn.slot, message, decision)
            case SkipMessage():
                kind, level = "skip", logging.INFO
                pool.finish(position, "skipped", decision.reason)
                self._counters.skipped += 1
            case DeadLetterMessage() | BlockQueue():
                pool.finish(position, FAILED, decision.reason, message.attempt)
                self._counters.dead_lettered += 1
        turn.claim.done = position
        self._observers.report(message, kind, reason)
        _log.log(
            level,
            "%s: attempt %d of request %s ended, outcome %s: %s",
            where(turn.slot),
            message.attempt,
            message.id,
            kind,
            reason,
            exc_info=traceback_for_log(error, kind == "dead-letter" or message.attempt == 1),
        )
        return TurnResult.MORE

    def _lost(self, slot: Slot, message: Message, error: BaseException) -> TurnResult:
        self._observers.report(message, "lost", describe(error))
        waits = only_waits(error, self._engine.policy_of(slot.queue))
        _log.log(
            logging.INFO if waits else logging.WARNING,
            "%s: message %s %s while its queue was released, lost or changed by an operator;"
            " the next owner retries it, or applies the operator's decision: %s",
            where(slot),
            message.id,
            "was given up by its job" if waits else "failed",
            describe(error),
        )
        return TurnResult.ENDED

    def _retry(
        self, turn: Turn, message: Message, error: BaseException, decision: RetryMessage
    ) -> TurnResult:
        slot, reason = turn.slot, describe(error)
        delay = round(decision.after_seconds, 3)
        # A queue would wait in full for a recorded time without a delay, even if the clock is set.
        due = round(time.time() + delay, 3) if delay else 0.0
        shown = self._engine.recorded(reason)
        failed = message.attempt if decision.counts else message.attempt - 1
        failure = FailureRecord(message.position, failed, shown, retry_at=due, retry_delay=delay)
        turn.claim.add_failure(failure)
        slot.waited = True
        self._observers.report(message, "retry" if decision.counts else "wait", reason)
        if not decision.counts:
            args = where(slot), message.id, decision.after_seconds, reason
            if lacks_resource(error):  # the same for all queues: their lines are limited together
                _broker_log.warning(
                    "%s: message %s waits %.2f s, because the broker or the coordinator is away or"
                    " full; no attempt is counted: %s",
                    *args,
                )
            else:
                _log.info(
                    "%s: message %s waits %.2f s for %s; no attempt is counted: %s",
                    *args[:3],
                    decision.waits_for,
                    reason,
                )
            return self.wait(slot, decision.after_seconds)
        self._counters.retried += 1
        _log.warning(
            "%s: attempt %d of %d of message %s failed, retrying in %.2f s: %s",
            where(slot),
            message.attempt,
            self._engine.policy_of(slot.queue).terms(error).attempts,
            message.id,
            decision.after_seconds,
            reason,
            exc_info=traceback_for_log(error, message.attempt == 1),
        )
        return self.wait(slot, decision.after_seconds)

    def wait(self, slot: Slot, seconds: float) -> TurnResult:
        """Make a slot wait, and drop its fetched rows."""
        slot.not_before = self._engine.clock() + seconds
        self._fetcher.clear(slot)
        return TurnResult.WAIT

    def _skip(
        self, turn: Turn, message: Message, error: BaseException, decision: SkipMessage
    ) -> TurnResult:
        self._counters.skipped += 1
        turn.claim.done = message.position
        self._observers.report(message, "skip", decision.reason)
        _log.info(
            "%s: message %s skipped in attempt %d: %s",
            where(turn.slot),
            message.id,
            message.attempt,
            decision.reason,
            exc_info=traceback_for_log(error),
        )
        return TurnResult.MORE

    def _block(
        self, turn: Turn, message: Message, error: BaseException, decision: BlockQueue
    ) -> TurnResult:
        slot = turn.slot
        self._counters.blocked += 1
        shown, now = self._engine.recorded(decision.reason), round(time.time(), 3)
        failure = FailureRecord(message.position, message.attempt, shown, blocked_since=now)
        turn.claim.add_failure(failure)
        self._fetcher.clear(slot)
        self._observers.report(message, "block", decision.reason)
        _log.error(
            "%s: blocked by message %s after %s; run `qdo retry-now`, `qdo skip` or"
            " `qdo dead-letters add` with %s %s: %s",
            where(slot),
            message.id,
            pluralize(message.attempt, "attempt"),
            slot.queue,
            message.id,
            decision.reason,
            exc_info=traceback_for_log(error),
        )
        return TurnResult.HELD

    def _wait_for_key(
        self, turn: Turn, row: Row, message: Message, error: BaseException
    ) -> TurnResult:
        """Block the queue until the key of its message is there; no attempt is counted."""
        slot, claim = turn.slot, turn.claim
        reason = self._engine.recorded(describe(error))[:FAILURE_ERROR_CHARACTERS]
        self._counters.attempts -= 1
        if turn.job.pool:  # another worker may have the key
            return self.apply(turn, row, message, error, RetryMessage(KEY_SECONDS, counts=False))
        if not turn.in_force:
            return TurnResult.ENDED
        known = claim.failure
        if known is None or (known.position, known.error) != (message.position, reason):
            now = round(time.time(), 3)
            attempts = message.attempt - 1
            claim.add_failure(
                FailureRecord(message.position, attempts, reason, retry_at=now, blocked_since=now)
            )
            self._counters.blocked += 1
            self._observers.report(message, "block", reason)
            _log.error(
                "%s: blocked by message %s until its key is there, looking every %g s: %s",
                where(slot),
                message.id,
                KEY_SECONDS,
                describe(error),
            )
        slot.waited = True
        return self.wait(slot, KEY_SECONDS)

    def _stop(self, slot: Slot, message: Message, decision: StopWorker) -> TurnResult:
        self._counters.stopped += 1
        self._counters.attempts -= 1
        self._fetcher.clear(slot)
        self._observers.report(message, "stop", decision.reason)
        _stop_log.warning(
            "%s: message %s stops the worker; the next owner of the queue runs it: %s",
            where(slot),
            message.id,
            decision.reason,
        )
        self._engine.on_stop(decision.reason)
        return TurnResult.HELD

    def _dead_letter(
        self,
        turn: Turn,
        row: Row,
        message: Message,
        error: BaseException,
        decision: DeadLetterMessage,
    ) -> TurnResult:
        slot = turn.slot
        slot.pending_dead_letter = DeadLetterRecord(
            queue=slot.queue,
            position=message.position,
            body=row[1],
            key=row[2],
            headers=row[3],
            error=decision.reason,
            traceback=own_traceback(error),
            attempts=message.attempt,
            worker=slot.member.name if slot.member is not None else "",
            fence=turn.claim.fence,
            dead_at=time.time(),
        )
        slot.dead_letter_message = message
        return self.store_dead_letter(turn, slot.pending_dead_letter, error)

    def store_dead_letter(
        self, turn: Turn, dead_letter: DeadLetterRecord, error: BaseException | None = None
    ) -> TurnResult:
        """Store a dead letter, and only then mark its message as done: no message gets lost."""
        slot = turn.slot
        slot.message = slot.message or slot.dead_letter_message  # in flight until it is stored
        try:
            self._broker.dead_letters.store(dead_letter)
        except Exception as failure:  # noqa: BLE001 - brokers raise what their libraries raise
            return self.broker_failed(slot, "cannot store the dead letter", failure)
        message, slot.dead_letter_message = slot.dead_letter_message, None
        if not turn.in_force:
            return TurnResult.ENDED
        slot.pending_dead_letter = None
        slot.broker_failures = 0
        turn.claim.done = dead_letter.position
        self._counters.dead_lettered += 1
        if message is not None:
            self._observers.report(message, "dead-letter", dead_letter.error)
        _log.error(
            "%s: message %s is a dead letter after %s: %s",
            where(slot),
            self._message_id(dead_letter.position) if message is None else message.id,
            pluralize(dead_letter.attempts, "attempt"),
            dead_letter.error,
            exc_info=traceback_for_log(error),
        )
        return TurnResult.MORE

    def broker_failed(self, slot: Slot, what: str, error: BaseException) -> TurnResult:
        """Wait for a broker that failed; the queue resumes after ``claim.done``."""
        slot.broker_failures += 1
        self._counters.broker_errors += 1
        delay = BROKER_BACKOFF.delay(slot.broker_failures, self._engine.jitter())
        # The subscription of a polled broker has a backoff of its own before it polls.
        own = slot.subscription is not None and what == UNREADABLE
        when = "with growing delays" if own else f"in {delay:.2f} s"
        # An operation that the broker does not support fails until an operator changes something.
        level = logging.ERROR if isinstance(error, UnsupportedError) else logging.WARNING
        _broker_log.log(level, "%s: %s, retrying %s: %s", where(slot), what, when, describe(error))
        return self.wait(slot, delay)
