"""Serves the dashboard with gevent: slow clients, and streams of events, cost a greenlet each.

A page may wait for coordinator or broker, so it is made in a thread, and its greenlet waits. What a
client sends is read before that, within a time and up to a size.
"""

from __future__ import annotations

import io
import logging
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from http.client import HTTPException
from socket import SHUT_RDWR
from typing import Any

import gevent
import gevent.socket
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
_CONNECTION = "qdo.connection"
"""The key for the connection in the environment of a request."""

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
        connection: _Handler = environ[_CONNECTION]
        connection.works()
        begun, parts = self._threads.apply(self._answer, (environ,))
        if not _is_stream(begun):
            connection.waits()
        start_response(*begun)
        return parts

    def _answer(self, environ: dict[str, Any]) -> tuple[tuple[Any, ...], Iterable[bytes]]:
        begun: list[tuple[Any, ...]] = []

        def start(status: str, headers: list[tuple[str, str]], failure: Any = None) -> None:
            begun[:] = [(status, headers)]

        parts = self._app(environ, start)
        if _is_stream(begun[0]):
            return begun[0], parts
        try:
            return begun[0], [b"".join(parts)]
        finally:
            close = getattr(parts, "close", None)
            if close is not None:
                close()


def _is_stream(begun: tuple[Any, ...]) -> bool:
    return STREAM in dict(begun[1]).get("Content-Type", "")


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


class _Places(Pool):
    """Places for connections. When all are taken, one that waits for its client makes room.

    It is the one that has waited longest. One for which a page is made, or with a stream of events,
    stays.
    """

    def __init__(self, most: int) -> None:
        super().__init__(most)  # type: ignore[no-untyped-call]
        self._waiting: dict[_Handler, None] = {}

    def full(self) -> bool:
        """Return whether no place is free; gevent asks before it accepts a client."""
        full = bool(super().full())  # type: ignore[no-untyped-call]
        if full and self._waiting:
            longest = next(iter(self._waiting))
            del self._waiting[longest]
            longest.cut()
        return full

    def wait(self, connection: _Handler) -> None:
        """Note that a connection waits for its client from now on."""
        self.keep(connection)
        self.full()  # clients may have been kept out while no connection waited
        self._waiting[connection] = None

    def keep(self, connection: _Handler) -> None:
        """Note that a connection does not wait for its client any more."""
        self._waiting.pop(connection, None)


class _Handler(WSGIHandler):
    """Gives up on clients that send or receive too slowly."""

    def handle(self) -> None:
        """Serve a connection until its end."""
        try:
            with suppress(OSError):  # the client has gone
                super().handle()  # type: ignore[no-untyped-call]
        finally:
            self.works()

    def waits(self) -> None:
        """Let this connection make room for another, if there are too many."""
        self.server.pool.wait(self)

    def works(self) -> None:
        """Let this connection stay."""
        self.server.pool.keep(self)

    def cut(self) -> None:
        """Break the connection: whatever its greenlet waits for ends with an OSError."""
        with suppress(OSError):
            # Not the method of a TLS socket: that one takes away what its greenlet uses.
            gevent.socket.socket.shutdown(self.socket, SHUT_RDWR)  # type: ignore[attr-defined]

    def get_environ(self) -> dict[str, Any]:
        environ: dict[str, Any] = super().get_environ()  # type: ignore[no-untyped-call]
        return {**environ, _CONNECTION: self}

    def MessageClass(self, file: Any, *rest: Any) -> Any:
        return super().MessageClass(_Headers(file), *rest)  # type: ignore[no-untyped-call]

    def _connection_upgrade_requested(self) -> bool:
        return False  # gevent would hand over the connection itself instead of a body of a length

    def read_request(self, raw_requestline: str) -> Any:
        """Raise ValueError for every bad request: gevent logs a traceback of all others."""
        try:
            return super().read_request(raw_requestline)  # type: ignore[no-untyped-call]
        except (HTTPException, IndexError) as error:
            raise ValueError(describe(error)) from error
        except OSError:
            return False  # the client has gone

    def handle_error(self, kind: type[BaseException], error: BaseException, trace: Any) -> None:
        """Log an error; without a traceback if the client has gone, or does not read."""
        if isinstance(error, OSError):
            self.close_connection = True
            self.log_error("%s", describe(error))  # type: ignore[no-untyped-call]
        else:
            super().handle_error(kind, error, trace)  # type: ignore[no-untyped-call]

    def handle_one_request(self) -> Any:
        self.waits()
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
        spawn=_Places(CONNECTIONS),
        # The first read does the handshake, within the time for a request.
        **({**tls, "do_handshake_on_connect": False} if tls else {}),
    )


class _ErrorLog:
    """Writes what gevent reports to the log."""

    def write(self, text: str) -> None:
        if text.strip():
            _log.warning("dashboard: %s", text.strip())

    def flush(self) -> None:
        pass
