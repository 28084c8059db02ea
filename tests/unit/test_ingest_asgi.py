"""Hostile requests to the ASGI receiver and to endpoints that verify for themselves."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi import Depends, FastAPI
from fastapi.testclient import TestClient
from starlette.applications import Starlette
from starlette.routing import Mount
from starlette.websockets import WebSocketDisconnect

from qdo import App, ingest
from qdo.connections.broker import OpenBroker
from qdo.contrib.starlette import verified
from qdo.errors import (
    DatabaseError,
    MessageTooLargeError,
    UnsupportedError,
    UsageError,
    WebhookRefusedError,
)
from qdo.ingest import asgi, verify
from qdo.sending.messages import NewMessage
from qdo.testing import TestKit
from tests.support.webhook_sender import SECRET, answer_of, signed

BODY = b'{"n": 1}'
SIGNED = {
    "content-type": "application/json",
    "content-length": str(len(BODY)),
    **signed("github", BODY),
}


@pytest.fixture
def app(monkeypatch: pytest.MonkeyPatch) -> App:
    monkeypatch.setenv("SECRET", SECRET)
    app = App("hooks", max_body_bytes=100_000)
    app.webhook("/github", queue="github", verify="github", secret="env:SECRET", max_bytes=200_000)
    return app


@pytest.fixture
def kit(app: App) -> Iterator[TestKit]:
    with TestKit(app, without_job="*") as kit:
        yield kit


def scope(headers: dict[str, str]) -> dict[str, Any]:
    raw = [(name.encode(), text.encode()) for name, text in headers.items()]
    return {"type": "http", "method": "POST", "path": "/github", "headers": raw}


@pytest.mark.parametrize(
    ("headers", "parts", "end", "status"),
    [
        ({}, [BODY[:3], b"", BODY[3:]], "more", 202),
        ({}, [BODY[:3]], "gone", 400),
        ({}, [BODY[:3]], "slow", 408),
        ({}, [BODY, b"x"], "slow", 400),
        ({}, [BODY[:-1] + b" "], "more", 401),
        *(({"content-length": each}, [BODY], "slow", 400) for each in ("-1", "8,8", "8.0", "+8")),
        ({"content-length": "9" * 5000}, [], "slow", 413),
        ({"content-length": "200001"}, [], "slow", 413),
        ({"content-length": "40000"}, [b"x" * 39_999], "slow", 503),
    ],
)
def test_a_hostile_request_gets_its_status(
    app: App,
    kit: TestKit,
    headers: dict[str, str],
    parts: list[bytes],
    end: str,
    status: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """At once if more bytes cannot help; the next request has the room of this one."""
    monkeypatch.setattr(ingest, "REQUEST_SECONDS", 0.05 if status == 408 else 60.0)
    monkeypatch.setattr(ingest, "MOST_BODIES_BYTES", 39_000)
    receiver = asgi(app)

    async def play() -> None:
        answer = await answer_of(receiver, scope({**SIGNED, **headers}), parts, end)
        assert answer[0] == status
        assert (b"retry-after" in answer[1]) == (status == 503)
        assert int(answer[1][b"content-length"]) > 0
        assert (await answer_of(receiver, scope(SIGNED), [BODY]))[0] == 202

    asyncio.run(play())
    assert len(kit.waiting("github")) == 1


def test_bodies_count_until_they_are_stored(
    app: App, kit: TestKit, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A broker that does not answer cannot fill the memory; each request holds its own bytes."""
    monkeypatch.setattr(ingest, "MOST_BODIES_BYTES", 80_000)
    body = b"x" * 60_000
    headers = {"content-length": str(len(body)), **signed("github", body)}
    begun = asyncio.Event()
    over = asyncio.Event()
    calls: list[Any] = []

    async def store(messages: Any) -> list[str]:
        calls.append(messages)
        begun.set()
        await over.wait()
        raise DatabaseError(path="x", reason="it is away")

    monkeypatch.setattr(kit.broker, "asend_many", store)
    receiver = asgi(app)

    async def play() -> None:
        first = asyncio.create_task(answer_of(receiver, scope(headers), [body]))
        await begun.wait()
        assert (await answer_of(receiver, scope(headers), [body]))[0] == 503
        over.set()
        assert (await first)[0] == 503
        assert (await answer_of(receiver, scope(headers), [body]))[0] == 503

    asyncio.run(play())
    assert len(calls) == 2, "the second one had no room"


