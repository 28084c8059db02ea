"""Getting the rows of a queue: in batches as large as its turns get through, and ahead of time
where the broker takes long."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from operator import length_hint
from typing import TypeAlias

import gevent

from qdo.brokers.base import Broker
from qdo.brokers.subscription import Reader
from qdo.coordination.slots import Claim
from qdo.worker.slot import Slot

Row: TypeAlias = tuple[int, bytes, "str | None", "str | None"]
Rows: TypeAlias = Iterator[Row]

FIRST_LIMIT = 16
"""Rows of a queue's first fetch; it grows to `fetch` while turns get through whole batches, and
so stays small where jobs are slow: many such queues must not fill the memory with rows."""
AHEAD_WORTH_SECONDS = 0.002
"""Fetching ahead pays where a fetch takes longer than this. The embedded broker's takes less,
and would only be moved to another greenlet."""

_log = logging.getLogger(__name__)


class Ahead:
    """The next batch of a queue, fetched while the one before is processed."""

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
        """Return the rows, waiting for them; raise what the broker raised."""
        self._greenlet.join()
        if self._error is not None:
            raise self._error
        return self._rows

    def abandon(self) -> None:
        """Close the reader once the fetch has come back."""
        self._greenlet.rawlink(lambda _: _close(self._reader))


class Fetcher:
    """Reads for the slots of a worker.

    :param fetch: most rows of one fetch.
    :ivar most: the same.
    """

    def __init__(self, broker: Broker, fetch: int, clock: Callable[[], float]) -> None:
        self._broker = broker
        self.most = fetch
        self._clock = clock

    def fetch(self, slot: Slot, claim: Claim) -> Rows:
        """Return rows that are left, else the batch fetched ahead, else what the broker has.

        Raises whatever the broker raises.
        """
        rows = slot.rows
        if rows is not None and length_hint(rows):
            return rows
        if not slot.limit:
            slot.limit = min(FIRST_LIMIT, self.most)
        source = slot.subscription
        if slot.reader is None:
            if source is None:
                slot.reader = self._broker.reader(slot.queue, claim.done)
            else:
                slot.reader = source.reader(claim.done)
        start = self._clock()
        ahead, slot.ahead = slot.ahead, None
        batch = slot.reader.fetch(slot.limit) if ahead is None else ahead.get()
        if source is None or batch:  # a source without rows has not been asked yet, maybe
            slot.troubles = 0
        took = self._clock() - start if ahead is None else ahead.took_seconds
        slow = took >= AHEAD_WORTH_SECONDS and source is None  # a source fetches ahead itself
        if batch and slow and slot.claim is claim and claim.open:
            slot.ahead = Ahead(slot.reader, slot.limit, self._clock)
        # A list's iterator tells how much is left; not every sequence's does.
        slot.rows = rows = iter(list(batch))
        return rows

    def clear(self, slot: Slot) -> None:
        """Drop everything read; the next fetch begins after ``claim.done``."""
        reader, slot.reader = slot.reader, None
        ahead, slot.ahead = slot.ahead, None
        slot.rows = None
        slot.gathered = None
        if ahead is not None:
            ahead.abandon()
        elif reader is not None:
            _close(reader)

    def learn(self, slot: Slot, started: int, left: int) -> None:
        """Fit the next fetch to what a turn got through: rows started, and rows left."""
        if left:
            slot.limit = min(max(FIRST_LIMIT, 2 * started), self.most)
        elif started >= slot.limit:
            slot.limit = min(4 * slot.limit, self.most)


def _close(reader: Reader) -> None:
    try:
        reader.close()
    except Exception:  # noqa: BLE001 - nothing is read from it any more
        _log.warning("a reader of the broker cannot be closed", exc_info=True)
