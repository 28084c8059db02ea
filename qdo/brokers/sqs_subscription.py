"""What the owner of an SQS queue has with it, from claim to release: polls, holds, deletes.

========  =================================================================  =================
polling   meaning                                                            next
========  =================================================================  =================
off       nobody fetches: what came is not started                           asking (a fetch
                                                                             that leaves
                                                                             nothing at hand)
asking    a long poll is open                                                off (it brought
                                                                             messages), resting
                                                                             (nothing, or an
                                                                             error)
resting   the queue is empty: a pause that grows up to `idle_seconds`; or    asking (the pause
          nothing may be started: it is blocked, or the lease is over; or    is over, a ring,
          the process holds as much as it should, see `Budget`               something is done)
closed    the claim has ended; what an open poll brings is given back        -
========  =================================================================  =================
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

import gevent

from qdo.brokers.base import Row
from qdo.brokers.sqs_attempts import Attempts
from qdo.brokers.sqs_budget import Budget
from qdo.brokers.sqs_deletes import Deletes
from qdo.brokers.sqs_extensions import Extensions
from qdo.brokers.sqs_holding import Held, Holding
from qdo.brokers.sqs_messages import Received
from qdo.brokers.sqs_pauses import TROUBLE, rest_seconds
from qdo.brokers.sqs_reader import SqsReader
from qdo.brokers.sqs_releases import Releases
from qdo.brokers.sqs_requests import BATCH, Requests
from qdo.brokers.subscription import Subscription
from qdo.errors import UnreachableError
from qdo.message import time_of_position
from qdo.policy import backoff

LOOK_AT = frozenset(3 << shift for shift in range(24))
"""After so many empty polls in a row it is looked whether the queue is empty, ever less often."""
UNWANTED_SECONDS = 1.0
"""How often it is looked whether the queue may be polled again."""

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
        budget: Budget,
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
        self._budget = budget
        self._size: float | None = None
        self._expected = 0
        self._waited = False
        budget.queues += 1
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
        self._empty_at = self._owed_until = 0.0
        self._given = 0
        self._failures = 0
        self._rung = False
        self._rest: Any = None
        self._attempts = Attempts()
        self._deletes = Deletes(queue, requests, holding, self._begin, clock, chance)
        self._extensions = Extensions(
            queue,
            requests,
            holding,
            self._begin,
            choose=self._choose,
            lose=self._lose,
            clock=clock,
            chance=chance,
        )
        self._give_back = Releases(queue, requests, holding, self._begin, chance).give_back
        self._under_way = 0
        self._closed = False

    # --- what the engine says and asks --------------------------------------------------

    def reader(self, after: int) -> SqsReader:
        return SqsReader(self.fetch, after)

    def fetch(self, after: int, limit: int) -> list[Row]:
        """Return rows that are at hand; have SQS asked for more where these are the last.

        :raises QdoError: what the last request failed with; once.
        """
        error, self._error = self._error, None
        if error is not None:
            raise error
        rows = self._holding.rows(after, limit)
        self._given = rows[-1].position if rows else after
        if not self._holding.has_rows(self._given):
            self._wanted = True
            self._ask()
        return rows

    def at_tip(self) -> bool:
        # What was fetched may stay held: the messages of a key that waits for an operator.
        if not self._empty or self._empty_at < self._owed_until:
            return False
        return not self._holding.has_rows(self._given) and not self._failures

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
            self._look_for_room()

    def done_through(self, position: int) -> None:
        self._deletes.add(self._holding.done_through(position), self._closed)
        self._look_for_room()

    def _look_for_room(self) -> None:
        """Ask where it was waited for messages to be done."""
        if self._waited and self._room():
            self._stop_resting()
            self._ask()

    def is_held(self, position: int) -> bool:
        return self._holding.is_held(position)

    def unconfirmed(self) -> tuple[str, ...]:
        return self._holding.unconfirmed()

    def ring(self) -> None:
        """Ask at once: somebody has sent to this queue.

        What an open poll answers may be older than that: if it is nothing SQS is asked again.
        """
        self._rung = self._asking
        if self._rest is not None and not self._failures:
            self._empty = 0
            self._stop_resting()
            self._ask()

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._wanted = False
        self._budget.queues -= 1
        self._extensions.stop()
        self._stop_resting()
        # The next owner need not wait for what is not done, nor that for deletes that fail.
        self._begin(self._deletes.flush)
        self._give_back(self._holding.undone())

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
            self._holding.polling(None)
            self._on_closed(self)

    # --- asking -------------------------------------------------------------------------

    def _ask(self) -> None:
        if self._asking or self._closed or self._rest is not None or not self._wanted:
            return
        if not self.may_start():
            # What comes now would only be hidden from whoever may start it.
            self._rest_for(UNWANTED_SECONDS)
            return
        if not self._room() and not self._waited:
            self._waited = True
            self._rest_for(UNWANTED_SECONDS)
            return
        self._waited = False
        self._asking = True
        gevent.spawn(self._poll)

    def _poll(self) -> None:
        asked_at = self._clock()
        try:
            attempt = self._attempts.next(asked_at)
            self._holding.polling(attempt)
            try:
                messages = self._requests.receive(
                    self.queue,
                    attempt,
                    self._how_many,
                    self._came,
                    self._owed,
                    lambda: self._closed,
                )
            finally:
                self._expect(0)
        except Exception as error:  # noqa: BLE001 - raised where rows are fetched
            self._asking = False
            if not isinstance(error, UnreachableError):
                self._attempts.answered()
            if not self._attempts.open:
                self._holding.polling(None)
            self._failed(error)
        else:
            self._asking = False
            self._attempts.answered()
            self._answered(messages, asked_at)
        self._look_closed()

    def _room(self) -> int:
        return self._budget.room(self._expected_size(), len(self._holding))

    def _expected_size(self) -> float:
        return self._budget.typical if self._size is None else self._size

    def _how_many(self) -> int:
        """Return how many messages a poll asks for whose turn it is now."""
        if self._closed:
            return 0
        most = self._attempts.most(min(BATCH, max(1, self._room())))
        self._expect(int(self._expected_size() * most))
        return most

    def _came(self, messages: Sequence[Received]) -> int:
        """Take note of an answer some bodies of which are still to be read from S3.

        Return for how many messages there is room, and expect those: one at least, if they are
        wanted at all, for they may be much larger than those before them.
        """
        if self._closed:
            return 0
        count = self._how_many_fit([each.size or len(each.body) for each in messages])
        self._attempts.answered()
        self._holding.came(each.receipt for each in messages[:count])
        return count

    def _how_many_fit(self, sizes: Sequence[int]) -> int:
        self._expect(0)
        for count, size in enumerate(sizes):
            if count and not self._budget.room(size, len(self._holding) + count):
                return count
            self._expect(self._expected + size)
        return len(sizes)

    def _owed(self, seconds: float) -> None:
        """Take note that messages were received that cannot be held now: they come again."""
        self._owed_until = self._clock() + seconds
        self._holding.in_doubt()

    def _expect(self, size: int) -> None:
        """Have so many bytes counted as held that the open poll may bring."""
        self._budget.freed(self._expected)
        self._budget.took(size)
        self._expected = size

    def _failed(self, error: Exception) -> None:
        if self._closed:
            _log.debug("queue %s: a poll of a closed claim failed: %s", self.queue, error)
            return
        self._failures += 1
        self._error = error
        self._holding.in_doubt()  # the answer may be what got lost
        self._rest_for(backoff(self._failures, TROUBLE, self._chance()))
        self._on_news()

    def _answered(self, messages: Sequence[Received], asked_at: float) -> None:
        self._failures = 0
        self._error = None
        taken = self._holding.take(messages, asked_at)
        self._holding.polling(None)
        if taken.again:
            _log.info(
                "queue %s: %d messages that are done were received again and are deleted",
                self.queue,
                len(taken.again),
            )
            self._deletes.add(taken.again, self._closed)
        if self._closed:
            # What an open poll brings after the end of the claim goes back at once.
            self._give_back(self._holding.undone())
            return
        if not self.may_start():
            self._keep_what_runs(self._holding.undone())
            self._rest_for(UNWANTED_SECONDS)
            return
        if len(messages):
            self._empty = 0
            self._size = self._budget.learn(messages)
            self._extensions.schedule()
        if taken.fresh:
            self._wanted = False
            self._on_news()
            return
        if not len(messages):
            self._empty += 1
            self._empty_at = asked_at
            self._holding.nothing_came(asked_at)
            if self._empty in LOOK_AT and not len(self._holding):
                self._begin(lambda: self._requests.look(self.queue))
        rung, self._rung = self._rung, False
        empty = 0 if rung else self._empty
        self._rest_for(rest_seconds(empty, self._idle_seconds, self._chance()))

    def _rest_for(self, seconds: float) -> None:
        self._rest = gevent.spawn_later(seconds, self._rested)

    def _rested(self) -> None:
        self._rest = None
        self._ask()

    def _stop_resting(self) -> None:
        rest, self._rest = self._rest, None
        if rest is not None:
            rest.kill(block=False)

    # --- what is not to be held, or is not held any more --------------------------------

    def _choose(self, due: Sequence[Held]) -> Sequence[Held]:
        """Return what is to be hidden for longer of what is due."""
        return self._keep_what_runs(due) if due and not self.may_start() else due

    def _keep_what_runs(self, due: Sequence[Held]) -> list[Held]:
        """Return what is to be held on although nothing may be started; give back the rest.

        The queue is blocked, or may be another worker's by now: it must be able to have them. All
        of them: what stayed here would run before what was given back.
        """
        in_hand = self.in_hand()
        undone = self._holding.undone()
        self._give_back([held for held in undone if held.position not in in_hand])
        return [held for held in due if held.done or held.position in in_hand]

    def _lose(self, lost: Sequence[Held]) -> None:
        """Take note that messages may be somebody else's by now: their jobs must not go on."""
        behind: list[Held] = []
        for held in lost:
            if not self._holding.is_held(held.position):
                continue
            if held.done:
                self._holding.undeletable(held)
                continue
            gone = self._holding.lost(held)
            behind += gone[1:]
            for each in gone:
                self._on_lost(each.position)
        now = self._clock()
        self._give_back([held for held in behind if held.until > now])
        if lost:
            self._on_news()
