"""The SQS requests of one owned queue, and their times: polls, deletes, extensions, releases."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator

import gevent
import pytest

from qdo.broker_errors import AccessDeniedError, AwsUnreachableError
from qdo.brokers.sqs.in_flight import name_of
from qdo.errors import UnreachableError
from qdo.positions import time_of_position
from tests.support.aws.sqs_consumer import VISIBILITY, SubscriptionSetup, clock, message, until


@pytest.fixture
def bench() -> Iterator[SubscriptionSetup]:
    bench = SubscriptionSetup()
    yield bench
    bench.end()


@pytest.fixture
def short() -> Iterator[SubscriptionSetup]:
    """The messages of this one are hidden for a moment only, so that it extends them."""
    short = SubscriptionSetup(visibility=VISIBILITY)
    yield short
    short.end()


# --- polls --------------------------------------------------------------------------------


def test_nothing_is_asked_before_somebody_fetches(bench: SubscriptionSetup) -> None:
    """A claim that is not worked on costs nothing."""
    gevent.sleep(0)
    assert bench.requests.polls == 0


def test_the_next_poll_is_open_while_messages_are_processed(bench: SubscriptionSetup) -> None:
    """Fetching the last ones at hand has more asked for."""
    bench.fetched(1, 2)
    until(lambda: bench.requests.open_polls == 1)


def test_a_fetch_never_waits(bench: SubscriptionSetup) -> None:
    """It returns the messages at hand, nothing while a poll is open."""
    assert bench.reader.fetch(10) == []
    until(lambda: bench.requests.open_polls == 1)
    assert bench.reader.fetch(10) == []
    assert bench.requests.polls == 1


def test_nothing_is_asked_while_messages_are_not_fetched(bench: SubscriptionSetup) -> None:
    """The polls of a queue that is blocked or paused stop."""
    bench.reader.fetch(10)
    bench.requests.answer([message(1)])
    until(lambda: bench.news == 1)
    assert bench.requests.polls == 1
    assert bench.requests.open_polls == 0


def test_fetched_messages_that_wait_leave_the_queue_at_its_tip(
    bench: SubscriptionSetup,
) -> None:
    """A key that is blocked keeps its messages; nothing more of the queue is to be had."""
    bench.fetched(1)
    bench.requests.answer([])
    until(lambda: bench.requests.polls >= 3)
    assert bench.subscription.at_tip()
    bench.requests.answer([message(2)])
    until(lambda: len(bench.holding) == 2)
    assert not bench.subscription.at_tip()


def test_an_idle_queue_rests_longer_and_longer() -> None:
    """Twice as long from poll to poll, up to idle_seconds; the first message ends that."""
    bench = SubscriptionSetup(idle_seconds=0.02)
    started = time.monotonic()
    bench.reader.fetch(10)
    bench.requests.answer(*([[]] * 5))
    until(lambda: bench.requests.polls == 6)
    assert time.monotonic() - started >= 5 * 0.9 * 0.02
    bench.fetched(1)
    bench.end()


def test_a_ring_ends_the_rest() -> None:
    """A message was sent: the owner need not wait."""
    bench = SubscriptionSetup(idle_seconds=600.0)
    bench.reader.fetch(10)
    # The pause after the tenth poll is minutes, but no poll before it is waited for here.
    for polls in itertools.count(1):
        until(lambda polls=polls: bench.requests.polls == polls)  # type: ignore[misc]
        bench.requests.answer([])
        until(lambda: bench.requests.open_polls == 0)
        if polls == 4:
            break
        bench.subscription.poll_now()
    bench.end()


def test_a_ring_while_a_poll_is_open_has_sqs_asked_again() -> None:
    """Its answer may have been under way when the message came; once, then the queue rests."""
    bench = SubscriptionSetup(idle_seconds=600.0)
    bench.reader.fetch(10)
    until(lambda: bench.requests.open_polls == 1)
    bench.subscription.poll_now()
    bench.requests.answer([])
    until(lambda: bench.requests.polls == 2)
    bench.requests.answer([])
    until(lambda: bench.requests.open_polls == 0)
    gevent.sleep(0.1)
    assert bench.requests.polls == 2
    bench.end()


def test_an_error_is_raised_where_rows_are_fetched_once(bench: SubscriptionSetup) -> None:
    """Then the poll is repeated after a pause, whichever reader fetches."""
    bench.reader.fetch(10)
    bench.requests.answer(UnreachableError(what="SQS", reason="no"))
    until(lambda: bench.news == 1)
    with pytest.raises(UnreachableError):
        bench.reader.fetch(10)
    assert bench.reader.fetch(10) == []
    until(lambda: bench.requests.polls == 2)
    assert not bench.subscription.at_tip()
    bench.fetched(1)


# --- deletes ------------------------------------------------------------------------------


def test_trap_12_ten_done_messages_are_deleted_in_one_request(bench: SubscriptionSetup) -> None:
    """And not one by one."""
    rows = bench.fetched(*range(1, 13))
    for row in rows[:10]:
        bench.subscription.done(row.position)
    until(lambda: bool(bench.requests.deleted))
    assert bench.requests.deleted == [list(range(1, 11))]
    assert bench.subscription.unconfirmed() == ()


def test_the_last_message_in_flight_is_deleted_at_once(bench: SubscriptionSetup) -> None:
    """No other message will follow to share the request."""
    (row,) = bench.fetched(1)
    bench.subscription.done(row.position)
    until(lambda: bench.requests.deleted == [[1]])


def test_a_done_message_does_not_wait_long_for_others(bench: SubscriptionSetup) -> None:
    """It is deleted while the next one's job runs."""
    first, _ = bench.fetched(1, 2)
    bench.subscription.done_through(first.position)
    assert bench.subscription.unconfirmed() == (name_of(1),)
    until(lambda: bench.requests.deleted == [[1]])
    until(lambda: bench.subscription.unconfirmed() == ())


