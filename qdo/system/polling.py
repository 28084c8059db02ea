"""Poll for changes that no event reports, with growing pauses."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from qdo.system.clock import clock

_FIRST_SECONDS, _LAST_SECONDS = 0.004, 0.1
_GROWTH = 1.2
"""A pause adds at most a fifth to the time until a change is seen."""


def polls(timeout_seconds: float, pause: Callable[[float], object] = time.sleep) -> Iterator[float]:
    """Yield the seconds waited so far, at least once, until the time is over.

    A caller returns from the loop on success; after the loop, it has waited in vain.

    :param pause: sleeps between two steps, as the client's handler requires.
    """
    began, seconds = clock(), _FIRST_SECONDS
    while True:
        yield clock() - began
        if clock() - began > timeout_seconds:
            return
        pause(seconds)
        seconds = min(_GROWTH * seconds, _LAST_SECONDS)
