"""Receive webhooks: verify a request, store it, and only then acknowledge it.

A receiver has no state. If it dies before it stores a request, the sender gets no answer and
repeats the request. If it dies later, the broker recognizes the repetition by its deduplication
key. The key comes from signed bytes, because an attacker who has read a webhook can change its
headers, but cannot sign another body.
"""

from __future__ import annotations

import hashlib
import logging
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from http import HTTPStatus
from typing import Any

from qdo.encoding import CONTENT_TYPE, JsonText, is_json, is_json_text
from qdo.errors import MessageTooLargeError, QdoError, UnsupportedError, UsageError
from qdo.sending.messages import NewMessage, build_outgoing
from qdo.sending.sender import Sender
from qdo.system.web_server import Admission, WsgiApp
from qdo.webhook_signatures import SCHEMES, Headers
from qdo.webhooks import DeclaredWebhook

_MORE_HEADERS = {405: ("Allow", "POST"), 503: ("Retry-After", "5")}
_is_plain = re.compile("[ -~]+").fullmatch
_log = logging.getLogger(__name__)


def wsgi(app: Sender) -> WebhookEndpoints:
    """Return a WSGI app that receives the webhooks of an app, to serve or mount.

    :raises UsageError: the app has no webhook, or a secret is missing or invalid.
    """
    if not app.webhooks:
        reason = f"app {app.name!r} must have a webhook; declare one with app.webhook"
        raise UsageError(reason=reason)
    return WebhookEndpoints(app, {path: each.keys() for path, each in app.webhooks.items()})


class WebhookEndpoints:
    """The WSGI app of `wsgi`.

    :param keys: the keys that verify the requests of each path.
    """

    def __init__(self, app: Sender, keys: Mapping[str, Sequence[bytes]]) -> None:
        self._app = app
        self._keys = keys
        self._lock = threading.Lock()
        self._counts: Counter[tuple[str, int]] = Counter()
        self._refused = False
        self._repeated: set[str] = set()

    def __call__(
        self, environ: Mapping[str, Any], start_response: Callable[..., Any]
    ) -> Iterable[bytes]:
        return self._answer(environ, self._status(environ))({}, start_response)

    def admit(self, environ: Mapping[str, Any]) -> Admission:
        """Accept or reject a request by its head, before a server reads the body."""
        status = self._status_of_head(environ)
        if status is not None:
            return Admission(self._answer(environ, status))
        webhook = self._app.webhooks[environ["PATH_INFO"]]
        return Admission(None, webhook.max_bytes, webhook.queue)

    def _answer(self, environ: Mapping[str, Any], code: int) -> WsgiApp:
        """Count a status, and return a WSGI app that answers with this status."""
        status = HTTPStatus(code)
        path = environ.get("PATH_INFO", "")
        if status != 200:  # skip health checks of a load balancer
            with self._lock:
                self._counts[path if path in self._app.webhooks else "other paths", status] += 1
        more = [each for code, each in _MORE_HEADERS.items() if code == status]

        def answer(_: Any, start_response: Callable[..., Any]) -> Iterable[bytes]:
            start_response(
                f"{status.value} {status.phrase}", [("Content-Type", "text/plain"), *more]
            )
            return [f"{status.phrase}\n".encode()]

        return answer

    def _status_of_head(self, environ: Mapping[str, Any]) -> int | None:
        """Return the status of a request if its head decides it, else None."""
        path = environ.get("PATH_INFO", "")
        webhook = self._app.webhooks.get(path)
        if webhook is None:
            return 200 if path == "/healthz" else 404
        if environ["REQUEST_METHOD"] != "POST":
            return 405
        if not environ.get("CONTENT_LENGTH"):
            return 411
        if not 0 <= int(environ["CONTENT_LENGTH"]) <= webhook.max_bytes:
            return 413
        scheme = SCHEMES[webhook.verify]
        return None if scheme.may_verify(_headers_of(environ), time.time()) else 401

    def _status(self, environ: Mapping[str, Any]) -> int:
        if (status := self._status_of_head(environ)) is not None:
            return status
        path = environ["PATH_INFO"]
        length = int(environ["CONTENT_LENGTH"])
        webhook = self._app.webhooks[path]
        headers = _headers_of(environ)
        body = environ["wsgi.input"].read(length)
        if len(body) != length:  # some servers forward incomplete bodies
            return 400
        if not SCHEMES[webhook.verify].verifies(self._keys[path], headers, body, time.time()):
            return 401
        return self.store(webhook, {**headers, CONTENT_TYPE: environ.get("CONTENT_TYPE", "")}, body)

    def store(self, webhook: DeclaredWebhook, headers: Headers, body: bytes) -> int:
        """Store a verified webhook; return the status of the answer."""
        kind = headers.get(CONTENT_TYPE, "")
        is_value = (is_json(kind) or not kind) and is_json_text(body)
        names = SCHEMES[webhook.verify].passed_on
        if is_value or not is_json(kind):  # a body that falsely claims to be JSON becomes bytes
            names = (*names, CONTENT_TYPE)
        kept = {name: headers[name] for name in names if _is_plain(headers.get(name, ""))}
        message = NewMessage(webhook.queue, JsonText(body) if is_value else body, headers=kept)
        try:
            self._send(webhook, SCHEMES[webhook.verify].identity(headers, body), message)
        except MessageTooLargeError:
            return 413
        except QdoError as error:
            if not self._refused:
                place = f"{webhook.path} in queue {webhook.queue}"
                _log.warning("cannot store webhooks of %s: %s; their senders get 503", place, error)
            self._refused = True
            return 503
        self._refused = False
        return 202

    def _send(self, webhook: DeclaredWebhook, identity: bytes | None, message: NewMessage) -> None:
        path = webhook.path
        if identity is None or path in self._repeated:
            self._app.send_many([message])
            return

        def on_unsupported(error: UnsupportedError) -> None:
            self._repeated.add(path)
            _log.warning("repeated webhooks of %s are stored again: %s", path, error)

        digest = hashlib.sha256(path.encode() + b"\0" + identity).hexdigest()
        self._app._store_once([build_outgoing(message)], [digest], on_unsupported)

    def log_counts(self) -> None:
        """Log the number of requests with each status since the last call, if there were any."""
        with self._lock:
            counts = sorted(self._counts.items())
            self._counts.clear()
        if counts:
            texts = [f"{path} {status}: {count}" for (path, status), count in counts]
            _log.info("webhooks answered: %s", ", ".join(texts))


def _headers_of(environ: Mapping[str, Any]) -> dict[str, str]:
    return {
        name[5:].replace("_", "-").lower(): text
        for name, text in environ.items()
        if name.startswith("HTTP_")
    }
