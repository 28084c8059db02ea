"""The clock of leases, turns, deadlines and heartbeats."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

from qdo.errors import UsageError

_MOST_SECONDS = 1e9
"""About 30 years. Timers of Python and of libev cannot hold infinity, nor much more than this."""

# partial, not def: the check before every message costs one C call (65 ns).
clock: Callable[[], float] = partial(
    time.clock_gettime, getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
)
"""Return the seconds since boot, including suspends; the same for all processes of a machine."""


def checked_timeout(seconds: Any, name: str = "timeout_seconds") -> float:
    """Return how long a call may wait; a negative one, which is left of a deadline, is 0.

    :raises UsageError: it is not a number, NaN, or too large for a timer, such as infinity.
    """
    number = isinstance(seconds, (int, float)) and not isinstance(seconds, bool)
    if not (number and -_MOST_SECONDS <= seconds <= _MOST_SECONDS):
        raise UsageError(
            reason=f"{name} must be a number of seconds up to {_MOST_SECONDS:g}, got {seconds!r}"
        )
    return max(0.0, float(seconds))
