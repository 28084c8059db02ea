"""Decide when to poll one SQS queue, for how many messages, and how long to back off.

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

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import gevent

from qdo.backoff import Backoff
from qdo.brokers.sqs.api import SqsApi
from qdo.brokers.sqs.codec import Received
from qdo.brokers.sqs.in_flight import InFlightMessages, MemoryBudget
from qdo.brokers.sqs.receive import ReceiveAttemptId
from qdo.brokers.sqs.url import BATCH
from qdo.errors import UnreachableError
from qdo.system.clock import clock as boot_clock

# Pause after the first poll that found nothing; it doubles from poll to poll.
FIRST_REST_SECONDS = 0.5
# Delays after calls that failed.
RETRY_BACKOFF = Backoff(0.2, 30.0)
# After so many empty polls in a row the poller checks the queue's backlog, ever less often.
LOOK_AT = frozenset(3 << shift for shift in range(24))
# How often the poller checks whether it may poll again.
UNWANTED_SECONDS = 1.0
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Timing:
    """The clock in seconds, and random numbers from 0 to 1; tests replace both."""

    clock: Callable[[], float] = boot_clock
    jitter: Callable[[], float] = random.random


def idle_backoff(empty: int, most: float, jitter: float) -> float:
    """Return the pause after empty polls: 0 at first, then longer from poll to poll.

    Without jitter, a worker would poll all its queues at the same times forever.

    :param most: maximum of these pauses; 0 for none.
    """
    if not most or not empty:
        return 0.0
    return Backoff(FIRST_REST_SECONDS, most, jitter=0.0).delay(empty, 0.0) * (0.9 + 0.2 * jitter)


class PollOwner(Protocol):
    """The subscription that a poller serves; see `SqsSubscription`."""

    queue: str
    may_start: Callable[[], bool]

    def received(self, messages: Sequence[Received], asked_at: float) -> int | None:
        """Store messages; return how many are new, None where none may be started."""

    def news(self) -> None:
        """Wake the engine."""

    def begin(self, task: Callable[[], None]) -> None:
        """Run a task in a greenlet of its own."""

    def poll_ended(self) -> None:
        """Handle the end of a poll."""


class Poller:
    """Polls one queue in greenlets of one thread; `open` while a long poll is open."""

    def __init__(
        self,
        owner: PollOwner,
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
        """Raise the error of the last poll, once."""
        error, self._error = self._error, None
        if error is not None:
            raise error

    def want(self) -> None:
        """Poll as soon as possible: the owner has fetched every message."""
        self._wanted = True
        self._poll_if_possible()

    def is_at_tip(self) -> bool:
        """Return whether the last poll found the queue empty."""
        return bool(self._empty) and self._empty_at >= self._owed_until and not self._failures

    def poll_now(self) -> None:
        """Poll at once: a sender rang.

        The answer of an open poll may be older than the ring: if it is empty, poll again.
        """
        self._rung = self.open
        if self._pause is not None and not self._failures:
            self._empty = 0
            self._end_pause()
            self._poll_if_possible()

    def check_room(self) -> None:
        """Poll if the poller waited for messages to be done."""
        if self._waits_for_room and self._room():
            self._end_pause()
            self._poll_if_possible()

    def close(self) -> None:
        """Stop polling."""
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
        except Exception as error:  # noqa: BLE001 - raised where rows are fetched
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
        """Return how many messages to receive, when it is the poll's turn."""
        if self._closed:
            return 0
        most = self._attempts.batch_size(min(BATCH, max(1, self._room())))
        self._expect(int(self._expected_size() * most))
        return most

    def _came(self, messages: Sequence[Received]) -> int:
        """Return for how many messages there is room, before their bodies are read from S3.

        At least one unless the claim has ended: messages may be much larger than those before.
        """
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
        """Remember that SQS will deliver again messages that could not be kept."""
        self._owed_until = self._timing.clock() + seconds
        self._holding.in_doubt()

    def _expect(self, size: int) -> None:
        """Count the bytes that the open poll may bring as held."""
        self._budget.freed(self._expected)
        self._budget.took(size)
        self._expected = size

    def _failed(self, error: Exception) -> None:
        if self._closed:
            _log.debug("queue %s: a poll of a closed claim failed: %s", self._queue, error)
            return
        self._failures += 1
        self._error = error
        self._holding.in_doubt()  # SQS may have sent messages in the lost answer
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
        rung, self._rung = self._rung, False
        empty = 0 if rung else self._empty
        self._pause_for(idle_backoff(empty, self._idle_seconds, self._timing.jitter()))

    def _pause_for(self, seconds: float) -> None:
        self._pause = gevent.spawn_later(seconds, self._pause_over)

    def _pause_over(self) -> None:
        self._pause = None
        self._poll_if_possible()

    def _end_pause(self) -> None:
        pause, self._pause = self._pause, None
        if pause is not None:
            pause.kill(block=False)
