"""Failure policies of queues by name: what an operator says in the settings, and what holds.

In a TOML file::

    [[policies]]
    queues = "pay-*"
    attempts = 5
    then = "block"

    [[policies.rules]]
    exception = "requests.exceptions:Timeout"
    attempts = 100

What a table leaves out is as the policy of the queue's job says; without one, as the settings
`attempts`, `backoff_seconds` and `backoff_max_seconds` say. Where several tables are for a queue,
the one with the most literal characters counts, alone.
"""

from __future__ import annotations

import builtins
import difflib
import fnmatch
import importlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from qdo.errors import PolicyError, UnknownSettingError
from qdo.ordering import blocks
from qdo.policy import OPTIONS, Policy, Rule, Then, check_options

if TYPE_CHECKING:
    from qdo.app import Job


@dataclass(frozen=True, slots=True)
class RuleTable:
    """A rule as settings say it: its exception is only imported by the worker process."""

    exception: str
    attempts: int | None = None
    backoff_seconds: float | None = None
    backoff_max_seconds: float | None = None
    then: Then | None = None

    def rule(self, where: str) -> Rule:
        """Return the rule, with its exception imported."""
        kind = _imported(self.exception, where)
        return Rule(kind, **{name: getattr(self, name) for name in OPTIONS})


@dataclass(frozen=True, slots=True)
class QueuePolicy:
    """One table of the setting `policies`; None is what it leaves out."""

    queues: str
    attempts: int | None = None
    backoff_seconds: float | None = None
    backoff_max_seconds: float | None = None
    then: Then | None = None
    rules: tuple[RuleTable, ...] | None = None

    @property
    def name(self) -> str:
        """How error messages call it."""
        return f"policies for {self.queues!r}"

    def over(self, below: Policy) -> Policy:
        """Return `below` as this table changes it.

        :raises PolicyError: an exception cannot be imported, or values contradict each other.
        """
        said: dict[str, Any] = {
            name: getattr(self, name) for name in OPTIONS if getattr(self, name) is not None
        }
        if self.rules is not None:
            said["rules"] = tuple(table.rule(self.name) for table in self.rules)
        try:
            return replace(below, **said)
        except PolicyError as error:
            details = error.details
            raise PolicyError(
                where=f"{self.name}: {details['where']}", reason=details["reason"]
            ) from error


def read_tables(value: Any, told: str = "") -> tuple[QueuePolicy, ...]:
    """Return the tables of the setting `policies`; checks all but exceptions, imports nothing.

    :param told: where they come from, in brackets, for error messages.
    :raises UnknownSettingError: a key is none.
    :raises PolicyError: a value will not do.
    """
    tables = tuple(_table(each, f"policies{told}") for each in value)
    seen: set[str] = set()
    for table in tables:
        if table.queues in seen:
            raise PolicyError(
                where=table.name, reason="there are two such tables: put them together"
            )
        seen.add(table.queues)
    return tables


def _table(value: Any, origin: str) -> QueuePolicy:
    if isinstance(value, QueuePolicy):
        return value
    known = {"queues", "rules", *OPTIONS}
    given = _checked_keys(value, known, origin)
    queues = given.get("queues")
    if not isinstance(queues, str) or not queues:
        raise PolicyError(
            where=origin, reason='a table names no queues: write queues = "GLOB", such as "pay-*"'
        )
    options = {name: given[name] for name in OPTIONS if given.get(name) is not None}
    where = f"policies for {queues!r}"
    check_options(where, options)
    rules = given.get("rules")
    if not options and rules is None:
        raise PolicyError(
            where=where, reason="it says nothing: give attempts, a back-off, then or rules"
        )
    if rules is not None and not isinstance(rules, (list, tuple)):
        raise PolicyError(where=where, reason="rules are tables: write [[policies.rules]]")
    found = None if rules is None else tuple(_rule(each, where) for each in rules)
    return QueuePolicy(queues, **options, rules=found)


def _rule(value: Any, where: str) -> RuleTable:
    given = _checked_keys(value, {"exception", *OPTIONS}, where)
    exception = given.get("exception")
    if not isinstance(exception, str) or not re.fullmatch(r"([\w.]+:)?[\w.]+", exception):
        raise PolicyError(
            where=where,
            reason=f'a rule is for {exception!r}: write exception = "ValueError", or '
            '"MODULE:NAME" for one that is not built in',
        )
    options = {name: given[name] for name in OPTIONS if given.get(name) is not None}
    if not options:
        raise PolicyError(
            where=f"{where}: the rule for {exception}",
            reason="it says nothing: give attempts, a back-off or then",
        )
    check_options(f"{where}: the rule for {exception}", options)
    return RuleTable(exception, **options)


def _checked_keys(value: Any, known: Iterable[str], origin: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise PolicyError(where=origin, reason=f"{value!r} is no table: write [[policies]]")
    for name in value:
        if name not in known:
            near = difflib.get_close_matches(str(name).lower(), sorted(known), n=1)
            hint = f" (did you mean {near[0]!r}?)" if near else ""
            raise UnknownSettingError(name=name, origin=origin, hint=hint)
    return value


def _imported(name: str, where: str) -> Any:
    module, colon, path = name.rpartition(":")
    try:
        found: Any = importlib.import_module(module) if colon else builtins
        for part in path.split("."):
            found = getattr(found, part)
    except Exception as error:
        raise PolicyError(
            where=where,
            reason=f"the exception {name!r} of a rule cannot be imported "
            f"({type(error).__name__}: {error}): write MODULE:NAME, or the name of a built-in one",
        ) from error
    return found


# --- which one holds ----------------------------------------------------------------


def policy_for(
    queue: str, job: Job | None, tables: Sequence[QueuePolicy], default: Policy
) -> Policy:
    """Return the policy of a queue: settings over decorator over the general settings."""
    below = job.policy if job is not None and job.policy is not None else default
    fitting = [table for table in tables if fnmatch.fnmatchcase(queue, table.queues)]
    if not fitting:
        return below
    return max(fitting, key=lambda table: literal_characters(table.queues)).over(below)


def check_policies(jobs: Iterable[Job], tables: Sequence[QueuePolicy], default: Policy) -> None:
    """Raise PolicyError at the start for what would else come up with the first failure."""
    for table in tables:
        for job in jobs:
            if _may_meet(table.queues, job.queues):
                merged = table.over(job.policy or default)
                if job.order == "none" and blocks(merged):
                    raise PolicyError(
                        where=table.name,
                        reason=f"it may block queues of job {job.name}, whose order='none' lets "
                        "no message wait for another: take then='block' out, or change the order",
                    )


def _may_meet(one: str, other: str) -> bool:
    """Return False where no queue can match both globs, judging by how they begin."""
    first, second = (re.split(r"[*?[]", glob, maxsplit=1)[0] for glob in (one, other))
    return first.startswith(second) or second.startswith(first)


def literal_characters(glob: str) -> int:
    """Return how particular a glob is: more literal characters count more."""
    return sum(character not in "*?[]" for character in glob)
