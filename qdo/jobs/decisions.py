"""Decisions after failed attempts, as pure functions of values: no clock, no I/O."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TypeAlias

from qdo.errors import BodyDecodeError, WorkerCrashedError
from qdo.jobs.policy import MAX_SECONDS, Policy, Then
from qdo.outcomes import DeadLetter, Retry, Skip, Stop
from qdo.text import describe, one_line

LONGEST_SECONDS = 10 * 366 * MAX_SECONDS
"""The longest pause that a job can request: timers overflow beyond it."""


@dataclass(frozen=True, slots=True)
class RetryMessage:
    """Retry the message; its queue waits until then to keep the order.

    :ivar counts: whether the attempt counts as a failed one.
    """

    after_seconds: float
    counts: bool = True


@dataclass(frozen=True, slots=True)
class DeadLetterMessage:
    """Store the message as a dead letter and continue."""

    reason: str


@dataclass(frozen=True, slots=True)
class SkipMessage:
    """Continue without the message."""

    reason: str


@dataclass(frozen=True, slots=True)
class BlockQueue:
    """Keep the message and stop its queue until an operator decides."""

    reason: str


@dataclass(frozen=True, slots=True)
class StopWorker:
    """Stop this worker; the attempt does not count."""

    reason: str


Decision: TypeAlias = RetryMessage | DeadLetterMessage | SkipMessage | BlockQueue | StopWorker


def decide(attempt: int, error: BaseException, policy: Policy, chance: float) -> Decision:
    """Return the decision after attempt number `attempt` (from 1) ended with `error`.

    :param chance: a random number in [0, 1) for the jitter.
    """
    kinds = type(error).__mro__
    if Stop in kinds:
        return StopWorker(_reason(error))
    if Skip in kinds:
        return SkipMessage(_reason(error))
    if DeadLetter in kinds:
        return DeadLetterMessage(_reason(error))
    terms = policy.terms(error)
    counts = not only_waits(error)
    if counts and (attempt >= terms.attempts or BodyDecodeError in kinds):
        return _end(terms.then, describe(error))
    after = _requested_delay(error) if Retry in kinds else None
    return RetryMessage(terms.backoff.delay(attempt, chance) if after is None else after, counts)


def only_waits(error: BaseException) -> bool:
    """Return whether an attempt does not count as failed, because its job only has to wait."""
    if Retry not in type(error).__mro__:
        return False
    try:
        return error.counts is False  # type: ignore[attr-defined]
    except BaseException:  # noqa: BLE001 - see `_reason`
        return False


def decide_crashed(attempts: int, reason: str, policy: Policy, chance: float) -> Decision:
    """Return the decision after the process died in the last of `attempts`.

    The next owner makes it before it runs the message.
    """
    terms = policy.terms(WorkerCrashedError(reason=reason))
    if attempts >= terms.attempts:
        return _end(terms.then, reason)
    return RetryMessage(terms.backoff.delay(attempts, chance))


def _end(then: Then, reason: str) -> DeadLetterMessage | SkipMessage | BlockQueue:
    if then == "block":
        return BlockQueue(reason)
    return SkipMessage(reason) if then == "skip" else DeadLetterMessage(reason)


def _reason(error: BaseException) -> str:
    """Return the reason of an outcome; subclasses in apps may define anything."""
    try:
        return one_line(error.reason)  # type: ignore[attr-defined]
    except BaseException:  # noqa: BLE001 - an attribute may be anything, also missing
        return describe(error)


def _requested_delay(error: BaseException) -> float | None:
    try:
        after = error.after  # type: ignore[attr-defined]
        return min(max(0.0, float(after)), LONGEST_SECONDS) if math.isfinite(after) else None
    except BaseException:  # noqa: BLE001 - see `_reason`
        return None
