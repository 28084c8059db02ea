"""How many messages are asked for when those that are held are large."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from qdo.brokers.sqs_budget import Budget
from qdo.errors import UnreachableError
from tests.support.sqs_bench import Bench, until


@pytest.fixture
def bench() -> Iterator[Bench]:
    bench = Bench(held_bytes=1000)
    yield bench
    bench.end()


@pytest.mark.parametrize(
    ("size", "held", "room"),
    [(0, 0, 10), (100, 0, 10), (101, 0, 9), (100, 500, 5), (100, 950, 1), (1e9, 0, 1), (1, 1e9, 1)],
)
def test_as_many_as_fit(size: float, held: int, room: int) -> None:
    """Never more than a request may ask for, and always one: every queue goes on."""
    budget = Budget(1000)
    budget.took(int(held))
    assert budget.room(size, 10) == room


def test_what_an_open_poll_may_bring_counts(bench: Bench) -> None:
    """Many polls that are open at once would each find the budget empty otherwise."""
    assert bench.reader.fetch(10) == []
    until(lambda: bench.requests.open_polls == 1)
    assert bench.budget.held == bench.budget.typical > 1000
    assert bench.requests.asked_for == [1]


def test_large_messages_are_asked_for_one_by_one(bench: Bench) -> None:
    """By the size that those of the last answer had."""
    first, second = bench.fetched(1, 2, size=400)
    until(lambda: bench.requests.open_polls == 1)
    assert bench.requests.asked_for[-1] == 1
    for row in (first, second):
        bench.subscription.done(row.position)
    until(lambda: bench.budget.held == 400)  # by the open poll
    bench.fetched(3, size=1)
    until(lambda: bench.requests.open_polls == 1)
    assert bench.requests.asked_for[-1] == 10


def test_a_receive_that_is_made_again_asks_for_as_many(bench: Bench) -> None:
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
