"""Decide the ends of attempts that did not return.

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

`queue_ends` and `request_ends` carry out the decisions.
"""

from __future__ import annotations

import logging

from qdo.callables import check_done
from qdo.errors import BodyDecodeError, FailureKind, KeyMissingError
from qdo.jobs.retry import Decision, RetryMessage, decide, only_waits
from qdo.message import Message
from qdo.outcomes import Outcome, Skip, Stop
from qdo.refusals import failure_kind
from qdo.text import describe
from qdo.worker.engine.context import Engine
from qdo.worker.engine.ends import EXPIRED_REASON, Ends
from qdo.worker.engine.jobs import Turn
from qdo.worker.engine.queue_ends import QueueEnds
from qdo.worker.engine.request_ends import RequestEnds
from qdo.worker.engine.slot import Row, Slot, TurnResult, where
from qdo.worker.executors.base import JobAborted

_log = logging.getLogger(__name__)


class Outcomes:
    """Decides the ends of attempts; `queue_ends` or `request_ends` carries out the decisions."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._broker = engine.broker
        self._fetcher = engine.fetcher
        self._observers = engine.observers
        self._counters = engine.counters
        self._queues = QueueEnds(engine)
        self._requests = RequestEnds(engine)
        self.wait = self._queues.wait
        self.broker_failed = self._queues.broker_failed
        self.store_dead_letter = self._queues.store_dead_letter

    def _ends(self, slot: Slot) -> Ends:
        return self._requests if slot.is_pool else self._queues

    def failed(self, turn: Turn, row: Row, message: Message, error: BaseException) -> TurnResult:
        """Apply the policy to an attempt that raised an error."""
        if KeyMissingError in type(error).__mro__:  # `isinstance` trusts `__class__`, which may lie
            return self._wait_for_key(turn, row, message, error)
        excused = self.excused(turn, message, error)
        if isinstance(excused, TurnResult):
            return excused
        policy = self._engine.policy_of(turn.slot.queue)
        kinds = type(error).__mro__
        waits = excused is not None or only_waits(error, policy)
        # The turn counts all messages that it took, so subtract an attempt that must not count.
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
        """Return a turn's end or a decision if the message did not cause its failure.

        The cause may be an unreachable broker or the failing server of a paused job, see
        `breakers`. Return None for other failures.
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
        """Drop a message that the broker took back while the message was in flight."""
        slot = turn.slot
        self._counters.attempts -= 1
        if slot.subscription is None or slot.subscription.is_held(message.position):
            # The broker took back another message that has already ended, so run this message
            # again.
            self._fetcher.clear(slot)
            return TurnResult.MORE
        turn.claim.done = message.position
        self.note_expired(slot, message.position)
        self._observers.report(message, "lost", EXPIRED_REASON)
        return TurnResult.MORE

    def note_expired(self, slot: Slot, position: int) -> None:
        """Record that the broker took back a message."""
        self._ends(slot).note_expired(slot, position)

    def call_failure_hook(self, message: Message, error: BaseException) -> None:
        """Call the app's `job_failure`; log the errors of this hook."""
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
        """Carry out a decision about a failed attempt, unless the worker has lost the queue."""
        # Check after the app's hook, because the worker may have lost the queue during the hook.
        if not turn.in_force:
            return self._lost(turn.slot, message, error)
        return self._ends(turn.slot).apply(turn, row, message, error, decision)

    def _wait_for_key(
        self, turn: Turn, row: Row, message: Message, error: BaseException
    ) -> TurnResult:
        self._counters.attempts -= 1
        if not turn.in_force:
            return self._lost(turn.slot, message, error) if turn.slot.is_pool else TurnResult.ENDED
        return self._ends(turn.slot).wait_for_key(turn, row, message, error)

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
