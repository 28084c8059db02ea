"""Hostile requests to the ASGI receiver and to endpoints that verify for themselves."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from fastapi import Depends, FastAPI
from fastapi.testclient import TestClient
from starlette.applications import Starlette
from starlette.routing import Mount
from starlette.websockets import WebSocketDisconnect

from qdo import App, errors, ingest
from qdo.contrib.starlette import verified
from qdo.sending.messages import NewMessage
from qdo.testing import TestKit
from tests.support.webhook_sender import SECRET, answer_of, signed

BODY = b'{"n": 1}'
SIGNED = {
    "content-type": "application/json",
    "content-length": str(len(BODY)),
    **signed("github", BODY),
}
AWAY = errors.DatabaseError(path="x", reason="it is away")


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


async def answer(
    receiver: Any, parts: Sequence[bytes] = (BODY,), end: str = "more", **changed: str
) -> tuple[int, dict[bytes, bytes]]:
    """Return the status and the headers for a webhook, some of whose headers are changed."""
    given = SIGNED | {name.replace("_", "-"): text for name, text in changed.items()}
    raw = [(name.encode(), text.encode()) for name, text in given.items()]
    scope = {"type": "http", "method": "POST", "path": "/github", "headers": raw}
    return await answer_of(receiver, {**scope, "query_string": b""}, parts, end)


def endpoints(app: App) -> FastAPI:
    """Return endpoints that verify for themselves; FastAPI reads the body of one before."""
    web = FastAPI()
    signature = Depends(verified(app, "/github"))

    @web.post("/github", status_code=202)
    async def plain(message: NewMessage = signature) -> str:
        return (await app.asend_many([message]))[0]

    @web.post("/parsed")
    async def parsed(event: dict[str, int], message: NewMessage = signature) -> str:
        return (await app.asend_many([message]))[event["n"] - 1]

    return web


@pytest.mark.parametrize("make", [ingest.asgi, endpoints])
@pytest.mark.parametrize(
    ("webhook", "status"),
    [
        ({"parts": [BODY[:3], b"", BODY[3:]]}, 202),
        ({"parts": [BODY[:3]], "end": "gone"}, 400),
        ({"parts": [BODY[:3]], "end": "slow"}, 408),
        ({"parts": [BODY, b"x"], "end": "slow"}, 400),
        ({"parts": [BODY[:-1] + b" "]}, 401),
        *(({"content_length": each, "end": "slow"}, 400) for each in ("-1", "8,8", "8.0", "+8")),
        ({"content_length": "9" * 5000, "end": "slow"}, 413),
        ({"content_length": "200001", "end": "slow"}, 413),
        ({"content_length": "40000", "parts": [b"x" * 39_999], "end": "slow"}, 503),
    ],
)
def test_a_hostile_request_gets_its_status(
    app: App,
    kit: TestKit,
    make: Any,
    webhook: dict[str, Any],
    status: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """At once if more bytes cannot help; the next request has the room of this one."""
    monkeypatch.setattr(ingest, "REQUEST_SECONDS", 0.05 if status == 408 else 60.0)
    monkeypatch.setattr(ingest, "MOST_BODIES_BYTES", 39_000)
    receiver = make(app)
    code, headers = asyncio.run(answer(receiver, **webhook))
    assert code == status
    assert (b"retry-after" in headers) == (status == 503)
    assert int(headers[b"content-length"]) > 0
    assert asyncio.run(answer(receiver))[0] == 202
    assert len(kit.waiting("github")) == 1


def test_bodies_count_until_they_are_stored(
    app: App, kit: TestKit, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A broker that does not answer cannot fill the memory; each request holds its own bytes."""
    monkeypatch.setattr(ingest, "MOST_BODIES_BYTES", 80_000)
    body = b"x" * 60_000
    large: Any = {"parts": [body], "content_length": "60000", **signed("github", body)}
    receiver = ingest.asgi(app)
    meanwhile: list[int] = []

    async def store(messages: Any) -> list[str]:
        meanwhile.append((await answer(receiver, **large))[0])
        raise AWAY

    async def play() -> list[int]:
        return [(await answer(receiver, **large))[0] for _ in range(2)]

    monkeypatch.setattr(kit.broker, "asend_many", store)
    assert asyncio.run(play()) == [503, 503]
    assert meanwhile == [503, 503], "none of these had room"


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
        raise errors.UnsupportedError(broker="x", what="know keys", remedy="send without")

    async def play() -> set[int]:
        return {code for code, _ in await asyncio.gather(answer(receiver), answer(receiver))}

    monkeypatch.setattr(kit.broker, "asend_many", refuse_keys)
    receiver = ingest.asgi(app)
    assert asyncio.run(play()) == {202}
    assert len(kit.waiting("github")) == 2


