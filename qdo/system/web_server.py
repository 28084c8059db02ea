"""Serves a WSGI app with gevent's server on a separate thread.

Each connection has a greenlet, so a slow client delays no other client. The server reads a request
within a time and size limit. Then a thread, which may wait, makes the response.
"""

from __future__ import annotations

import io
import logging
import re
import socket
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from email.errors import FirstHeaderLineIsContinuationDefect, MissingHeaderBodySeparatorDefect
from functools import partial
from http.client import HTTPException
from typing import Any

import gevent
import gevent.socket
from gevent.lock import Semaphore
from gevent.pool import Pool
from gevent.pywsgi import WSGIHandler, WSGIServer

from qdo.text import describe, printable

THREADS = 16
CONNECTIONS = 500
# Maximum time for a client to send a request, or to receive one part of a response.
REQUEST_SECONDS = 15.0
SEND_SECONDS = 30.0
# Maximum time for which `close` waits for responses.
STOP_SECONDS = 1.0
LINGER_SECONDS = 1.0
LINGER_READS = 16
MOST_BODY_BYTES = 64 * 1024
# Maximum size of all bodies together, including unfinished bodies. The server refuses a large body
# above this size.
MOST_BODIES_BYTES = 48 * 1024 * 1024
# The server never refuses a smaller body. All connections together need 16 MiB for small bodies.
SMALL_BODY_BYTES = 32 * 1024
# Maximum number of threads for one line of requests. A slow line must not stop other lines. Further
# requests of the line wait at most `REQUEST_SECONDS`.
MOST_THREADS_OF_ONE = THREADS // 2
MOST_HEADER_BYTES = 32 * 1024
# Defects after which Python ignores further headers. Another server may read these headers.
_UNREAD = (FirstHeaderLineIsContinuationDefect, MissingHeaderBodySeparatorDefect)
_WITH_BODY = ("POST", "PUT", "PATCH")
_is_absolute = re.compile(r"https?://[^/?#]*/?(.*)", re.IGNORECASE).fullmatch
_is_request = re.compile("[A-Z]+ [!-~\x80-\xff]+ HTTP/1[.][01]").fullmatch

_log = logging.getLogger(__name__)
Headers = list[tuple[str, str]]
StartResponse = Callable[..., Any]
WsgiApp = Callable[[dict[str, Any], StartResponse], Iterable[bytes]]


@dataclass(frozen=True, slots=True)
class Admission:
    """An app's decision about a request before the server reads the body.

    If an app has a method `admit`, the server calls the method on the event loop. The method gets
    the environ without a body.
    """

    # The response, if the body does not matter. With None, the server reads the body and calls the
    # app.
    response: WsgiApp | None = None
    # Maximum size of the body of this request.
    most_body_bytes: int = MOST_BODY_BYTES
    # Name of the request's line. Requests of one line wait for the same resource, such as a queue.
    line: str = ""


class WebServer:
    """Serves an app until it is closed.

    The server's thread runs an event loop of gevent. Threads that use the server need no event
    loop.

    :param tls: `certfile` and `keyfile`. Without these files, the server uses HTTP.
    :param connections: maximum number of connections. If all are in use, the server closes the
        connection that has waited longest for its client.
    :ivar address: host and port on which the server listens. For port 0, the system chooses the
        port.
    :raises OSError: the server cannot listen on the address.
    """

    def __init__(
        self,
        app: WsgiApp,
        address: tuple[str, int],
        *,
        tls: Mapping[str, str] | None = None,
        connections: int = CONNECTIONS,
    ) -> None:
        ipv6 = ":" in address[0]
        self._listener = socket.create_server(
            address,
            family=socket.AF_INET6 if ipv6 else socket.AF_INET,
            backlog=128,
            dualstack_ipv6=ipv6 and socket.has_dualstack_ipv6(),
        )
        self._listener.setblocking(False)
        # gevent sends the headers, then the body. Without this option, the body would wait 40 ms
        # until the client acknowledges the headers.
        self._listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.address: tuple[str, int] = self._listener.getsockname()[:2]
        self._stop: Callable[[], object] = bool
        self._ready = threading.Event()
        self._thread = threading.Thread(
            target=self._run, args=(app, tls, connections), name="http", daemon=True
        )
        self._thread.start()
        self._ready.wait()

    def close(self) -> None:
        """Stop serving. Wait `STOP_SECONDS` for unfinished responses."""
        self._stop()
        self._thread.join(2 * STOP_SECONDS)

    def _run(self, app: WsgiApp, tls: Mapping[str, str] | None, connections: int) -> None:
        hub = gevent.get_hub()
        hub.threadpool_size = THREADS
        server = WSGIServer(
            self._listener,
            app,
            log=None,  # addresses contain names of queues
            error_log=_log,
            handler_class=_Handler,
            spawn=_Places(connections),
            # The first read performs the handshake within the time limit of a request.
            **({**tls, "do_handshake_on_connect": False} if tls else {}),
        )
        self._stop = lambda: hub.loop.run_callback_threadsafe(server.close)
        server.start()
        self._ready.set()
        server.serve_forever(STOP_SECONDS)
        hub.destroy()


