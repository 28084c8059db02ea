"""The value of the node ``limits/<name>``: the terms of a limit, and the shares of processes."""

from __future__ import annotations

import math
import re
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from typing import Any

from qdo.coordination.znodes.values import encode_with_others, load, shown, text_of
from qdo.errors import UsageError

# Largest `max`, `burst`, and starts per second.
MOST = 1_000_000
# The fault of a limit without a node.
MISSING = "it does not exist"
SECONDS = {"s": 1, "m": 60, "h": 3600}
RATE_TEXT = "must be a number of starts a second, minute or hour such as 50/s, 5/m or 100/h"
_RATE = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,6})?)/([smh])", re.ASCII)


@dataclass(frozen=True, slots=True)
class ShareHolder:
    """The share of one process: the permits that it holds and the permits that it wants."""

    # Name of the process's worker node, or "client/" and the name of a component's node.
    worker: str
    held: int
    wants: int


# Holders in the order in which they receive permits.
ShareHolders = tuple[ShareHolder, ...]


@dataclass(frozen=True, slots=True)
class LimitNode:
    """A limit."""

    # Maximum number of permits in the whole fleet; None for any number.
    max: int | None = None
    # Maximum number of starts per second in the whole fleet; None for any number.
    rate: float | None = None
    # Maximum number of starts in any window of burst / rate seconds. Each process has a share of
    # the burst.
    burst: int = 1
    reason: str = ""
    permits: ShareHolders = ()
    # The holders of parts of `burst`.
    starts: ShareHolders = ()
    # Other keys of the node, which qdo keeps.
    extra: dict[str, Any] = field(default_factory=dict)
    # The reason why the node cannot be used, or None.
    fault: str | None = None
    # Whether the terms come from `App.limit` and no operator has changed them.
    declared: bool = False

    @classmethod
    def parse(cls, data: bytes | None) -> LimitNode:
        value, fault = load(data)
        most = value.pop("max", None)
        rate = value.pop("rate", None)
        burst = value.pop("burst", 1)
        fault = fault or _fault(most, rate, burst)
        node = cls(
            reason=text_of(value.pop("reason", "")),
            permits=_holders(value.pop("permits", ())),
            starts=_holders(value.pop("starts", ())),
            declared=value.pop("declared", False) is True,
            extra=value,
            fault=fault,
        )
        if fault is not None:
            return node
        return replace(node, max=most, rate=None if rate is None else float(rate), burst=burst)

    @property
    def workers(self) -> frozenset[str]:
        """The worker names of the processes that hold or want permits or starts."""
        return frozenset(each.worker for each in (*self.permits, *self.starts))

    def held_by(self, workers: Collection[str]) -> LimitNode:
        """Return the limit without the shares of other processes."""
        permits = tuple(each for each in self.permits if each.worker in workers)
        starts = tuple(each for each in self.starts if each.worker in workers)
        return replace(self, permits=permits, starts=starts)

    def encode(self) -> bytes:
        value: dict[str, Any] = {"max": self.max}
        if self.rate is not None:
            value |= {"rate": self.rate, "burst": self.burst}
        if self.reason:
            value["reason"] = self.reason
        if self.declared:
            value["declared"] = True
        for key, holders in (("permits", self.permits), ("starts", self.starts)):
            if holders:
                value[key] = [[each.worker, each.held, each.wants] for each in holders]
        return encode_with_others(value, self.extra)


def checked_terms(max: Any, rate: Any, burst: Any = None) -> LimitNode:
    """Return the terms of a limit that code declares; raise UsageError if a value is not valid."""
    if max is not None and not is_count(max, 0):
        raise UsageError(reason=f"max must be an integer from 0 to {MOST}, got {max!r}")
    if burst is not None and (rate is None or not is_count(burst, 1)):
        reason = f"burst must be an integer from 1 to {MOST}, with a rate, got {burst!r}"
        raise UsageError(reason=reason)
    if rate is None:
        return LimitNode(max)
    try:
        starts = rate_of(rate)
    except ValueError as error:
        raise UsageError(reason=f"rate {error}") from None
    return LimitNode(max, starts, burst or default_burst(starts))


@dataclass(slots=True)
class DeclaredLimit:
    """The terms that an app declares for a limit."""

    # The declared terms, as a limit without holders.
    node: LimitNode
    # Whether the coordinator already has these terms, newer terms, or an operator's terms.
    is_told: bool = False

    def changed(self, before: LimitNode) -> LimitNode | None:
        """Return the limit with the declared terms, or None if the limit must keep its terms."""
        mine = self.node
        is_missing = before.fault == MISSING
        if not is_missing and (self.is_told or not before.declared):
            return None
        same = (mine.max, mine.rate, mine.burst) == (before.max, before.rate, before.burst)
        terms = replace(before, max=mine.max, rate=mine.rate, burst=mine.burst)
        return None if same else replace(terms, declared=True, fault=None)


def _fault(most: Any, rate: Any, burst: Any) -> str | None:
    if most is None and rate is None:
        return "it has neither max nor rate"
    if most is not None and not is_count(most, 0):
        return f"max must be an integer from 0 to {MOST}, got {shown(most)}"
    if rate is not None and not is_rate(rate):
        return f"rate must be a number of starts a second up to {MOST}, got {shown(rate)}"
    if not is_count(burst, 1):
        return f"burst must be an integer from 1 to {MOST}, got {shown(burst)}"
    return None


def is_count(value: Any, least: int) -> bool:
    """Return whether a value can be `max` (at least 0) or `burst` (at least 1)."""
    return type(value) is int and least <= value <= MOST


def is_rate(value: Any) -> bool:
    # The comparison also rejects infinity, NaN, and integers too large for a float.
    return type(value) in (int, float) and bool(1 / 86_400 <= value <= MOST)


def _holders(value: Any) -> ShareHolders:
    found: dict[str, ShareHolder] = {}
    for each in value if isinstance(value, (list, tuple)) else ():
        if isinstance(each, list) and len(each) == 3 and isinstance(each[0], str):
            worker, held, wants = each
            if is_count(held, 0) and is_count(wants, 0):
                found.setdefault(worker, ShareHolder(worker, held, wants))
    return tuple(found.values())


def rate_of(text: Any) -> float:
    """Return the starts per second of a rate such as "50/s", from one a day to a million a second.

    :raises ValueError: the text is not a rate in this range.
    """
    match = _RATE.fullmatch(text) if isinstance(text, str) else None
    rate = float(match[1]) / SECONDS[match[2]] if match else 0.0
    if not is_rate(rate):
        raise ValueError(f"{RATE_TEXT}, got {str(text)[:60]!r}")
    return rate


def rate_text(rate: float) -> str:
    """Return the text of a rate, with a unit for which the number is at least 1."""
    for unit, seconds in SECONDS.items():
        if rate * seconds >= 0.9995 or unit == "h":
            return f"{round(rate * seconds, 3):g}/{unit}"
    raise AssertionError


def default_burst(rate: float) -> int:
    return max(1, math.ceil(rate))
