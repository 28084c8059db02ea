"""The programs of the page about workflows end as they say, wherever their worker dies."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest

import qdo
from qdo.errors import RequestCancelledError, RequestFailedError, RequestStateError
from qdo.ops.requests import retry
from qdo.testing import TestKit
from tests.support.brokers import rows
from tests.support.doc_pages import blocks, read

DAY = 86_400


def load(name: str) -> ModuleType:
    (text,) = [
        each.text
        for each in blocks(read("workflows"))
        if each.options.get("caption") == f"{name}.py"
    ]
    module = ModuleType(name)
    exec(compile(text, f"{name}.py", "exec"), module.__dict__)
    return module


def outcome(app: Any, id: str) -> object:
    try:
        return app.handle(id).result(0)
    except (RequestFailedError, RequestCancelledError) as error:
        return error.details["reason"]


# A program, its pool and body, its other steps, the result, and the number of its steps.
ENDS: dict[str, tuple[str, str, Any, Any, int]] = {
    "steps": (
        "shop",
        "order",
        {"item": "lamp", "card": "valid"},
        "sent from the shelf of lamps, 20 euros paid",
        3,
    ),
    "failed step": (
        "shop",
        "order",
        {"item": "lamp", "card": "expired"},
        "its step x/charge failed: the card is expired",
        2,
    ),
    "fan-out": ("album", "album", {"pages": 3}, {"pages": 3, "bytes": 303}, 3),
    "saga": ("trip", "trip", "Bonn", ["flight", "hotel", "car"], 3),
    "undone saga": ("trip", "trip", "Rome", "its step x/book-3 failed: no car in Rome", 5),
    "failed undo": (
        "trip",
        "trip",
        "Oslo",
        "its step x/cancel-2 failed: the airline does not answer",
        5,
    ),
    "answer": ("refund", "refund", 30, "paid 30 euros", 3),
    "child": ("move", "move", ["hall", "attic"], ["hall: 3 boxes", "attic: 3 boxes"], 6),
}


@contextlib.contextmanager
def running(name: str, pool: str, body: Any) -> Iterator[TestKit]:
    with TestKit(load(name).app, without_job="told") as kit:
        kit.app.request(pool, body, id="x", then="told")
        yield kit


def finish(kit: TestKit) -> None:
    kit.run_until_settled()
    question = kit.broker.requests.find("x/approval")
    if question is not None and question.asks:
        kit.app.handle("x/approval").resume("yes")
        kit.run_until_settled()


@pytest.mark.parametrize("end", ENDS)
def test_a_workflow_ends_wherever_its_worker_dies(end: str) -> None:
    """At every step of the worker: with one result, one message, and each step once."""
    name, pool, body, result, count = ENDS[end]
    for nth in itertools.count(1):
        with running(name, pool, body) as kit:
            kit.crash_at(nth=nth)
            finish(kit)
            assert outcome(kit.app, "x") == result, nth
            steps = [each for each in kit.requests() if each["id"] != "x"]
            assert len(steps) == count, nth
            assert {each["state"] for each in steps} == {"over"}
            assert len(rows(kit.broker, "told")) == 1, nth
            if kit.faults_left:
                break
    assert nth > 15


def test_a_failed_undo_is_repeated() -> None:
    """Alone; a repeated booking behind its undo is refused before it books."""
    trip = load("trip")
    with TestKit(trip.app) as kit:
        store = kit.broker.requests
        for town in ("Oslo", "Rome"):
            trip.app.request("trip", town, id=town)
        kit.run_until_settled()
        trip.OFFLINE.clear()
        store.retry("Oslo", ["Oslo/cancel-2"])
        kit.run_until_settled()
        assert outcome(trip.app, "Oslo") == "its step Oslo/book-3 failed: no car in Oslo"
        trip.FULL.clear()
        store.retry("Rome", ["Rome/book-3"])
        kit.run_until_settled()
        assert "has not reached 'Rome/cancel'" in str(outcome(trip.app, "Rome"))
        assert store.find("Rome/book-3") is None
        retry(store, "Rome", "Rome/book")
        kit.run_until_settled()
        assert outcome(trip.app, "Rome") == ["flight", "hotel", "car"]


def test_a_question_takes_no_place_and_has_a_deadline() -> None:
    with running("refund", "refund", 30) as kit:
        kit.run_until_settled()
        assert kit.broker.requests.owners() == []
        kit.advance(3 * DAY - 1)
        assert kit.app.handle("x").state == "paused"
        kit.advance(2)
        assert outcome(kit.app, "x") == "no answer in three days"
        with pytest.raises(RequestStateError):
            kit.app.handle("x/approval").resume("yes")


def test_a_deadline_of_the_whole_lets_it_undo() -> None:
    """It cancels the open step and one that begins later, and not the steps that undo."""
    app = qdo.App("whole")

    @app.job("trip", pool=True)
    def trip(request: qdo.Request, context: Any) -> None:
        request.call("book")
        try:
            request.call("question", paused=True)
        except RequestCancelledError:
            request.gather([("undo", 1), ("undo", 2)])
            raise

    @app.job("book", pool=True)
    @app.job("undo", pool=True)
    def step(request: qdo.Request, context: Any) -> None:
        kit.spend(60)

    for seconds, reached in ((90, 4), (30, 4)):
        with TestKit(app) as kit:
            app.request("trip", None, id="x", deadline_seconds=seconds)
            kit.advance(3600)
            assert outcome(app, "x") == (
                "its step x/question was cancelled: its deadline has passed"
            )
            assert len(kit.requests()) == reached + 1
    with TestKit(app) as kit:
        app.request("trip", None, id="x")
        kit.run_until_idle()
        assert app.handle("x").cancel("changed my mind")
        kit.advance(3600)
        assert app.handle("x").state == "over"
        assert app.handle("x/undo-2").state == "over"


def test_steps_are_checked() -> None:
    """An id of one's own, an unknown parameter and too many steps end the request."""
    app = qdo.App("checked", attempts=1)
    wrong = [
        [{"pool": "step", "body": 1, "id": "mine"}],
        [{"pool": "step", "body": 1, "dead_line": 1}],
        [{"pool": "step", "body": 1, "deadline_seconds": 0}],
        [{"pool": "step", "body": 1, "paused": 1}],
        [("step", each) for each in range(10_001)],
    ]

    @app.job("whole", pool=True)
    def whole(request: qdo.Request, context: Any) -> None:
        request.gather(wrong[request.body])

    with TestKit(app) as kit:
        for each in range(len(wrong)):
            app.request("whole", each)
        kit.run_until_settled()
        assert {each["outcome"] for each in kit.requests("whole")} == {"failed"}
        assert kit.requests("step") == []


def test_a_coroutine_calls_steps() -> None:
    app = qdo.App("awaits")

    @app.job("whole", pool=True)
    async def whole(request: qdo.Request, context: Any) -> Any:
        first = await request.acall("double", 1)
        return [first, *await request.agather([("double", 2), ("double", 3)])]

    @app.job("double", pool=True)
    def double(request: qdo.Request, context: Any) -> int:
        return 2 * request.body

    with TestKit(app) as kit:
        app.request("whole", None, id="x")
        kit.run_until_settled()
        assert outcome(app, "x") == [2, 4, 6]
