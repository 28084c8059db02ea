"""When a message runs for much longer than usual, with hand-made histories of turns."""

from __future__ import annotations

import pytest

from qdo.worker.engine.durations import ENOUGH, FACTOR, LEAST_SECONDS, PACE_SECONDS, Durations


def history(*seconds: float) -> Durations:
    """Return what was learned from turns of one message each."""
    durations = Durations()
    for each in seconds:
        durations.learn(1, each, each - 0.05)
    return durations


def test_short_messages_are_named_after_ten_seconds() -> None:
    durations = history(*[0.001] * ENOUGH)
    assert not durations.are_exceeded(LEAST_SECONDS - 0.1)
    assert durations.are_exceeded(LEAST_SECONDS)


def test_long_messages_are_named_after_ten_times_as_long() -> None:
    durations = history(*[90.0] * ENOUGH)
    assert durations.usual_seconds == 90.0
    assert not durations.are_exceeded(FACTOR * 90.0 - 0.1)
    assert durations.are_exceeded(FACTOR * 90.0)


@pytest.mark.parametrize("messages", [0, 1, ENOUGH - 1])
def test_a_queue_without_a_history_is_not_judged(messages: int) -> None:
    assert not history(*[0.001] * messages).are_exceeded(1e9)


def test_the_messages_of_one_turn_are_a_history() -> None:
    durations = Durations()
    durations.learn(100, 0.05, 0.0005)
    assert durations.usual_seconds == 0.0005
    assert durations.are_exceeded(LEAST_SECONDS)


def test_the_last_message_of_a_turn_may_be_a_long_one() -> None:
    durations = Durations()
    durations.learn(100, 8.0, 7.95)
    assert durations.usual_seconds == 7.95


def test_turns_that_started_nothing_teach_nothing() -> None:
    durations = history(*[2.0] * ENOUGH)
    durations.learn(0, 100.0, 99.0)
    assert durations.usual_seconds == 2.0


def test_a_pace_is_that_of_the_last_one_or_two_minutes() -> None:
    """Known from the second look on; what was done before counts no longer."""
    durations = history(5.0)
    assert durations.pace(100.0) is None
    assert durations.pace(110.0) is None
    durations.learn(30, 15.0)
    assert durations.pace(130.0) == (1.0, 0.5)
    durations.learn(1, 50.0, batch=10)
    assert durations.pace(100.0 + PACE_SECONDS) == (40 / 60, 65.0 / 40)
    durations.learn(1, 2.0)
    assert durations.pace(180.0) == (41 / 80, 67.0 / 41)
    assert durations.pace(240.0) == (1 / 80, 2.0)
    assert durations.pace(310.0) is None


@pytest.mark.parametrize("every", [1, 2, 10, 100, 200])
def test_a_queue_of_short_and_long_messages_raises_no_alarm(every: int) -> None:
    """Each of `every` messages takes a minute, the others a millisecond."""
    durations, named = Durations(), []
    for number in range(20 * every):
        seconds = 0.001 if number % every else 60.0
        if number >= 10 * every and durations.are_exceeded(seconds):
            named.append(number)
        durations.learn(1, seconds, seconds - 0.05)
    assert named == []


def test_a_long_message_among_thousands_of_short_ones_is_named() -> None:
    durations = history(60.0, *[0.001] * 2000)
    assert durations.are_exceeded(60.0)


def test_a_message_that_hung_does_not_hide_the_next_one() -> None:
    durations = history(*[0.2] * 100, 3600.0)
    assert durations.limit_seconds == pytest.approx(FACTOR * LEAST_SECONDS)


def test_jobs_that_became_slower_are_soon_usual() -> None:
    durations, named = history(*[0.2] * 100), 0
    for _ in range(100):
        named += durations.are_exceeded(300.0)
        durations.learn(1, 300.0, 299.95)
    assert named == 2


def test_jobs_that_became_faster_are_usual_in_time() -> None:
    durations = history(*[100.0] * 50, *[0.1] * 700)
    assert durations.limit_seconds == LEAST_SECONDS
