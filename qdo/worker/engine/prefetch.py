"""Fetched rows, and the batch that is fetched while the previous one is processed."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

import gevent

from qdo.brokers.subscription import Reader

_log = logging.getLogger(__name__)

Row: TypeAlias = tuple[int, bytes, "str | None", "str | None"]
"""Position, body, key, headers (JSON)."""
Rows: TypeAlias = Iterator[Row]


class Prefetch:
    """The next batch of a queue, fetched while the previous one is processed."""

    def __init__(self, reader: Reader, limit: int, clock: Callable[[], float]) -> None:
        self._reader = reader
        self._error: Exception | None = None
        self._rows: Sequence[Row] = ()
        self.took_seconds = 0.0
        self._greenlet = gevent.spawn(self._fetch, limit, clock)

    def _fetch(self, limit: int, clock: Callable[[], float]) -> None:
        start = clock()
        try:
            self._rows = self._reader.fetch(limit)
        except Exception as error:  # noqa: BLE001 - raised in `get`
            self._error = error
        self.took_seconds = clock() - start

    def get(self) -> Sequence[Row]:
        """Wait for the rows and return them; raise any error of the broker."""
        self._greenlet.join()
        if self._error is not None:
            raise self._error
        return self._rows

    def abandon(self) -> None:
        """Close the reader once the fetch has returned."""
        self._greenlet.rawlink(lambda _: close_reader(self._reader))


def close_reader(reader: Reader) -> None:
    """Close a reader; log an error, because nothing more is read from it."""
    try:
        reader.close()
    except Exception:  # noqa: BLE001 - nothing more is read from it
        _log.warning("cannot close a reader of the broker; it is not used again", exc_info=True)
