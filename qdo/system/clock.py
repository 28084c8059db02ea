"""The clock of leases and deadlines, polling, pauses of long loops, and histograms of durations."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, TypeVar

from qdo.errors import UsageError

_T = TypeVar("_T")

# About 30 years. Timers of Python and of libev cannot hold infinity, nor much more than this.
_MOST_SECONDS = 1e9
# Items between two pauses: a few milliseconds for items that take 5 us each.
STRIDE = 500
# Pauses of `polls`. The growth adds at most a fifth to the time until a change is seen.
_FIRST_SECONDS = 0.004
_LAST_SECONDS = 0.1
_GROWTH = 1.2

# Use partial, not def: the check before every message costs one C call (65 ns).
# Return the seconds since boot, including suspends; the same for all processes of a machine.
clock: Callable[[], float] = partial(
    time.clock_gettime, getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
)


def checked_timeout(seconds: Any, name: str = "timeout_seconds") -> float:
    """Return how long a call may wait, 0 for a negative time; raise UsageError for no number."""
    number = isinstance(seconds, (int, float)) and not isinstance(seconds, bool)
    if not (number and -_MOST_SECONDS <= seconds <= _MOST_SECONDS):
        raise UsageError(
            reason=f"{name} must be a number of seconds up to {_MOST_SECONDS:g}, got {seconds!r}"
        )
    return max(0.0, float(seconds))  # what is left of a deadline may be negative


def polls(timeout_seconds: float, pause: Callable[[float], object] = time.sleep) -> Iterator[float]:
    """Yield the seconds waited so far, at least once, until the time is over.

    A caller returns from the loop on success; after the loop, it has waited in vain.

    :param pause: sleeps between two steps, as the client's handler requires.
    """
    began = clock()
    seconds = _FIRST_SECONDS
    while True:
        yield clock() - began
        if clock() - began > timeout_seconds:
            return
        pause(seconds)
        seconds = min(_GROWTH * seconds, _LAST_SECONDS)


def paced(items: Iterable[_T]) -> Iterator[_T]:
    """Yield the items, and let other greenlets run after every `STRIDE` of them."""
    # For a loop whose length another party decides, in a process whose event loop must not block.
    for number, item in enumerate(items, 1):
        yield item
        if number % STRIDE == 0:
            time.sleep(0)  # gevent's in a worker process


class Histogram:
    """Counts durations by their size, and adds them up in `seconds`.

    :ivar bounds: upper bounds of all classes but the last, in seconds; a class includes its bound.
    """

    __slots__ = ("bounds", "counts", "seconds")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.seconds = 0.0

    def observe(self, seconds: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, seconds)] += times
        self.seconds += seconds * times

    def dump(self) -> list[float]:
        """Return the counts of all classes, and then the sum."""
        return [*self.counts, self.seconds]
