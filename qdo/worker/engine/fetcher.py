"""Fetch rows of a queue in batches that fit its turns, and ahead of time from slow brokers.

The memory for fetched bodies of a process is bounded. A fetch waits until `HELD_BYTES` have room
for a body of the maximum size, first come, first served. While the process holds no other body, the
body may be larger. Queues between their turns give up their rows for a waiting fetch. When half of
the memory is in use, a fetch reads only one row, so that more queues have a row. Lanes and polled
brokers have separate limits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from operator import length_hint

from gevent.event import Event

from qdo.brokers.base import Broker, check_reached
from qdo.coordination.protocol.claims import Claim
from qdo.message import Origin
from qdo.worker.engine.slot import Prefetch, Row, Rows, Slot

# Maximum rows of a queue's first fetch. The limit grows to `fetch` while turns process whole
# batches. The limit stays small for slow jobs, because many queues of slow jobs must not fill the
# memory.
FIRST_LIMIT = 16
# Minimum duration of a fetch for which prefetching pays off. The embedded broker is faster, so
# prefetching would only move its fetch to another greenlet.
AHEAD_WORTH_SECONDS = 0.002

# Maximum bytes of bodies that a process has fetched for queues without lanes. The broker may return
# 32 MiB more than expected.
HELD_BYTES = 256 << 20
# Maximum rows for which the fetcher adds up all sizes. The fetcher estimates larger fetches from
# their first and last bodies, because the sum takes 4 % of a message's time.
FEW_ROWS = 64
# Seconds between two checks whether the claim of a fetch that waits for memory has ended.
LOOK_SECONDS = 0.25


class Fetcher:
    """Reads rows for the slots of a worker, at most `most` rows at once.

    :ivar held_bytes: approximate size in bytes of the fetched bodies, and of bodies being fetched.
    :param body_bytes: maximum size of a body in bytes.
    :param app: the app's `Settings.scope`.
    """

    def __init__(
        self,
        broker: Broker,
        fetch: int,
        clock: Callable[[], float],
        body_bytes: int = 1,
        app: str = "",
    ) -> None:
        self._broker = broker
        self.most = fetch
        self._clock = clock
        self._largest = body_bytes
        self._plain = Origin(app, None, broker.id_scheme)
        self.held_bytes = 0
        self._resting: dict[Slot, None] = {}
        self._waiting: deque[object] = deque()
        self._freed = Event()

    def limit(self, fetch: int) -> None:
        """Set the maximum number of rows to read at once."""
        self.most = fetch

    def begin(self, slot: Slot) -> None:
        """Let a queue keep its rows during its turn."""
        self._resting.pop(slot, None)

    def rest(self, slot: Slot) -> None:
        """Let a queue give up its rows after its turn if other queues need memory."""
        if not slot.held_bytes:
            return
        # While rows are left, the whole fetch counts.
        if not length_hint(slot.rows or ()):
            ahead = 0 if slot.ahead is None else slot.ahead.held_bytes
            self._hold(slot, _size(slot.gathered or ()) + ahead)
        if slot.held_bytes:
            self._resting[slot] = None
            self._tell_next()

    def read(self, slot: Slot, claim: Claim) -> Rows | None:
        """Fetch rows once memory is free; return None if the claim or the lease ends first."""
        if length_hint(slot.rows or ()) or slot.subscription is not None:
            return self.fetch(slot, claim)
        # A queue with a part of a batch must not wait, because two such queues would wait for each
        # other.
        if slot.ahead is None and not slot.gathered:
            if not self._make_room(claim):
                return None
            # Reserve before the fetch, because other queues ask for memory during the fetch.
            self._hold(slot, self._largest)
            if self.held_bytes > HELD_BYTES // 2:
                slot.limit = 1
        return self.fetch(slot, claim)

    def _fits(self) -> bool:
        return not self.held_bytes or self.held_bytes + self._largest <= HELD_BYTES

    def _make_room(self, claim: Claim) -> bool:
        """Wait for memory; return whether the queue may still start messages after the wait."""
        if not self._waiting and self._fits():
            return True
        ticket = object()
        self._waiting.append(ticket)
        try:
            while claim.open and self._clock() < claim.lease.until:
                if self._waiting[0] is ticket:
                    # The queue that has rested longest gives up its rows first.
                    while self._resting and not self._fits():
                        self.clear(next(iter(self._resting)))
                    if self._fits():
                        return True
                self._freed.clear()
                self._freed.wait(LOOK_SECONDS)
            return False
        finally:
            # Remove the ticket even if the claim has ended, because the next fetch in the line may
            # fit.
            self._waiting.remove(ticket)
            self._tell_next()

    def _hold(self, slot: Slot, size: int) -> None:
        """Set the number of bytes that a slot holds."""
        freed = slot.held_bytes - size
        slot.held_bytes = size
        self.held_bytes -= freed
        if freed > 0:
            self._tell_next()

    def _tell_next(self) -> None:
        if self._waiting:
            self._freed.set()

    def fetch(self, slot: Slot, claim: Claim) -> Rows:
        """Return the remaining rows, the prefetched batch, or new rows; raise any broker error."""
        rows = slot.rows
        if rows is not None and length_hint(rows):
            return rows
        slot.limit = min(slot.limit or FIRST_LIMIT, self.most)
        subscription = slot.subscription
        if slot.reader is None:
            check_reached(self._broker, slot.queue, claim.done)
            slot.origin = self._plain
            if subscription is None:
                stream = self._broker.stream_of(slot.queue)
                if stream != slot.queue:
                    slot.origin = replace(self._plain, stream=stream)
                slot.reader = self._broker.reader(slot.queue, claim.done)
            else:
                slot.reader = subscription.reader(claim.done)
        start = self._clock()
        ahead = slot.ahead
        # Clear before `get`, because `_arrived` must not count the bodies a second time.
        slot.ahead = None
        batch: Sequence[Row] = () if ahead is None else ahead.get()
        if not batch:
            # An empty prefetched batch may be older than the wake of this turn, so fetch again.
            ahead = None
            batch = slot.reader.fetch(slot.limit)
        if subscription is None or batch:  # a subscription without rows may not have polled yet
            slot.broker_failures = 0
        took = self._clock() - start if ahead is None else ahead.took_seconds
        # Subscriptions prefetch by themselves.
        slow = took >= AHEAD_WORTH_SECONDS and subscription is None
        counted = slot.held_bytes > 0  # lanes count their rows themselves
        if counted:
            self._hold(slot, _about(batch) + _size(slot.gathered or ()))
        # Do not prefetch for a claim that ended during the fetch.
        if batch and slow and slot.claim is claim and claim.open and self._fits():
            expected = self._largest if counted else 0
            self._hold(slot, slot.held_bytes + expected)
            slot.ahead = Prefetch(
                slot.reader,
                slot.limit,
                self._clock,
                expected,
                lambda ahead, rows: self._arrived(slot, ahead, rows),
            )
        if batch:
            slot.fetched = batch[-1][0]
        # The iterator of a list knows the number of remaining rows. Other iterators may not.
        slot.rows = rows = iter(list(batch))
        return rows

    def _arrived(self, slot: Slot, ahead: Prefetch, rows: Sequence[Row]) -> None:
        """Count the bodies of a prefetched batch."""
        if slot.ahead is ahead and ahead.held_bytes:
            expected = ahead.held_bytes
            ahead.held_bytes = _about(rows)
            self._hold(slot, slot.held_bytes - expected + ahead.held_bytes)

    def clear(self, slot: Slot) -> None:
        """Drop all fetched rows; the next fetch begins after ``claim.done``."""
        slot.reader = slot.ahead = None
        slot.rows = None
        slot.fetched = 0
        slot.gathered = None
        if slot.held_bytes:
            self._hold(slot, 0)
        self._resting.pop(slot, None)

    def learn(self, slot: Slot, started: int, left: int) -> None:
        """Adapt the size of the next fetch to the started and leftover rows of a turn."""
        if left:
            slot.limit = min(max(FIRST_LIMIT, 2 * started), self.most)
        elif started >= slot.limit:
            slot.limit = min(4 * slot.limit, self.most)


def _about(rows: Sequence[Row]) -> int:
    """Return the approximate size of the bodies of a fetch."""
    if len(rows) <= FEW_ROWS:
        return _size(rows)
    return len(rows) * max(len(rows[0][1]), len(rows[-1][1]), 1)


def _size(rows: Sequence[Row]) -> int:
    return sum(len(row[1]) + 1 for row in rows)
