"""What follows from a failed attempt: pure decisions, no clock, no I/O.

=============================  ==========================================================
how the attempt ended          decision
=============================  ==========================================================
``raise Retry(after)``         run again after that time, or the policy's back-off;
                               a dead letter once the policy's attempts are used up
``raise DeadLetter(reason)``   a dead letter at once
``raise Skip(reason)``         pass the message over
the body cannot be decoded     a dead letter at once: it will never decode
anything else                  run again after the policy's back-off; a dead letter once
                               the policy's attempts are used up
=============================  ==========================================================
"""

from __future__ import annotations

import traceback
from dataclasses import dataclass
from typing import Literal, TypeAlias

from qdo.errors import BodyDecodeError
from qdo.outcomes import DeadLetter, Retry, Skip

Jitter: TypeAlias = Literal["full", "equal"]

_LONGEST_EXPONENT = 62
"""Doubling stops to matter long before; a float must not overflow at attempt 2000."""


@dataclass(frozen=True, slots=True)
class Policy:
    """How often and how fast a failed message is run again.

    :ivar attempts: how many attempts a message gets, the first one included.
    :ivar backoff_seconds: ceiling of the delay after the first attempt; it doubles.
    :ivar backoff_max_seconds: no delay is longer.
    :ivar jitter: ``"full"``: anywhere from 0 to the ceiling; ``"equal"``: the upper half.
        Both keep queues that failed together from coming back together.
    """

    attempts: int = 10
    backoff_seconds: float = 0.5
    backoff_max_seconds: float = 60.0
    jitter: Jitter = "equal"


@dataclass(frozen=True, slots=True)
class RetryLater:
    """Run the message again; its queue waits until then, so that order is kept."""

    after_seconds: float


@dataclass(frozen=True, slots=True)
class SetAside:
    """Store the message as a dead letter and go on."""

    reason: str


@dataclass(frozen=True, slots=True)
class PassOver:
    """Go on without the message, as the job asked for."""

    reason: str


Decision: TypeAlias = RetryLater | SetAside | PassOver


def decide(attempt: int, error: BaseException, policy: Policy, chance: float) -> Decision:
    """Return what follows from attempt number `attempt` (from 1) that ended with `error`.

    :param chance: a random number in [0, 1) for the jitter.
    """
    if isinstance(error, Skip):
        return PassOver(_text(error.reason))
    if isinstance(error, DeadLetter):
        return SetAside(_text(error.reason))
    if isinstance(error, BodyDecodeError):
        return SetAside(describe(error))
    if attempt >= policy.attempts:
        return SetAside(describe(error))
    if isinstance(error, Retry) and error.after is not None:
        return RetryLater(max(0.0, error.after))
    return RetryLater(backoff(attempt, policy, chance))


def backoff(attempt: int, policy: Policy, chance: float) -> float:
    """Return the delay in seconds after attempt number `attempt`: exponential, with jitter."""
    doubled = policy.backoff_seconds * 2.0 ** min(attempt - 1, _LONGEST_EXPONENT)
    ceiling = min(doubled, policy.backoff_max_seconds)
    if policy.jitter == "full":
        return ceiling * chance
    return ceiling * (0.5 + 0.5 * chance)


def describe(error: BaseException) -> str:
    """Return an error as one line, even when its own `str()` raises."""
    text = " ".join(_text(error).split())
    name = type(error).__name__
    return f"{name}: {text}" if text else name


def _text(value: object) -> str:
    """Return `value` as text, whatever an app has put there: it may raise, even SystemExit."""
    try:
        return str(value)
    except BaseException:  # noqa: BLE001 - the text of an app's error is the app's code
        return "(its text cannot be shown: str() of it raises)"


def describe_traceback(error: BaseException) -> str:
    """Return the traceback of an error, even when its own `str()` or `repr()` raises."""
    try:
        return "".join(traceback.format_exception(error))
    except BaseException:  # noqa: BLE001 - see `_text`
        return "".join(traceback.format_tb(error.__traceback__)) + describe(error)
