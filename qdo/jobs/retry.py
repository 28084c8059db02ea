"""Retrying: policies, the decision after a failed attempt, and the policy of each queue.

Pure functions of values: no clock, no I/O. `worker.engine.outcomes` carries out the decisions.

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
any other exception            retry after the policy's backoff; after the last attempt, the
                               policy's end
=============================  ==========================================================

The end of a policy is a dead letter, skipping the message, or blocking its queue. The first rule
that matches an error overrides any option of its policy.

Tables of the setting `policies` give queues policies by name. In a TOML file::

    [[policies]]
    queues = "pay-*"
    attempts = 5
    then = "block"

    [[policies.rules]]
    exception = "requests.exceptions:Timeout"
    attempts = 100

Omitted options are those of the policy of the queue's job, and those that it omits are those of
the settings `attempts`, `backoff_seconds` and `backoff_max_seconds`. If several tables match a
queue, only the one with the most literal characters applies.
"""

from __future__ import annotations

import builtins
import fnmatch
import importlib
import inspect
import math
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, TypeAlias, TypeVar, get_args

from qdo.backoff import Backoff
from qdo.broker_errors import PostgresqlConnectionsError, PostgresqlFullError
from qdo.errors import (
    BodyDecodeError,
    DatabaseFullError,
    PolicyError,
    UnknownSettingError,
    WorkerCrashedError,
)
from qdo.outcomes import DeadLetter, Outcome, Retry, Skip, Stop
from qdo.text import describe, did_you_mean, one_line

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

    `attempts`, `backoff_seconds` and `backoff_max_seconds` are by default those of the settings.

    :ivar attempts: number of attempts of a message, including the first one.
    :ivar backoff_seconds: maximum delay after the first attempt; it doubles with each attempt.
    :ivar backoff_max_seconds: no delay is longer.
    :ivar rules: different options for some exceptions; the first rule that matches an error wins.
    :ivar then: what happens after the last attempt: "dead-letter", "block" or "skip".
    :ivar jitter: ``"full"``: a random delay from 0 to the maximum; ``"equal"``: from its upper
        half. Both keep queues that failed together from retrying together.
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
            raise PolicyError(
                where="a policy", reason=f"jitter must be 'full' or 'equal', got {self.jitter!r}"
            )
        for rule in self.rules:
            # A rule's omitted options come from the policy: only here are both limits known.
            terms = _with(self, rule)
            _check_order(rule.name, terms.backoff_seconds, terms.backoff_max_seconds)

    @property
    def blocks(self) -> bool:
        """Whether it may block a queue."""
        return self.then == "block" or any(rule.then == "block" for rule in self.rules)

    def over(self, below: PolicyInForce) -> PolicyInForce:
        """Return this policy, with the values of `below` where it has none.

        :raises PolicyError: a maximum is below the first delay.
        """
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        return replace(
            below, **{name: value for name, value in values.items() if value is not None}
        )


@dataclass(frozen=True, slots=True)
class PolicyInForce(Policy):
    """A policy that has all values."""

    attempts: int
    backoff_seconds: float
    backoff_max_seconds: float

    @property
    def backoff(self) -> Backoff:
        """The delays between attempts, as a `Backoff`."""
        random_share = 1.0 if self.jitter == "full" else 0.5
        return Backoff(self.backoff_seconds, self.backoff_max_seconds, random_share)

    def terms(self, error: BaseException) -> PolicyInForce:
        """Return the policy for an error: this one, changed by the first rule that matches."""
        for rule in self.rules:
            if rule.fits(error):
                return _with(self, rule)
        return self


_AnyPolicy = TypeVar("_AnyPolicy", bound=Policy)


def _with(policy: _AnyPolicy, rule: Rule) -> _AnyPolicy:
    options = {name: value for name, value in rule.options() if value is not None}
    return replace(policy, rules=(), **options)


