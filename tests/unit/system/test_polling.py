"""Waiting for something that no event tells."""

from __future__ import annotations

import pytest

from qdo.system import clock


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Return the pauses, which move the clock."""
    made: list[float] = []
    monkeypatch.setattr(clock, "clock", lambda: sum(made))
    return made


def test_a_wait_without_time_asks_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """As `timeout_seconds` of 0 does: the clock goes on while the caller asks."""
    times = iter((5.0, 5.0, 5.001))
    monkeypatch.setattr(clock, "clock", lambda: next(times))
    assert list(clock.polls(0.0, pause=pytest.fail)) == [0.0]


def test_pauses_grow_to_a_tenth_of_a_second(pauses: list[float]) -> None:
    waited = list(clock.polls(2.0, pause=pauses.append))
    assert waited[:3] == pytest.approx([0.0, 0.004, 0.0088])
    assert pauses == sorted(pauses)
    assert max(pauses) == 0.1


def test_the_last_question_comes_after_the_time_is_over(pauses: list[float]) -> None:
    *earlier, last = clock.polls(2.0, pause=pauses.append)
    assert max(earlier) <= 2.0 < last < 2.1 + 1e-9


def test_a_caller_may_stop_at_any_time(pauses: list[float]) -> None:
    for waited in clock.polls(60.0, pause=pauses.append):
        if waited > 0.5:
            break
    assert sum(pauses) < 0.7
