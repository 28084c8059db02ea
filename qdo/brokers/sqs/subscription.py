"""Polls, holds and deletes the messages of an SQS queue for its owner, from claim to release."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import gevent

from qdo.backoff import Backoff
from qdo.brokers.base import Row, Subscription
from qdo.brokers.sqs.api import SqsApi
from qdo.brokers.sqs.codec import Received
from qdo.brokers.sqs.in_flight import InFlightMessage, InFlightMessages, MemoryBudget
from qdo.brokers.sqs.receive import ReceiveAttemptId
from qdo.brokers.sqs.url import BATCH
from qdo.brokers.sqs.visibility import (
    RETRY_BACKOFF,
    ConsumedQueue,
    Deleter,
    Timing,
    VisibilityExtender,
    release,
)
from qdo.errors import UnreachableError
from qdo.positions import time_of_position

_log = logging.getLogger(__name__)

# The pause after the first empty poll; each further empty poll doubles the pause.
FIRST_REST_SECONDS = 0.5
# The numbers of successive empty polls, at growing intervals, at which the poller checks the
# backlog.
LOOK_AT = frozenset(3 << shift for shift in range(24))
# The interval in which the poller checks whether it may poll again.
UNWANTED_SECONDS = 1.0


def idle_backoff(empty: int, most: float, jitter: float) -> float:
    """Return the pause after empty polls; it grows with each empty poll, up to `most`."""
    # Without jitter, a worker would poll all its queues at the same times forever.
    if not most or not empty:
        return 0.0
    return Backoff(FIRST_REST_SECONDS, most, jitter=0.0).delay(empty, 0.0) * (0.9 + 0.2 * jitter)


@dataclass(frozen=True, slots=True)
class Callbacks:
    """The callbacks for the events of a subscription."""

    # A function of the position of a message that the owner no longer holds.
    lost: Callable[[int], None]
    # A function to call when there are messages to fetch, or an error.
    news: Callable[[], None]
    # A function to call when the last call and task of a closed subscription have ended.
    closed: Callable[[SqsSubscription], None]


class Poller:
    """Polls one queue in greenlets of one thread; `open` is True during a long poll.

    =======  ==================================================================  ==================
    state    meaning                                                             next
    =======  ==================================================================  ==================
    off      the owner does not fetch: its messages are not started              polling (a fetch
                                                                                 that leaves no
                                                                                 messages)
    polling  a long poll is open                                                 off (it brought
                                                                                 messages), idle
                                                                                 (none, or an
                                                                                 error)
    idle     the queue is empty: a pause that grows up to `idle_seconds`; or     polling (the pause
             jobs may not start: the queue is blocked, or the lease is over; or  is over, a
             the process holds as much as it should, see `MemoryBudget`          doorbell, or a
                                                                                 message is done)
    closed   the claim has ended; messages of an open poll are released          -
    =======  ==================================================================  ==================
    """

    def __init__(
        self,
        owner: SqsSubscription,
        api: SqsApi,
        holding: InFlightMessages,
        budget: MemoryBudget,
        idle_seconds: float,
        timing: Timing,
    ) -> None:
        self.open = False
        self._owner = owner
        self._queue = owner.queue
        self._api = api
        self._holding = holding
        self._budget = budget
        self._idle_seconds = idle_seconds
        self._timing = timing
        self._attempts = ReceiveAttemptId()
        self._size: float | None = None
        self._expected = 0
        self._waits_for_room = False
        self._error: Exception | None = None
        self._wanted = False
        self._empty = 0
        self._empty_at = self._owed_until = 0.0
        self._failures = 0
        self._rung = False
        self._pause: Any = None
        self._closed = False
        budget.queues += 1

    def raise_error(self) -> None:
        error = self._error
        self._error = None
        if error is not None:
            raise error

    def want(self) -> None:
        """Poll as soon as possible, because the owner has fetched every message."""
        self._wanted = True
        self._poll_if_possible()

    def is_at_tip(self) -> bool:
        """Return whether the last poll found the queue empty."""
        return bool(self._empty) and self._empty_at >= self._owed_until and not self._failures

    def poll_now(self) -> None:
        """Poll at once, because a sender rang the doorbell."""
        # SQS may have sent the response of an open poll before the message. So after an empty
        # response, poll again.
        self._rung = self.open
        if self._pause is not None and not self._failures:
            self._empty = 0
            self._end_pause()
            self._poll_if_possible()

    def check_room(self) -> None:
        """Poll if the poller was waiting for memory that done messages have freed."""
        if self._waits_for_room and self._room():
            self._end_pause()
            self._poll_if_possible()

    def close(self) -> None:
        self._closed = True
        self._wanted = False
        self._budget.queues -= 1
        self._end_pause()

    def _poll_if_possible(self) -> None:
        if self.open or self._closed or self._pause is not None or not self._wanted:
            return
        if not self._owner.may_start():
            # Polling now would only hide messages from a worker that may start them.
            self._pause_for(UNWANTED_SECONDS)
            return
        if not self._room() and not self._waits_for_room:
            self._waits_for_room = True
            self._pause_for(UNWANTED_SECONDS)
            return
        self._waits_for_room = False
        self.open = True
        gevent.spawn(self._poll)

    def _poll(self) -> None:
        asked_at = self._timing.clock()
        try:
            attempt = self._attempts.next(asked_at)
            self._holding.poll.opened(attempt)
            try:
                messages = self._api.receive(
                    self._queue,
                    attempt,
                    self._how_many,
                    self._came,
                    self._owed,
                    lambda: self._closed,
                )
            finally:
                self._expect(0)
        except Exception as error:  # noqa: BLE001 - `fetch` raises it
            self.open = False
            if not isinstance(error, UnreachableError):
                self._attempts.answered()
            if not self._attempts.unanswered:
                self._holding.poll.opened(None)
            self._failed(error)
        else:
            self.open = False
            self._attempts.answered()
            self._answered(messages, asked_at)
        self._owner.poll_ended()

    def _room(self) -> int:
        return self._budget.room(self._expected_size(), len(self._holding))

    def _expected_size(self) -> float:
        return self._budget.typical if self._size is None else self._size

    def _how_many(self) -> int:
        if self._closed:
            return 0
        most = self._attempts.batch_size(min(BATCH, max(1, self._room())))
        self._expect(int(self._expected_size() * most))
        return most

    def _came(self, messages: Sequence[Received]) -> int:
        """Return the number of messages to keep, before the API reads bodies from S3."""
        # Keep at least one message unless the claim has ended, because messages may be larger than
        # expected.
        if self._closed:
            return 0
        count = self._how_many_fit([each.size or len(each.body) for each in messages])
        self._attempts.answered()
        self._holding.poll.answered(each.receipt for each in messages[:count])
        return count

    def _how_many_fit(self, sizes: Sequence[int]) -> int:
        self._expect(0)
        for count, size in enumerate(sizes):
            if count and not self._budget.room(size, len(self._holding) + count):
                return count
            self._expect(self._expected + size)
        return len(sizes)

    def _owed(self, seconds: float) -> None:
        """Record that SQS will redeliver messages that the poller could not keep."""
        self._owed_until = self._timing.clock() + seconds
        self._holding.in_doubt()

    def _expect(self, size: int) -> None:
        self._budget.freed(self._expected)
        self._budget.took(size)
        self._expected = size

    def _failed(self, error: Exception) -> None:
        if self._closed:
            _log.debug("queue %s: a poll of a closed claim failed: %s", self._queue, error)
            return
        self._failures += 1
        self._error = error
        self._holding.in_doubt()  # the lost response may have had messages
        self._pause_for(RETRY_BACKOFF.delay(self._failures, self._timing.jitter()))
        self._owner.news()

    def _answered(self, messages: Sequence[Received], asked_at: float) -> None:
        self._failures = 0
        self._error = None
        fresh = self._owner.received(messages, asked_at)
        if self._closed:
            return
        if fresh is None:
            self._pause_for(UNWANTED_SECONDS)
            return
        if messages:
            self._empty = 0
            self._size = self._budget.learn(messages)
        if fresh:
            self._wanted = False
            self._owner.news()
            return
        if not messages:
            self._empty += 1
            self._empty_at = asked_at
            self._holding.nothing_came(asked_at)
            if self._empty in LOOK_AT and not len(self._holding):
                self._owner.begin(lambda: self._api.look(self._queue))
        rung = self._rung
        self._rung = False
        empty = 0 if rung else self._empty
        self._pause_for(idle_backoff(empty, self._idle_seconds, self._timing.jitter()))

    def _pause_for(self, seconds: float) -> None:
        self._pause = gevent.spawn_later(seconds, self._pause_over)

    def _pause_over(self) -> None:
        self._pause = None
        self._poll_if_possible()

    def _end_pause(self) -> None:
        pause = self._pause
        self._pause = None
        if pause is not None:
            pause.kill(block=False)


class SqsSubscription(Subscription):
    """Holds the messages of a queue. All its code runs in greenlets of one thread."""

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
        self._release = partial(release, consumed)

    def reader(self, after: int) -> SqsReader:
        return SqsReader(self.fetch, after)

    def fetch(self, after: int, limit: int) -> list[Row]:
        """Return held rows, or raise the last poll's error; poll for more after the last row."""
        self._poller.raise_error()
        rows = self._holding.rows(after, limit)
        self._fetched = rows[-1].position if rows else after
        if not self._holding.has_rows(self._fetched):
            self._poller.want()
        return rows

    def at_tip(self) -> bool:
        # Do not require that no messages are held, because a key may wait for an operator.
        return self._poller.is_at_tip() and not self._holding.has_rows(self._fetched)

    def behind_seconds(self) -> float | None:
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
        # Begin both at once, because the next owner must not wait for a failing delete.
        self.begin(self._deletes.flush)
        self._release(self._holding.undone())

    def news(self) -> None:
        self._callbacks.news()

    def begin(self, task: Callable[[], None]) -> None:
        """Run a task in a separate greenlet; the subscription closes after the last task."""

        def run() -> None:
            try:
                task()
            finally:
                self._running -= 1
                self.poll_ended()

        self._running += 1
        gevent.spawn(run)

    def poll_ended(self) -> None:
        """Report the end of a closed subscription when all its tasks have ended."""
        self._check_confirmed()  # an empty response may prove deletions
        if self._closed and not self._running and not self._poller.open:
            self._holding.poll.opened(None)
            self._callbacks.closed(self)

    def _check_confirmed(self) -> None:
        """Tell the engine if it no longer needs the recorded names of done messages."""
        if self._has_told_names and not self._holding.unconfirmed():
            self._has_told_names = False
            self.on_confirmed()

    def received(self, messages: Sequence[Received], asked_at: float) -> int | None:
        """Store polled messages; return the number of new messages, None if all are released."""
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
        return self._keep_what_runs(due) if due and not self.may_start() else due

    def _keep_what_runs(self, due: Sequence[InFlightMessage]) -> list[InFlightMessage]:
        """Return the due messages to hold while jobs may not start; release all others."""
        # The queue is blocked, or another worker may own the queue and must be able to receive the
        # messages. Release all messages without running jobs, because a held message would run
        # before released messages.
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
    """Reads the rows of a subscription after a position."""

    def __init__(self, fetch: Callable[[int, int], list[Row]], after: int) -> None:
        self._fetch = fetch
        self._after = after

    def fetch(self, limit: int) -> list[Row]:
        rows = self._fetch(self._after, limit)
        if rows:
            self._after = rows[-1].position
        return rows
