"""Statistics of repeated runs and of samples. Pure functions."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Spread:
    """The results of several runs of one measurement."""

    best: float
    median: float
    worst: float
    runs: int

    @classmethod
    def of_rates(cls, values: Sequence[float]) -> Spread:
        """Return the spread of values, of which the highest is the best."""
        return cls(max(values), statistics.median(values), min(values), len(values))

    @classmethod
    def of_costs(cls, values: Sequence[float]) -> Spread:
        """Return the spread of values, of which the lowest is the best."""
        return cls(min(values), statistics.median(values), max(values), len(values))

    @property
    def spread(self) -> float:
        """The difference of best and worst, relative to the median."""
        return abs(self.best - self.worst) / self.median if self.median else 0.0


def percentile(values: Iterable[float], percent: float) -> float:
    """Return the smallest value that `percent` % or more of the values do not exceed."""
    ordered = sorted(values)
    if not ordered:
        raise ValueError("a percentile needs at least one value")
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]


@dataclass(frozen=True, slots=True)
class Ages:
    """The age of messages at the start of their job, in milliseconds."""

    samples: int
    median: float
    p99: float
    longest: float

    @classmethod
    def of_seconds(cls, values: Sequence[float]) -> Ages:
        return cls(
            len(values),
            1000 * statistics.median(values),
            1000 * percentile(values, 99),
            1000 * max(values),
        )


@dataclass(frozen=True, slots=True)
class Goal:
    """A required figure, and whether it was reached."""

    what: str
    wanted: str
    found: str
    reached: bool

    @classmethod
    def at_least(cls, what: str, wanted: float, found: float, form: str = ",.2f") -> Goal:
        return cls(what, f">= {wanted:{form}}", f"{found:{form}}", found >= wanted)

    @classmethod
    def at_most(cls, what: str, wanted: float, found: float, form: str = ",.2f") -> Goal:
        return cls(what, f"<= {wanted:{form}}", f"{found:{form}}", found <= wanted)


def fewest_moves(before: dict[str, str], members: Iterable[str]) -> int:
    """Return the least number of moves after which all shares differ by at most one.

    :param before: owner of each thing; owners that are not in `members` have left.
    :param members: owners after the change.
    """
    names = list(members)
    held = dict.fromkeys(names, 0)
    for owner in before.values():
        if owner in held:
            held[owner] += 1
    low, extra = divmod(len(before), len(names))
    # The larger shares go to the members with the most things, which saves moves.
    kept = sum(
        min(count, low + (rank < extra))
        for rank, count in enumerate(sorted(held.values(), reverse=True))
    )
    return len(before) - kept
