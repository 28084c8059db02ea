"""A histogram of durations, counted in memory."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence


class Histogram:
    """Counts durations by their size.

    :ivar bounds: upper bounds of all classes but the last, in seconds; a class has its bound.
    :ivar counts: durations of each class.
    :ivar seconds: the sum of all durations.
    """

    __slots__ = ("bounds", "counts", "seconds")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.seconds = 0.0

    def observe(self, seconds: float, times: int = 1) -> None:
        """Count a duration."""
        self.counts[bisect_left(self.bounds, seconds)] += times
        self.seconds += seconds * times

    def dump(self) -> list[float]:
        """Return the counts of all classes, and then the sum."""
        return [*self.counts, self.seconds]