@dataclass(frozen=True, slots=True)
class _Response:
    """A complete response, which is also a WSGI app that returns this response."""

    status: str
    body: bytes
    headers: Headers = field(default_factory=lambda: [("Content-Type", "text/plain")])

    def __call__(self, environ: dict[str, Any], start_response: StartResponse) -> list[bytes]:
        start_response(self.status, self.headers)
        return [self.body]


def _respond(app: WsgiApp, environ: dict[str, Any]) -> _Response:
    begun: list[tuple[str, Headers]] = []
    parts: list[bytes] = []

    def start(status: str, headers: Headers, failure: object = None) -> Callable[[bytes], None]:
        begun[:] = [(status, headers)]
        return parts.append

    try:
        found = app(environ, start)
        try:
            parts.extend(found)
        finally:
            if (close := getattr(found, "close", None)) is not None:
                close()
        status, headers = begun[0]
    except Exception:  # noqa: BLE001 - the client gets a response, and the log the error
        _log.exception("cannot answer an HTTP request")
        return _Response("500 Internal Server Error", b"internal error; see the log\n")
    body = b"" if environ["REQUEST_METHOD"] == "HEAD" else b"".join(parts)
    return _Response(status, body, headers)


class _RefusedError(Exception):
    """The server refuses a request with an HTTP status."""

    def __init__(self, status: str, reason: str, retry_seconds: int = 0) -> None:
        super().__init__(reason)
        self.status = status
        self.headers: Headers = [("Retry-After", str(retry_seconds))] if retry_seconds else []


def _too_much() -> _RefusedError:
    return _RefusedError("503 Service Unavailable", "too much at once", retry_seconds=5)


def _check_line(line: bytes) -> None:
    """Raise ValueError for a header line that other servers may split or cut off."""
    text = line.removesuffix(b"\n").removesuffix(b"\r")
    if b"\r" in text or b"\0" in text or text.startswith(b":"):
        raise ValueError("a header must have a name, and neither CR nor NUL within it")


def _length_of(length: int) -> dict[str, str]:
    return {"CONTENT_LENGTH": str(length)}


class _TooLongError(ValueError):
    """The headers of a request exceed the limit."""


class _Headers:
    """Reads the headers of one request from the file of a connection."""

    def __init__(self, file: Any) -> None:
        self._file = file
        self._left = MOST_HEADER_BYTES

    def readline(self, most: int) -> bytes:
        """Return a line; raise _TooLongError if all lines together are too long."""
        line: bytes = self._file.readline(most)
        _check_line(line)
        self._left -= len(line)
        if self._left < 0:
            raise _TooLongError(f"the headers have more than {MOST_HEADER_BYTES} bytes")
        return line


