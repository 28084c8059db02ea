"""Resume a queue by its subscription at a polled broker, and handle its recorded failure.

A subscription lasts as long as its claim. A slot's reader lasts until the slot becomes idle.

`FailureResumer` handles the recorded failure of a message before the message runs again. This
worker, an earlier owner, or a parent process has recorded the failure. A parent records a failure
when its worker process dies with the message in flight.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import replace

from qdo.brokers.base import Broker, Subscription
from qdo.coordination.protocol.claims import Claim
from qdo.coordination.znodes.queue_node import FailureRecord
from qdo.errors import WorkerCrashedError
from qdo.jobs.retry import (
    LONGEST_SECONDS,
    DeadLetterMessage,
    Decision,
    RetryMessage,
    SkipMessage,
    decide_crashed,
)
from qdo.text import pluralize
from qdo.worker.engine.context import Engine
from qdo.worker.engine.jobs import NO_JOB, Turn
from qdo.worker.engine.outcomes import Outcomes
from qdo.worker.engine.slot import Row, Slot, SlotState, TurnResult, where
from qdo.worker.executors.base import MessageExpired

OPERATOR_REASON = "an operator decided so"
# Seconds in which a new owner usually repeats the messages that the previous owner ran after its
# last checkpoint.
SUSPECT_SECONDS = 1.0
_log = logging.getLogger(__name__)


class Subscriptions:
    """The subscriptions of one worker process."""

    def __init__(self, broker: Broker, clock: Callable[[], float]) -> None:
        self._needed = broker.capabilities.subscriptions
        self._broker = broker
        self._clock = clock

    def needed(self, turn: Turn) -> bool:
        """Return whether a turn needs a new subscription."""
        if turn.slot.subscription is not None or turn.job is NO_JOB:
            return False
        return self._needed or turn.slot.is_pool

    def begin(self, turn: Turn) -> None:
        """Subscribe to the messages of a claim; raise an error of the broker."""
        slot = turn.slot
        claim = turn.claim
        batch = turn.job.batch
        subscribe = turn.pool.subscribe if turn.slot.is_pool else self._broker.subscribe
        subscription = subscribe(
            slot.queue,
            claim.done,
            claim.unconfirmed,
            lambda position: _expired(slot, position, batch),
        )
        slot.subscription = subscription
        claim.refresh = refresher(claim, subscription)
        subscription.on_confirmed = lambda: _record(slot, claim)
        subscription.may_start = lambda: _may_start(slot, claim, self._clock())
        subscription.in_flight = lambda: _all_in_flight(slot, batch)

    def end(self, slot: Slot) -> None:
        """Close the subscription of a slot, to release its messages."""
        subscription = slot.subscription
        slot.subscription = None
        if subscription is not None:
            subscription.close()


def refresher(claim: Claim, subscription: Subscription) -> Callable[[], None]:
    """Return a function that updates a claim from its subscription before each recording."""

    def refresh() -> None:
        claim.unconfirmed = subscription.unconfirmed()

    return refresh


def advance_to_end(slot: Slot, claim: Claim) -> None:
    """Advance a claim to the end of the fetched part of its queue, or to the end of the queue.

    Call this for a queue whose fetched messages are all done.
    """
    subscription = slot.subscription
    if subscription is None:
        return
    end = subscription.fetched_through if subscription.end is None else subscription.end
    if end is not None and claim.done < end:
        claim.done = end


def _record(slot: Slot, claim: Claim) -> None:
    """Checkpoint a claim again, because its subscription has changed."""
    if slot.claim is claim and not claim.over and slot.member is not None:
        slot.member.progress(claim)


def _expired(slot: Slot, position: int, batch: int) -> None:
    """End the job of a message that the broker took back."""
    # Do not wait for the end of the job, because the calling subscription must continue.
    for running in slot.lanes.in_flight() if slot.lanes is not None else (slot,):
        if running.greenlet is not None and position in _in_flight(running, batch):
            running.greenlet.kill(MessageExpired(), block=False)


def _may_start(slot: Slot, claim: Claim, now: float) -> bool:
    """Return whether messages of a claim may start, now or when concurrency allows."""
    in_force = slot.claim is claim and claim.open and now < claim.lease.until
    return in_force and slot.state is not SlotState.HELD


def _all_in_flight(slot: Slot, batch: int) -> list[int]:
    slots = slot.lanes.in_flight() if slot.lanes is not None else (slot,)
    return [position for running in slots for position in _in_flight(running, batch)]


def _in_flight(slot: Slot, batch: int) -> Iterable[int]:
    if slot.message is None:
        return ()
    if slot.pending_dead_letter is not None:  # the job has ended; store the dead letter
        return (slot.pending_dead_letter.position,)
    if batch and slot.gathered:
        return [row[0] for row in slot.gathered[:batch]]
    return (slot.message.position,)


class FailureResumer:
    """Applies operators' decisions, backoffs, and the policy for crashed attempts."""

    def __init__(self, engine: Engine, outcomes: Outcomes) -> None:
        self._engine = engine
        self._decoder = engine.decoder
        self._outcomes = outcomes

    def resume(self, turn: Turn, row: Row, failure: FailureRecord) -> TurnResult | None:
        """Handle a recorded failure; return None if the message may run now.

        Do not decode the message, because decoding may have killed the process.
        """
        slot = turn.slot
        if failure.decision:
            return self._apply_decision(turn, row, failure)
        # This worker began the backoff in an earlier turn, and the backoff has ended.
        if slot.waited:
            return None
        slot.waited = True
        # The recorded time may come from another clock, or from this clock before a correction.
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
            "%s: %s of %s failed on another worker, retrying in %.2f s: %s",
            where(slot),
            pluralize(failed, "attempt") if failed else "no attempt",
            self._decoder.undecoded(turn, row, failed).id,
            delay,
            failure.error,
        )
        return self._outcomes.wait(slot, delay)

    def may_begin(
        self,
        turn: Turn,
        position: int,
        settle: Callable[[], None] = lambda: None,
        *,
        alone: bool = True,
    ) -> bool:
        """Record the start of a message that may kill its owner; return whether it may begin.

        If this owner dies before it counts the attempt, the next owner counts the attempt at its
        claim (`QueueNode.claimed_by`). If the previous owner has probably also begun the message,
        the next owner counts two attempts.

        :param settle: updates the queue's claim from a lane's claim.
        :param alone: whether the job gets only this message.
        """
        claim = turn.claim
        whole = claim.whole
        own = claim.failure if claim.failure and claim.failure.position == position else None
        if turn.slot.is_pool or not (whole.careful or (own is not None and own.crashed)):
            return True
        whole.careful = max(0, whole.careful - 1)
        now = self._engine.clock()
        name = turn.member.name
        whole.suspects_until = whole.suspects_until or now + SUSPECT_SECONDS
        suspected = whole.former and now < whole.suspects_until and own is None and alone
        begun_by = (whole.former, name) if suspected else (name,)
        claim.add_failure(replace(own or FailureRecord(position, 0), begun_by=begun_by))
        # Settle first, because the member records the queue's claim. Recording waits for the
        # coordinator, and the claim or the lease may end during the wait.
        settle()
        turn.member.record(whole)
        return claim.open and self._engine.clock() < claim.lease.until

    def _apply_decision(self, turn: Turn, row: Row, failure: FailureRecord) -> TurnResult:
        """Skip or dead-letter a message by an operator's decision."""
        decision: Decision = SkipMessage(OPERATOR_REASON)
        if failure.decision == "dead-letter":
            decision = DeadLetterMessage(failure.error)
        message = self._decoder.undecoded(turn, row, failure.attempts)
        error = WorkerCrashedError(reason=failure.error)
        return self._outcomes.apply(turn, row, message, error, decision)

    def _end_crashed(
        self, turn: Turn, row: Row, failure: FailureRecord, decision: Decision
    ) -> TurnResult:
        """End a message whose last attempt died with its process."""
        message = self._decoder.undecoded(turn, row, failure.attempts)
        error = WorkerCrashedError(reason=failure.error)
        self._outcomes.call_failure_hook(message, error)
        return self._outcomes.apply(turn, row, message, error, decision)