def test_it_is_mounted_below_a_path(app: App, kit: TestKit) -> None:
    """And its framework below that of a proxy, as with ``uvicorn --root-path /shop``."""
    web = Starlette(routes=[Mount("/hooks", ingest.asgi(app))])
    with TestClient(web, root_path="/shop") as client:
        for path, status in (("/shop/hooks/github", 202), ("/shop/github", 404)):
            assert client.post(path, content=BODY, headers=SIGNED).status_code == status
        assert client.get("/shop/hooks/healthz").text == "OK\n"
        with pytest.raises(WebSocketDisconnect), client.websocket_connect("/shop/hooks/github"):
            pass


def test_the_broker_opens_beside_the_loop(
    app: App, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And an outage at the first webhook is answered as a later one."""
    monkeypatch.chdir(tmp_path)
    threads: list[int] = []
    opening = app._open_broker

    def open_broker() -> Any:
        threads.append(threading.get_ident())
        if len(threads) == 1:
            raise AWAY
        return opening()

    async def play() -> list[int]:
        codes = [(await answer(receiver))[0] for _ in range(3)]
        await app.aclose()
        return codes

    monkeypatch.setattr(app._broker, "_open", open_broker)
    receiver = ingest.asgi(app)
    assert asyncio.run(play()) == [503, 202, 202]
    assert len(threads) == 2
    assert threading.get_ident() not in threads


@pytest.mark.parametrize("path", ["/github", "/parsed"])
def test_an_endpoint_verifies_for_itself(app: App, kit: TestKit, path: str) -> None:
    """Once for each event; the schema has the endpoint."""
    with TestClient(endpoints(app)) as client:
        ids = {client.post(path, content=BODY, headers=SIGNED).text for _ in range(2)}
        assert len(ids) == 1, "the second one is a repetition"
        refused = client.post(path, content=BODY + b" ", headers=SIGNED | {"content-length": "9"})
        assert (refused.status_code, refused.json()) == (401, {"detail": "Unauthorized"})
        kind = {"content-type": "application/json"}
        assert client.post(path, content=iter([BODY]), headers=kind).status_code == 411
        assert "post" in client.get("/openapi.json").json()["paths"][path]
    assert kit.waiting("github") == [{"n": 1}]


def test_a_request_of_any_framework_is_verified(app: App, kit: TestKit) -> None:
    signature = SIGNED["x-hub-signature-256"]
    headers = {"X-Hub-Signature-256": signature, "Transfer-Encoding": "chunked"}
    message = ingest.verify(app, "/github", headers, BODY)
    assert message.body == BODY
    assert app.send_many([message]) == app.send_many([message])
    for headers, body, status in (({}, BODY, 401), (SIGNED, b"x" * 200_001, 413)):
        with pytest.raises(errors.WebhookRefusedError) as found:
            ingest.verify(app, "/github", headers, body)
        assert found.value.details["status"] == status
    large = b"x" * 150_000
    with pytest.raises(errors.MessageTooLargeError):
        app.send_many([ingest.verify(app, "/github", signed("github", large), large)])
    with pytest.raises(errors.UsageError):
        ingest.verify(app, "/gitub", {}, b"")
    with pytest.raises(errors.UsageError):
        verified(app, "/gitub")
