"""Requests as apps ask for them: terms, handles, results, cancelling, resuming, encryption."""

from __future__ import annotations

import asyncio
import datetime
import json
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import qdo
from qdo import App
from qdo.brokers.request_store import RequestStore
from qdo.brokers.requests import OVER, PAUSED, RUNNING, WAITING, RequestRecord, Take
from qdo.encoding import key_id_of
from qdo.errors import (
    BodyAuthenticationError,
    BodyLimitError,
    QueueNameError,
    RequestCancelledError,
    RequestExistsError,
    RequestFailedError,
    RequestNotFoundError,
    RequestStateError,
    RequestTimeoutError,
    UnsupportedError,
    UsageError,
)
from qdo.requests.replies import end_request, sealed
from qdo.settings.sources import load
from tests.support.brokers import opening
from tests.support.fakes.key_files import key, write_keys


@pytest.fixture(params=["memory", "embedded"])
def app(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[App]:
    with (
        opening(request.param, tmp_path, request) as connect,
        App("shop") as app,
        app.override_broker(connect("shop"), load(environ={})),
    ):
        yield app


def store(app: App) -> RequestStore:
    return app.broker.requests


def record(app: App, id: str) -> RequestRecord:
    found = store(app).find(id)
    assert found is not None
    return found


def take(app: App, pool: str = "invoice") -> Take:
    (taken,) = store(app).take("worker-1", pool, 1, ()).requests
    return taken.take


def finish(app: App, value: Any, pool: str = "invoice") -> None:
    """Do as a worker does for the oldest request."""
    assert store(app).end(take(app, pool), "done", sealed(app, pool, value))


def messages(app: App, queue: str) -> list[tuple[Any, str | None]]:
    """Return bodies and keys of the messages of a queue."""
    return [(json.loads(row[1]), row[2]) for row in app.broker.reader(queue, 0).fetch(100)]


# --- asking ---


def test_a_request_is_stored_as_asked(app: App) -> None:
    """Its terms, and what a store keeps for those who end it."""
    tag = {"do": "invoiced", "n": [1]}
    app.request(
        "invoice",
        {"order": 17},
        id="17/invoice",
        then="order-17",
        key="k",
        tag=tag,
        events=True,
        priority=qdo.URGENT,
        at=4e9,
        keep_seconds=0,
    )
    found = record(app, "17/invoice")
    assert (found.pool, found.state, found.priority, found.due) == ("invoice", WAITING, 0, 4e9)
    assert found.content == (b'{"order":17}', None)
    wanted = {"then": "order-17", "key": "k", "tag": tag, "events": True}
    assert json.loads(found.reply or "") == wanted


def test_a_request_needs_only_pool_and_body(app: App) -> None:
    """It has an id of its own, is due at once, and nothing is told."""
    first, second = (app.request("invoice", None) for _ in range(2))
    assert first.id != second.id
    assert re.fullmatch("[0-9a-f]{32}", first.id)
    found = record(app, first.id)
    assert (found.content, found.priority, found.reply) == ((b"null", None), qdo.NORMAL, None)
    assert found.due <= time.time() + 0.001
    assert first.state == "waiting"


def test_a_delay_is_a_time_before_which_it_waits(app: App) -> None:
    app.request("invoice", 1, id="a", delay_seconds=3600)
    assert 3590 < record(app, "a").due - time.time() < 3610
    assert not store(app).take("worker-1", "invoice", 1, ()).requests


def test_the_same_request_is_stored_once(app: App) -> None:
    """The handle is that of the existing one, whose terms stay."""
    app.request("invoice", {"a": 1, "b": [2]}, id="a", priority=3)
    again = app.request("invoice", {"a": 1, "b": [2]}, id="a", priority=7)
    assert again.id == "a"
    assert record(app, "a").priority == 3
    finish(app, 5)
    assert app.request("invoice", {"a": 1, "b": [2]}, id="a").result(0) == 5


@pytest.mark.parametrize(("pool", "body"), [("invoice", 2), ("other", 1), ("invoice", b"1")])
def test_another_request_needs_another_id(app: App, pool: str, body: Any) -> None:
    """Bytes are another body than the JSON of the same bytes."""
    app.request("invoice", 1, id="a")
    with pytest.raises(RequestExistsError) as caught:
        app.request_many([{"pool": "new", "body": 1}, {"pool": pool, "body": body, "id": "a"}])
    assert caught.value.details["id"] == "a"
    assert [*store(app).due()] == ["invoice"]


def test_many_requests_are_stored_together(app: App) -> None:
    """In order; none if one of them is invalid."""
    asked = [{"pool": "invoice", "body": n, "id": f"n{n}"} for n in range(3)]
    assert [each.id for each in app.request_many(asked)] == ["n0", "n1", "n2"]
    assert app.request_many([]) == []
    for bad in ({"pool": "invoice"}, {"pool": "invoice", "body": {1}}, {"x": 1}, ("p", 1), 5):
        with pytest.raises(UsageError):
            app.request_many([{"pool": "invoice", "body": 9}, bad])  # type: ignore[list-item]
    assert [each.id for each in store(app).records()] == ["n0", "n1", "n2"]


@pytest.mark.parametrize(
    ("terms", "part"),
    [
        ({"id": ""}, "got ''"),
        ({"id": "x" * 201}, "200"),
        ({"id": "a\nb"}, "control"),
        ({"id": "\ud800"}, "surrogates"),
        ({"id": 5}, "got 5"),
        ({"then": "q", "key": 5}, "got 5"),
        ({"then": "q", "key": "x" * 1001}, "1000"),
        ({"then": "q", "key": "\ud800"}, "surrogate"),
        ({"then": "q", "key": "\0"}, "NUL"),
        ({"key": "k"}, "then"),
        ({"tag": {}}, "then"),
        ({"events": True}, "then"),
        ({"then": "q", "events": 1}, "got 1"),
        ({"then": "q", "tag": [1]}, "got [1]"),
        ({"then": "q", "tag": {"result": 1}}, "outcome, pool, request, result"),
        ({"then": "q", "tag": {"a": {1}}}, "JSON"),
        ({"then": "q", "tag": {"a": float("nan")}}, "JSON"),
        ({"then": "q", "tag": {"a": "x" * 65_536}}, "65536"),
        ({"priority": 10}, "got 10"),
        ({"priority": "high"}, "got 'high'"),
        ({"delay_seconds": -1}, "got -1"),
        ({"delay_seconds": 1, "at": 1}, "not both"),
        ({"at": datetime.datetime(2030, 1, 1)}, "time zone"),
        ({"keep_seconds": -1}, "got -1"),
        ({"keep_seconds": float("nan")}, "got nan"),
        ({"keep_seconds": True}, "got True"),
        ({"keep_seconds": 1e9}, "366 days"),
        ({"body": object()}, "JSON"),
        ({"body": float("inf")}, "JSON"),
    ],
)
def test_rejects_invalid_terms(app: App, terms: dict[str, Any], part: str) -> None:
    """Nothing is stored."""
    with pytest.raises(UsageError) as caught:
        app.request(**{"pool": "invoice", "body": 1, **terms})
    assert part in caught.value.details["reason"]
    assert store(app).records() == []


@pytest.mark.parametrize("name", ["", "a/b", "..", "x" * 201, 5])
def test_pools_and_queues_have_names_of_queues(app: App, name: Any) -> None:
    with pytest.raises(QueueNameError):
        app.request(name, 1)
    with pytest.raises(QueueNameError):
        app.request("invoice", 1, then=name)
    assert store(app).records() == []


def test_a_body_is_limited_as_that_of_a_message(app: App) -> None:
    with pytest.raises(BodyLimitError) as caught:
        app.request("invoice", b"x" * (app.settings.max_body_bytes + 1))
    assert caught.value.details["queue"] == "invoice"


def test_a_broker_without_requests_says_so(app: App, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the remedy; also for a handle."""
    monkeypatch.delattr(app.broker, "requests")
    for call in (lambda: app.request("invoice", 1), lambda: app.handle("a").state):
        with pytest.raises(UnsupportedError) as caught:
            call()
        assert "PostgreSQL" in caught.value.details["remedy"]


def test_default_headers_reach_the_request(app: App) -> None:
    """So a trace continues in its job; the id still tells equal requests."""
    for number in "12":
        app.default_headers = lambda number=number: {"traceparent": number}
        app.request("invoice", 1, id="a")
    assert record(app, "a").content == (b"1", '{"traceparent":"1"}')


# --- results ---


@pytest.mark.parametrize("value", [{"url": "ü"}, [], None, 0, "text", b"\x00\xff", b""])
def test_a_result_arrives_as_it_was_returned(app: App, value: Any) -> None:
    handle = app.request("invoice", 1)
    finish(app, value)
    assert handle.state == "over"
    assert handle.result() == value
    assert app.handle(handle.id).result(timeout_seconds=0) == value


def test_a_result_is_awaited(app: App) -> None:
    """By a thread and by a coroutine, until the worker ends it."""
    handle = app.request("invoice", 1)
    work = threading.Timer(0.1, finish, (app, 42))
    work.start()
    assert handle.result(timeout_seconds=20) == 42
    work.join()

    async def ask() -> Any:
        later = await app.arequest("invoice", 2, id="later")
        looped = asyncio.create_task(later.aresult(timeout_seconds=20))
        await asyncio.sleep(0.05)
        await asyncio.to_thread(finish, app, 43)
        return await looped

    assert asyncio.run(ask()) == 43


@pytest.mark.parametrize("seconds", [0, 0.02])
def test_a_result_may_come_too_late(app: App, seconds: float) -> None:
    handle = app.request("invoice", 1, id="a")
    take(app)
    for wait in (handle.result, lambda seconds: asyncio.run(handle.aresult(seconds))):
        with pytest.raises(RequestTimeoutError) as caught:
            wait(seconds)
        assert caught.value.details == {"id": "a", "seconds": seconds, "state": "running"}


def test_looks_become_rarer(app: App, monkeypatch: pytest.MonkeyPatch) -> None:
    """From 1 to 250 ms."""
    pauses: list[float] = []

    def sleep(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 35:
            finish(app, 1)

    handle = app.request("invoice", 1)
    monkeypatch.setattr("qdo.requests.calls.time.sleep", sleep)
    assert handle.result() == 1
    assert pauses == sorted(pauses)
    assert (pauses[0], pauses[-1]) == (0.001, 0.25)


@pytest.mark.parametrize("seconds", [-1, float("nan"), "5", True])
def test_rejects_an_invalid_timeout(app: App, seconds: Any) -> None:
    with pytest.raises(UsageError):
        app.request("invoice", 1).result(seconds)


@pytest.mark.parametrize("outcome", ["failed", "skipped"])
def test_another_outcome_is_an_error(app: App, outcome: str) -> None:
    handle = app.request("invoice", 1, id="a")
    assert store(app).end(take(app), outcome, error="ValueError: no")
    with pytest.raises(RequestFailedError) as caught:
        handle.result()
    wanted = {"id": "a", "pool": "invoice", "outcome": outcome, "reason": "ValueError: no"}
    assert caught.value.details == wanted
    assert not isinstance(caught.value, RequestCancelledError)


def test_a_damaged_result_is_an_error(app: App) -> None:
    """Another program wrote it."""
    handle = app.request("invoice", 1)
    store(app).end(take(app), "done", (b"{", None))
    with pytest.raises(RequestFailedError) as caught:
        handle.result()
    assert "cannot be read" in caught.value.details["reason"]


def test_a_missing_request_is_an_error(app: App) -> None:
    """One that never existed, and one that has expired."""
    over = app.request("invoice", 1, keep_seconds=0)
    finish(app, 1)
    store(app).expire()
    for handle in (over, app.handle("never")):
        for call in (handle.result, handle.cancel, handle.resume, lambda each=handle: each.state):
            with pytest.raises(RequestNotFoundError) as caught:
                call()
            assert caught.value.details["id"] == handle.id
            assert caught.value.exit_code == 6


@pytest.mark.parametrize("id", ["", "x" * 201, None, "\x00"])
def test_a_handle_needs_a_valid_id(app: App, id: Any) -> None:
    with pytest.raises(UsageError):
        app.handle(id)


# --- cancelling and resuming ---


def test_a_waiting_request_is_cancelled_at_once(app: App) -> None:
    """Its message is that of its end."""
    handle = app.request("invoice", 1, id="a", then="orders", key="k", tag={"do": "x"})
    assert handle.cancel("twice")
    assert handle.state == "over"
    with pytest.raises(RequestCancelledError) as caught:
        handle.result()
    assert caught.value.details["reason"] == "twice"
    told = {"request": "a", "take": 0, "pool": "invoice", "outcome": "cancelled", "result": None}
    assert messages(app, "orders") == [({"do": "x", **told, "error": "twice"}, "k")]
    assert handle.cancel()  # it is cancelled already
    assert len(messages(app, "orders")) == 1
    assert not store(app).take("worker-1", "invoice", 1, ()).requests


def test_any_error_can_be_told(app: App) -> None:
    """Names of files that are not UTF-8 are text with surrogates."""
    app.request("invoice", 1, id="a", then="orders")
    taken = take(app)
    reply = json.dumps({"then": "orders"})
    assert end_request(app, taken, "invoice", reply, "failed", "caf\udce9.pdf")
    ((body, _),) = messages(app, "orders")
    assert body["error"] == "caf\\udce9.pdf"


def test_a_running_request_gets_a_mark(app: App) -> None:
    """Its worker ends it; a request that ended otherwise stays so."""
    handle = app.request("invoice", 1, id="a", then="orders")
    taken = take(app)
    assert handle.cancel("twice")
    assert handle.state == "running"
    assert json.loads(record(app, "a").mark or "") == {"cancel": "twice"}
    assert messages(app, "orders") == []
    assert store(app).end(taken, "done", sealed(app, "invoice", 1))
    assert not handle.cancel()
    assert handle.result() == 1


def test_the_progress_is_shown_until_it_is_done(app: App) -> None:
    handle = app.request("invoice", 1)
    taken = take(app)
    assert handle.progress is None
    assert store(app).note(taken, RUNNING, "50%")
    assert handle.progress == "50%"
    assert store(app).end(taken, "done", sealed(app, "invoice", 1))
    assert handle.progress is None


def test_a_request_taken_meanwhile_gets_a_mark(app: App, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cancel that came too late for one that waits is repeated."""
    handle, requests = app.request("invoice", 1, id="a"), store(app)
    end = type(requests).end

    def late(self: RequestStore, *arguments: Any) -> bool:
        monkeypatch.setattr(type(requests), "end", end)
        take(app)
        return end(self, *arguments)

    monkeypatch.setattr(type(requests), "end", late)
    assert handle.cancel()
    assert record(app, "a").is_cancelled
    assert handle.state == "running"


@pytest.mark.parametrize("reason", ["\ud800\x00\x1b[31m", "x" * 5000, "a\nb", ""])
def test_a_reason_may_be_any_text(app: App, reason: str) -> None:
    handle = app.request("invoice", 1)
    assert handle.cancel(reason)
    with pytest.raises(RequestCancelledError) as caught:
        handle.result()
    shown = caught.value.details["reason"]
    assert shown.isprintable()
    assert 0 < len(shown) < 1100
    with pytest.raises(UsageError):
        handle.cancel(5)  # type: ignore[arg-type]


def test_a_paused_request_is_resumed(app: App) -> None:
    """Only while it is paused and not answered, and not if it is to be cancelled."""
    handle = app.request("invoice", 1, id="a")
    with pytest.raises(RequestStateError) as caught:
        handle.resume()
    told = {"id": "a", "expected": "paused", "state": "waiting", "note": None}
    assert caught.value.details == told
    taken = take(app)
    with pytest.raises(RequestStateError) as caught:
        handle.resume()
    assert caught.value.details["state"] == "running"
    assert store(app).note(taken, PAUSED, "approval?")
    assert handle.state == "paused"
    for value in ({1}, float("nan"), b"x", "x" * 65_536):
        with pytest.raises(UsageError):
            handle.resume(value)
    handle.resume({"by": "Ada"})
    with pytest.raises(RequestStateError) as caught:
        handle.resume({"by": "Bob"})
    assert caught.value.details["state"] == "answered already"
    assert json.loads(record(app, "a").mark or "") == {"resume": {"by": "Ada"}}
    handle.cancel("no")
    with pytest.raises(RequestStateError) as caught:
        handle.resume()
    assert caught.value.details["state"] == "being cancelled"
    assert store(app).end(taken, "cancelled")
    with pytest.raises(RequestStateError):
        handle.resume()


def test_handles_are_shown_by_id(app: App) -> None:
    assert repr(app.handle("a")) == "<Handle of request 'a'>"
    assert record(app, app.request("invoice", 1).id).state not in (RUNNING, OVER)


# --- encryption ---


@pytest.fixture
def encrypting(app: App, tmp_path: Path) -> App:
    """The app with a key, which encrypts bodies."""
    keys = write_keys(tmp_path / "keys", key("k1"))
    chosen = {"keys": keys, "encrypt": ("bodies",), "require_encryption": True}
    app.use(app.settings.merged(chosen, "the test"))
    return app


@pytest.mark.parametrize("value", [{"secret": 1}, b"secret"])
def test_bodies_and_results_are_encrypted(encrypting: App, value: Any) -> None:
    """The same request is recognized, although its ciphertext differs."""
    app = encrypting
    for _ in range(2):
        handle = app.request("invoice", value, id="a", then="orders")
    body = record(app, "a").content[0]
    assert key_id_of(body)
    assert b"secret" not in body
    finish(app, value)
    result = record(app, "a").result
    assert result is not None
    assert key_id_of(result[0])
    assert handle.result() == value


def test_a_result_belongs_to_its_pool(encrypting: App) -> None:
    """As a body to its queue: one that was moved is refused."""
    app = encrypting
    handle = app.request("invoice", 1)
    assert store(app).end(take(app), "done", sealed(app, "other", 1))
    with pytest.raises(BodyAuthenticationError):
        handle.result()


def test_the_message_of_a_cancel_is_encrypted(encrypting: App) -> None:
    app = encrypting
    app.request("invoice", 1, then="orders").cancel("twice")
    ((_, body, *_),) = app.broker.reader("orders", 0).fetch(10)
    assert key_id_of(body)