def check_options(where: str, options: dict[str, Any]) -> None:
    """Raise PolicyError for invalid options; None stands for an omitted one."""
    given = {name: value for name, value in options.items() if value is not None}
    if "attempts" in given:
        _check_attempts(where, given["attempts"])
    for name in ("backoff_seconds", "backoff_max_seconds"):
        if name in given:
            _check_seconds(where, name, given[name])
    if "then" in given:
        _check_end(where, given["then"])
    _check_order(where, given.get("backoff_seconds"), given.get("backoff_max_seconds"))


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


def _check_order(where: str, first: float | None, longest: float | None) -> None:
    if first is not None and longest is not None and longest < first:
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


def decide(attempt: int, error: BaseException, policy: PolicyInForce, chance: float) -> Decision:
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


EXHAUSTED = {
    (kind.__module__, kind.__name__)
    for kind in (DatabaseFullError, PostgresqlFullError, PostgresqlConnectionsError)
}
"""Errors of a job that sends, when a resource of the broker has run out. Those of job processes
arrive as names."""


def lacks_resource(error: BaseException) -> bool:
    """Return whether a job failed for want of a resource, which no message can change."""
    kinds = type(error).__mro__
    return not EXHAUSTED.isdisjoint((kind.__module__, kind.__name__) for kind in kinds)


def only_waits(error: BaseException) -> bool:
    """Return whether an attempt does not count as failed, because its job only has to wait."""
    if lacks_resource(error):
        return True
    if Retry not in type(error).__mro__:
        return False
    try:
        return error.counts is False  # type: ignore[attr-defined]
    except BaseException:  # noqa: BLE001 - see `_reason`
        return False


def decide_crashed(attempts: int, reason: str, policy: PolicyInForce, chance: float) -> Decision:
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


@dataclass(frozen=True, slots=True)
class RuleTable:
    """A rule in the settings; only worker processes import its exception."""

    exception: str
    attempts: int | None = None
    backoff_seconds: float | None = None
    backoff_max_seconds: float | None = None
    then: Then | None = None

    def rule(self, where: str) -> Rule:
        """Return the rule, with its exception imported."""
        kind = self._kind(where)
        return Rule(kind, **{name: getattr(self, name) for name in OPTIONS})

    def _kind(self, where: str) -> Any:
        module, colon, path = self.exception.rpartition(":")
        try:
            found: Any = importlib.import_module(module) if colon else builtins
            for part in path.split("."):
                found = getattr(found, part)
        except Exception as error:
            raise PolicyError(
                where=where,
                reason=f"cannot import the exception {self.exception!r} of a rule "
                f"({type(error).__name__}: {error}); write MODULE:NAME, or the name of a built-in "
                "one",
            ) from error
        return found


@dataclass(frozen=True, slots=True)
class LiveRuleTable(RuleTable):
    """A rule in the live settings, whose writers must not choose a module to import and run."""

    def _kind(self, where: str) -> Any:
        module, colon, path = self.exception.rpartition(":")
        found: Any = sys.modules.get(module) if colon else builtins
        for part in path.split("."):
            found = inspect.getattr_static(found, part, None)
        if found is None:
            raise PolicyError(
                where=where,
                reason="the exception of a live rule must be in a module that the app has "
                f"imported, got {self.exception!r}; import it in the app, or write the rule into "
                "the settings file",
            )
        return found


@dataclass(frozen=True, slots=True)
class QueuePolicy:
    """One table of the setting `policies`; None stands for an omitted option."""

    queues: str
    attempts: int | None = None
    backoff_seconds: float | None = None
    backoff_max_seconds: float | None = None
    then: Then | None = None
    rules: tuple[RuleTable, ...] | None = None

    @property
    def name(self) -> str:
        """Its name in error messages."""
        return f"policies for {self.queues!r}"

    def override(self, below: PolicyInForce) -> PolicyInForce:
        """Return a policy, changed by the options of this table."""
        options: dict[str, Any] = {
            name: getattr(self, name) for name in OPTIONS if getattr(self, name) is not None
        }
        if self.rules is not None:
            options["rules"] = tuple(table.rule(self.name) for table in self.rules)
        try:
            return replace(below, **options)
        except PolicyError as error:
            details = error.details
            raise PolicyError(
                where=f"{self.name}: {details['where']}", reason=details["reason"]
            ) from error


