"""What the owner of an SQS queue has with it, from claim to release: polls, holds, deletes.

========  =================================================================  =================
polling   meaning                                                            next
========  =================================================================  =================
off       nobody fetches: the queue is blocked, or what came is not started  asking (a fetch
                                                                             that leaves
                                                                             nothing at hand)
asking    a long poll is open                                                off (it brought
                                                                             messages), resting
                                                                             (nothing, or an
                                                                             error)
resting   the queue is empty: a pause that grows up to `idle_seconds`        asking (the pause
                                                                             is over, a ring)
closed    the claim has ended; what an open poll brings is given back        -
========  =================================================================  =================
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import gevent

from qdo.brokers.base import Row, Subscription
from qdo.brokers.sqs_holding import Held, Holding
from qdo.brokers.sqs_requests import Requests
from qdo.policy import Policy, backoff

FIRST_REST_SECONDS = 0.5
"""Pause after the first poll that found nothing; it doubles from poll to poll."""
TROUBLE = Policy(backoff_seconds=0.2, backoff_max_seconds=30.0)
"""Pauses after requests that failed."""
EXTENSION_TROUBLE = Policy(backoff_seconds=0.2, backoff_max_seconds=2.0)
"""Pauses after extensions that failed: short ones, for time is running out."""
LINGER_SECONDS = 0.5
"""A done message waits so long at most for others to be deleted with it."""
BATCH = 10
"""Entries of one request at most."""

_log = logging.getLogger(__name__)


class SqsSubscription(Subscription):
    """See the module's docstring. Everything runs in greenlets of one thread.

    :param on_lost: told the position of a message that is no longer held.
    :param on_news: told when there is something to fetch, or nothing more to come.
    :param on_closed: told when nothing of this subscription is under way any more.
    """

    def __init__(
        self,
        queue: str,
        requests: Requests,
        holding: Holding,
        *,
        idle_seconds: float,
        on_lost: Callable[[int], None],
        on_news: Callable[[], None],
        on_closed: Callable[[SqsSubscription], None],
        clock: Callable[[], float],
        chance: Callable[[], float],
    ) -> None:
        self.queue = queue
        self._requests = requests
        self._holding = holding
        self._idle_seconds = idle_seconds
        self._on_lost = on_lost
        self._on_news = on_news
        self._on_closed = on_closed
        self._clock = clock
        self._chance = chance
        self._error: Exception | None = None
        self._asking = False
        self._wanted = False
        self._empty = 0
        self._failures = 0
        self._rest: Any = None
        self._deleting: list[Held] = []
        self._delete_timer: Any = None
        self._extend_timer: Any = None
        self._extending = False
        self._extend_failures = 0
        self._under_way = 0
        self._closed = False

    # --- what the engine says and asks --------------------------------------------------

    def reader(self, after: int) -> SqsReader:
        return SqsReader(self, after)

    def fetch(self, after: int, limit: int) -> list[Row]:
        """Return rows that are at hand; have SQS asked for more where these are the last.

        :raises QdoError: what the last request failed with; once.
        """
        error, self._error = self._error, None
        if error is not None:
            raise error
        rows = self._holding.rows(after, limit)
        if not self._holding.has_rows(rows[-1].position if rows else after):
            self._wanted = True
            self._ask()
        return rows

    def at_tip(self) -> bool:
        return self._empty > 0 and not len(self._holding) and not self._failures

    def done(self, position: int) -> None:
        held = self._holding.done(position)
        if held is not None:
            self._delete([held])

    def done_through(self, position: int) -> None:
        self._delete(self._holding.done_through(position))

    def is_held(self, position: int) -> bool:
        return self._holding.is_held(position)

    def unconfirmed(self) -> tuple[str, ...]:
        return self._holding.unconfirmed()

    def ring(self) -> None:
        """Ask at once: somebody has sent to this queue."""
        if self._rest is not None and not self._failures:
            self._empty = 0
            self._stop_resting()
            self._ask()

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._wanted = False
        self._stop_resting()
        self._begin(self._leave)

    def _leave(self) -> None:
        """Give back what is not done and delete the rest, so that the next owner need not wait.

        In this order: deleting may have to be tried again. Of a message group nothing is given
        out before what is done of it is deleted.
        """
        self._give_back(self._holding.give_up())
        self._flush()

    def _give_back(self, held: Sequence[Held]) -> None:
        """Let SQS show messages again, to whoever asks.

        Of a message group none is given out while another one is hidden, so that the order in
        which they become visible is of no consequence.
        """
        for start in range(0, len(held), BATCH):
            self._requests.release(self.queue, held[start : start + BATCH])

    def _begin(self, task: Callable[[], None]) -> None:
        """Run something beside everything else, and take note when it was the last."""

        def run() -> None:
            try:
                task()
            finally:
                self._under_way -= 1
                self._look_closed()

        self._under_way += 1
        gevent.spawn(run)

    def _look_closed(self) -> None:
        if self._closed and not self._under_way and not self._asking:
            self._stop_timers()
            self._on_closed(self)

    def _stop_timers(self) -> None:
        for timer in (self._delete_timer, self._extend_timer):
            if timer is not None:
                timer.kill(block=False)
        self._delete_timer = self._extend_timer = None

    # --- asking -------------------------------------------------------------------------

    def _ask(self) -> None:
        if not (self._asking or self._closed or self._rest is not None) and self._wanted:
            self._asking = True
            gevent.spawn(self._poll)

    def _poll(self) -> None:
        asked_at = self._clock()
        try:
            messages = self._requests.receive(self.queue, lambda: not self._closed)
        except Exception as error:  # noqa: BLE001 - raised where rows are fetched
            self._asking = False
            self._failed(error)
        else:
            self._asking = False
            self._answered(messages, asked_at)
        self._look_closed()

    def _failed(self, error: Exception) -> None:
        if self._closed:
            _log.debug("queue %s: a poll of a closed claim failed: %s", self.queue, error)
            return
        self._failures += 1
        self._error = error
        self._holding.in_doubt()  # the answer may be what got lost
        self._rest_for(backoff(self._failures, TROUBLE, self._chance()))
        self._on_news()

    def _answered(self, messages: Sequence[Any], asked_at: float) -> None:
        self._failures = 0
        self._error = None
        taken = self._holding.take(messages, asked_at)
        if taken.again:
            _log.info(
                "queue %s: %d messages that are done were received again and are deleted",
                self.queue,
                len(taken.again),
            )
            self._delete(taken.again)
        if self._closed:
            # What an open poll brings after the end of the claim goes back at once.
            self._begin(self._leave)
            return
        if len(messages):
            self._empty = 0
            self._schedule_extension()
        if taken.fresh:
            self._wanted = False
            self._on_news()
            return
        if not len(messages):
            self._empty += 1
            self._holding.nothing_came(asked_at)
        self._rest_for(self._idle_pause())

    def _idle_pause(self) -> float:
        """Return how long to rest: nothing at first, then more from poll to poll.

        With a little chance in it, or all queues of a worker would be polled at once for ever.
        """
        if not self._idle_seconds or not self._empty:
            return 0.0
        pause = min(self._idle_seconds, FIRST_REST_SECONDS * 2.0 ** min(self._empty - 1, 30))
        return pause * (0.9 + 0.2 * self._chance())

    def _rest_for(self, seconds: float) -> None:
        self._rest = gevent.spawn_later(seconds, self._rested)

    def _rested(self) -> None:
        self._rest = None
        self._ask()

    def _stop_resting(self) -> None:
        rest, self._rest = self._rest, None
        if rest is not None:
            rest.kill(block=False)

    # --- deleting -----------------------------------------------------------------------

    def _delete(self, held: Sequence[Held]) -> None:
        """Delete messages soon: ten at a time, or when no other is in hand, or after a while."""
        if not held:
            return
        self._deleting += held
        if len(self._deleting) >= BATCH or not len(self._holding) or self._closed:
            self._begin(self._flush)
        elif self._delete_timer is None:
            self._delete_timer = gevent.spawn_later(LINGER_SECONDS, self._linger_over)

    def _linger_over(self) -> None:
        self._delete_timer = None
        self._begin(self._flush)

    def _flush(self) -> None:
        """Delete what is done."""
        timer, self._delete_timer = self._delete_timer, None
        if timer is not None:
            timer.kill(block=False)
        while self._deleting:
            batch, self._deleting = self._deleting[:BATCH], self._deleting[BATCH:]
            self._delete_batch(batch)

    def _delete_batch(self, batch: list[Held]) -> None:
        failures = 0
        while batch:
            answer = self._requests.delete(self.queue, batch)
            for held in answer.done:
                self._holding.confirmed(held)
            for held in answer.refused:
                # Another receipt is valid now; with that it comes again, and is recognised.
                self._holding.undeletable(held)
            batch = list(answer.failed)
            if not batch:
                return
            failures += 1
            now = self._clock()
            for held in [each for each in batch if each.until <= now]:
                batch.remove(held)
                self._holding.undeletable(held)
            gevent.sleep(backoff(failures, TROUBLE, self._chance()) if batch else 0)

    # --- hiding for longer --------------------------------------------------------------

    def _schedule_extension(self) -> None:
        if self._extend_timer is None and not (self._closed or self._extending):
            due = self._holding.extend_at()
            if due != float("inf"):
                pause = max(0.0, due - self._clock())
                self._extend_timer = gevent.spawn_later(pause, self._extension_due)

    def _extension_due(self) -> None:
        self._extend_timer = None
        self._begin(self._extend)

    def _extend(self) -> None:
        """Have SQS hide for longer what is still in hand or waits for it."""
        self._extending = True
        try:
            due, over = self._holding.to_extend(self._clock())
            self._lose(over)
            failed = False
            for start in range(0, len(due), BATCH):
                batch = [held for held in due[start : start + BATCH] if self._is_wanted(held)]
                if batch and not self._closed:
                    failed |= not self._extend_batch(batch)
            self._extend_failures = self._extend_failures + 1 if failed else 0
            if failed:  # tried again below
                gevent.sleep(backoff(self._extend_failures, EXTENSION_TROUBLE, self._chance()))
        finally:
            self._extending = False
            self._schedule_extension()

    def _is_wanted(self, held: Held) -> bool:
        return self._holding.is_held(held.position)

    def _extend_batch(self, batch: list[Held]) -> bool:
        """Ask once; return whether every entry has its answer."""
        asked_at = self._clock()
        receipts = [held.receipt for held in batch]
        answer = self._requests.extend(self.queue, batch)
        for held in answer.done:
            self._holding.extended(held, asked_at)
        # One that was received again meanwhile is ours by another receipt.
        asked = dict(zip(map(id, batch), receipts, strict=True))
        self._lose([held for held in answer.refused if asked[id(held)] == held.receipt])
        return not answer.failed

    def _lose(self, lost: Sequence[Held]) -> None:
        """Take note that messages may be somebody else's by now: their jobs must not go on."""
        behind: list[Held] = []
        for held in lost:
            if not self._is_wanted(held):
                continue
            if held.done:
                self._holding.undeletable(held)
                continue
            gone = self._holding.lost(held)
            behind += gone[1:]
            for each in gone:
                self._on_lost(each.position)
        now = self._clock()
        hidden = [held for held in behind if held.until > now]
        if hidden:
            self._begin(lambda: self._give_back(hidden))
        if lost:
            self._on_news()


class SqsReader:
    """Reads what a subscription holds, from a position on."""

    def __init__(self, subscription: SqsSubscription, after: int) -> None:
        self._subscription = subscription
        self._after = after

    def fetch(self, limit: int) -> list[Row]:
        """Return the next rows at hand, none when there are none; raises what a poll raised."""
        rows = self._subscription.fetch(self._after, limit)
        if rows:
            self._after = rows[-1].position
        return rows

    def close(self) -> None:
        """Nothing is held by a reader."""
