"""Policies of queues in the settings.

Tables of the setting `policies` give queues policies by name. In a TOML file::

    [[policies]]
    queues = "pay-*"
    attempts = 5
    then = "block"

    [[policies.rules]]
    exception = "requests.exceptions:Timeout"
    attempts = 100

Omitted options come from the policy of the queue's job, and then from the settings `attempts`,
`backoff_seconds` and `backoff_max_seconds`. If several tables match a queue, only the table with
the most literal characters applies.
"""

from __future__ import annotations

import builtins
import fnmatch
import importlib
import inspect
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from qdo.errors import PolicyError, UnknownSettingError
from qdo.jobs.retry import (
    OPTIONS,
    RULE_OPTIONS,
    Policy,
    PolicyInForce,
    Rule,
    Then,
    check_options,
    policy_fault,
)
from qdo.text import did_you_mean


@dataclass(frozen=True, slots=True)
class RuleTable:
    """A rule in the settings. Only worker processes import its exception."""

    exception: str
    attempts: int | None = None
    backoff_seconds: float | None = None
    backoff_max_seconds: float | None = None
    then: Then | None = None
    counts: bool | None = None

    def rule(self, where: str) -> Rule:
        options = {name: getattr(self, name) for name in RULE_OPTIONS}
        return Rule(self._kind(where), **options)

    def _kind(self, where: str) -> Any:
        module, colon, path = self.exception.rpartition(":")
        try:
            found: Any = importlib.import_module(module) if colon else builtins
            for part in path.split("."):
                found = getattr(found, part)
        except Exception as error:
            raise policy_fault(
                f"cannot import the exception {self.exception!r} of a rule "
                f"({type(error).__name__}: {error}); write MODULE:NAME, or the name of a built-in "
                "one",
                where,
            ) from error
        return found


@dataclass(frozen=True, slots=True)
class LiveRuleTable(RuleTable):
    """A rule in the live settings. Its writers must not be able to choose a module to import."""

    def _kind(self, where: str) -> Any:
        module, colon, path = self.exception.rpartition(":")
        found: Any = sys.modules.get(module) if colon else builtins
        for part in path.split("."):
            found = inspect.getattr_static(found, part, None)
        if found is None:
            raise policy_fault(
                "the exception of a live rule must be in a module that the app has "
                f"imported, got {self.exception!r}; import it in the app, or write the rule into "
                "the settings file",
                where,
            )
        return found


@dataclass(frozen=True, slots=True)
class QueuePolicy:
    """One table of the setting `policies`. Omitted options are None."""

    queues: str
    attempts: int | None = None
    backoff_seconds: float | None = None
    backoff_max_seconds: float | None = None
    then: Then | None = None
    rules: tuple[RuleTable, ...] | None = None

    @property
    def name(self) -> str:
        """The name of the table in error messages."""
        return f"policies for {self.queues!r}"

    def override(self, below: PolicyInForce) -> PolicyInForce:
        """Return a policy with the options of this table."""
        options: dict[str, Any] = {
            name: getattr(self, name) for name in OPTIONS if getattr(self, name) is not None
        }
        if self.rules is not None:
            options["rules"] = tuple(table.rule(self.name) for table in self.rules)
        try:
            return replace(below, **options)
        except PolicyError as error:
            details = error.details
            raise policy_fault(details["reason"], f"{self.name}: {details['where']}") from error


def read_tables(
    value: Any, origin: str = "", rule: type[RuleTable] = RuleTable
) -> tuple[QueuePolicy, ...]:
    """Return the tables of the setting `policies`. Error messages contain the `origin`.

    The function checks everything except the exceptions, and imports nothing.
    """
    tables = tuple(_table(each, f"policies{origin}", rule) for each in value)
    seen: set[str] = set()
    for table in tables:
        if table.queues in seen:
            raise policy_fault("there are two tables with these queues; merge them", table.name)
        seen.add(table.queues)
    return tables


def _table(value: Any, origin: str, rule: type[RuleTable]) -> QueuePolicy:
    if isinstance(value, QueuePolicy):
        return value
    known = {"queues", "rules", *OPTIONS}
    given = _checked_keys(value, known, origin)
    queues = given.get("queues")
    if not isinstance(queues, str) or not queues:
        raise policy_fault('a table must name its queues, such as queues = "pay-*"', origin)
    options = {name: given[name] for name in OPTIONS if given.get(name) is not None}
    where = f"policies for {queues!r}"
    check_options(where, options)
    rules = given.get("rules")
    if not options and rules is None:
        raise policy_fault(f"it must have at least one of {', '.join(OPTIONS)}, rules", where)
    if rules is not None and not isinstance(rules, (list, tuple)):
        raise policy_fault("rules must be tables; write [[policies.rules]]", where)
    found = None if rules is None else tuple(_rule(each, where, rule) for each in rules)
    return QueuePolicy(queues, **options, rules=found)


def _rule(value: Any, where: str, rule: type[RuleTable]) -> RuleTable:
    given = _checked_keys(value, {"exception", *RULE_OPTIONS}, where)
    exception = given.get("exception")
    if not isinstance(exception, str) or not re.fullmatch(r"([\w.]+:)?[\w.]+", exception):
        raise policy_fault(
            'the exception of a rule must be "MODULE:NAME", or the name of a built-in one '
            f'such as "ValueError", got {exception!r}',
            where,
        )
    options = {name: given[name] for name in RULE_OPTIONS if given.get(name) is not None}
    if not options:
        raise policy_fault(
            f"it must have at least one of {', '.join(RULE_OPTIONS)}",
            f"{where}: the rule for {exception}",
        )
    check_options(f"{where}: the rule for {exception}", options)
    return rule(exception, **options)


def _checked_keys(value: Any, known: Iterable[str], origin: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise policy_fault(f"it must be a table, got {value!r}; write [[policies]]", origin)
    for name in value:
        if name not in known:
            hint = did_you_mean(str(name).lower(), sorted(known))
            raise UnknownSettingError(name=name, origin=origin, hint=hint)
    return value


def policy_for(
    queue: str, own: Policy | None, tables: Sequence[QueuePolicy], default: PolicyInForce
) -> PolicyInForce:
    """Return the policy of a queue, with values from its table, its job or the default."""
    below = default if own is None else own.over(default)
    fitting = [table for table in tables if fnmatch.fnmatchcase(queue, table.queues)]
    if not fitting:
        return below
    return max(fitting, key=lambda table: literal_characters(table.queues)).override(below)


def may_overlap(one: str, other: str) -> bool:
    """Return False if the beginnings of two globs differ. Then no queue can match both globs."""
    first, second = (re.split(r"[*?[]", glob, maxsplit=1)[0] for glob in (one, other))
    return first.startswith(second) or second.startswith(first)


def literal_characters(glob: str) -> int:
    """Return the number of literal characters in a glob, which measures how specific it is."""
    return sum(character not in "*?[]" for character in glob)
