"""End requests of pools, and record each end in the row of the request."""

from __future__ import annotations

import logging

from qdo.brokers.requests import FAILED
from qdo.jobs.retry import (
    BlockQueue,
    DeadLetterMessage,
    Decision,
    RetryMessage,
    SkipMessage,
    StopWorker,
)
from qdo.message import Message
from qdo.outcomes import OutcomeName
from qdo.text import describe
from qdo.worker.engine.ends import KEY_SECONDS, Ends, traceback_for_log
from qdo.worker.engine.jobs import Turn
from qdo.worker.engine.slot import Row, Slot, TurnResult, where

_log = logging.getLogger(__name__)


class RequestEnds(Ends):
    """Ends attempts of requests; each method returns once the broker has stored the end."""

    def apply(
        self, turn: Turn, row: Row, message: Message, error: BaseException, decision: Decision
    ) -> TurnResult:
        pool = turn.pool
        position = message.position
        reason = describe(error)
        kind: OutcomeName = "dead-letter"
        level = logging.ERROR
        match decision:
            case RetryMessage():
                kind = "retry" if decision.counts else "wait"
                level = logging.WARNING
                failed = message.attempt - (not decision.counts)
                pool.put_back(position, failed, decision.after_seconds, reason)
                self._counters.retried += decision.counts
            case StopWorker():
                pool.put_back(position, message.attempt - 1, 0.0, reason)
                return self.stop(turn.slot, message, decision)
            case SkipMessage():
                kind = "skip"
                level = logging.INFO
                pool.finish(position, "skipped", decision.reason)
                self._counters.skipped += 1
            case DeadLetterMessage() | BlockQueue():  # a pool has no order to keep
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

    def wait_for_key(
        self, turn: Turn, row: Row, message: Message, error: BaseException
    ) -> TurnResult:
        # Another worker may have the key.
        return self.apply(turn, row, message, error, RetryMessage(KEY_SECONDS, counts=False))

    def note_expired(self, slot: Slot, position: int) -> None:
        """Do nothing, because the pool has logged the cancellation of the request."""
