"""Retry policies, and the decision after a failed attempt.

Pure functions of values, without a clock or I/O. `worker.engine.outcomes` carries out the
decisions.

=============================  ==========================================================
how the attempt ended          decision
=============================  ==========================================================
``raise Stop(reason)``         the worker stops; the attempt does not count
``raise Skip(reason)``         the message is skipped
``raise DeadLetter(reason)``   the message becomes a dead letter at once
the body cannot be decoded     the policy's end at once: a retry would fail again
``raise Retry(after)``         retry after that time, or after the policy's backoff; after the
                               last attempt, the policy's end
a resource of the broker ran   retry after the policy's backoff; the attempt does not count
out, see `EXHAUSTED`
a rule says that the error     likewise
does not count
any other exception            retry after the policy's backoff; after the last attempt, the
                               policy's end
=============================  ==========================================================

At its end, a policy makes the message a dead letter, skips it, or blocks its queue. The first rule
that matches an error overrides any option of its policy.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, TypeAlias, TypeVar, get_args

from qdo.backoff import Backoff
from qdo.broker_errors import (
    AwsUnreachableError,
    PostgresqlConnectionsError,
    PostgresqlFullError,
    ThrottledError,
)
from qdo.errors import (
    BodyDecodeError,
    CoordinatorUnreachableError,
    DatabaseFullError,
    PolicyError,
    WorkerCrashedError,
)
from qdo.outcomes import DeadLetter, Outcome, Retry, Skip, Stop
from qdo.text import describe, did_you_mean, one_line

Jitter: TypeAlias = Literal["full", "equal"]
Then: TypeAlias = Literal["dead-letter", "block", "skip"]
Kinds: TypeAlias = type[BaseException] | tuple[type[BaseException], ...]

ENDS: tuple[Then, ...] = get_args(Then)
MAX_ATTEMPTS = 1_000_000
MAX_SECONDS = 86_400.0
# The longest pause that a job can request. Longer pauses would overflow timers.
LONGEST_SECONDS = 10 * 366 * MAX_SECONDS
# Common options of policies and rules.
OPTIONS = ("attempts", "backoff_seconds", "backoff_max_seconds", "then")
RULE_OPTIONS = (*OPTIONS, "counts")
# Errors of a job that sends or acquires a lock while a service is unavailable or a resource of the
# broker has run out. Compare errors by name, because job processes report names.
EXHAUSTED = {
    (kind.__module__, kind.__name__)
    for kind in (
        DatabaseFullError,
        PostgresqlFullError,
        PostgresqlConnectionsError,
        CoordinatorUnreachableError,
        AwsUnreachableError,
        ThrottledError,
    )
}


def policy_fault(reason: str, where: str) -> PolicyError:
    return PolicyError(where=where, reason=reason)


@dataclass(frozen=True, slots=True)
class Rule:
    """Options of a policy for some exceptions. Omitted options come from the policy.

    :ivar exception: one or more exception classes. A rule also matches their subclasses.
    :ivar counts: whether attempts that end with these errors count as failed. Use
        ``qdo.Rule(psycopg.OperationalError, counts=False)`` for a database that may be unavailable.
    """

    exception: Kinds
    attempts: int | None = None
    backoff_seconds: float | None = None
    backoff_max_seconds: float | None = None
    then: Then | None = None
    counts: bool | None = None

    def __post_init__(self) -> None:
        if not self.kinds:
            raise policy_fault("it must name an exception", "a rule")
        for kind in self.kinds:
            _check_kind(kind)
        if all(getattr(self, name) is None for name in RULE_OPTIONS):
            raise policy_fault(f"it must have at least one of {', '.join(RULE_OPTIONS)}", self.name)
        check_options(self.name, {**dict(self.options()), "counts": self.counts})

    @property
    def kinds(self) -> tuple[type[BaseException], ...]:
        return self.exception if isinstance(self.exception, tuple) else (self.exception,)

    @property
    def name(self) -> str:
        """The name of the rule in error messages."""
        return f"the rule for {', '.join(kind.__name__ for kind in self.kinds)}"

    def options(self) -> Iterator[tuple[str, Any]]:
        """Yield the name and value of each option. The value of an omitted option is None."""
        return ((name, getattr(self, name)) for name in OPTIONS)

    def fits(self, error: BaseException) -> bool:
        """Return whether the rule matches the class of an error. An instance may hide its class."""
        return not set(self.kinds).isdisjoint(type(error).__mro__)


@dataclass(frozen=True, slots=True)
class Policy:
    """The attempts of a failing message, their delays, and the outcome after the last attempt.

    >>> qdo.Policy(attempts=3, rules=(qdo.Rule(KeyError, then="skip"),)).then
    'dead-letter'

    `attempts`, `backoff_seconds` and `backoff_max_seconds` default to the values in the settings.

    :ivar attempts: number of attempts of a message, including the first attempt.
    :ivar backoff_seconds: maximum delay after the first attempt. The delay doubles with each
        attempt.
    :ivar backoff_max_seconds: upper limit of all delays.
    :ivar rules: different options for some exceptions. The first rule that matches an error
        applies.
    :ivar then: the outcome after the last attempt: "dead-letter", "block" or "skip".
    :ivar jitter: ``"full"``: a random delay from 0 to the maximum. ``"equal"``: a random delay from
        half the maximum to the maximum. Both prevent queues that failed together from retrying
        together.
    :raises PolicyError: a value is invalid, or a rule can never match.
    """

    attempts: int | None = None
    backoff_seconds: float | None = None
    backoff_max_seconds: float | None = None
    rules: tuple[Rule, ...] = ()
    then: Then = "dead-letter"
    jitter: Jitter = "equal"

    def __post_init__(self) -> None:
        object.__setattr__(self, "rules", _checked_rules(self.rules))
        check_options("a policy", {name: getattr(self, name) for name in OPTIONS})
        _check_end("a policy", self.then)
        if self.jitter not in get_args(Jitter):
            raise policy_fault(f"jitter must be 'full' or 'equal', got {self.jitter!r}", "a policy")
        for rule in self.rules:
            # A rule's omitted options come from the policy. Therefore both limits are known only
            # here.
            terms = _with(self, rule)
            _check_order(rule.name, terms.backoff_seconds, terms.backoff_max_seconds)

    @property
    def blocks(self) -> bool:
        """Whether the policy may block a queue."""
        return self.then == "block" or any(rule.then == "block" for rule in self.rules)

    def over(self, below: PolicyInForce) -> PolicyInForce:
        """Return this policy with missing values from `below`.

        :raises PolicyError: a maximum is below the first delay.
        """
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        return replace(
            below, **{name: value for name, value in values.items() if value is not None}
        )


@dataclass(frozen=True, slots=True)
class PolicyInForce(Policy):
    """A policy with all values set."""

    attempts: int
    backoff_seconds: float
    backoff_max_seconds: float

    @property
    def backoff(self) -> Backoff:
        random_share = 1.0 if self.jitter == "full" else 0.5
        return Backoff(self.backoff_seconds, self.backoff_max_seconds, random_share)

    def rule(self, error: BaseException) -> Rule | None:
        return next((rule for rule in self.rules if rule.fits(error)), None)

    def terms(self, error: BaseException) -> PolicyInForce:
        """Return the policy for an error, with the options of the first matching rule."""
        rule = self.rule(error)
        return self if rule is None else _with(self, rule)


_AnyPolicy = TypeVar("_AnyPolicy", bound=Policy)


def _with(policy: _AnyPolicy, rule: Rule) -> _AnyPolicy:
    options = {name: value for name, value in rule.options() if value is not None}
    return replace(policy, rules=(), **options)


def check_options(where: str, options: dict[str, Any]) -> None:
    """Raise PolicyError for invalid options. Omitted options are None."""
    given = {name: value for name, value in options.items() if value is not None}
    if "attempts" in given:
        _check_attempts(where, given["attempts"])
    for name in ("backoff_seconds", "backoff_max_seconds"):
        if name in given:
            _check_seconds(where, name, given[name])
    if "then" in given:
        _check_end(where, given["then"])
    if "counts" in given:
        _check_counts(where, given)
    _check_order(where, given.get("backoff_seconds"), given.get("backoff_max_seconds"))


def _check_attempts(where: str, value: Any) -> None:
    whole = isinstance(value, int) and not isinstance(value, bool)
    if not (whole and 1 <= value <= MAX_ATTEMPTS):
        raise policy_fault(
            f"attempts must be an integer from 1 to {MAX_ATTEMPTS}, got {value!r}; 1 means "
            "no retries",
            where,
        )


def _check_seconds(where: str, name: str, value: Any) -> None:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not (number and 0 <= value <= MAX_SECONDS):
        raise policy_fault(
            f"{name} must be a number from 0 to {MAX_SECONDS:g}, got {value!r}", where
        )


def _check_counts(where: str, given: Mapping[str, Any]) -> None:
    value = given["counts"]
    if not isinstance(value, bool):
        raise policy_fault(f"counts must be true or false, got {value!r}", where)
    if not value and not given.keys().isdisjoint({"attempts", "then"}):
        raise policy_fault(
            "counts must not be false beside attempts or then: a message whose attempts do "
            "not count is tried until it succeeds; omit attempts and then",
            where,
        )


def _check_end(where: str, value: Any) -> None:
    if not isinstance(value, str) or value not in ENDS:
        hint = did_you_mean(str(value).lower(), ENDS)
        raise policy_fault(f"then must be one of {', '.join(ENDS)}, got {value!r}{hint}", where)


def _check_order(where: str, first: float | None, longest: float | None) -> None:
    if first is not None and longest is not None and longest < first:
        raise policy_fault(
            f"backoff_max_seconds must be at least backoff_seconds, {first:g}, got "
            f"{longest:g}; raise the maximum, or lower backoff_seconds",
            where,
        )


def _check_kind(kind: Any) -> None:
    if not (isinstance(kind, type) and issubclass(kind, BaseException)):
        raise policy_fault(f"it must name an exception class, got {kind!r}", "a rule")
    if issubclass(kind, Outcome) and not issubclass(kind, Retry):
        raise policy_fault(
            "a job that raises it decides itself, so the rule would never apply; omit it",
            f"the rule for {kind.__name__}",
        )


def _checked_rules(rules: Any) -> tuple[Rule, ...]:
    found = (rules,) if isinstance(rules, Rule) else tuple(rules)
    seen: list[type[BaseException]] = []
    for rule in found:
        if not isinstance(rule, Rule):
            raise policy_fault(f"each rule must be a qdo.Rule, got {rule!r}", "a policy")
        for kind in rule.kinds:
            earlier = next((each for each in seen if issubclass(kind, each)), None)
            if earlier is not None:
                raise policy_fault(
                    f"it can never match {kind.__name__}, because an earlier rule matches "
                    f"{earlier.__name__}; move it before that rule",
                    rule.name,
                )
        seen.extend(rule.kinds)
    return found


@dataclass(frozen=True, slots=True)
class RetryMessage:
    """Retry the message. To keep the order, its queue waits until the retry."""

    after_seconds: float
    # Whether the attempt counts as failed.
    counts: bool = True
    # The reason for waiting, for the log, if the attempt does not count.
    waits_for: str = "its job"


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
    """Stop this worker. The attempt does not count."""

    reason: str


Decision: TypeAlias = RetryMessage | DeadLetterMessage | SkipMessage | BlockQueue | StopWorker


def decide(attempt: int, error: BaseException, policy: PolicyInForce, chance: float) -> Decision:
    """Return the decision after attempt number `attempt` (from 1) ended with `error`.

    :param chance: a random number in [0, 1) for the jitter.
    """
    # Compare classes without `isinstance`, because an instance of an app's class may hide its
    # class.
    kinds = type(error).__mro__
    if Stop in kinds:
        return StopWorker(_reason(error))
    if Skip in kinds:
        return SkipMessage(_reason(error))
    if DeadLetter in kinds:
        return DeadLetterMessage(_reason(error))
    terms = policy.terms(error)
    counts = not only_waits(error, policy)
    if counts and (attempt >= terms.attempts or BodyDecodeError in kinds):
        return _end(terms.then, describe(error))
    after = _requested_delay(error) if Retry in kinds else None
    return RetryMessage(terms.backoff.delay(attempt, chance) if after is None else after, counts)


def lacks_resource(error: BaseException) -> bool:
    """Return whether a job failed because of a missing resource, not because of its message."""
    kinds = type(error).__mro__
    return not EXHAUSTED.isdisjoint((kind.__module__, kind.__name__) for kind in kinds)


def only_waits(error: BaseException, policy: PolicyInForce) -> bool:
    """Return whether an attempt does not count as failed, because its job only needs to wait."""
    if lacks_resource(error):
        return True
    if Retry not in type(error).__mro__:
        rule = policy.rule(error)
        return rule is not None and rule.counts is False
    try:
        return error.counts is False  # type: ignore[attr-defined]
    except BaseException:  # noqa: BLE001 - see `_reason`
        return False


def decide_crashed(attempts: int, reason: str, policy: PolicyInForce, chance: float) -> Decision:
    """Return the decision after the process has died during the last of `attempts`."""
    terms = policy.terms(WorkerCrashedError(reason=reason))
    if attempts >= terms.attempts:
        return _end(terms.then, reason)
    return RetryMessage(terms.backoff.delay(attempts, chance))


def _end(then: Then, reason: str) -> DeadLetterMessage | SkipMessage | BlockQueue:
    if then == "block":
        return BlockQueue(reason)
    return SkipMessage(reason) if then == "skip" else DeadLetterMessage(reason)


def _reason(error: BaseException) -> str:
    try:
        return one_line(error.reason)  # type: ignore[attr-defined]
    except BaseException:  # noqa: BLE001 - an attribute may be invalid or missing
        return describe(error)


def _requested_delay(error: BaseException) -> float | None:
    try:
        after = error.after  # type: ignore[attr-defined]
        return min(max(0.0, float(after)), LONGEST_SECONDS) if math.isfinite(after) else None
    except BaseException:  # noqa: BLE001 - see `_reason`
        return None
