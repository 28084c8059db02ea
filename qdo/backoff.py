"""Exponential backoff. No other code computes growing delays between attempts."""

from __future__ import annotations

from dataclasses import dataclass

# 2 ** 62 times any delay exceeds every maximum. Much larger exponents would overflow a float.
_MAX_EXPONENT = 62


@dataclass(frozen=True, slots=True)
class Backoff:
    """Delays that double after each failure up to a maximum, with random jitter.

    The jitter keeps clients that failed together from retrying together (see "Exponential Backoff
    And Jitter", AWS Architecture Blog, 2015).

    :ivar first_seconds: the delay after the first failure, before jitter.
    :ivar max_seconds: the maximum delay.
    :ivar jitter: the random share of a delay, from 0 to 1. With 1, a delay is between 0 and its
        full length. With 0.5, a delay is at least half its full length.
    """

    first_seconds: float
    max_seconds: float
    jitter: float = 0.5

    def delay(self, failures: int, chance: float) -> float:
        """Return the seconds to wait after 1 or more failures. `chance` is a number from 0 to 1."""
        doubled = self.first_seconds * 2.0 ** min(failures - 1, _MAX_EXPONENT)
        ceiling = min(doubled, self.max_seconds)
        return ceiling * (1.0 - self.jitter + self.jitter * chance)
