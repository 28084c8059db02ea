"""What follows from a failed attempt: values and pure decisions, no clock, no I/O.

=============================  ==========================================================
how the attempt ended          decision
=============================  ==========================================================
``raise Stop(reason)``         the worker stops; the attempt does not count
``raise Skip(reason)``         pass the message over
``raise DeadLetter(reason)``   a dead letter at once
the body cannot be decoded     at once what the policy ends with: it will never decode
``raise Retry(after)``         run again after that time, or the policy's back-off; once the
                               attempts are used up, what the policy ends with
anything else                  run again after the policy's back-off; once the attempts are
                               used up, what the policy ends with
=============================  ==========================================================

A policy ends with a dead letter, by passing the message over, or by blocking its queue. The
first rule that is for an error may say otherwise than its policy, in every point.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias, get_args

from qdo.describe import describe, text_of
from qdo.errors import BodyDecodeError, PolicyError, WorkerCrashedError
from qdo.outcomes import DeadLetter, Outcome, Retry, Skip, Stop

Jitter: TypeAlias = Literal["full", "equal"]
Then: TypeAlias = Literal["dead-letter", "block", "skip"]
Kinds: TypeAlias = "type[BaseException] | tuple[type[BaseException], ...]"

ENDS: tuple[Then, ...] = get_args(Then)
MAX_ATTEMPTS = 1_000_000
MAX_SECONDS = 86_400.0
LONGEST_SECONDS = 10 * 366 * MAX_SECONDS
"""The longest pause that a job can ask for: timers overflow somewhere behind it."""

_LONGEST_EXPONENT = 62
"""Doubling stops to matter long before; a float must not overflow at attempt 2000."""


@dataclass(frozen=True, slots=True)
class Rule:
    """What is different for some exceptions; what it leaves out is as the policy says.

    :ivar exception: an exception class or several; their subclasses count too.
    """

    exception: Kinds
    attempts: int | None = None
    backoff_seconds: float | None = None
    backoff_max_seconds: float | None = None
    then: Then | None = None

    def __post_init__(self) -> None:
        if not self.kinds:
            raise PolicyError(where="a rule", reason="it is for no exception: name one")
        for kind in self.kinds:
            _check_kind(kind)
        if not any(value is not None for _, value in self.options()):
            raise PolicyError(
                where=self.name, reason="it says nothing: give attempts, a back-off or then"
            )
        check_options(self.name, dict(self.options()))

    @property
    def kinds(self) -> tuple[type[BaseException], ...]:
        """The exceptions that it is for."""
        return self.exception if isinstance(self.exception, tuple) else (self.exception,)

    @property
    def name(self) -> str:
        """How error messages call it."""
        return f"the rule for {', '.join(kind.__name__ for kind in self.kinds)}"

    def options(self) -> Iterator[tuple[str, Any]]:
        """Give name and value of each option, None for those left out."""
        return ((name, getattr(self, name)) for name in OPTIONS)

    def fits(self, error: BaseException) -> bool:
        """Return whether it is for an error. Asks the class, for an instance may lie."""
        return not set(self.kinds).isdisjoint(type(error).__mro__)


OPTIONS = ("attempts", "backoff_seconds", "backoff_max_seconds", "then")
"""What both a policy and a rule may say."""


@dataclass(frozen=True, slots=True)
class Policy:
    """How often and how fast a failed message is run again, and what comes then.

    :ivar attempts: how many attempts a message gets, the first one included.
    :ivar backoff_seconds: ceiling of the delay after the first attempt; it doubles.
    :ivar backoff_max_seconds: no delay is longer.
    :ivar rules: exceptions to it; the first one that is for an error counts.
    :ivar then: what comes after the last attempt: "dead-letter", "block" or "skip".
    :ivar jitter: ``"full"``: anywhere from 0 to the ceiling; ``"equal"``: the upper half.
        Both keep queues that failed together from coming back together.
    :raises PolicyError: a value will not do, or a rule never counts.
    """

    attempts: int = 10
    backoff_seconds: float = 0.5
    backoff_max_seconds: float = 60.0
    rules: tuple[Rule, ...] = ()
    then: Then = "dead-letter"
    jitter: Jitter = "equal"

    def __post_init__(self) -> None:
        object.__setattr__(self, "rules", _checked_rules(self.rules))
        check_options("a policy", {name: getattr(self, name) for name in OPTIONS}, whole=True)
        if self.jitter not in get_args(Jitter):
            raise PolicyError(
                where="a policy", reason=f"jitter={self.jitter!r} is neither 'full' nor 'equal'"
            )
        for rule in self.rules:
            # What a rule leaves out comes from here, so only here both limits are known.
            terms = _with(self, rule)
            _check_order(rule.name, terms.backoff_seconds, terms.backoff_max_seconds)

    def terms(self, error: BaseException) -> Policy:
        """Return what holds for an error: this policy as its first fitting rule changes it."""
        for rule in self.rules:
            if rule.fits(error):
                return _with(self, rule)
        return self


def _with(policy: Policy, rule: Rule) -> Policy:
    said = {name: value for name, value in rule.options() if value is not None}
    return replace(policy, rules=(), **said)


# --- bad use ------------------------------------------------------------------------


def check_options(where: str, options: dict[str, Any], *, whole: bool = False) -> None:
    """Raise PolicyError unless every option that is given is of use.

    :param whole: None is no value either.
    """
    given = {name: value for name, value in options.items() if whole or value is not None}
    if "attempts" in given:
        _check_attempts(where, given["attempts"])
    for name in ("backoff_seconds", "backoff_max_seconds"):
        if name in given:
            _check_seconds(where, name, given[name])
    if "then" in given:
        _check_end(where, given["then"])
    if "backoff_seconds" in given and "backoff_max_seconds" in given:
        _check_order(where, given["backoff_seconds"], given["backoff_max_seconds"])


def _check_attempts(where: str, value: Any) -> None:
    whole = isinstance(value, int) and not isinstance(value, bool)
    if not (whole and 1 <= value <= MAX_ATTEMPTS):
        raise PolicyError(
            where=where,
            reason=f"attempts={value!r} is no whole number from 1 to {MAX_ATTEMPTS}; 1 means "
            "that a failing message is not run again",
        )


def _check_seconds(where: str, name: str, value: Any) -> None:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not (number and 0 <= value <= MAX_SECONDS):
        raise PolicyError(
            where=where, reason=f"{name}={value!r} is no number from 0 to {MAX_SECONDS:g}"
        )


def _check_end(where: str, value: Any) -> None:
    if not isinstance(value, str) or value not in ENDS:
        near = difflib.get_close_matches(str(value).lower(), ENDS, n=1)
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        raise PolicyError(
            where=where, reason=f"then={value!r} is none of {', '.join(ENDS)}{hint}"
        )


def _check_order(where: str, first: float, longest: float) -> None:
    if longest < first:
        raise PolicyError(
            where=where,
            reason=f"backoff_max_seconds, {longest:g}, is less than backoff_seconds, {first:g}: "
            "raise the one or lower the other",
        )


def _check_kind(kind: Any) -> None:
    if not (isinstance(kind, type) and issubclass(kind, BaseException)):
        raise PolicyError(
            where="a rule", reason=f"{kind!r} is no exception class: give one, such as ValueError"
        )
    if issubclass(kind, Outcome) and not issubclass(kind, Retry):
        raise PolicyError(
            where=f"the rule for {kind.__name__}",
            reason="a job that raises it has decided already, and no rule is asked: leave it out",
        )


def _checked_rules(rules: Any) -> tuple[Rule, ...]:
    found = (rules,) if isinstance(rules, Rule) else tuple(rules)
    seen: list[type[BaseException]] = []
    for rule in found:
        if not isinstance(rule, Rule):
            raise PolicyError(
                where="a policy", reason=f"{rule!r} is no rule: write qdo.Rule(EXCEPTION, ...)"
            )
        for kind in rule.kinds:
            earlier = next((each for each in seen if issubclass(kind, each)), None)
            if earlier is not None:
                raise PolicyError(
                    where=rule.name,
                    reason=f"it never counts for {kind.__name__}, for an earlier rule is for "
                    f"{earlier.__name__}: put it before that one",
                )
        seen.extend(rule.kinds)
    return found


# --- decisions ----------------------------------------------------------------------


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
    """Go on without the message."""

    reason: str


@dataclass(frozen=True, slots=True)
class BlockQueue:
    """Keep the message where it is, and run nothing of its queue until an operator says."""

    reason: str


@dataclass(frozen=True, slots=True)
class StopWorker:
    """Run nothing more here; the attempt does not count."""

    reason: str


Decision: TypeAlias = RetryLater | SetAside | PassOver | BlockQueue | StopWorker


def decide(attempt: int, error: BaseException, policy: Policy, chance: float) -> Decision:
    """Return what follows from attempt number `attempt` (from 1) that ended with `error`.

    :param chance: a random number in [0, 1) for the jitter.
    """
    kinds = type(error).__mro__
    if Stop in kinds:
        return StopWorker(_reason(error))
    if Skip in kinds:
        return PassOver(_reason(error))
    if DeadLetter in kinds:
        return SetAside(_reason(error))
    terms = policy.terms(error)
    if attempt >= terms.attempts or BodyDecodeError in kinds:
        return _end(terms.then, describe(error))
    after = _asked_delay(error) if Retry in kinds else None
    return RetryLater(backoff(attempt, terms, chance) if after is None else after)


def decide_crashed(attempts: int, reason: str, policy: Policy, chance: float) -> Decision:
    """Return what follows when the last of `attempts` ended with the process itself.

    Decided by the next owner, before it runs the message: the dead cannot decide.
    """
    terms = policy.terms(WorkerCrashedError(reason=reason))
    if attempts >= terms.attempts:
        return _end(terms.then, reason)
    return RetryLater(backoff(attempts, terms, chance))


def _end(then: Then, reason: str) -> SetAside | PassOver | BlockQueue:
    if then == "block":
        return BlockQueue(reason)
    return PassOver(reason) if then == "skip" else SetAside(reason)


def backoff(attempt: int, policy: Policy, chance: float) -> float:
    """Return the delay in seconds after attempt number `attempt`: exponential, with jitter."""
    doubled = policy.backoff_seconds * 2.0 ** min(attempt - 1, _LONGEST_EXPONENT)
    ceiling = min(doubled, policy.backoff_max_seconds)
    if policy.jitter == "full":
        return ceiling * chance
    return ceiling * (0.5 + 0.5 * chance)


def _reason(error: BaseException) -> str:
    """Return the reason of an outcome; apps derive classes from them and do as they like."""
    try:
        return text_of(error.reason)  # type: ignore[attr-defined]
    except BaseException:  # noqa: BLE001 - an attribute may be anything, also missing
        return describe(error)


def _asked_delay(error: BaseException) -> float | None:
    try:
        after = error.after  # type: ignore[attr-defined]
        return min(max(0.0, float(after)), LONGEST_SECONDS) if math.isfinite(after) else None
    except BaseException:  # noqa: BLE001 - see `_reason`
        return None