def test_trap_03_entries_that_fail_are_deleted_again(bench: SubscriptionSetup) -> None:
    """The request as a whole was answered with success; only those are repeated."""
    bench.requests.fail_deletes = 1
    rows = bench.fetched(1, 2)
    bench.subscription.done_through(rows[-1].position)
    until(lambda: bench.requests.deleted == [[1, 2], [1]])
    until(lambda: bench.subscription.unconfirmed() == ())


def test_a_refused_delete_is_remembered(bench: SubscriptionSetup) -> None:
    """The message may come again: it is deleted then, and not run."""
    (row,) = bench.fetched(1)
    bench.requests.refuse = {1}
    bench.subscription.done(row.position)
    until(lambda: bench.requests.deleted == [[1]])
    until(lambda: not bench.subscription.is_held(row.position))
    assert bench.subscription.unconfirmed() == (name_of(1),)
    bench.requests.refuse = set()
    bench.requests.answer([message(1)])
    until(lambda: bench.requests.deleted == [[1], [1]])
    until(lambda: bench.subscription.unconfirmed() == ())
    assert bench.reader.fetch(10) == []


# --- extensions ---------------------------------------------------------------------------


def test_what_is_in_flight_is_extended_again_and_again(short: SubscriptionSetup) -> None:
    """All that were received, not only the one whose job runs."""
    short.fetched(1, 2)
    until(lambda: len(short.requests.extended) >= 3)
    assert all(each == [1, 2] for each in short.requests.extended)
    assert short.lost == []


def test_a_refused_extension_takes_the_message_away(short: SubscriptionSetup) -> None:
    """With the messages behind it in its group, which are released to keep their order."""
    rows = short.fetched(1, 2, 3)
    short.requests.refuse = {2}
    until(lambda: short.lost == [2, 3])
    until(lambda: short.requests.released == [3])
    assert short.subscription.is_held(rows[0].position)
    short.subscription.done(rows[1].position)
    assert short.requests.deleted == []


# --- the end ------------------------------------------------------------------------------


def test_closing_deletes_what_is_done_and_gives_the_rest_back(bench: SubscriptionSetup) -> None:
    """The next owner need not wait for the visibility timeout."""
    rows = bench.fetched(1, 2, 3)
    bench.subscription.done(rows[0].position)
    bench.subscription.close()
    until(lambda: bench.requests.released == [2, 3])
    assert bench.requests.deleted == [[1]]


def test_what_an_open_poll_brings_after_the_end_is_given_back(bench: SubscriptionSetup) -> None:
    """It is closed only when that is done."""
    bench.reader.fetch(10)
    until(lambda: bench.requests.open_polls == 1)
    bench.subscription.close()
    gevent.sleep(0.01)
    assert not bench.closed
    bench.requests.answer([message(1)])
    until(lambda: bench.closed)
    assert bench.requests.released == [1]
    assert bench.requests.polls == 1


# --- how far behind ---------------------------------------------------------------------------


def test_the_first_undone_message_gives_the_lag_of_its_queue(
    bench: SubscriptionSetup,
) -> None:
    """Its age while there is one, 0 at the tip, nothing before anything is known."""
    assert bench.subscription.behind_seconds() is None
    rows = bench.fetched(1, 2)
    age = time.time() - time_of_position(1002)
    assert bench.subscription.behind_seconds() == pytest.approx(age, abs=60)
    bench.subscription.done_through(rows[-1].position)
    bench.requests.answer([])
    until(bench.subscription.at_tip)
    assert bench.subscription.behind_seconds() == 0


