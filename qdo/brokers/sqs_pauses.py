"""How long is waited between requests to SQS."""

from __future__ import annotations

from qdo.policy import Policy

FIRST_REST_SECONDS = 0.5
"""Pause after the first poll that found nothing; it doubles from poll to poll."""
TROUBLE = Policy(backoff_seconds=0.2, backoff_max_seconds=30.0)
"""Pauses after requests that failed."""


def rest_seconds(empty: int, most: float, chance: float) -> float:
    """Return how long a queue rests: nothing at first, then more from poll to poll.

    With a little chance in it, or all queues of a worker would be polled at once for ever.

    :param empty: polls in a row that found nothing.
    :param most: of these pauses; 0 for none.
    :param chance: from 0 to 1.
    """
    if not most or not empty:
        return 0.0
    return min(most, FIRST_REST_SECONDS * 2.0 ** min(empty - 1, 30)) * (0.9 + 0.2 * chance)
