"""An owner's messages of an SQS queue, from claim to release: `Poller` polls, this holds them."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import gevent

from qdo.brokers.base import Row, Subscription
from qdo.brokers.sqs.api import SqsApi
from qdo.brokers.sqs.codec import Received
from qdo.brokers.sqs.in_flight import InFlightMessage, InFlightMessages, MemoryBudget
from qdo.brokers.sqs.poller import Poller, Timing
from qdo.brokers.sqs.visibility import ConsumedQueue, Deleter, Releaser, VisibilityExtender
from qdo.positions import time_of_position

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Callbacks:
    """Callbacks for the events of a subscription.

    :ivar lost: called with the position of a message that is no longer held.
    :ivar news: called when there are messages to fetch, or an error.
    :ivar closed: called when no call or task of the subscription still runs.
    """

    lost: Callable[[int], None]
    news: Callable[[], None]
    closed: Callable[[SqsSubscription], None]


class SqsSubscription(Subscription):
    """Holds the messages of a queue. Everything runs in greenlets of one thread."""

    def __init__(
        self,
        queue: str,
        api: SqsApi,
        holding: InFlightMessages,
        budget: MemoryBudget,
        idle_seconds: float,
        callbacks: Callbacks,
        timing: Timing,
    ) -> None:
        self.queue = queue
        self._holding = holding
        self._callbacks = callbacks
        self._clock = timing.clock
        self._fetched = 0
        self._running = 0
        self._closed = False
        self._has_told_names = bool(holding.unconfirmed())
        self._poller = Poller(self, api, holding, budget, idle_seconds, timing)
        consumed = ConsumedQueue(queue, api, holding, self.begin, timing)
        self._deletes = Deleter(consumed, self._check_confirmed)
        self._extensions = VisibilityExtender(consumed, choose=self._choose, lose=self._lose)
        self._release = Releaser(consumed).release

    def reader(self, after: int) -> SqsReader:
        return SqsReader(self.fetch, after)

    def fetch(self, after: int, limit: int) -> list[Row]:
        """Return held rows; poll for more where these are the last.

        :raises QdoError: the error of the last poll; once.
        """
        self._poller.raise_error()
        rows = self._holding.rows(after, limit)
        self._fetched = rows[-1].position if rows else after
        if not self._holding.has_rows(self._fetched):
            self._poller.want()
        return rows

    def at_tip(self) -> bool:
        # Fetched messages may stay held: those of a key that waits for an operator.
        return self._poller.is_at_tip() and not self._holding.has_rows(self._fetched)

    def behind_seconds(self) -> float | None:
        """Return the age of the first message that was received and is not done."""
        sent = self._holding.oldest_sent()
        if sent is not None:
            return max(0.0, time.time() - time_of_position(sent))
        return 0.0 if self.at_tip() else None

    def done(self, position: int) -> None:
        held = self._holding.done(position)
        if held is not None:
            self._deletes.add([held], self._closed)
            self._poller.check_room()

    def done_through(self, position: int) -> None:
        self._deletes.add(self._holding.done_through(position), self._closed)
        self._poller.check_room()

    def is_held(self, position: int) -> bool:
        return self._holding.is_held(position)

    def has_followers(self) -> bool:
        return any(held.has_followers for held in self._holding.undone())

    def unconfirmed(self) -> tuple[str, ...]:
        names = self._holding.unconfirmed()
        self._has_told_names = bool(names)
        return names

    def poll_now(self) -> None:
        self._poller.poll_now()

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._poller.close()
        self._extensions.stop()
        # The next owner need not wait for messages that are not done, nor for failing deletes.
        self.begin(self._deletes.flush)
        self._release(self._holding.undone())

    def news(self) -> None:
        self._callbacks.news()

    def begin(self, task: Callable[[], None]) -> None:
        """Run a task in a greenlet of its own; the subscription is closed after the last one."""

        def run() -> None:
            try:
                task()
            finally:
                self._running -= 1
                self.poll_ended()

        self._running += 1
        gevent.spawn(run)

    def poll_ended(self) -> None:
        """Report the end of a closed subscription once none of its tasks runs."""
        self._check_confirmed()  # an empty answer may prove that messages were deleted
        if self._closed and not self._running and not self._poller.open:
            self._holding.poll.opened(None)
            self._callbacks.closed(self)

    def _check_confirmed(self) -> None:
        """Tell the engine when the names that it may have recorded are no longer needed."""
        if self._has_told_names and not self._holding.unconfirmed():
            self._has_told_names = False
            self.on_confirmed()

    def received(self, messages: Sequence[Received], asked_at: float) -> int | None:
        """Store the messages of a poll; return the number of new ones, None if all are released."""
        taken = self._holding.take(messages, asked_at)
        self._holding.poll.opened(None)
        if taken.again:
            _log.info(
                "queue %s: %d done messages were received again and are deleted",
                self.queue,
                len(taken.again),
            )
            self._deletes.add(taken.again, self._closed)
        if self._closed:
            self._release(self._holding.undone())
            return None
        if not self.may_start():
            self._keep_what_runs(self._holding.undone())
            return None
        if messages:
            self._extensions.schedule()
        return taken.fresh

    def _choose(self, due: Sequence[InFlightMessage]) -> Sequence[InFlightMessage]:
        """Return the due messages whose visibility timeout to extend."""
        return self._keep_what_runs(due) if due and not self.may_start() else due

    def _keep_what_runs(self, due: Sequence[InFlightMessage]) -> list[InFlightMessage]:
        """Return the due messages to hold although jobs may not start; release all others.

        The queue is blocked, or another worker may own it and must be able to receive them. All
        are released: a message that stayed here would run before those that were released.
        """
        running = self.in_flight()
        undone = self._holding.undone()
        self._release([held for held in undone if held.position not in running])
        return [held for held in due if held.done or held.position in running]

    def _lose(self, lost: Sequence[InFlightMessage]) -> None:
        """End the jobs of messages that another owner may have received."""
        behind: list[InFlightMessage] = []
        for held in lost:
            if not self._holding.is_held(held.position):
                continue
            if held.done:
                self._holding.undeletable(held)
                continue
            gone = self._holding.lost(held)
            behind += gone[1:]
            for each in gone:
                self._callbacks.lost(each.position)
        now = self._clock()
        self._release([held for held in behind if held.until > now])
        if lost:
            self.news()


class SqsReader:
    """Reads a subscription from a position on; `fetch` returns the rows behind a position."""

    def __init__(self, fetch: Callable[[int, int], list[Row]], after: int) -> None:
        self._fetch = fetch
        self._after = after

    def fetch(self, limit: int) -> list[Row]:
        rows = self._fetch(self._after, limit)
        if rows:
            self._after = rows[-1].position
        return rows
