"""Reading a shard for its owner: a greenlet that asks Kinesis ahead of what the owner fetches."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence

from qdo.brokers.base import Backlog
from qdo.brokers.kinesis_hand import Hand
from qdo.brokers.kinesis_poller import ANSWER_BYTES, MOST_RECORDS, Read, ShardPoll, Taken
from qdo.brokers.kinesis_positions import at_time, end, time_in
from qdo.brokers.kinesis_reading import Paces, ShardReading
from qdo.brokers.subscription import Subscription
from qdo.message import position_of_time

log = logging.getLogger(__name__)

AHEAD_BYTES = ANSWER_BYTES // 2
AHEAD_MESSAGES = MOST_RECORDS // 2
"""With less than both in hand, and an owner who fetches, the next records are asked for."""
TIP_SECONDS = 900.0
"""How often it is recorded that a shard without messages was read to its tip."""

Begin = Callable[[int], ShardReading]


class KinesisSubscription(Subscription):
    """The messages of one shard, for its owner.

    :param begin: makes the reading behind a position; it may ask Kinesis.
    :param wake: called when there is something new to fetch.
    :param ended: called when it will make no request any more.
    :param clock: Unix time.
    """

    def __init__(
        self,
        shard: str,
        after: int,
        begin: Begin,
        paces: Paces,
        wake: Callable[[], None],
        ended: Callable[[KinesisSubscription], None],
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._shard = shard
        self._begin = begin
        self._paces = paces
        self._wake = wake
        self._ended = ended
        self._clock = clock
        self._lock = threading.Lock()
        self._news = threading.Event()
        self._closed = False
        self._thread: threading.Thread | None = None
        self._restart(after)

    def _restart(self, after: int) -> None:
        """Begin behind a position, whatever was read before; call it with the lock held."""
        self._after = after
        self._hand = Hand(after)
        self._reading: ShardReading | None = None
        self._wanted = False
        self._failure: Exception | None = None
        self.end = self.reached = None

    def start(self) -> None:
        """Begin to ask, once somebody fetches."""
        self._thread = threading.Thread(
            target=self._run, name=f"qdo-kinesis-{self._shard}", daemon=True
        )
        self._thread.start()

    # --- the owner's side ---

    def reader(self, after: int) -> KinesisReader:
        with self._lock:
            # `reached` stays: it counts once everything in hand was fetched again.
            self.end = None
            if not self._hand.rewind(after):
                self._restart(after)
        return KinesisReader(self)

    def fetch(self, limit: int) -> list[Taken]:
        """Return the next messages in hand, at most `limit`; have more asked for.

        :raises QdoError: what was in hand is given out, and Kinesis cannot be asked for more.
        """
        with self._lock:
            rows = self._hand.take(limit)
            failure = None if rows else self._failure
            if failure is not None:
                self._failure = None
            self._note_end()
            ask = self.end is None and failure is None and not self._is_enough()
            self._wanted = self._wanted or ask
        if ask:
            self._news.set()
        if failure is not None:
            raise failure
        return rows

    def at_tip(self) -> bool:
        with self._lock:
            if self._hand.waiting or self._reading is None:
                return False
            return self._reading.poll.at_tip or self._reading.poll.ended

    def done(self, position: int) -> None:
        with self._lock:
            self._hand.done(position)

    def done_through(self, position: int) -> None:
        with self._lock:
            self._hand.done_through(position)

    def backlog(self, after: int) -> Backlog | None:
        """Return what waits behind a position; None where Kinesis must be asked."""
        with self._lock:
            reading = self._reading
            now = self._clock()
            if reading is None or not reading.poll.is_fresh(now) or not self._hand.reaches(after):
                return None
            return reading.seen(self._hand.behind(after), now)

    def close(self) -> None:
        with self._lock:
            self._closed = True
        self._news.set()
        self._paces.forget(self._shard)

    def join(self, timeout_seconds: float) -> bool:
        """Wait until nothing is asked any more; return whether that is so."""
        if self._thread is not None:
            self._thread.join(timeout_seconds)
            return not self._thread.is_alive()
        return True

    # --- Kinesis' side ---

    def _run(self) -> None:
        try:
            while not self._closed:
                pause = self.step()
                if pause is None or pause > 0:
                    self._news.wait(pause)
        finally:
            self._ended(self)

    def step(self) -> float | None:
        """Make the next request if one is wanted and due.

        :return: seconds until the next step; None: not before somebody wants more.
        """
        self._news.clear()
        with self._lock:
            wanted = self._wanted and not self._closed
            hand, after, reading = self._hand, self._after, self._reading
        if not wanted:
            return None
        try:
            return self._ask(hand, reading or self._begun(hand, after))
        except Exception as error:  # noqa: BLE001 - raised where the owner fetches
            self._fail(hand, error)
            return None

    def _begun(self, hand: Hand, after: int) -> ShardReading:
        reading = self._begin(after)
        with self._lock:
            if hand is self._hand:
                self._reading = reading
        return reading

    def _ask(self, hand: Hand, reading: ShardReading) -> float | None:
        poll = reading.poll
        now = self._clock()
        if pause := poll.due_in(now):
            return pause
        request = poll.next(now)
        if request is None:
            return self._take(hand, poll, [])
        if isinstance(request, Read) and (pause := self._paces.wait(self._shard, now)):
            return pause
        rows = reading.step(request, self._clock())
        return self._take(hand, poll, rows)

    def _take(self, hand: Hand, poll: ShardPoll, rows: list[Taken]) -> float | None:
        """Put what came in hand; return when to ask again."""
        with self._lock:
            if hand is not self._hand:
                return 0.0  # the owner went back meanwhile
            hand.add(rows)
            self._note_end()
            if rows or poll.ended:
                self._wanted = False
            wanted = self._wanted
            news = bool(rows) or poll.ended or self._note_tip(poll)
        if news:
            self._wake()
        return poll.due_in(self._clock()) if wanted else None

    def _note_tip(self, poll: ShardPoll) -> bool:
        """Say now and then that the tip was reached; call it with the lock held.

        A position without a time stands for the configured start, and would stand for another
        one tomorrow; one whose record is no longer kept would look as if something was missed.
        """
        complete_until = poll.complete_until
        if not poll.at_tip or complete_until is None or self._hand.waiting:
            return False
        hand = self._hand
        known = max(time_in(hand.newest()), time_in(hand.tip))
        tip = position_of_time(complete_until)
        if known and tip < known + TIP_SECONDS * 10_000_000:
            return False
        hand.tip = self.reached = at_time(hand.newest(), tip)
        return True

    def _fail(self, hand: Hand, error: Exception) -> None:
        with self._lock:
            if hand is not self._hand:
                return
            self._failure = error
            self._wanted = False
        self._wake()

    def _note_end(self) -> None:
        """Know the end of the shard once everything was given out; call it with the lock held."""
        reading = self._reading
        if reading is not None and reading.poll.ended and not self._hand.waiting:
            self.end = end(time_in(reading.poll.after))

    def _is_enough(self) -> bool:
        hand = self._hand
        return hand.waiting >= AHEAD_MESSAGES or hand.waiting_bytes >= AHEAD_BYTES


class KinesisReader:
    """Gives out what a subscription has, from where the owner began to read."""

    __slots__ = ("_subscription",)

    def __init__(self, subscription: KinesisSubscription) -> None:
        self._subscription = subscription

    def fetch(self, limit: int) -> Sequence[Taken]:
        return self._subscription.fetch(limit)

    def close(self) -> None:
        """Nothing is held but what the subscription has."""
