"""Fetches rows of a queue: in batches of the size that its turns process, and ahead of time
when the broker is slow."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from operator import length_hint

from qdo.brokers.base import Broker, check_reached
from qdo.coordination.protocol.claims import Claim
from qdo.worker.engine.slot import Prefetch, Row, Rows, Slot

FIRST_LIMIT = 16
"""Rows of a queue's first fetch. The limit grows to `fetch` while turns process whole batches. It
stays small where jobs are slow: many such queues must not fill the memory with rows."""
AHEAD_WORTH_SECONDS = 0.002
"""Fetching ahead pays off when a fetch takes longer than this. The embedded broker is faster;
prefetching would only move its fetch to another greenlet."""

_log = logging.getLogger(__name__)


class Fetcher:
    """Reads for the slots of a worker, at most `most` rows at once."""

    def __init__(self, broker: Broker, fetch: int, clock: Callable[[], float]) -> None:
        self._broker = broker
        self.most = fetch
        self._clock = clock

    def limit(self, fetch: int) -> None:
        """Read at most this many rows at once from now on."""
        self.most = fetch

    def fetch(self, slot: Slot, claim: Claim) -> Rows:
        """Return the remaining rows, the prefetched batch, or new rows; raise any broker error."""
        rows = slot.rows
        if rows is not None and length_hint(rows):
            return rows
        slot.limit = min(slot.limit or FIRST_LIMIT, self.most)
        subscription = slot.subscription
        if slot.reader is None:
            check_reached(self._broker, slot.queue, claim.done)
            if subscription is None:
                slot.reader = self._broker.reader(slot.queue, claim.done)
            else:
                slot.reader = subscription.reader(claim.done)
        start = self._clock()
        ahead, slot.ahead = slot.ahead, None
        batch: Sequence[Row] = () if ahead is None else ahead.get()
        if not batch:
            # A batch that was fetched ahead may be older than the wakeup of this turn.
            ahead = None
            batch = slot.reader.fetch(slot.limit)
        if subscription is None or batch:  # without rows, it may not have polled yet
            slot.broker_failures = 0
        took = self._clock() - start if ahead is None else ahead.took_seconds
        # Subscriptions fetch ahead themselves.
        slow = took >= AHEAD_WORTH_SECONDS and subscription is None
        if batch and slow and slot.claim is claim and claim.open:
            slot.ahead = Prefetch(slot.reader, slot.limit, self._clock)
        if batch:
            slot.fetched = batch[-1][0]
        # The iterator of a list knows how much is left; not every sequence's iterator does.
        slot.rows = rows = iter(list(batch))
        return rows

    def clear(self, slot: Slot) -> None:
        """Drop all fetched rows; the next fetch begins after ``claim.done``."""
        slot.reader = slot.ahead = None
        slot.rows = None
        slot.fetched = 0
        slot.gathered = None

    def learn(self, slot: Slot, started: int, left: int) -> None:
        """Adapt the next fetch to a turn: the rows that it started, and those left over."""
        if left:
            slot.limit = min(max(FIRST_LIMIT, 2 * started), self.most)
        elif started >= slot.limit:
            slot.limit = min(4 * slot.limit, self.most)
