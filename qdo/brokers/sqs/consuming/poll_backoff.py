"""The pauses between requests to SQS."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from qdo.backoff import Backoff
from qdo.system.clock import clock as boot_clock

FIRST_REST_SECONDS = 0.5
"""Pause after the first poll that found nothing; it doubles from poll to poll."""
RETRY_BACKOFF = Backoff(0.2, 30.0)
"""Delays after requests that failed."""


@dataclass(frozen=True, slots=True)
class Timing:
    """The clock in seconds, and random numbers from 0 to 1; tests replace both."""

    clock: Callable[[], float] = boot_clock
    jitter: Callable[[], float] = random.random


def idle_backoff(empty: int, most: float, jitter: float) -> float:
    """Return the pause after empty polls: 0 at first, then longer from poll to poll.

    Without jitter, a worker would poll all its queues at the same times forever.

    :param empty: number of empty polls in a row.
    :param most: maximum of these pauses; 0 for none.
    :param jitter: from 0 to 1.
    """
    if not most or not empty:
        return 0.0
    return Backoff(FIRST_REST_SECONDS, most, jitter=0.0).delay(empty, 0.0) * (0.9 + 0.2 * jitter)
