"""Handles a message with a recorded failure before it runs again.

The failure was recorded by this worker, by an earlier owner of the queue, or by a parent process
whose worker process died with the message in flight.
"""

from __future__ import annotations

import logging
import time

from qdo.coordination.znodes.progress import FailureRecord
from qdo.errors import WorkerCrashedError
from qdo.jobs.decisions import (
    LONGEST_SECONDS,
    DeadLetterMessage,
    Decision,
    RetryMessage,
    SkipMessage,
    decide_crashed,
)
from qdo.text import pluralize
from qdo.worker.engine.context import Engine
from qdo.worker.engine.outcomes import Outcomes
from qdo.worker.engine.prefetch import Row
from qdo.worker.engine.slot import TurnResult, where
from qdo.worker.engine.turn import Turn

OPERATOR_REASON = "an operator decided so"

_log = logging.getLogger(__name__)


class FailureResumer:
    """Applies operators' decisions, backoffs and the policy for crashed attempts."""

    def __init__(self, engine: Engine, outcomes: Outcomes) -> None:
        self._engine = engine
        self._decoder = engine.decoder
        self._outcomes = outcomes

    def resume(self, turn: Turn, row: Row, failure: FailureRecord) -> TurnResult | None:
        """Handle a message that failed before; return None if it may run now.

        The message is never decoded here: decoding it may have killed the process.
        """
        slot = turn.slot
        if failure.decision:
            return self._apply_decision(turn, row, failure)
        if slot.waited:
            return None
        slot.waited = True
        # The time was set by another clock, or by this one before it was set back.
        delay = min(failure.retry_at - time.time(), failure.retry_delay or LONGEST_SECONDS)
        if failure.crashed:
            policy = self._engine.policy_of(slot.queue)
            decision = decide_crashed(
                failure.attempts, failure.error, policy, self._engine.jitter()
            )
            if not isinstance(decision, RetryMessage):
                return self._end_crashed(turn, row, failure, decision)
            delay = decision.after_seconds
        if delay <= 0:
            return None
        failed = failure.attempts
        _log.warning(
            "%s: %s of message %s failed on another worker, retrying in %.2f s: %s",
            where(slot),
            pluralize(failed, "attempt") if failed else "no attempt",
            self._decoder.undecoded(turn, row, failed).id,
            delay,
            failure.error,
        )
        return self._outcomes.wait(slot, delay)

    def _apply_decision(self, turn: Turn, row: Row, failure: FailureRecord) -> TurnResult:
        """Skip or dead-letter a message, as an operator decided."""
        decision: Decision = SkipMessage(OPERATOR_REASON)
        if failure.decision == "dead-letter":
            decision = DeadLetterMessage(failure.error)
        message = self._decoder.undecoded(turn, row, failure.attempts)
        error = WorkerCrashedError(reason=failure.error)
        return self._outcomes.apply(turn, row, message, error, decision)

    def _end_crashed(
        self, turn: Turn, row: Row, failure: FailureRecord, decision: Decision
    ) -> TurnResult:
        """End a message whose last attempt ended with its process."""
        message = self._decoder.undecoded(turn, row, failure.attempts)
        error = WorkerCrashedError(reason=failure.error)
        self._outcomes.call_failure_hook(message, error)
        return self._outcomes.apply(turn, row, message, error, decision)
