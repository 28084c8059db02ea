"""Receives webhooks. Verifies a request, stores it, and only then acknowledges it.

A receiver has no state. If a receiver dies before it stores a request, the sender gets no answer
and repeats the request. If the receiver dies later, the broker recognizes the repetition by its
deduplication key. The key comes from signed bytes. An attacker who has read a webhook can change
its headers, but cannot sign another body.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import re
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from http import HTTPStatus
from typing import Any, TypeVar

from qdo.brokers.base import LASTING_DEDUP_SECONDS
from qdo.encoding import CONTENT_TYPE, JsonText, is_json, is_json_text
from qdo.errors import (
    MessageTooLargeError,
    QdoError,
    UnsupportedError,
    UsageError,
    WebhookRefusedError,
)
from qdo.sending.messages import NewMessage
from qdo.sending.sender import Sender
from qdo.system.web_server import (
    MOST_BODIES_BYTES,
    REQUEST_SECONDS,
    SMALL_BODY_BYTES,
    Admission,
    WsgiApp,
)
from qdo.text import did_you_mean
from qdo.webhook_signatures import SCHEMES, Headers

_MORE_HEADERS = {405: ("Allow", "POST"), 503: ("Retry-After", "5")}
_is_plain = re.compile("[ -~]+").fullmatch
# Headers that WSGI names without HTTP_.
_WITHOUT_PREFIX = (CONTENT_TYPE, "content-length")
_is_length = re.compile("[0-9]+").fullmatch
_log = logging.getLogger(__name__)
_Result = TypeVar("_Result")
# The parts of ASGI that a receiver uses.
Scope = Mapping[str, Any]
Receive = Callable[[], Awaitable[Mapping[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]


def wsgi(app: Sender) -> WebhookEndpoints:
    """Return a WSGI app that receives the webhooks of an app, to serve or mount.

    :raises UsageError: the app has no webhook, or a secret is missing or invalid.
    """
    if not app.webhooks:
        reason = f"app {app.name!r} must have a webhook; declare one with app.webhook"
        raise UsageError(reason=reason)
    return WebhookEndpoints(app, {path: each.keys() for path, each in app.webhooks.items()})


def asgi(app: Sender) -> Callable[[Scope, Receive, Send], Awaitable[None]]:
    """Return an ASGI app that receives the webhooks of an app, to serve or mount.

    The app checks and answers requests like `wsgi`, and uses no thread for a request.

    >>> web.mount("/hooks", qdo.ingest.asgi(app))

    :raises UsageError: as `wsgi`.
    """
    endpoints = wsgi(app)

    async def receiver(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":  # refused by a server that offers a lifespan: it has none
            await send({"type": "websocket.close"})
            return
        # A framework that mounts an app leaves the whole path in the scope, and `root_path` names
        # its beginning.
        path = str(scope["path"]).removeprefix(scope.get("root_path", ""))
        headers = headers_of(scope)
        parts = _parts(receive)
        status = await endpoints.areceive(scope["method"], path, headers, parts, endpoints.astore)
        more, body = endpoints.answer(path, status)
        more.append(("Content-Length", str(len(body))))  # or servers send it in chunks
        raw = [(name.lower().encode(), text.encode()) for name, text in more]
        await send({"type": "http.response.start", "status": status, "headers": raw})
        await send({"type": "http.response.body", "body": body})

    return receiver


def verify(app: Sender, path: str, headers: Mapping[str, str], body: bytes) -> NewMessage:
    """Verify a webhook at an endpoint of your own, and return the message that stores it once.

    >>> message = qdo.ingest.verify(app, "/github", request.headers, request.body)
    >>> app.send_many([message])

    :param path: the path of a declared webhook; the path of the endpoint may be another one.
    :param body: the raw bytes of the request, which the sender signed.
    :raises WebhookRefusedError: the signature is not valid, or the body has too many bytes.
        `details` has the HTTP `status` of the answer.
    :raises UsageError: the app has no such webhook, or its secret is missing or invalid.
    """
    endpoints = endpoints_of(app, path)
    lower = {name.lower(): text for name, text in headers.items()}
    lower.pop("transfer-encoding", None)  # the server has decoded the body
    lower["content-length"] = str(len(body))
    status = endpoints.status_of_head("POST", path, lower)
    if status := status or endpoints.status_of_body(path, lower, body):
        reason = HTTPStatus(status).phrase
        raise WebhookRefusedError(path=path, status=status, reason=reason)
    return endpoints.message(path, lower, body)


def endpoints_of(app: Sender, path: str) -> WebhookEndpoints:
    """Return endpoints with one path; raise UsageError if the app has no webhook for it."""
    if path not in app.webhooks:
        hint = did_you_mean(path, app.webhooks)
        raise UsageError(reason=f"app {app.name!r} has no webhook for {path!r:.100}{hint}")
    return WebhookEndpoints(app, {path: app.webhooks[path].keys()})


class WebhookEndpoints:
    """The WSGI app of `wsgi`, and the decisions about each request.

    :param keys: the keys that verify the requests of each path.
    """

    def __init__(self, app: Sender, keys: Mapping[str, Sequence[bytes]]) -> None:
        self._app = app
        self._keys = keys
        self._lock = threading.Lock()
        self._counts: Counter[tuple[str, int]] = Counter()
        self._refused = False
        self._repeated: set[str] = set()
        self._body_bytes = 0

    def __call__(
        self, environ: Mapping[str, Any], start_response: Callable[..., Any]
    ) -> Iterable[bytes]:
        path = environ.get("PATH_INFO", "")
        headers = _headers_of(environ)
        status = self.status_of_head(environ["REQUEST_METHOD"], path, headers)
        if status is None:
            body = environ["wsgi.input"].read(int(headers["content-length"]))
            status = self.status_of_body(path, headers, body)
        return self._answer(path, status or self.store(path, headers, body))({}, start_response)

    def admit(self, environ: Mapping[str, Any]) -> Admission:
        """Accept or reject a request by its head, before a server reads the body."""
        path = environ.get("PATH_INFO", "")
        status = self.status_of_head(environ["REQUEST_METHOD"], path, _headers_of(environ))
        if status is not None:
            return Admission(self._answer(path, status))
        webhook = self._app.webhooks[path]
        return Admission(None, webhook.max_bytes, webhook.queue)

    def answer(self, path: str, code: int) -> tuple[list[tuple[str, str]], bytes]:
        """Count a status; return the headers and the body of the answer."""
        status = HTTPStatus(code)
        if status != 200:  # skip health checks of a load balancer
            with self._lock:
                self._counts[path if path in self._app.webhooks else "other paths", status] += 1
        more = [each for code, each in _MORE_HEADERS.items() if code == status]
        return [("Content-Type", "text/plain"), *more], f"{status.phrase}\n".encode()

    def _answer(self, path: str, code: int) -> WsgiApp:
        headers, body = self.answer(path, code)

        def answer(_: Any, start_response: Callable[..., Any]) -> Iterable[bytes]:
            start_response(f"{code} {HTTPStatus(code).phrase}", headers)
            return [body]

        return answer

    def status_of_head(self, method: str, path: str, headers: Headers) -> int | None:
        """Return the status of a request if its head decides the status, otherwise None."""
        webhook = self._app.webhooks.get(path)
        if webhook is None:
            return 200 if path == "/healthz" else 404
        if method != "POST":
            return 405
        length = headers.get("content-length", "")
        if not length or "transfer-encoding" in headers:
            return 411
        if not _is_length(length):
            return 400
        if len(length) > 9 or int(length) > webhook.max_bytes:  # it may have any number of zeros
            return 413
        return None if SCHEMES[webhook.verify].may_verify(headers, time.time()) else 401

    def status_of_body(self, path: str, headers: Headers, body: bytes) -> int | None:
        """Return the status of a request that its body decides, or None for a verified request."""
        if len(body) != int(headers["content-length"]):  # some servers forward incomplete bodies
            return 400
        scheme = SCHEMES[self._app.webhooks[path].verify]
        return None if scheme.verifies(self._keys[path], headers, body, time.time()) else 401

    def message(self, path: str, headers: Headers, body: bytes) -> NewMessage:
        """Return the message of a verified request, with a key that recognizes its repetition."""
        webhook = self._app.webhooks[path]
        kind = headers.get(CONTENT_TYPE, "")
        is_value = (is_json(kind) or not kind) and is_json_text(body)
        names = SCHEMES[webhook.verify].passed_on
        if is_value or not is_json(kind):  # store a body that falsely claims to be JSON as bytes
            names = (*names, CONTENT_TYPE)
        kept = {name: headers[name] for name in names if _is_plain(headers.get(name, ""))}
        content = JsonText(body) if is_value else body
        message = NewMessage(webhook.queue, content, headers=kept, kind=webhook.kind)
        identity = SCHEMES[webhook.verify].identity(headers, body)
        if identity is None or path in self._repeated:
            return message
        digest = hashlib.sha256(path.encode() + b"\0" + identity).hexdigest()
        window = self._app.broker.capabilities.dedup_seconds or LASTING_DEDUP_SECONDS
        return replace(message, dedup_key=digest, dedup_seconds=window)

    async def amessage(self, path: str, headers: Headers, body: bytes) -> NewMessage:
        if not self._app._broker.is_open():
            await self._app.aopen()
        return self.message(path, headers, body)

    def store(self, path: str, headers: Headers, body: bytes, again: bool = False) -> int:
        """Store a verified webhook; return the status of the answer."""
        try:
            self._app.send_many([self.message(path, headers, body)])
        except QdoError as error:
            status = self._status_of_error(path, error, again)
            return status or self.store(path, headers, body, again=True)
        self._refused = False
        return 202

    async def astore(self, path: str, headers: Headers, body: bytes, again: bool = False) -> int:
        """Store like `store`, without blocking the loop."""
        try:
            await self._app.asend_many([await self.amessage(path, headers, body)])
        except QdoError as error:
            status = self._status_of_error(path, error, again)
            return status or await self.astore(path, headers, body, again=True)
        self._refused = False
        return 202

    def _status_of_error(self, path: str, error: QdoError, again: bool) -> int | None:
        """Return the status of the answer, or None: store the webhook again, without its key."""
        if isinstance(error, MessageTooLargeError):
            return 413
        if isinstance(error, UnsupportedError) and not again:
            if path not in self._repeated:  # Kinesis and standard queues of SQS
                self._repeated.add(path)
                _log.warning("repeated webhooks of %s are stored again: %s", path, error)
            return None
        if not self._refused:
            place = f"{path} in queue {self._app.webhooks[path].queue}"
            _log.warning("cannot store webhooks of %s: %s; their senders get 503", place, error)
        self._refused = True
        return 503

    async def areceive(
        self,
        method: str,
        path: str,
        headers: Headers,
        parts: AsyncIterator[bytes],
        use: Callable[[str, Headers, bytes], Awaitable[_Result]],
    ) -> int | _Result:
        """Verify a request; return what `use` returns for it, or else the status of the answer.

        :param parts: the body as it arrives.
        """
        status = self.status_of_head(method, path, headers)
        if status is not None:
            return status
        body = bytearray()
        try:
            status = await self._read(parts, int(headers["content-length"]), body)
            whole = bytes(body)
            status = status or self.status_of_body(path, headers, whole)
            return status or await use(path, headers, whole)
        finally:
            self._body_bytes -= len(body)

    async def _read(self, parts: AsyncIterator[bytes], length: int, body: bytearray) -> int | None:
        """Read a body within the limits of `qdo ingest`; return a status if a limit is exceeded."""
        # Count only received bytes. A client that only announces a large body must not take room.
        try:
            async with asyncio.timeout(REQUEST_SECONDS):
                async for part in parts:
                    body += part
                    self._body_bytes += len(part)
                    if len(body) > length:
                        return 400
                    if length > SMALL_BODY_BYTES and self._body_bytes > MOST_BODIES_BYTES:
                        return 503
        except TimeoutError:
            return 408
        return None

    def log_counts(self) -> None:
        """Log the number of requests with each status since the last call, if any."""
        with self._lock:
            counts = sorted(self._counts.items())
            self._counts.clear()
        if counts:
            texts = [f"{path} {status}: {count}" for (path, status), count in counts]
            _log.info("webhooks answered: %s", ", ".join(texts))


async def _parts(receive: Receive) -> AsyncIterator[bytes]:
    """Yield the parts of a body. End early if the client disconnects."""
    more = True
    while more:
        event = await receive()
        yield event.get("body", b"")
        more = event.get("more_body", False)


def headers_of(scope: Scope) -> dict[str, str]:
    """Return the headers of an ASGI request by name; the last one counts if one is repeated."""
    return {name.decode("latin-1"): text.decode("latin-1") for name, text in scope["headers"]}


def _headers_of(environ: Mapping[str, Any]) -> dict[str, str]:
    headers = {
        name[5:].replace("_", "-").lower(): text
        for name, text in environ.items()
        if name.startswith("HTTP_")
    }
    own = {name: environ.get(name.upper().replace("-", "_"), "") for name in _WITHOUT_PREFIX}
    return {**headers, **own}
