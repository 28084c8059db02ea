"""Statistics of repeated runs and of samples; values in, values out."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Spread:
    """What several runs of one measurement gave; `best` is what the machine can do."""

    best: float
    median: float
    worst: float
    runs: int

    @classmethod
    def of_rates(cls, values: Sequence[float]) -> Spread:
        """Return the spread of values of which the highest is the best."""
        return cls(max(values), statistics.median(values), min(values), len(values))

    @classmethod
    def of_costs(cls, values: Sequence[float]) -> Spread:
        """Return the spread of values of which the lowest is the best."""
        return cls(min(values), statistics.median(values), max(values), len(values))

    @property
    def spread(self) -> float:
        """How far best and worst are apart, as a part of the median."""
        return abs(self.best - self.worst) / self.median if self.median else 0.0


def percentile(values: Iterable[float], percent: float) -> float:
    """Return the smallest value that at least `percent` % of the values do not exceed."""
    ordered = sorted(values)
    if not ordered:
        raise ValueError("a percentile of no values")
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]


@dataclass(frozen=True, slots=True)
class Ages:
    """How old messages were when their job started, in milliseconds."""

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
    """A figure that must be reached, and whether it was."""

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
    """Return how few of the owned things must change hands to be balanced within one.

    :param before: owner of each thing; owners that are no longer members count as leavers.
    :param members: who shares them afterwards.
    """
    names = list(members)
    held = dict.fromkeys(names, 0)
    for owner in before.values():
        if owner in held:
            held[owner] += 1
    low, extra = divmod(len(before), len(names))
    # The larger shares go to those who hold most, so that they keep the most.
    kept = sum(
        min(count, low + (rank < extra))
        for rank, count in enumerate(sorted(held.values(), reverse=True))
    )
    return len(before) - kept
