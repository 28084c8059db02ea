"""End messages of queues in their order, and record each end in the queue's node.

``claim.failure`` contains the state that must outlive this worker. The worker records the failure
at the next checkpoint or at the release.
"""

from __future__ import annotations

import logging
import time

from qdo.brokers.dead_letters import DeadLetterRecord
from qdo.coordination.znodes.queue_node import FAILURE_ERROR_CHARACTERS, FailureRecord
from qdo.encoding import parsed
from qdo.jobs.retry import (
    BlockQueue,
    DeadLetterMessage,
    Decision,
    RetryMessage,
    SkipMessage,
    StopWorker,
    lacks_resource,
)
from qdo.message import Message
from qdo.sending.once import free_key
from qdo.text import describe, pluralize
from qdo.worker.engine.ends import (
    EXPIRED_REASON,
    KEY_SECONDS,
    Ends,
    own_traceback,
    traceback_for_log,
)
from qdo.worker.engine.jobs import Turn
from qdo.worker.engine.slot import Row, Slot, TurnResult, where

_log = logging.getLogger(__name__)
# All queues share this logger, because its lines have a common limit.
_broker_log = logging.getLogger("qdo.worker.engine.ends.broker")


class QueueEnds(Ends):
    """Ends attempts of messages that belong to a queue."""

    def apply(
        self, turn: Turn, row: Row, message: Message, error: BaseException, decision: Decision
    ) -> TurnResult:
        match decision:
            case RetryMessage():
                return self._retry(turn, message, error, decision)
            case DeadLetterMessage():
                return self._dead_letter(turn, row, message, error, decision)
            case SkipMessage():
                return self._skip(turn, row, message, error, decision)
            case BlockQueue():
                return self._block(turn, message, error, decision)
            case StopWorker():
                return self.stop(turn.slot, message, decision)

    def _retry(
        self, turn: Turn, message: Message, error: BaseException, decision: RetryMessage
    ) -> TurnResult:
        slot = turn.slot
        reason = describe(error)
        delay = round(decision.after_seconds, 3)
        # Record no time without a delay, because a queue would wait for the time if the clock is
        # set back.
        due = round(time.time() + delay, 3) if delay else 0.0
        shown = self._engine.recorded(reason)
        failed = message.attempt if decision.counts else message.attempt - 1
        failure = FailureRecord(message.position, failed, shown, retry_at=due, retry_delay=delay)
        turn.claim.add_failure(failure)
        slot.waited = True
        self._observers.report(message, "retry" if decision.counts else "wait", reason)
        if not decision.counts:
            if lacks_resource(error):
                _broker_log.warning(
                    "%s: message %s waits %.2f s, because the broker or the coordinator is away or"
                    " full; no attempt is counted: %s",
                    where(slot),
                    message.id,
                    decision.after_seconds,
                    reason,
                )
            else:
                _log.info(
                    "%s: message %s waits %.2f s for %s; no attempt is counted: %s",
                    where(slot),
                    message.id,
                    decision.after_seconds,
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

    def _skip(
        self, turn: Turn, row: Row, message: Message, error: BaseException, decision: SkipMessage
    ) -> TurnResult:
        try:
            self._free(turn.slot.queue, row[2], row[3], row[0])
        except Exception as failure:  # noqa: BLE001 - brokers raise what their libraries raise
            return self.broker_failed(turn.slot, "cannot free the unique key", failure)
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
        failure = FailureRecord(
            message.position,
            message.attempt,
            self._engine.recorded(decision.reason),
            blocked_since=round(time.time(), 3),
        )
        turn.claim.add_failure(failure)
        self._fetcher.clear(slot)
        self._observers.report(message, "block", decision.reason)
        _log.error(
            "%s: message %s blocks the queue after %s; run `qdo retry-now`, `qdo skip` or"
            " `qdo dead-letters add` with %s %s: %s",
            where(slot),
            message.id,
            pluralize(message.attempt, "failed attempt"),
            slot.queue,
            message.id,
            decision.reason,
            exc_info=traceback_for_log(error),
        )
        return TurnResult.HELD

    def wait_for_key(
        self, turn: Turn, row: Row, message: Message, error: BaseException
    ) -> TurnResult:
        slot = turn.slot
        claim = turn.claim
        reason = self._engine.recorded(describe(error))[:FAILURE_ERROR_CHARACTERS]
        failure = claim.failure
        # Record and log only once, not at each check for the key.
        if failure is None or (failure.position, failure.error) != (message.position, reason):
            now = round(time.time(), 3)
            claim.add_failure(
                FailureRecord(
                    message.position,
                    message.attempt - 1,
                    reason,
                    retry_at=now,
                    blocked_since=now,
                )
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
        """Store a dead letter, and only then mark its message as done."""
        slot = turn.slot
        slot.message = slot.message or slot.dead_letter_message  # in flight until stored
        try:
            self._broker.dead_letters.store(dead_letter)
            self._free(slot.queue, dead_letter.key, dead_letter.headers, dead_letter.position)
        except Exception as failure:  # noqa: BLE001 - brokers raise what their libraries raise
            return self.broker_failed(slot, "cannot store the dead letter", failure)
        message = slot.dead_letter_message
        slot.dead_letter_message = None
        # If the worker lost the queue during the write, the next owner runs the message again.
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

    def _free(self, queue: str, key: str | None, headers: str | None, position: int) -> None:
        if headers is not None:
            id = self._message_id(position)
            free_key(self._broker, queue, key, parsed(headers) or {}, id)

    def note_expired(self, slot: Slot, position: int) -> None:
        self._counters.expired += 1
        _log.warning(
            "%s: message %s is no longer held: %s",
            where(slot),
            self._message_id(position),
            EXPIRED_REASON,
        )

    def _message_id(self, position: int) -> str:
        return self._broker.positions.message_id(position, self._broker.id_node)
