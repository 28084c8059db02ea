"""Serves the dashboard with gevent: slow clients, and streams of events, cost a greenlet each.

A page may wait for coordinator or broker, so it is made in a thread, and its greenlet waits. What a
client sends is read before that, within a time and up to a size.
"""

from __future__ import annotations

import io
import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import gevent
from gevent.pool import Pool
from gevent.pywsgi import WSGIHandler, WSGIServer
from gevent.threadpool import ThreadPool

THREADS = 16
CONNECTIONS = 500
REQUEST_SECONDS = 15.0
"""How long a client may take to send a request."""
SEND_SECONDS = 30.0
"""How long a client may take to receive one part of an answer."""
MOST_BODY_BYTES = 64 * 1024
STREAM = "text/event-stream"

_log = logging.getLogger(__name__)
StartResponse = Callable[..., Any]
WsgiApp = Callable[[dict[str, Any], StartResponse], Iterable[bytes]]


class ThreadedApp:
    """A WSGI app whose pages are made in threads."""

    def __init__(self, app: WsgiApp, threads: int = THREADS) -> None:
        self._app = app
        self._threads = ThreadPool(threads)

    def __call__(self, environ: dict[str, Any], start_response: StartResponse) -> Iterable[bytes]:
        body = _body(environ)
        if body is None:
            headers = [("Content-Type", "text/plain"), ("Connection", "close")]
            start_response("413 Content Too Large", headers)
            return [b"the request is too large, or came too slowly\n"]
        environ["wsgi.input"] = io.BytesIO(body)
        environ["wsgi.multithread"] = True
        begun: tuple[Any, ...]
        parts: Iterable[bytes]
        begun, parts = self._threads.apply(self._answer, (environ,))
        start_response(*begun)
        return parts

    def _answer(self, environ: dict[str, Any]) -> tuple[tuple[Any, ...], Iterable[bytes]]:
        begun: list[tuple[Any, ...]] = []

        def start(status: str, headers: list[tuple[str, str]], failure: Any = None) -> None:
            begun[:] = [(status, headers)]

        parts = self._app(environ, start)
        if STREAM in dict(begun[0][1]).get("Content-Type", ""):
            return begun[0], parts
        try:
            return begun[0], [b"".join(parts)]
        finally:
            close = getattr(parts, "close", None)
            if close is not None:
                close()


def _body(environ: dict[str, Any]) -> bytes | None:
    """Return what the client sends; None if that is too much, too slow or without a length."""
    source = environ["wsgi.input"]
    length = environ.get("CONTENT_LENGTH") or "0"
    chunked = bool(environ.get("HTTP_TRANSFER_ENCODING"))
    if not chunked and length.isdecimal() and int(length[:12]) <= MOST_BODY_BYTES:
        with gevent.Timeout(REQUEST_SECONDS, False):
            read: bytes = source.read(int(length))
            return read
    # Do not wait for the rest: the connection is closed.
    source.chunked_input, source.content_length = False, source.position
    return None


class _Handler(WSGIHandler):
    """Gives up on clients that send or receive too slowly."""

    def handle_one_request(self) -> Any:
        timeout = gevent.Timeout.start_new(REQUEST_SECONDS)
        self._sending = timeout
        try:
            return super().handle_one_request()  # type: ignore[no-untyped-call]
        except gevent.Timeout as error:
            if error is not timeout:
                raise
            return None  # closes the connection
        finally:
            timeout.close()

    def handle_one_response(self) -> None:
        self._sending.close()
        self.socket.settimeout(SEND_SECONDS)
        super().handle_one_response()  # type: ignore[no-untyped-call]


def make_server(app: WsgiApp, address: tuple[str, int], tls: Mapping[str, str]) -> WSGIServer:
    """Return a server that does not listen yet.

    :param tls: `certfile` and `keyfile`.
    """
    return WSGIServer(
        address,
        ThreadedApp(app),
        log=None,  # addresses have names of queues; logins and actions are logged
        error_log=_ErrorLog(),
        handler_class=_Handler,
        spawn=Pool(CONNECTIONS),
        **tls,
    )


class _ErrorLog:
    """Writes what gevent reports to the log."""

    def write(self, text: str) -> None:
        if text.strip():
            _log.warning("dashboard: %s", text.strip())

    def flush(self) -> None:
        pass
