"""Exponential backoff: the only code that computes growing delays between attempts."""

from __future__ import annotations

from dataclasses import dataclass

# 2 ** 62 times any delay exceeds every maximum; much larger exponents overflow a float.
_MAX_EXPONENT = 62


@dataclass(frozen=True, slots=True)
class Backoff:
    """Delays that double after each failure up to a maximum, with random jitter.

    The jitter keeps clients that failed together from retrying together; see "Exponential
    Backoff And Jitter", AWS Architecture Blog, 2015.

    :ivar first_seconds: the delay after the first failure, before jitter.
    :ivar max_seconds: the maximum delay.
    :ivar jitter: the random share of a delay, from 0 to 1. 1 gives a delay between 0 and its full
        length; 0.5 gives at least half its length.
    """

    first_seconds: float
    max_seconds: float
    jitter: float = 0.5

    def delay(self, failures: int, chance: float) -> float:
        """Return the seconds to wait after 1 or more failures; `chance` is from 0 to 1."""
        doubled = self.first_seconds * 2.0 ** min(failures - 1, _MAX_EXPONENT)
        ceiling = min(doubled, self.max_seconds)
        return ceiling * (1.0 - self.jitter + self.jitter * chance)
