"""How many messages are asked for when those that are held are large."""

from __future__ import annotations

import time
from collections.abc import Iterator

import gevent
import pytest

from qdo.brokers.sqs.in_flight import MemoryBudget
from qdo.errors import UnreachableError
from tests.support.aws.sqs_consumer import SubscriptionSetup, message, until


@pytest.fixture
def bench() -> Iterator[SubscriptionSetup]:
    bench = SubscriptionSetup(held_bytes=1000)
    yield bench
    bench.end()


@pytest.mark.parametrize(
    ("size", "held", "has", "room"),
    [
        (100, 0, 0, 10),
        (101, 0, 0, 9),
        (100, 500, 5, 5),
        (100, 950, 0, 5),
        (100, 950, 3, 2),
        (100, 950, 5, 0),
        (400, 950, 1, 0),
        (2000, 950, 0, 1),
        (0, 950, 5, 495),
    ],
)
def test_what_is_free_or_missing_to_a_share(size: int, held: int, has: int, room: int) -> None:
    """Of two queues; one that holds nothing may always ask for one message."""
    budget = MemoryBudget(1000)
    budget.queues = 2
    budget.took(held)
    assert budget.room(size, has) == room


def test_what_an_open_poll_may_bring_counts(bench: SubscriptionSetup) -> None:
    """Many polls that are open at once would each find the budget empty otherwise."""
    assert bench.reader.fetch(10) == []
    until(lambda: bench.requests.open_polls == 1)
    assert bench.budget.held == bench.budget.typical > 1000
    assert bench.requests.asked_for == [1]


def test_large_messages_are_waited_for(bench: SubscriptionSetup) -> None:
    """No more are asked for than fit, by the size that those of the last answer had."""
    first, second = bench.fetched(1, 2, size=400)
    gevent.sleep(0.02)
    assert bench.requests.open_polls == 0
    bench.subscription.done(first.position)
    until(lambda: bench.requests.open_polls == 1)
    assert bench.requests.asked_for[-1] == 1
    bench.subscription.done(second.position)
    until(lambda: bench.budget.held == 400)  # by the open poll
    bench.fetched(3, size=1)
    until(lambda: bench.requests.open_polls == 1)
    assert bench.requests.asked_for[-1] == 10


def test_a_queue_with_too_much_asks_after_a_while(bench: SubscriptionSetup) -> None:
    """Its held messages may wait for an operator, and other messages need not."""
    bench.fetched(1, 2, size=400)
    asked = time.monotonic()
    until(lambda: bench.requests.open_polls == 1)
    assert bench.requests.asked_for[-1] == 1
    assert time.monotonic() - asked > 0.5


def test_a_receive_that_is_made_again_asks_for_as_many(bench: SubscriptionSetup) -> None:
    """It is the same receive, by its id: whatever else came to be held meanwhile."""
    bench.fetched(1, size=100)
    until(lambda: bench.requests.open_polls == 1)
    asked = bench.requests.asked_for[-1]
    bench.budget.took(800)
    bench.requests.answer(UnreachableError(what="SQS", reason="reset"))
    until(lambda: len(bench.requests.asked_for) == 3)
    assert bench.requests.attempts[-1] == bench.requests.attempts[-2]
    assert bench.requests.asked_for[-1] == asked > bench.budget.room(100, 10)
    bench.budget.freed(800)


def test_bodies_in_s3_are_not_read_beyond_what_fits(bench: SubscriptionSetup) -> None:
    """Their sizes are known in advance, and may far exceed the assumed size."""
    bench.fetched(1, size=100)
    until(lambda: bench.requests.open_polls == 1)
    assert bench.requests.came([message(number, size=300) for number in range(2, 6)]) == 3
    assert bench.budget.held == 1000
    # Where it is asked for, one at least.
    assert bench.requests.came([message(2, size=5000), message(3, size=400)]) == 1
    bench.subscription.close()
    assert bench.requests.came([message(2)]) == 0
