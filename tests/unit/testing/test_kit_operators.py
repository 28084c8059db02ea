"""`app.cancel` and the other calls of operators, in the testing kit."""

from __future__ import annotations

from typing import Any

import pytest

import qdo
from qdo.errors import (
    MessageNotFailingError,
    NotFailingError,
    NotFoundError,
    PartialFailureError,
    UsageError,
)
from qdo.testing import TestKit


@pytest.fixture
def app() -> qdo.App:
    app = qdo.App("desk")

    @app.job(policy=qdo.Policy(attempts=1, then="block"))
    def job(message: qdo.Message, context: Any) -> None:
        if message.body == "bad":
            raise ValueError

    return app


def test_messages_are_cancelled_before_they_run(app: qdo.App) -> None:
    """Delayed and waiting ones, in a new queue and in an old one; each once."""
    with TestKit(app) as kit:
        later, now = app.send("q", 1, delay_seconds=60), app.send("q", 2)
        assert [each.kind for each in app.peek("q")] == ["waiting", "delayed"]
        assert app.owner("q") is None
        cancelled = app.cancel("q", later, now, reason="paid")
        assert cancelled == {later: "cancelled", now: "cancelled"}
        assert app.cancel("q", later, now) == {later: "already-cancelled", now: "already-cancelled"}
        again = app.send("q", 1, delay_seconds=60)
        assert app.cancel("q", again) == {again: "cancelled"}
        with pytest.raises(NotFoundError):  # no entry remembers it
            app.cancel("q", again)
        done = app.send("q", 3)
        assert kit.run_until_settled() == 0
        assert kit.done() == [3]
        owner = app.owner("q")
        assert owner is not None
        assert owner.queue == "q"
        third = app.send("q", 4)
        with pytest.raises(PartialFailureError):
            app.cancel("q", done, third)
        kit.run_until_settled()
        assert kit.done() == [3]
        with pytest.raises(NotFoundError):
            app.cancel("other", third)


def test_a_job_cancels_what_comes_after_it(app: qdo.App) -> None:
    """Its own message has begun."""
    outcomes: list[Any] = []

    @app.job("chain")
    def chain(message: qdo.Message, context: Any) -> None:
        if message.body == 1:
            with pytest.raises(PartialFailureError):
                app.cancel("chain", message.id)
            outcomes.append(app.cancel("chain", ids[1]))

    with TestKit(app) as kit:
        ids = [app.send("chain", body) for body in (1, 2, 3)]
        kit.run_until_settled()
        assert kit.done() == [1, 3]
    assert outcomes == [{ids[1]: "cancelled"}]


def test_failing_messages_are_decided(app: qdo.App) -> None:
    with TestKit(app) as kit:
        bad, good = app.send("q", "bad"), app.send("q", 2)
        kit.run_until_settled()
        (blocking,) = app.peek("q", kind="blocking")
        assert (blocking.id, blocking.body) == (bad, b'"bad"')
        with pytest.raises(MessageNotFailingError):
            app.skip("q", good)
        assert app.retry_now("q") == [bad]
        kit.run_until_settled()
        assert app.skip("q", bad) == [bad]
        kit.run_until_settled()
        assert kit.done() == [2]
        with pytest.raises(NotFailingError):
            app.retry_now("q", every=True)


def test_queues_pause_and_resume(app: qdo.App) -> None:
    with TestKit(app) as kit:
        with pytest.raises(NotFoundError) as raised:
            app.pause("q*", "other")
        assert raised.value.details["name"] == "q*"
        app.pause("q*", "other", allow_none=True)
        app.send("q", 1)
        kit.run_until_settled()
        assert kit.done() == []
        with pytest.raises(NotFoundError):
            app.resume("q")
        app.resume("q*")
        kit.run_until_settled()
        assert kit.done() == [1]
        assert [each.queues for each in kit.holds.pauses] == [("other",)]
        with pytest.raises(UsageError):
            app.pause("q", seconds=60)


def test_calls_without_a_name_are_refused(app: qdo.App) -> None:
    """And those with too many."""
    for call in (app.skip, app.cancel):
        with pytest.raises(UsageError):
            call("q")
    with pytest.raises(UsageError):
        app.resume()
    with pytest.raises(UsageError):
        app.retry_now("q", "1", every=True)
    for options in ({"limit": 0}, {"kind": "odd"}):
        with pytest.raises(UsageError):
            app.peek("q", **options)  # type: ignore[arg-type]