def test_webhooks_at_once_are_stored_without_a_key(
    app: App, kit: TestKit, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the queue knows no keys; none of those that were under way at the first is refused."""
    store = kit.broker.asend_many
    both = asyncio.Barrier(2)

    async def refuse_keys(messages: Any) -> list[str]:
        if messages[0].terms is None:
            return await store(messages)
        await both.wait()
        raise UnsupportedError(broker="x", what="deduplicate messages", remedy="send without")

    monkeypatch.setattr(kit.broker, "asend_many", refuse_keys)
    receiver = asgi(app)

    async def play() -> list[int]:
        calls = [answer_of(receiver, scope(SIGNED), [BODY]) for _ in range(2)]
        return [status for status, _ in await asyncio.gather(*calls)]

    assert asyncio.run(play()) == [202, 202]
    assert len(kit.waiting("github")) == 2


@pytest.mark.parametrize("root", ["", "/shop"])
def test_it_is_mounted_below_a_path(app: App, kit: TestKit, root: str) -> None:
    """And its framework below that of a proxy, as with ``uvicorn --root-path /shop``."""
    web = Starlette(routes=[Mount("/hooks", asgi(app))])
    with TestClient(web, root_path=root) as client:
        got = client.post(f"{root}/hooks/github", content=BODY, headers=SIGNED)
        assert got.status_code == 202
        assert client.get(f"{root}/hooks/healthz").text == "OK\n"
        assert client.post(f"{root}/github", content=BODY, headers=SIGNED).status_code == 404
        socket = client.websocket_connect(f"{root}/hooks/github")
        with pytest.raises(WebSocketDisconnect), socket:
            pass


def test_the_broker_opens_beside_the_loop(
    app: App, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And an outage at the first webhook is answered as a later one."""
    monkeypatch.chdir(tmp_path)
    opened_on: list[int] = []
    opening = app._open_broker

    def open_broker() -> OpenBroker:
        opened_on.append(threading.get_ident())
        if len(opened_on) == 1:
            raise DatabaseError(path="x", reason="it is away")
        return opening()

    monkeypatch.setattr(app._broker, "_open", open_broker)
    receiver = asgi(app)

    async def play() -> list[int]:
        answers = [(await answer_of(receiver, scope(SIGNED), [BODY]))[0] for _ in range(3)]
        await app.aclose()
        return answers

    assert asyncio.run(play()) == [503, 202, 202]
    assert len(opened_on) == 2
    assert threading.get_ident() not in opened_on


@pytest.mark.parametrize("is_parsed", [False, True])
def test_an_endpoint_verifies_for_itself(app: App, kit: TestKit, is_parsed: bool) -> None:
    """Also if FastAPI has read the body for another parameter; the schema has the endpoint."""
    web = FastAPI()
    signature = Depends(verified(app, "/github"))

    async def plain(message: NewMessage = signature) -> str:
        return (await app.asend_many([message]))[0]

    async def parsed(event: dict[str, int], message: NewMessage = signature) -> str:
        assert event == {"n": 1}
        return (await app.asend_many([message]))[0]

    web.post("/in")(parsed if is_parsed else plain)
    with TestClient(web) as client:
        ids = {client.post("/in", content=BODY, headers=SIGNED).text for _ in range(2)}
        assert len(ids) == 1, "the second one is a repetition"
        refused = client.post("/in", content=BODY + b" ", headers=SIGNED | {"content-length": "9"})
        assert refused.status_code == 401
        assert refused.json() == {"detail": "Unauthorized"}
        chunks = client.post(
            "/in", content=iter([BODY]), headers={"content-type": "application/json"}
        )
        assert chunks.status_code == 411
        assert "post" in client.get("/openapi.json").json()["paths"]["/in"]
    assert kit.waiting("github") == [{"n": 1}]


def test_a_request_of_any_framework_is_verified(app: App, kit: TestKit) -> None:
    message = verify(app, "/github", {"X-Hub-Signature-256": SIGNED["x-hub-signature-256"]}, BODY)
    assert message.body == BODY
    assert app.send_many([message]) == app.send_many([message])
    assert len(kit.waiting("github")) == 1
    for headers, body, status in (({}, BODY, 401), (SIGNED, b"x" * 200_001, 413)):
        with pytest.raises(WebhookRefusedError) as found:
            verify(app, "/github", headers, body)
        assert found.value.details["status"] == status
    large = b"x" * 150_000
    with pytest.raises(MessageTooLargeError):
        app.send_many([verify(app, "/github", signed("github", large), large)])
    for make in (verify, verified):
        with pytest.raises(UsageError):
            make(app, "/gitub", *(({}, b"") if make is verify else ()))