class _Places(Pool):
    """Places for connections. If all are taken, the server closes an idle connection.

    The server closes the connection that has waited longest for its client, but never during a
    response.

    :ivar body_bytes: total size of the bodies that the server is reading or using.
    :ivar lines: the places of each line of requests. A request takes a place only after the server
        has read it.
    """

    def __init__(self, most: int) -> None:
        super().__init__(most)  # type: ignore[no-untyped-call]
        self.body_bytes = 0
        self.lines: dict[str, Semaphore] = defaultdict(partial(Semaphore, MOST_THREADS_OF_ONE))
        self._waiting: dict[_Handler, None] = {}

    def full(self) -> bool:
        """Return whether no place is free. gevent calls this before it accepts a client."""
        full = bool(super().full())  # type: ignore[no-untyped-call]
        if full and self._waiting:
            longest = next(iter(self._waiting))
            del self._waiting[longest]
            longest.cut()
        return full

    def wait(self, connection: _Handler) -> None:
        """Record that a connection now waits for its client."""
        self.keep(connection)
        self.full()  # the server may have kept clients out while no connection waited
        self._waiting[connection] = None

    def keep(self, connection: _Handler) -> None:
        self._waiting.pop(connection, None)


class _Handler(WSGIHandler):
    """Handles one client's requests. Gives up on clients that are too slow or send too much."""

    environ: Any
    wsgi_input: Any

    def handle(self) -> None:
        self.socket.settimeout(SEND_SECONDS)
        try:
            with suppress(OSError):  # the client has gone
                super().handle()  # type: ignore[no-untyped-call]
        finally:
            self.server.pool.keep(self)

    def cut(self) -> None:
        """Break the connection. The greenlet that waits for the client gets an OSError."""
        with suppress(OSError):
            # The method of a TLS socket would remove the object that the greenlet uses.
            gevent.socket.socket.shutdown(self.socket, socket.SHUT_RDWR)  # type: ignore[attr-defined]

    def MessageClass(self, file: Any, *rest: Any) -> Any:
        return super().MessageClass(_Headers(file), *rest)  # type: ignore[no-untyped-call]

    def handle_one_request(self) -> Any:
        self.server.pool.wait(self)
        outcome: Any = None  # closes the connection
        with gevent.Timeout(REQUEST_SECONDS, False) as self._timer:
            outcome = super().handle_one_request()  # type: ignore[no-untyped-call]
        return outcome  # noqa: RET504 - the timeout ends only the block

    def read_request(self, raw_requestline: str) -> Any:
        """Refuse control characters in the request line. Accept an absolute address."""
        # A server must accept the absolute form (RFC 9112, section 3.2.2).
        if not _is_request(raw_requestline.rstrip("\r\n")):
            raise ValueError("the request line must be METHOD TARGET HTTP/1.1")
        found = super().read_request(raw_requestline)  # type: ignore[no-untyped-call]
        if (whole := _is_absolute(str(self.path))) is not None:
            self.path = f"/{whole[1]}"
        return found

    def handle_one_response(self) -> None:
        try:
            is_read = self._make_response()
        except _RefusedError as error:
            headers = [("Content-Type", "text/plain"), ("Connection", "close"), *error.headers]
            self.application = _Response(error.status, f"{error}\n".encode(), headers)
            is_read = False
        source = self.wsgi_input
        if not is_read:  # do not wait for the rest of the body before the response
            self.close_connection = True
            source.chunked_input = False
            source.content_length = source.position
        super().handle_one_response()  # type: ignore[no-untyped-call]
        if not is_read:
            self._linger()

    def _linger(self) -> None:
        """Continue reading for a moment, because unread data would discard the response."""
        with suppress(OSError), gevent.Timeout(LINGER_SECONDS, False):
            gevent.socket.socket.shutdown(self.socket, socket.SHUT_WR)  # type: ignore[attr-defined]
            for _ in range(LINGER_READS):
                if not self.socket.recv(MOST_BODY_BYTES):
                    break

    def _make_response(self) -> bool:
        """Call the app, unless the headers decide. Return whether the body was read."""
        pool = self.server.pool
        length = self._length()
        admit = getattr(self.application, "admit", None)
        admission = Admission() if admit is None else admit({**self.environ, **_length_of(length)})
        if admission.response is not None:
            self.application = _respond(admission.response, self.environ)
            return not length
        if length > admission.most_body_bytes:
            reason = f"the body must have at most {admission.most_body_bytes} bytes; send less"
            raise _RefusedError("413 Content Too Large", reason)
        self._taken = 0
        try:
            self._call_app(self._read_body(length), admission.line)
        finally:
            pool.body_bytes -= self._taken
        return True

    def _call_app(self, body: bytes, line: str) -> None:
        pool = self.server.pool
        pool.keep(self)
        with self._place(pool.lines[line]) if line else nullcontext():
            self._timer.close()
            given = {"wsgi.input": io.BytesIO(body), "wsgi.multithread": True}
            environ = {**self.environ, **given, **_length_of(len(body))}
            threads = gevent.get_hub().threadpool
            self.application = threads.apply(_respond, (self.application, environ))
        pool.wait(self)

    @contextmanager
    def _place(self, places: Semaphore) -> Iterator[None]:
        """Wait for a place of a line; raise _RefusedError if the wait takes too long."""
        try:
            places.acquire()
        except gevent.Timeout as timeout:
            if timeout is not self._timer:
                raise
            raise _too_much() from timeout
        try:
            yield
        finally:
            places.release()

    def _read_body(self, length: int) -> bytes:
        """Return a body; raise _RefusedError for a slow or incomplete body, or without room."""
        # Count only received bytes. A client that only announces a large body must not take room.
        source = self.wsgi_input
        pool = self.server.pool
        parts: list[bytes] = []
        try:
            while self._taken < length:
                part = source.read(min(MOST_BODY_BYTES, length - self._taken))
                parts.append(part)
                self._taken += len(part)
                pool.body_bytes += len(part)
                if length > SMALL_BODY_BYTES and pool.body_bytes > MOST_BODIES_BYTES:
                    raise _too_much()
            return b"".join(parts)
        except OSError as error:
            raise _RefusedError("400 Bad Request", "the request ended early") from error
        except gevent.Timeout as timeout:
            if timeout is not self._timer:
                raise
            reason = "the request came too slowly"
            raise _RefusedError("408 Request Timeout", reason) from timeout

    def _length(self) -> int:
        """Return the number of bytes that the client announces."""
        if any(isinstance(each, _UNREAD) for each in self.headers.defects):
            raise _RefusedError("400 Bad Request", "each header must have a name and a colon")
        if "Transfer-Encoding" in self.headers:  # even if the first of several headers is empty
            raise _RefusedError("411 Length Required", "the request must have a Content-Length")
        if self.command in _WITH_BODY and "Content-Length" not in self.headers:
            raise _RefusedError("411 Length Required", "the request must have a Content-Length")
        text, *more = self.headers.get_all("Content-Length", ["0"])
        if more or not text.isascii() or not text.isdecimal():
            raise _RefusedError("400 Bad Request", "the Content-Length must be a decimal number")
        # Parse only a short text, because the text may have any number of leading zeros.
        if len(text) > 9:
            raise _RefusedError("413 Content Too Large", "the body is too large; send less at once")
        return int(text)

    def _handle_client_error(self, error: Exception) -> tuple[str, bytes]:
        """Return the response to an invalid request line or invalid headers."""
        long = isinstance(error, (_TooLongError, HTTPException))
        status = "431 Request Header Fields Too Large" if long else "400 Bad Request"
        self._note(error)
        end = "Connection: close\r\nContent-Length: 0\r\n\r\n"
        return status[:3], f"HTTP/1.1 {status}\r\n{end}".encode()

    def handle_error(self, kind: type[BaseException], error: BaseException, trace: Any) -> None:
        """Log an error, without a traceback if the client has gone or does not read."""
        if isinstance(error, OSError):
            self.close_connection = True
            self._note(error)
        else:
            super().handle_error(kind, error, trace)  # type: ignore[no-untyped-call]

    def _note(self, error: BaseException) -> None:
        client = self.client_address[0]
        # Any client can cause this error a thousand times a second.
        _log.debug("closing the HTTP connection of %s: %s", client, printable(describe(error)))
