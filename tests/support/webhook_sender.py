"""Senders of webhooks for tests, which sign by the senders' documents and not with qdo."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import http.client
import io
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from datetime import UTC, datetime
from inspect import iscoroutinefunction
from typing import Any
from wsgiref.util import setup_testing_defaults
from wsgiref.validate import validator

from standardwebhooks.webhooks import Webhook

SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
"""A secret that each scheme can have."""
SIGNED = ("github", "gitlab", "standard", "stripe")


def signed(scheme: str, body: bytes, id: str = "", at: float | None = None) -> dict[str, str]:
    """Return the headers of a webhook."""
    now = int(time.time() if at is None else at)
    if scheme == "github":
        return {"x-hub-signature-256": f"sha256={_hex(body)}", "x-github-delivery": id}
    if scheme == "gitlab":
        return {"x-gitlab-token": SECRET, "idempotency-key": id}
    if scheme == "stripe":
        return {"stripe-signature": f"t={now},v1={_hex(b'%d.' % now + body)}"}
    moment = datetime.fromtimestamp(now, UTC)
    signature = Webhook(SECRET).sign(id, moment, body.decode())
    return {"webhook-id": id, "webhook-timestamp": str(now), "webhook-signature": signature}


def _hex(signed: bytes) -> str:
    return hmac.new(SECRET.encode(), signed, hashlib.sha256).hexdigest()


def deliver(
    app: Callable[..., Any], path: str, body: bytes, headers: Mapping[str, str], **environ: str
) -> int:
    """Deliver to an ASGI app, or a WSGI app, which must obey PEP 3333; return the status."""
    names = {f"HTTP_{name.upper().replace('-', '_')}": text for name, text in headers.items()}
    kind = {"CONTENT_TYPE": names.pop("HTTP_CONTENT_TYPE", "application/json")}
    given = {"REQUEST_METHOD": "POST", "PATH_INFO": path, "CONTENT_LENGTH": str(len(body))}
    given |= {"QUERY_STRING": "", "SCRIPT_NAME": ""}
    request: dict[str, Any] = {**given, **names, **kind, "wsgi.input": io.BytesIO(body), **environ}
    setup_testing_defaults(request)
    if iscoroutinefunction(app):
        return asyncio.run(answer_of(app, scope_of(request), [body]))[0]
    found: list[str] = []
    answer = validator(app)(request, lambda status, headers: found.append(status))  # type: ignore[arg-type]
    with closing(answer):  # type: ignore[type-var]
        assert b"".join(answer)
    return int(found[0].split()[0])


def scope_of(environ: Mapping[str, Any]) -> dict[str, Any]:
    """Return the scope of an ASGI request from the environ of the same WSGI request."""
    names = {each: each.removeprefix("HTTP_") for each in environ if each.startswith("HTTP_")}
    names |= {each: each for each in ("CONTENT_TYPE", "CONTENT_LENGTH") if environ[each]}
    headers = [
        (name.lower().replace("_", "-").encode(), environ[each].encode("latin-1"))
        for each, name in names.items()
    ]
    head = {"type": "http", "method": environ["REQUEST_METHOD"], "headers": headers}
    return {**head, "path": environ["SCRIPT_NAME"] + environ["PATH_INFO"]}


async def answer_of(
    app: Callable[..., Any], request: Mapping[str, Any], parts: Sequence[bytes], end: str = "more"
) -> tuple[int, dict[bytes, bytes]]:
    """Send the parts of a body to an ASGI app; return the status and headers of its answer.

    :param end: "gone": the client disconnects after the parts; "slow": it sends no more.
    """
    events: list[dict[str, Any]] = [
        {"type": "http.request", "body": part, "more_body": True} for part in parts
    ]
    if end == "gone":
        events.append({"type": "http.disconnect"})
    elif end != "slow":
        events.append({"type": "http.request"})
    answers: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        return events.pop(0) if events else await asyncio.Event().wait()  # type: ignore[return-value]

    async def send(event: dict[str, Any]) -> None:
        answers.append(event)

    await app(request, receive, send)
    start, body = answers
    assert body["body"]
    return start["status"], dict(start["headers"])


def post(port: int, path: str, body: bytes, headers: Mapping[str, str]) -> int:
    """POST to a port of 127.0.0.1; return the status, 0 without an answer."""
    try:
        with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=20)) as connection:
            connection.request("POST", path, body, dict(headers))
            return connection.getresponse().status
    except (OSError, http.client.HTTPException):
        return 0
