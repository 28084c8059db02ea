"""SQS requests while no message may be started, or after lost answers."""

from __future__ import annotations

from collections.abc import Iterator

import gevent
import pytest

from qdo.broker_errors import AccessDeniedError, AwsUnreachableError
from qdo.brokers.sqs import poller
from tests.support.aws.sqs_consumer import VISIBILITY, SubscriptionSetup, message, until


@pytest.fixture
def bench() -> Iterator[SubscriptionSetup]:
    bench = SubscriptionSetup()
    yield bench
    bench.end()


def test_a_receive_with_a_lost_answer_repeats_its_attempt_id() -> None:
    """SQS then returns the messages it had locked for it; any other receive has its own id."""
    bench = SubscriptionSetup()
    lost = AwsUnreachableError(service="SQS", region="eu-west-1", reason="reset", hint="")
    denied = AccessDeniedError(
        service="SQS", action="sqs:ReceiveMessage", resource="queue 'q'", code="", reason="no"
    )
    bench.requests.answer(lost, [], denied, [message(1)])
    bench.reader.fetch(10)
    until(lambda: bench.requests.polls == 1)
    until(lambda: bench.holding.has_rows(0))
    first, again, third, last = bench.requests.attempts
    assert first == again
    assert len({first, third, last}) == 3
    bench.end()


def test_a_queue_of_which_nothing_may_be_started_is_not_polled(
    bench: SubscriptionSetup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be another worker's by now; it is polled again when the lease runs."""
    monkeypatch.setattr(poller, "UNWANTED_SECONDS", 0.01)
    bench.subscription.may_start = lambda: False
    assert bench.reader.fetch(10) == []
    gevent.sleep(0.1)
    assert bench.requests.polls == 0
    bench.subscription.may_start = lambda: True
    until(lambda: bench.requests.polls == 1)


def test_polled_messages_that_may_not_start_are_released(bench: SubscriptionSetup) -> None:
    """At once: a worker that may start it need not wait for the visibility timeout."""
    bench.reader.fetch(10)
    until(lambda: bench.requests.open_polls == 1)
    bench.subscription.may_start = lambda: False
    bench.requests.answer([message(1), message(2)])
    until(lambda: bench.requests.released == [1, 2])
    assert bench.reader.fetch(10) == []


def test_only_what_runs_is_held_on_while_nothing_may_be_started() -> None:
    """Messages in flight are extended, the others are released."""
    bench = SubscriptionSetup(visibility=VISIBILITY)
    runs, _ = bench.fetched(2, 3)
    bench.subscription.may_start = lambda: False
    bench.subscription.in_flight = lambda: (runs.position,)
    until(lambda: len(bench.requests.extended) >= 2)
    assert all(batch == [2] for batch in bench.requests.extended)
    assert bench.requests.released == [3]
    assert bench.subscription.is_held(runs.position)
    bench.end()


def test_giving_back_is_tried_again(bench: SubscriptionSetup) -> None:
    """A moment's trouble at the end of a claim does not hide messages for a minute."""
    bench.requests.fail_releases = 2
    bench.fetched(1, 2)
    bench.subscription.close()
    until(lambda: bench.requests.released == [1, 2, 1, 2, 1, 2])


def test_an_empty_queue_is_looked_at_less_and_less_often(
    bench: SubscriptionSetup,
) -> None:
    """After 3, 6, 12, 24 empty polls: it costs next to nothing where queues are idle."""
    bench.reader.fetch(10)
    bench.requests.answer(*([[]] * 30))
    until(lambda: bench.requests.polls == 31)
    assert bench.requests.looks == 4


def test_a_queue_of_which_something_is_held_is_not_looked_at(bench: SubscriptionSetup) -> None:
    """That other messages of the group do not come is as it should be."""
    bench.fetched(1, 2)
    bench.requests.answer(*([[]] * 10))
    until(lambda: bench.requests.polls == 12)
    assert bench.requests.looks == 0
