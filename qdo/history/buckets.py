"""The classes of durations that a history counts."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

BOUNDS = tuple(0.0001 * 3.0**index for index in range(15))
"""Upper bounds of all classes but the last, in seconds: 0.1 ms, 0.3 ms, ... 478 s."""
BUCKETS = len(BOUNDS) + 1


def bucket_of(seconds: float) -> int:
    """Return the index of the class of a duration."""
    return bisect_right(BOUNDS, seconds)


def percentile(counts: Sequence[int], share: float) -> float | None:
    """Return a duration in seconds that this share of attempts did not exceed.

    It is the upper bound of a class: at most three times too large. Durations above the last bound
    count as that bound. None without any attempt.
    """
    wanted = share * sum(counts)
    if not wanted:
        return None
    reached = 0
    for bound, count in zip(BOUNDS, counts, strict=False):
        reached += count
        if reached >= wanted:
            return bound
    return BOUNDS[-1]
