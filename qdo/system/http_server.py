"""A small HTTP server for answers from memory: one thread, and no more than it can bear.

It answers GET and HEAD for a few fixed paths, and closes the connection. Everything is bounded: the
number of connections, the size of a request, and the time that a connection may take. A client that
is slow, sends forever or never reads holds up nobody: no call waits for one client, and when all
places are taken, the oldest connection makes room.
"""

from __future__ import annotations

import contextlib
import http
import logging
import re
import selectors
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

MOST_CONNECTIONS = 64
REQUEST_BYTES = 8192
"""Longest request line and headers."""
SECONDS = 5.0
"""How long a connection may take, from its beginning to the end of the response."""
LINGER_SECONDS = 1.0
"""How long a client may go on sending after its response: to close before would discard it."""
_CHUNK = 1 << 16
_PAUSE_SECONDS = 0.1
_REQUEST_LINE = re.compile(rb"([A-Z]{1,20}) (/[!-~]*) HTTP/1\.[01]")

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class HttpAnswer:
    """The response to a request."""

    status: int
    body: bytes
    content_type: str = "text/plain; charset=utf-8"


Routes = Mapping[str, Callable[[], HttpAnswer]]
"""What answers each path. It is called on the server's thread and must not wait."""


class _Connection:
    """One client: its request is read, its response is written, and what it still sends is dropped.

    :ivar deadline: when it is closed, whatever it does; on `time.monotonic`.
    """

    def __init__(self, client: socket.socket, now: float) -> None:
        self.socket = client
        self.deadline = now + SECONDS
        self.request = b""
        self.response = memoryview(b"")
        self.lingers = False

    def receive(self, routes: Routes) -> bool:
        """Read what the client has sent; return whether the response is known now.

        :raises OSError: the client has gone.
        """
        data = self.socket.recv(_CHUNK)
        if not data:
            raise ConnectionResetError
        self.request += data
        head, end, _ = self.request.partition(b"\r\n\r\n")
        if len(head) > REQUEST_BYTES:
            self.response = memoryview(_encode(_plain(431, "the request is too long\n")))
        elif end:
            self.response = memoryview(_respond(head, routes))
        else:
            return False
        self.request = b""
        return True

    def send(self) -> bool:
        """Send as much of the response as the client takes; return whether that was all."""
        self.response = self.response[self.socket.send(self.response) :]
        return not self.response

    def drop(self) -> None:
        """Discard what the client still sends.

        :raises OSError: it has closed its end.
        """
        if not self.socket.recv(_CHUNK):
            raise ConnectionResetError


class HttpServer:
    """Serves until it is closed.

    :ivar address: host and port on which it listens; the port is the one that it got for port 0.
    :raises OSError: it cannot listen on the address.
    """

    def __init__(self, host: str, port: int, routes: Routes) -> None:
        self._routes = routes
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, port), family=family, backlog=128)
        self.address: tuple[str, int] = self._listener.getsockname()[:2]
        self._listener.setblocking(False)
        self._wakeup, self._wakeup_end = socket.socketpair()
        self._connections: dict[_Connection, None] = {}
        """The oldest first."""
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._wakeup, selectors.EVENT_READ)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="http", daemon=True)

    def start(self) -> None:
        """Start the thread that serves."""
        self._thread.start()

    def close(self) -> None:
        """Stop serving."""
        self._closing.set()
        self._wakeup_end.send(b"\0")
        if self._thread.ident is not None:
            self._thread.join()
        for connection in list(self._connections):
            self._end(connection)
        self._selector.close()
        for each in (self._listener, self._wakeup, self._wakeup_end):
            each.close()

    def _run(self) -> None:
        while not self._closing.is_set():
            try:
                self._step()
            except Exception:  # noqa: BLE001 - the next client may be served
                _log.exception("the HTTP server failed; it continues")
                self._closing.wait(_PAUSE_SECONDS)

    def _step(self) -> None:
        deadlines = [each.deadline for each in self._connections]
        timeout = max(0.0, min(deadlines) - time.monotonic()) if deadlines else None
        for key, _ in self._selector.select(timeout):
            if key.fileobj is self._listener:
                self._accept()
            elif isinstance(key.data, _Connection) and key.data in self._connections:
                self._advance(key.data)
        now = time.monotonic()
        for connection in [each for each in self._connections if each.deadline <= now]:
            self._end(connection)

    def _accept(self) -> None:
        try:
            client, _ = self._listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        except OSError as error:  # no descriptor is free
            _log.warning("cannot accept an HTTP connection: %s", error)
            self._closing.wait(_PAUSE_SECONDS)
            return
        while len(self._connections) >= MOST_CONNECTIONS:
            self._end(next(iter(self._connections)))
        client.setblocking(False)
        connection = _Connection(client, time.monotonic())
        self._connections[connection] = None
        self._selector.register(client, selectors.EVENT_READ, connection)

    def _advance(self, connection: _Connection) -> None:
        try:
            if connection.lingers:
                connection.drop()
            elif connection.response or connection.receive(self._routes):
                self._send(connection)
        except BlockingIOError:
            pass
        except OSError:
            self._end(connection)

    def _send(self, connection: _Connection) -> None:
        try:
            sent = connection.send()
        except BlockingIOError:
            sent = False
        if sent:
            connection.socket.shutdown(socket.SHUT_WR)
            connection.lingers = True
            connection.deadline = min(connection.deadline, time.monotonic() + LINGER_SECONDS)
        events = selectors.EVENT_READ if sent else selectors.EVENT_WRITE
        self._selector.modify(connection.socket, events, connection)

    def _end(self, connection: _Connection) -> None:
        del self._connections[connection]
        self._selector.unregister(connection.socket)
        with contextlib.suppress(OSError):
            connection.socket.close()


def _respond(head: bytes, routes: Routes) -> bytes:
    """Return the response to the head of a request."""
    found = _REQUEST_LINE.fullmatch(head.partition(b"\r\n")[0])
    if found is None:
        return _encode(_plain(400, "this is not a request of HTTP/1.1\n"))
    method, target = found[1].decode(), found[2].decode()
    if method not in ("GET", "HEAD"):
        return _encode(_plain(405, "only GET and HEAD are allowed\n"))
    route = routes.get(target.partition("?")[0])
    if route is None:
        return _encode(_plain(404, f"there are only {', '.join(routes)}\n"), method)
    try:
        answer = route()
    except Exception:  # noqa: BLE001 - the client gets an answer, and the log the error
        _log.exception("cannot answer an HTTP request")
        answer = _plain(500, "internal error; see the log\n")
    return _encode(answer, method)


def _plain(status: int, text: str) -> HttpAnswer:
    return HttpAnswer(status, text.encode())


def _encode(answer: HttpAnswer, method: str = "GET") -> bytes:
    lines = [
        f"HTTP/1.1 {answer.status} {http.HTTPStatus(answer.status).phrase}",
        f"Content-Type: {answer.content_type}",
        f"Content-Length: {len(answer.body)}",
        "Cache-Control: no-store",
        "X-Content-Type-Options: nosniff",
        "Connection: close",
    ]
    if answer.status == 405:
        lines.append("Allow: GET, HEAD")
    head = "\r\n".join((*lines, "", "")).encode()
    return head if method == "HEAD" else head + answer.body
