"""Policies: the consequences of failed attempts, as values.

=============================  ==========================================================
how the attempt ended          decision
=============================  ==========================================================
``raise Stop(reason)``         the worker stops; the attempt does not count
``raise Skip(reason)``         the message is skipped
``raise DeadLetter(reason)``   the message becomes a dead letter at once
the body cannot be decoded     the policy's end at once: a retry would fail again
``raise Retry(after)``         retry after that time, or after the policy's backoff; after the
                               last attempt, the policy's end
any other exception            retry after the policy's backoff; after the last attempt, the
                               policy's end
=============================  ==========================================================

The end of a policy is a dead letter, skipping the message, or blocking its queue. The first rule
that matches an error overrides any option of its policy.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias, get_args

from qdo.backoff import Backoff
from qdo.errors import PolicyError
from qdo.outcomes import Outcome, Retry
from qdo.text import did_you_mean

Jitter: TypeAlias = Literal["full", "equal"]
Then: TypeAlias = Literal["dead-letter", "block", "skip"]
Kinds: TypeAlias = "type[BaseException] | tuple[type[BaseException], ...]"

ENDS: tuple[Then, ...] = get_args(Then)
MAX_ATTEMPTS = 1_000_000
MAX_SECONDS = 86_400.0


@dataclass(frozen=True, slots=True)
class Rule:
    """Options of a policy for some exceptions; omitted options are those of the policy.

    :ivar exception: an exception class or several; a rule also matches their subclasses.
    """

    exception: Kinds
    attempts: int | None = None
    backoff_seconds: float | None = None
    backoff_max_seconds: float | None = None
    then: Then | None = None

    def __post_init__(self) -> None:
        if not self.kinds:
            raise PolicyError(where="a rule", reason="it must name an exception")
        for kind in self.kinds:
            _check_kind(kind)
        if not any(value is not None for _, value in self.options()):
            raise PolicyError(
                where=self.name, reason=f"it must have at least one of {', '.join(OPTIONS)}"
            )
        check_options(self.name, dict(self.options()))

    @property
    def kinds(self) -> tuple[type[BaseException], ...]:
        """The exceptions that it matches."""
        return self.exception if isinstance(self.exception, tuple) else (self.exception,)

    @property
    def name(self) -> str:
        """Its name in error messages."""
        return f"the rule for {', '.join(kind.__name__ for kind in self.kinds)}"

    def options(self) -> Iterator[tuple[str, Any]]:
        """Yield name and value of each option, None for omitted ones."""
        return ((name, getattr(self, name)) for name in OPTIONS)

    def fits(self, error: BaseException) -> bool:
        """Return whether it matches an error, by the error's class: an instance may lie."""
        return not set(self.kinds).isdisjoint(type(error).__mro__)


OPTIONS = ("attempts", "backoff_seconds", "backoff_max_seconds", "then")
"""Options that both a policy and a rule have."""


@dataclass(frozen=True, slots=True)
class Policy:
    """How often and how fast a failed message is retried, and what happens then.

    >>> qdo.Policy(attempts=3, rules=(qdo.Rule(KeyError, then="skip"),)).then
    'dead-letter'

    :ivar attempts: number of attempts of a message, including the first one.
    :ivar backoff_seconds: maximum delay after the first attempt; it doubles with each attempt.
    :ivar backoff_max_seconds: no delay is longer.
    :ivar rules: different options for some exceptions; the first rule that matches an error wins.
    :ivar then: what happens after the last attempt: "dead-letter", "block" or "skip".
    :ivar jitter: ``"full"``: a random delay from 0 to the maximum; ``"equal"``: from its upper
        half. Both keep queues that failed together from retrying together.
    :raises PolicyError: a value is invalid, or a rule can never match.
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
                where="a policy", reason=f"jitter must be 'full' or 'equal', got {self.jitter!r}"
            )
        for rule in self.rules:
            # A rule's omitted options come from the policy: only here are both limits known.
            terms = _with(self, rule)
            _check_order(rule.name, terms.backoff_seconds, terms.backoff_max_seconds)

    @property
    def backoff(self) -> Backoff:
        """The delays between attempts, as a `Backoff`."""
        random_share = 1.0 if self.jitter == "full" else 0.5
        return Backoff(self.backoff_seconds, self.backoff_max_seconds, random_share)

    def terms(self, error: BaseException) -> Policy:
        """Return the policy for an error: this one, changed by the first rule that matches."""
        for rule in self.rules:
            if rule.fits(error):
                return _with(self, rule)
        return self


def _with(policy: Policy, rule: Rule) -> Policy:
    options = {name: value for name, value in rule.options() if value is not None}
    return replace(policy, rules=(), **options)


# --- checks -------------------------------------------------------------------------


def check_options(where: str, options: dict[str, Any], *, whole: bool = False) -> None:
    """Raise PolicyError unless every given option is valid.

    :param whole: every option must be given; None is invalid as well.
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
            reason=f"attempts must be an integer from 1 to {MAX_ATTEMPTS}, got {value!r}; 1 means "
            "no retries",
        )


def _check_seconds(where: str, name: str, value: Any) -> None:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not (number and 0 <= value <= MAX_SECONDS):
        raise PolicyError(
            where=where, reason=f"{name} must be a number from 0 to {MAX_SECONDS:g}, got {value!r}"
        )


def _check_end(where: str, value: Any) -> None:
    if not isinstance(value, str) or value not in ENDS:
        hint = did_you_mean(str(value).lower(), ENDS)
        raise PolicyError(
            where=where, reason=f"then must be one of {', '.join(ENDS)}, got {value!r}{hint}"
        )


def _check_order(where: str, first: float, longest: float) -> None:
    if longest < first:
        raise PolicyError(
            where=where,
            reason=f"backoff_max_seconds must be at least backoff_seconds, {first:g}, got "
            f"{longest:g}; raise the maximum, or lower backoff_seconds",
        )


def _check_kind(kind: Any) -> None:
    if not (isinstance(kind, type) and issubclass(kind, BaseException)):
        raise PolicyError(where="a rule", reason=f"it must name an exception class, got {kind!r}")
    if issubclass(kind, Outcome) and not issubclass(kind, Retry):
        raise PolicyError(
            where=f"the rule for {kind.__name__}",
            reason="a job that raises it decides itself, so the rule would never apply; omit it",
        )


def _checked_rules(rules: Any) -> tuple[Rule, ...]:
    found = (rules,) if isinstance(rules, Rule) else tuple(rules)
    seen: list[type[BaseException]] = []
    for rule in found:
        if not isinstance(rule, Rule):
            raise PolicyError(
                where="a policy", reason=f"each rule must be a qdo.Rule, got {rule!r}"
            )
        for kind in rule.kinds:
            earlier = next((each for each in seen if issubclass(kind, each)), None)
            if earlier is not None:
                raise PolicyError(
                    where=rule.name,
                    reason=f"it can never match {kind.__name__}, because an earlier rule matches "
                    f"{earlier.__name__}; move it before that rule",
                )
        seen.extend(rule.kinds)
    return found
