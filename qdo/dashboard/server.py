"""Serves the dashboard with gevent: slow clients, and streams of events, cost a greenlet each.

A page may wait for coordinator or broker, so it is made in a thread, and its greenlet waits. What a
client sends is read before that, within a time and up to a size.
"""

from __future__ import annotations

import io
import logging
from collections.abc import Callable, Iterable, Mapping
from http.client import HTTPException
from typing import Any

import gevent
from gevent.pool import Pool
from gevent.pywsgi import WSGIHandler, WSGIServer
from gevent.threadpool import ThreadPool

from qdo.text import describe

THREADS = 16
CONNECTIONS = 500
REQUEST_SECONDS = 15.0
"""How long a client may take to send a request."""
SEND_SECONDS = 30.0
"""How long a client may take to receive one part of an answer."""
MOST_BODY_BYTES = 64 * 1024
MOST_HEADER_BYTES = 32 * 1024
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
        try:
            body = _body(environ)
        except _RefusedError as error:
            headers = [("Content-Type", "text/plain"), ("Connection", "close")]
            start_response(error.status, headers)
            return [f"{error}\n".encode()]
        environ["wsgi.input"] = io.BytesIO(body)
        environ["CONTENT_LENGTH"] = str(len(body))
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


class _RefusedError(Exception):
    """A request that is refused, with a status of HTTP."""

    def __init__(self, status: str, reason: str) -> None:
        super().__init__(reason)
        self.status = status


def _body(environ: Mapping[str, Any]) -> bytes:
    """Return what the client sends.

    :raises _RefusedError: that is too much, too slow or not complete.
    """
    source = environ["wsgi.input"]
    try:
        length = _length(environ)
        with gevent.Timeout(REQUEST_SECONDS, False):
            body: bytes = source.read(length)
            return body
        raise _RefusedError("408 Request Timeout", "the request came too slowly")
    except OSError as error:
        raise _RefusedError("400 Bad Request", "the request ended early") from error
    finally:
        # Do not wait for the rest: the connection is closed.
        source.chunked_input, source.content_length = False, source.position


def _length(environ: Mapping[str, Any]) -> int:
    """Return how many bytes the client says that it sends."""
    if environ.get("HTTP_TRANSFER_ENCODING"):
        raise _RefusedError("411 Length Required", "the request must have a Content-Length")
    text = environ.get("CONTENT_LENGTH") or "0"
    if not text.isascii() or not text.isdecimal():
        raise _RefusedError("400 Bad Request", "the Content-Length must be a decimal number")
    # The text itself may be long, and have zeros in front: it is parsed once, and only if short.
    if len(text) > 9 or int(text) > MOST_BODY_BYTES:
        reason = f"a request must have at most {MOST_BODY_BYTES} bytes; send less at once"
        raise _RefusedError("413 Content Too Large", reason)
    return int(text)


class _Headers:
    """The file of a connection, from which the headers of one request are read."""

    def __init__(self, file: Any) -> None:
        self._file = file
        self._left = MOST_HEADER_BYTES

    def readline(self, most: int) -> bytes:
        """Return a line of at most so many bytes.

        :raises ValueError: the lines are too long together.
        """
        line: bytes = self._file.readline(most)
        self._left -= len(line)
        if self._left < 0:
            raise ValueError(f"the headers have more than {MOST_HEADER_BYTES} bytes")
        return line


class _Handler(WSGIHandler):
    """Gives up on clients that send or receive too slowly."""

    def MessageClass(self, file: Any, *rest: Any) -> Any:
        return super().MessageClass(_Headers(file), *rest)  # type: ignore[no-untyped-call]

    def _connection_upgrade_requested(self) -> bool:
        return False  # gevent would hand over the connection itself instead of a body of a length

    def read_request(self, raw_requestline: str) -> Any:
        """Raise ValueError for every bad request: gevent logs a traceback of all others."""
        try:
            return super().read_request(raw_requestline)  # type: ignore[no-untyped-call]
        except (HTTPException, IndexError, OSError) as error:
            raise ValueError(describe(error)) from error

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