def read_tables(
    value: Any, origin: str = "", rule: type[RuleTable] = RuleTable
) -> tuple[QueuePolicy, ...]:
    """Return the tables of the setting `policies`; checks all but exceptions, imports nothing.

    :param origin: their origin in brackets, for error messages.
    :param rule: the class of their rules.
    """
    tables = tuple(_table(each, f"policies{origin}", rule) for each in value)
    seen: set[str] = set()
    for table in tables:
        if table.queues in seen:
            raise PolicyError(
                where=table.name, reason="there are two tables with these queues; merge them"
            )
        seen.add(table.queues)
    return tables


def _table(value: Any, origin: str, rule: type[RuleTable]) -> QueuePolicy:
    if isinstance(value, QueuePolicy):
        return value
    known = {"queues", "rules", *OPTIONS}
    given = _checked_keys(value, known, origin)
    queues = given.get("queues")
    if not isinstance(queues, str) or not queues:
        raise PolicyError(
            where=origin, reason='a table must name its queues, such as queues = "pay-*"'
        )
    options = {name: given[name] for name in OPTIONS if given.get(name) is not None}
    where = f"policies for {queues!r}"
    check_options(where, options)
    rules = given.get("rules")
    if not options and rules is None:
        raise PolicyError(
            where=where, reason=f"it must have at least one of {', '.join(OPTIONS)}, rules"
        )
    if rules is not None and not isinstance(rules, (list, tuple)):
        raise PolicyError(where=where, reason="rules must be tables; write [[policies.rules]]")
    found = None if rules is None else tuple(_rule(each, where, rule) for each in rules)
    return QueuePolicy(queues, **options, rules=found)


def _rule(value: Any, where: str, rule: type[RuleTable]) -> RuleTable:
    given = _checked_keys(value, {"exception", *OPTIONS}, where)
    exception = given.get("exception")
    if not isinstance(exception, str) or not re.fullmatch(r"([\w.]+:)?[\w.]+", exception):
        raise PolicyError(
            where=where,
            reason='the exception of a rule must be "MODULE:NAME", or the name of a built-in one '
            f'such as "ValueError", got {exception!r}',
        )
    options = {name: given[name] for name in OPTIONS if given.get(name) is not None}
    if not options:
        raise PolicyError(
            where=f"{where}: the rule for {exception}",
            reason=f"it must have at least one of {', '.join(OPTIONS)}",
        )
    check_options(f"{where}: the rule for {exception}", options)
    return rule(exception, **options)


def _checked_keys(value: Any, known: Iterable[str], origin: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise PolicyError(
            where=origin, reason=f"it must be a table, got {value!r}; write [[policies]]"
        )
    for name in value:
        if name not in known:
            hint = did_you_mean(str(name).lower(), sorted(known))
            raise UnknownSettingError(name=name, origin=origin, hint=hint)
    return value


def policy_for(
    queue: str, own: Policy | None, tables: Sequence[QueuePolicy], default: PolicyInForce
) -> PolicyInForce:
    """Return the policy of a queue: values of its table, else of its job, else the default."""
    below = default if own is None else own.over(default)
    fitting = [table for table in tables if fnmatch.fnmatchcase(queue, table.queues)]
    if not fitting:
        return below
    return max(fitting, key=lambda table: literal_characters(table.queues)).override(below)


def may_overlap(one: str, other: str) -> bool:
    """Return False if no queue can match both globs, because their beginnings differ."""
    first, second = (re.split(r"[*?[]", glob, maxsplit=1)[0] for glob in (one, other))
    return first.startswith(second) or second.startswith(first)


def literal_characters(glob: str) -> int:
    """Return the number of literal characters of a glob: the most specific glob has most."""
    return sum(character not in "*?[]" for character in glob)
