"""Timers in a testing kit: the clock of the test sends their messages."""

from __future__ import annotations

from typing import Any

import pytest

import qdo
from qdo.errors import NotSettledError
from qdo.testing import TestKit


def made() -> qdo.App:
    app = qdo.App("clock")
    app.timer("hourly", every_seconds=3600, queue="hourly")

    @app.job("hourly")
    def job(message: qdo.Message, context: Any) -> None:
        assert message.headers["qdo-timer"] == f"hourly@{message.body['at']}"

    return app


def test_advance_sends_each_occurrence_at_its_time() -> None:
    with TestKit(made()) as kit:
        kit.run_until_idle()
        kit.advance(3599.0)
        assert kit.done() == []
        kit.advance(7201.0)
        assert [each["at"] for each in kit.done()] == [
            f"2026-01-01T0{hour}:00:00Z" for hour in (1, 2, 3)
        ]
        assert {each["missed"] for each in kit.done()} == {0}


def test_timers_send_while_messages_wait_and_settle_with_them() -> None:
    app = made()

    @app.job("slow")
    def slow(message: qdo.Message, context: Any) -> None:
        if message.attempt == 1:
            raise qdo.Retry(after=5400)

    with TestKit(app) as kit:
        assert kit.run_until_settled() == 0.0
        kit.send("slow", 1)
        assert kit.run_until_settled() == 5400.0
        assert len(kit.done("hourly")) == 1


def test_a_timer_whose_message_never_settles() -> None:
    app = qdo.App("clock")
    app.timer("t", every_seconds=10, queue="t")

    @app.job("t")
    def job(message: qdo.Message, context: Any) -> None:
        raise qdo.Retry(after=60, counts=False)

    with TestKit(app) as kit:
        kit.advance(10.0)
        with pytest.raises(NotSettledError):
            kit.run_until_settled(most_seconds=600.0)


def test_a_timer_waits_for_its_queue_unless_it_is_done() -> None:
    app = qdo.App("clock")
    app.timer("poll", every_seconds=10, queue="poll", unless_waiting=True)

    @app.job("poll")
    def job(message: qdo.Message, context: Any) -> None:
        if message.attempt == 1:
            raise qdo.Retry(after=35)

    with TestKit(app) as kit:
        kit.advance(60.0)
        assert [each["at"][-4:-1] for each in kit.done()] == [":10"]
        assert [each["at"][-4:-1] for each in kit.waiting("poll")] == [":50"]
