"""A subscription to a queue of SQS, with SQS as tests want it to answer."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import gevent
from gevent.event import Event

from qdo.brokers.base import Row
from qdo.brokers.sqs.api import ReceiveResponse
from qdo.brokers.sqs.codec import Received, sequence_of
from qdo.brokers.sqs.in_flight import HELD_BYTES, InFlightMessage, InFlightMessages, MemoryBudget
from qdo.brokers.sqs.subscription import Callbacks, SqsSubscription
from qdo.brokers.sqs.visibility import Timing

VISIBILITY = 0.4
WAIT_SECONDS = 10.0


class StallFreeClock:
    """The clock of subscriptions: it runs while `until` waits, at most 0.02 s in each step.

    A machine that stalls for a visibility timeout would lose the messages, as it should.
    """

    def __init__(self) -> None:
        self.now = time.monotonic()

    def __call__(self) -> float:
        return self.now


clock = StallFreeClock()


def until(true: Callable[[], bool]) -> None:
    """Let greenlets run until a condition holds."""
    deadline = time.monotonic() + WAIT_SECONDS
    while not true():
        began = time.monotonic()
        assert began < deadline, "it did not come to that in time"
        gevent.sleep(0.005)
        clock.now += min(time.monotonic() - began, 0.02)


def message(number: int, group: str = "g", size: int = 0) -> Received:
    body = (b"%d" % number).ljust(size)
    return Received(1000 + number, number, number, body, group, None, f"r{number}", group, 1, None)


class FakeRequests:
    """A fake SQS with the answers that tests want; it records its requests.

    :ivar answers: to receives, in turn: messages, or an error; without one, a poll waits.
    """

    def __init__(self) -> None:
        self.answers: list[list[Received] | Exception] = []
        self.polls = 0
        self.attempts: list[str] = []
        self.asked_for: list[int] = []
        self.open_polls = 0
        self.deleted: list[list[int]] = []
        self.extended: list[list[int]] = []
        self.released: list[int] = []
        self.refuse: set[int] = set()
        self.fail_deletes = 0
        self.looks = 0
        self.fail_releases = 0
        self.fail_extensions = False
        self.given_back: list[list[int]] = []
        self.on_extend: Callable[[], None] = lambda: None
        self.on_delete: Callable[[], None] = lambda: None
        self._news = Event()

    def answer(self, *answers: list[Received] | Exception) -> None:
        self.answers += answers
        self._news.set()

    def receive(
        self,
        queue: str,
        attempt: str,
        wanted: Callable[[], int],
        came: Callable[[Sequence[Received]], int],
        owed: Callable[[float], None],
        ended: Callable[[], bool],
    ) -> list[Received]:
        self.polls += 1
        self.came = came
        self.attempts.append(attempt)
        self.asked_for.append(wanted())
        self.open_polls += 1
        while not self.answers:
            self._news.clear()
            self._news.wait(WAIT_SECONDS)
        self.open_polls -= 1
        found = self.answers.pop(0)
        if isinstance(found, Exception):
            raise found
        return found

    def delete(self, queue: str, batch: Sequence[InFlightMessage]) -> ReceiveResponse:
        self.on_delete()
        self.deleted.append(_numbers(batch))
        if self.fail_deletes:
            self.fail_deletes -= 1
            return ReceiveResponse(batch[1:], failed=batch[:1])
        return self._answer(batch)

    def extend(self, queue: str, batch: Sequence[InFlightMessage]) -> ReceiveResponse:
        self.on_extend()
        self.extended.append(_numbers(batch))
        if self.fail_extensions:
            return ReceiveResponse((), failed=batch)
        return self._answer(batch)

    def release(self, queue: str, batch: Sequence[InFlightMessage]) -> ReceiveResponse:
        self.released += _numbers(batch)
        self.given_back.append(_numbers(batch))
        if self.fail_releases:
            self.fail_releases -= 1
            return ReceiveResponse((), failed=batch)
        return ReceiveResponse(batch)

    def look(self, queue: str) -> None:
        self.looks += 1

    def _answer(self, batch: Sequence[InFlightMessage]) -> ReceiveResponse:
        refused = [held for held in batch if sequence_of(held.position) in self.refuse]
        return ReceiveResponse([held for held in batch if held not in refused], refused)


def _numbers(batch: Sequence[InFlightMessage]) -> list[int]:
    return [sequence_of(held.position) for held in batch]


class AnyQueue:
    """Finds every queue: its URL is its name, and nothing waits."""

    def url(self, queue: str) -> str:
        return queue

    def waiting(self, queue: str) -> int:
        return 0

    def forget_queue(self, queue: str) -> None:
        """Remember nothing."""


class SubscriptionSetup:
    """A subscription, and its reports."""

    def __init__(
        self,
        idle_seconds: float = 0.0,
        visibility: float = 60.0,
        held_bytes: int = HELD_BYTES,
    ) -> None:
        self.requests = FakeRequests()
        self.lost: list[int] = []
        self.news = 0
        self.closed = False
        self.budget = MemoryBudget(held_bytes)
        self.holding = InFlightMessages(0, (), visibility, clock, budget=self.budget)
        self.subscription = SqsSubscription(
            "q.fifo",
            self.requests,  # type: ignore[arg-type]
            self.holding,
            self.budget,
            idle_seconds,
            Callbacks(
                lambda position: self.lost.append(sequence_of(position)),
                self._note_news,
                self._note_closed,
            ),
            Timing(clock, lambda: 0.5),
        )
        self.reader = self.subscription.reader(0)

    def _note_news(self) -> None:
        self.news += 1

    def _note_closed(self, subscription: SqsSubscription) -> None:
        self.closed = True

    def fetched(self, *numbers: int, size: int = 0) -> list[Row]:
        """Have these messages received and fetch them."""
        if not self.requests.polls:
            assert self.reader.fetch(10) == []
        self.requests.answer([message(number, size=size) for number in numbers])
        news = self.news
        until(lambda: self.news > news)
        rows = self.reader.fetch(100)
        assert [sequence_of(row.position) for row in rows] == list(numbers)
        return rows

    def end(self) -> None:
        """Close the subscription, and let its poll end."""
        self.subscription.close()
        self.requests.answer([], [], [])
        until(lambda: self.closed)
        assert self.budget.held == 0, "something that is not held any more is still counted"
