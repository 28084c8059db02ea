"""Extend the visibility timeouts of held messages, and release messages, for one queue."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import gevent

from qdo.backoff import Backoff
from qdo.brokers.sqs.api import SqsApi
from qdo.brokers.sqs.in_flight import InFlightMessage, InFlightMessages
from qdo.brokers.sqs.url import BATCH
from qdo.system.clock import clock as boot_clock

# The delays after failed extensions; short, because the visibility timeout continues.
EXTEND_BACKOFF = Backoff(0.2, 2.0)
# The maximum number of attempts to release a message, which appears after its timeout anyway.
TRIES = 4
# The maximum time for which a done message waits for others, to delete them in one call.
LINGER_SECONDS = 0.5
# The delays after failed calls.
RETRY_BACKOFF = Backoff(0.2, 30.0)


@dataclass(frozen=True, slots=True)
class Timing:
    """The clock in seconds, and random numbers from 0 to 1; tests replace both."""

    clock: Callable[[], float] = boot_clock
    jitter: Callable[[], float] = random.random


@dataclass(frozen=True, slots=True)
class ConsumedQueue:
    """A queue and its held messages; `begin` runs a task in a separate greenlet."""

    name: str
    api: SqsApi
    holding: InFlightMessages
    begin: Callable[[Callable[[], None]], None]
    timing: Timing

    def pause(self, failures: int) -> None:
        gevent.sleep(RETRY_BACKOFF.delay(failures, self.timing.jitter()))


class VisibilityExtender:
    """Extends the visibility timeouts of the messages that one owner holds.

    :param choose: a function that returns the due messages to hold.
    :param lose: a function of messages that another owner may have received.
    """

    def __init__(
        self,
        queue: ConsumedQueue,
        *,
        choose: Callable[[Sequence[InFlightMessage]], Sequence[InFlightMessage]],
        lose: Callable[[Sequence[InFlightMessage]], None],
    ) -> None:
        self._queue = queue
        self._holding = queue.holding
        self._choose = choose
        self._lose = lose
        self._clock = queue.timing.clock
        self._timer: Any = None
        self._under_way = False
        self._failures = 0
        self._stopped = False

    def schedule(self) -> None:
        """Schedule the next extension; call this after receiving messages."""
        if self._timer is not None or self._under_way or self._stopped:
            return
        due = self._holding.extensions.next_at()
        if due != float("inf"):
            pause = max(0.0, due - self._clock())
            if self._failures:
                pause = max(
                    pause, EXTEND_BACKOFF.delay(self._failures, self._queue.timing.jitter())
                )
            self._timer = gevent.spawn_later(pause, self._due)

    def stop(self) -> None:
        self._stopped = True
        timer = self._timer
        self._timer = None
        if timer is not None:
            timer.kill(block=False)

    def _due(self) -> None:
        self._timer = None
        self._queue.begin(self._extend)

    def _extend(self) -> None:
        self._under_way = True
        failed = True
        try:
            failed = not self._extend_all()
        finally:
            self._under_way = False
            self._failures = self._failures + 1 if failed else 0
            self.schedule()

    def _extend_all(self) -> bool:
        """Make one call for each ten due messages; return whether all calls succeeded."""
        due, over = self._holding.extensions.due(self._clock())
        self._lose(over)
        chosen = self._choose(due)
        answered = True
        for start in range(0, len(chosen), BATCH):
            batch = [
                held
                for held in chosen[start : start + BATCH]
                if self._holding.is_held(held.position)
            ]
            if batch and not self._stopped:
                answered &= self._extend_batch(batch)
        return answered

    def _extend_batch(self, batch: list[InFlightMessage]) -> bool:
        asked_at = self._clock()
        receipts = [held.receipt for held in batch]
        answer = self._queue.api.extend(self._queue.name, batch)
        for held in answer.done:
            self._holding.extensions.extended(held, asked_at)
        # If the owner has received a message again meanwhile, it holds the message by a new
        # receipt.
        asked = dict(zip(map(id, batch), receipts, strict=True))
        self._lose([held for held in answer.refused if asked[id(held)] == held.receipt])
        return not answer.failed


def release(queue: ConsumedQueue, held: Sequence[InFlightMessage]) -> None:
    """Make messages visible again; return at once."""
    # While SQS hides a message, it delivers no other message of the group. So the order in which
    # messages become visible does not matter.
    for each in held:
        queue.holding.released(each)
    for start in range(0, len(held), BATCH):
        batch = held[start : start + BATCH]
        queue.begin(lambda batch=batch: _release_batch(queue, batch))  # type: ignore[misc]


def _release_batch(queue: ConsumedQueue, batch: Sequence[InFlightMessage]) -> None:
    """Release messages; retry after failures, because the messages would stay hidden."""
    for failures in range(1, TRIES + 1):
        batch = queue.api.release(queue.name, batch).failed
        if not batch:
            return
        queue.pause(failures)


class Deleter:
    """Deletes done messages; calls `deleted` after each call."""

    def __init__(self, queue: ConsumedQueue, deleted: Callable[[], None]) -> None:
        self._queue = queue
        self._deleted = deleted
        self._holding = queue.holding
        self._waiting: list[InFlightMessage] = []
        self._timer: Any = None

    def add(self, held: Sequence[InFlightMessage], at_once: bool = False) -> None:
        """Delete messages when ten are done, no other message is held, or some time has passed."""
        if not held:
            return
        self._waiting += held
        if len(self._waiting) >= BATCH or not len(self._holding) or at_once:
            self._queue.begin(self.flush)
        elif self._timer is None:
            self._timer = gevent.spawn_later(LINGER_SECONDS, self._lingered)

    def _lingered(self) -> None:
        self._timer = None
        self._queue.begin(self.flush)

    def flush(self) -> None:
        """Delete all done messages; return when every message is deleted or undeletable."""
        timer = self._timer
        self._timer = None
        if timer is not None:
            timer.kill(block=False)
        while self._waiting:
            batch = self._waiting[:BATCH]
            self._waiting = self._waiting[BATCH:]
            self._delete(batch)

    def _delete(self, batch: list[InFlightMessage]) -> None:
        failures = 0
        while batch:
            answer = self._queue.api.delete(self._queue.name, batch)
            for held in answer.done:
                self._holding.confirmed(held)
            if answer.done:
                self._deleted()
            for held in answer.refused:
                # A newer receipt is valid. SQS delivers the message again, and the owner recognizes
                # the message.
                self._holding.undeletable(held)
            batch = list(answer.failed)
            if not batch:
                return
            failures += 1
            now = self._queue.timing.clock()
            for held in [each for each in batch if each.until <= now]:
                batch.remove(held)
                self._holding.undeletable(held)
            if batch:
                self._queue.pause(failures)
