"""What follows from an attempt that did not return: one function per outcome.

===========  ===========================================================================
outcome      what happens
===========  ===========================================================================
retry        the queue waits and runs the same message again, so that its order is kept
dead-letter  stored durably, and only then is the message passed
skip         the message is passed, as the job, the policy or an operator asked for
block        the queue waits for an operator, so that its order is kept
stop         the worker drains; the attempt does not count
lost         nothing: the queue has another owner, which runs the message again
===========  ===========================================================================

What must outlive this worker is left in ``claim.marks``: they are recorded with the next
checkpoint, or with the release.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable
from typing import Any

from qdo.app import App
from qdo.brokers.base import Broker, DeadLetterRecord
from qdo.coordination.layout import Marks
from qdo.coordination.slots import Claim
from qdo.describe import counted, describe, describe_traceback
from qdo.errors import UnsupportedError, WorkerCrashedError
from qdo.message import Message
from qdo.outcomes import Skip, Stop
from qdo.policy import (
    LONGEST_SECONDS,
    BlockQueue,
    Decision,
    PassOver,
    Policy,
    RetryLater,
    SetAside,
    StopWorker,
    backoff,
    decide,
    decide_crashed,
)
from qdo.worker.counters import Counters
from qdo.worker.fetching import Fetcher, Row
from qdo.worker.observing import Observing
from qdo.worker.slot import JobAborted, Slot, Turn

BROKER_POLICY = Policy(backoff_seconds=0.1, backoff_max_seconds=5.0)
"""How long a queue waits after its broker failed; it is asked again for ever."""
UNREADABLE = "it cannot be read"
OPERATOR_REASON = "an operator decided so"
EXPIRED_REASON = "the broker has it back; it is run when it is received again"

_log = logging.getLogger(__name__)


class Outcomes:
    """Ends attempts.

    :ivar context: what the app's `job_failure` gets as its second argument.
    :param policy_for: the policy of a queue.
    :param on_stop: called with the reason when a job asks to stop the worker.
    """

    def __init__(
        self,
        app: App,
        broker: Broker,
        fetcher: Fetcher,
        counters: Counters,
        observing: Observing,
        policy_for: Callable[[str], Policy],
        on_stop: Callable[[str], None],
        clock: Callable[[], float],
        chance: Callable[[], float] = random.random,
    ) -> None:
        self.context: Any = None
        self.counters = counters
        self._app = app
        self._broker = broker
        self._fetcher = fetcher
        self._observing = observing
        self._policy_for = policy_for
        self._on_stop = on_stop
        self._clock = clock
        self._chance = chance

    def failed(
        self, slot: Slot, claim: Claim, row: Row, message: Message, error: BaseException
    ) -> Turn:
        """Do what the policy says about an attempt that did not return."""
        kinds = type(error).__mro__
        if Stop not in kinds:
            self.counters.unsuccessful += 1
        policy = self._policy_for(slot.queue)
        decision = decide(message.attempt, error, policy, self._chance())
        if Skip not in kinds and Stop not in kinds:
            self._tell(message, error)
        return self._apply(slot, claim, row, message, error, decision)

    def expired(self, slot: Slot, claim: Claim, message: Message) -> Turn:
        """Leave a message alone that the broker took back while it was in hand."""
        self.counters.attempts -= 1
        source = slot.subscription
        if source is None or source.is_held(message.position):
            self._fetcher.clear(slot)
            return Turn.MORE  # another one was meant, and has ended meanwhile: run this anew
        claim.done = message.position
        self.note_expired(slot, message.position)
        self._observing.tell(message, "lost", EXPIRED_REASON)
        return Turn.MORE

    def note_expired(self, slot: Slot, position: int) -> None:
        """Count a message that the broker took back."""
        self.counters.expired += 1
        _log.warning(
            "%s: message %s is no longer held: %s",
            _where(slot),
            self._id_of(position),
            EXPIRED_REASON,
        )

    def _id_of(self, position: int) -> str:
        return self._broker.positions.message_id(position, self._broker.id_node)

    def before(self, slot: Slot, claim: Claim, row: Row, marks: Marks) -> Turn | None:
        """Do what is due for a message that failed before it runs again; None: run it."""
        if marks.verdict:
            message = self._unread(slot, claim, row, marks.attempts)
            verdict: Decision = PassOver(OPERATOR_REASON)
            if marks.verdict == "dead-letter":
                verdict = SetAside(marks.error)
            error = WorkerCrashedError(reason=marks.error)
            return self._apply(slot, claim, row, message, error, verdict)
        if slot.waited:
            return None
        slot.waited = True
        # Set by another clock, or by this one before it was set back.
        delay = min(marks.due - time.time(), marks.pause or LONGEST_SECONDS)
        if marks.crashed:
            policy = self._policy_for(slot.queue)
            decision = decide_crashed(marks.attempts, marks.error, policy, self._chance())
            if not isinstance(decision, RetryLater):
                return self._crashed(slot, claim, row, marks, decision)
            delay = decision.after_seconds
        if delay <= 0:
            return None
        _log.warning(
            "%s: %s of message %s failed elsewhere, the next one in %.2f s: %s",
            _where(slot),
            counted(marks.attempts, "attempt"),
            self._unread(slot, claim, row, marks.attempts).id,
            delay,
            marks.error,
        )
        return self._wait(slot, delay)

    def _crashed(
        self, slot: Slot, claim: Claim, row: Row, marks: Marks, decision: Decision
    ) -> Turn:
        """End a message whose last attempt ended with its process."""
        message = self._unread(slot, claim, row, marks.attempts)
        error = WorkerCrashedError(reason=marks.error)
        self._tell(message, error)
        return self._apply(slot, claim, row, message, error, decision)

    def _unread(self, slot: Slot, claim: Claim, row: Row, attempt: int) -> Message:
        """Return a message with the body as it was sent: decoding it may be what kills."""
        position, body, key, _ = row
        node = self._broker.naming
        return Message(slot.queue, position, body, key, {}, claim.fence, attempt, node)

    def _apply(
        self,
        slot: Slot,
        claim: Claim,
        row: Row,
        message: Message,
        error: BaseException,
        decision: Decision,
    ) -> Turn:
        if slot.claim is not claim:
            return self._lost(slot, message, error)
        match decision:
            case RetryLater():
                return self._retry(slot, claim, message, error, decision)
            case SetAside():
                return self._dead_letter(slot, claim, row, message, error, decision)
            case PassOver():
                return self._skip(slot, claim, message, decision)
            case BlockQueue():
                return self._block(slot, claim, message, decision)
            case StopWorker():
                return self._stop(slot, message, decision)

    def _tell(self, message: Message, error: BaseException) -> None:
        try:
            self._app.job_failure(message, self.context, error)
        except JobAborted:
            raise
        except BaseException:  # noqa: BLE001 - a hook of the app must not end the worker
            _log.exception("queue %s: job_failure raised an error itself", message.queue)

    # --- one function per outcome -------------------------------------------------------

    def _lost(self, slot: Slot, message: Message, error: BaseException) -> Turn:
        """Leave the message to the queue's next owner."""
        self._observing.tell(message, "lost", describe(error))
        _log.warning(
            "%s: message %s failed while its queue was given up; the next owner of the"
            " queue runs it again: %s",
            _where(slot),
            message.id,
            describe(error),
        )
        return Turn.ENDED

    def _retry(
        self, slot: Slot, claim: Claim, message: Message, error: BaseException, decision: RetryLater
    ) -> Turn:
        """Wait, and run the same message again: the queue's order is kept."""
        self.counters.retried += 1
        told = describe(error)
        pause = round(decision.after_seconds, 3)
        # A time that is recorded without a pause is waited for, whatever a clock makes of it.
        due = round(time.time() + pause, 3) if pause else 0.0
        claim.marks = Marks(message.position, message.attempt, told, due=due, pause=pause)
        slot.waited = True
        self._observing.tell(message, "retry", told)
        _log.warning(
            "%s: attempt %d of %d of message %s failed, the next one in %.2f s: %s",
            _where(slot),
            message.attempt,
            self._policy_for(slot.queue).terms(error).attempts,
            message.id,
            decision.after_seconds,
            told,
            exc_info=error if _log.isEnabledFor(logging.DEBUG) else None,
        )
        return self._wait(slot, decision.after_seconds)

    def _wait(self, slot: Slot, seconds: float) -> Turn:
        slot.not_before = self._clock() + seconds
        self._fetcher.clear(slot)
        return Turn.WAIT

    def _skip(self, slot: Slot, claim: Claim, message: Message, decision: PassOver) -> Turn:
        """Pass a message over, as the job, the policy or an operator asked for."""
        self.counters.skipped += 1
        claim.done = message.position
        self._observing.tell(message, "skip", decision.reason)
        _log.info(
            "%s: message %s skipped in attempt %d: %s",
            _where(slot),
            message.id,
            message.attempt,
            decision.reason,
        )
        return Turn.MORE

    def _block(self, slot: Slot, claim: Claim, message: Message, decision: BlockQueue) -> Turn:
        """Keep the message where it is, and the queue with it, until an operator says."""
        self.counters.blocked += 1
        claim.marks = Marks(
            message.position, message.attempt, decision.reason, since=round(time.time(), 3)
        )
        self._fetcher.clear(slot)
        self._observing.tell(message, "block", decision.reason)
        _log.error(
            "%s: blocked by message %s after %s, until somebody runs"
            " `qdo unblock %s%s` with --retry, --skip or --dead-letter: %s",
            _where(slot),
            message.id,
            counted(message.attempt, "attempt"),
            slot.queue,
            f" --position {message.position}" if slot.in_lane else "",
            decision.reason,
        )
        return Turn.HELD

    def _stop(self, slot: Slot, message: Message, decision: StopWorker) -> Turn:
        """Have the worker stop in good order; the message is not done, nothing is counted."""
        self.counters.stopped += 1
        self.counters.attempts -= 1
        self._fetcher.clear(slot)
        self._observing.tell(message, "stop", decision.reason)
        _log.warning(
            "%s: message %s stops the worker; the next owner of the queue runs it: %s",
            _where(slot),
            message.id,
            decision.reason,
        )
        self._on_stop(decision.reason)
        return Turn.HELD

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
            traceback=_traceback(error),
            attempts=message.attempt,
            worker=slot.member.name if slot.member is not None else "",
            fence=claim.fence,
            dead_at=time.time(),
        )
        slot.letter_of = message
        return self.bury(slot, claim, slot.letter)

    def bury(self, slot: Slot, claim: Claim, letter: DeadLetterRecord) -> Turn:
        """Store a dead letter, and only then pass its message: nothing is ever lost."""
        slot.message = slot.message or slot.letter_of  # in hand until it is stored
        try:
            self._broker.bury(letter)
        except Exception as error:  # noqa: BLE001 - brokers raise what their libraries raise
            return self.trouble(slot, "its dead letter cannot be stored", error)
        message, slot.letter_of = slot.letter_of, None
        if slot.claim is not claim:
            return Turn.ENDED
        slot.letter = None
        slot.troubles = 0
        claim.done = letter.position
        self.counters.dead_lettered += 1
        if message is not None:
            self._observing.tell(message, "dead-letter", letter.error)
        _log.error(
            "%s: message %s is a dead letter after %s: %s",
            _where(slot),
            self._id_of(letter.position) if message is None else message.id,
            counted(letter.attempts, "attempt"),
            letter.error,
        )
        return Turn.MORE

    def trouble(self, slot: Slot, what: str, error: Exception) -> Turn:
        """Wait for a broker that failed; the queue goes on after ``claim.done``."""
        slot.troubles += 1
        pause = backoff(slot.troubles, BROKER_POLICY, self._chance())
        # Those that must be asked for messages have pauses of their own before they are asked.
        own = slot.subscription is not None and what == UNREADABLE
        when = "with growing pauses" if own else f"in {pause:.2f} s"
        # What the broker never does stands still until somebody changes something.
        level = logging.ERROR if isinstance(error, UnsupportedError) else logging.WARNING
        _log.log(level, "%s: %s, tried again %s: %s", _where(slot), what, when, describe(error))
        return self._wait(slot, pause)


def _traceback(error: BaseException) -> str:
    """Return the traceback of an error, nothing of one that was never raised."""
    raised = error.__traceback__ is not None or error.__cause__ is not None
    return describe_traceback(error) if raised else ""


def _where(slot: Slot) -> str:
    worker = slot.member.name if slot.member is not None else "worker"
    return f"{worker}, queue {slot.queue}"