def test_followers_of_a_lost_message_are_released_ten_at_a_time(short: SubscriptionSetup) -> None:
    """Not each in a request of its own, all of them at once."""
    short.fetched(*range(1, 26))
    short.requests.refuse = {1}
    until(lambda: len(short.requests.released) == 24)
    assert [len(each) for each in short.requests.given_back] == [10, 10, 4]
    assert short.lost == list(range(1, 26))


def test_messages_that_are_visible_again_are_not_released(short: SubscriptionSetup) -> None:
    """A process that was stopped for long asks for nothing of which SQS knows."""
    short.fetched(1, 2, 3)
    short.requests.fail_extensions = True
    until(lambda: short.lost == [1, 2, 3])
    assert short.requests.released == []


@pytest.mark.slow
def test_extensions_that_fail_are_not_asked_for_without_pause() -> None:
    """An endpoint that is out of reach is asked a few times until the messages are lost."""
    bench = SubscriptionSetup(visibility=2.0)
    bench.fetched(1)
    bench.requests.fail_extensions = True
    until(lambda: bench.lost == [1])
    assert 2 <= len(bench.requests.extended) <= 8
    bench.end()


@pytest.mark.slow
def test_neither_are_those_that_end_in_a_fault_of_ours(capfd: pytest.CaptureFixture[str]) -> None:
    """It is tried again with pauses, and does not keep a process busy with itself."""
    bench = SubscriptionSetup(visibility=2.0)
    bench.fetched(1)
    tried = []

    def fail() -> None:
        tried.append(1)
        raise ZeroDivisionError

    bench.requests.on_extend = fail
    until(lambda: bench.lost == [1])
    assert 2 <= len(tried) <= 8
    assert "ZeroDivisionError" in capfd.readouterr().err
    bench.end()


def test_a_refused_old_receipt_does_not_drop_the_message(short: SubscriptionSetup) -> None:
    """It was received again while the request was under way, and is ours by its new receipt."""
    (row,) = short.fetched(1)
    again = message(1)._replace(receipt="newer")

    def come_again() -> None:
        short.requests.refuse = set() if short.requests.polls > 2 else {1}
        short.requests.answer([again])
        until(lambda: short.requests.polls > 2)

    short.requests.on_extend = come_again
    until(lambda: len(short.requests.extended) >= 3)
    assert short.lost == []
    assert short.subscription.is_held(row.position)


def test_giving_back_does_not_wait_for_deletes(bench: SubscriptionSetup) -> None:
    """They may have to be tried again for as long as the messages are hidden."""
    first, *_ = bench.fetched(1, 2, 3)
    bench.requests.fail_deletes = 3
    bench.subscription.done(first.position)
    bench.subscription.close()
    until(lambda: bench.requests.released == [2, 3])
    assert bench.requests.deleted in ([], [[1]])
    until(lambda: bench.requests.deleted == [[1]] * 4)


def test_what_comes_while_the_claim_ends_is_given_back_once(bench: SubscriptionSetup) -> None:
    """Even while done messages are still being deleted."""
    first, *_ = bench.fetched(1, 2)
    until(lambda: bench.requests.open_polls == 1)

    def come() -> None:
        bench.requests.answer([message(3)])
        until(lambda: not bench.requests.open_polls)

    bench.requests.on_delete = come
    bench.subscription.done(first.position)
    bench.subscription.close()
    until(lambda: bench.closed)
    assert bench.requests.released == [2, 3]
    assert len(bench.holding) == 0


def test_waiting_messages_are_released_where_no_start_is_allowed(short: SubscriptionSetup) -> None:
    """Otherwise, one that was extended later than others of its group would run before them."""
    first, *others = short.fetched(1, 2, 3)
    short.holding.extensions.extended(short.holding.undone()[2], clock() + VISIBILITY)
    short.subscription.in_flight = lambda: [first.position]
    short.subscription.may_start = lambda: False
    until(lambda: short.requests.released == [2, 3])
    assert short.subscription.is_held(first.position)
    assert not any(short.subscription.is_held(each.position) for each in others)


# --- while nothing may be started ----------------------------------------------------------


def test_trap_08_a_receive_with_a_lost_answer_repeats_its_id(bench: SubscriptionSetup) -> None:
    """SQS then returns the messages it had locked for it; any other receive has its own id."""
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


def test_a_queue_of_which_nothing_may_be_started_is_not_polled(
    bench: SubscriptionSetup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be another worker's by now; it is polled again when the lease runs."""
    monkeypatch.setattr("qdo.brokers.sqs.subscription.UNWANTED_SECONDS", 0.01)
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
