"""What follows from an attempt that did not return: one function per outcome.

===========  ===========================================================================
outcome      what happens
===========  ===========================================================================
retry        the queue waits and runs the same message again, so that its order is kept
dead letter  stored durably, and only then is the message passed
skip         the message is passed, as the job asked for
===========  ===========================================================================
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable
from typing import Any

from qdo.app import App
from qdo.brokers.base import Broker, DeadLetterRecord
from qdo.coordination.slots import Claim
from qdo.message import Message
from qdo.worker.counters import Counters
from qdo.worker.fetching import Fetcher, Row
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
from qdo.worker.slot import JobAborted, Slot, Turn

BROKER_POLICY = Policy(backoff_seconds=0.1, backoff_max_seconds=5.0)
"""How long a queue waits after its broker failed; it is asked again for ever."""

_log = logging.getLogger(__name__)


class Outcomes:
    """Ends attempts.

    :ivar context: what the app's `job_failure` gets as its second argument.
    """

    def __init__(
        self,
        app: App,
        broker: Broker,
        fetcher: Fetcher,
        counters: Counters,
        policy: Policy,
        clock: Callable[[], float],
        chance: Callable[[], float] = random.random,
    ) -> None:
        self.context: Any = None
        self.counters = counters
        self._app = app
        self._broker = broker
        self._fetcher = fetcher
        self._policy = policy
        self._clock = clock
        self._chance = chance

    def failed(
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
        self._fetcher.clear(slot)
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
        return self.bury(slot, claim, slot.letter)

    def bury(self, slot: Slot, claim: Claim, letter: DeadLetterRecord) -> Turn:
        """Store a dead letter, and only then pass its message: nothing is ever lost."""
        try:
            self._broker.bury(letter)
        except Exception as error:  # noqa: BLE001 - brokers raise what their libraries raise
            return self.trouble(slot, "its dead letter cannot be stored", error)
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

    def trouble(self, slot: Slot, what: str, error: Exception) -> Turn:
        """Wait for a broker that failed; the queue goes on after ``claim.done``."""
        self._fetcher.clear(slot)
        slot.troubles += 1
        pause = backoff(slot.troubles, BROKER_POLICY, self._chance())
        slot.not_before = self._clock() + pause
        _log.warning(
            "%s: %s, tried again in %.2f s: %s", _where(slot), what, pause, describe(error)
        )
        return Turn.WAIT


def _where(slot: Slot) -> str:
    worker = slot.member.name if slot.member is not None else "worker"
    return f"{worker}, queue {slot.queue}"
