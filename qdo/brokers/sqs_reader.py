"""Reading what a subscription to SQS has at hand."""

from __future__ import annotations

from collections.abc import Callable

from qdo.brokers.base import Row


class SqsReader:
    """Reads what a subscription holds, from a position on.

    :param fetch: returns up to so many rows behind a position.
    """

    def __init__(self, fetch: Callable[[int, int], list[Row]], after: int) -> None:
        self._fetch = fetch
        self._after = after

    def fetch(self, limit: int) -> list[Row]:
        """Return the next rows at hand, none when there are none; raises what a poll raised."""
        rows = self._fetch(self._after, limit)
        if rows:
            self._after = rows[-1].position
        return rows

    def close(self) -> None:
        """Nothing is held by a reader."""
