"""The clock of leases and deadlines. Also polls, paces long loops, and counts durations."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, TypeVar

from qdo.errors import UsageError

_T = TypeVar("_T")

# About 30 years. Timers of Python and of libev cannot hold much longer times or infinity.
_MOST_SECONDS = 1e9
# Number of items between two pauses. At 5 us each, these items take a few milliseconds.
STRIDE = 500
# First pause of `polls`. The growing pauses delay the discovery of a change by at most a fifth.
_FIRST_SECONDS = 0.004
_LAST_SECONDS = 0.1
_GROWTH = 1.2

# Use partial, not def. Every message needs this check, and a call of a C function takes only 65 ns.
# Return the seconds since boot, including suspends. All processes of a machine share this clock.
clock: Callable[[], float] = partial(
    time.clock_gettime, getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
)


def checked_timeout(seconds: Any, name: str = "timeout_seconds") -> float:
    """Return a timeout in seconds (0 for a negative number); raise UsageError for other values."""
    number = isinstance(seconds, (int, float)) and not isinstance(seconds, bool)
    if not (number and -_MOST_SECONDS <= seconds <= _MOST_SECONDS):
        raise UsageError(
            reason=f"{name} must be a number of seconds up to {_MOST_SECONDS:g}, got {seconds!r}"
        )
    return max(0.0, float(seconds))  # the remaining time of a deadline may be negative


def polls(timeout_seconds: float, pause: Callable[[float], object] = time.sleep) -> Iterator[float]:
    """Yield the seconds waited so far, at least once, until the timeout.

    The caller leaves the loop on success. If the loop ends, the timeout has passed.

    :param pause: the function that sleeps between two steps. A client's handler may require its own
        function.
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
    """Yield the items. Let other greenlets run after every `STRIDE` items."""
    # Use this function for loops of unknown length in a process whose event loop must not block.
    for number, item in enumerate(items, 1):
        yield item
        if number % STRIDE == 0:
            time.sleep(0)  # in a worker process, this is gevent's function


class Histogram:
    """Counts durations by class, and adds up the durations in `seconds`.

    :ivar bounds: upper bounds, in seconds, of all classes except the last class. A class includes
        its bound.
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
        """Return the counts of all classes, followed by the sum of the durations."""
        return [*self.counts, self.seconds]
