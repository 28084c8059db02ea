"""The part of HTTP/1.1 that servers of the tests need: fast, with keep-alive, on one thread.

A request is processed once it is complete; its response may follow at any time. Requests of one
connection are answered one after another, those of different connections concurrently.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable

_LENGTH = re.compile(rb"\r\ncontent-length:[ \t]*(\d+)", re.IGNORECASE)
_CHUNKED = re.compile(rb"\r\ntransfer-encoding:[ \t]*chunked", re.IGNORECASE)
_EXPECTS = re.compile(rb"\r\nexpect:[ \t]*100-continue", re.IGNORECASE)
_CLOSES = re.compile(rb"\r\nconnection:[ \t]*close", re.IGNORECASE)
_REASONS = {200: "OK", 400: "Bad HttpRequest", 403: "Forbidden", 404: "Not Found",
            500: "Internal Server Error", 503: "Service Unavailable"}  # fmt: skip


class HttpRequest:
    """A request as received.

    :ivar head: the request line and the headers, without the empty line behind them.
    :ivar body: without the marks of chunks.
    :ivar raw: the body as it was sent.
    """

    __slots__ = ("body", "connection", "head", "method", "path", "raw")

    def __init__(self, connection: Connection, head: bytes, body: bytes, raw: bytes) -> None:
        self.connection = connection
        self.head = head
        self.body = body
        self.raw = raw
        method, path, _ = head.split(b"\r\n", 1)[0].split(b" ", 2)
        self.method = method.decode()
        self.path = path.decode()

    def header(self, name: str) -> str:
        """Return a header, "" without one."""
        found = re.search(
            rb"\r\n" + name.encode() + rb":[ \t]*([^\r]*)", self.head, flags=re.IGNORECASE
        )
        return found[1].decode("latin-1").rstrip() if found else ""

    def reply(
        self,
        status: int,
        body: bytes,
        kind: str = "application/x-amz-json-1.0",
        headers: str = "",
    ) -> None:
        """Send the response; does nothing if the connection is gone.

        :param headers: more of them, each with its end of line.
        """
        reason = _REASONS.get(status, "Unknown")
        head = (
            f"HTTP/1.1 {status} {reason}\r\nContent-Type: {kind}\r\n"
            f"Content-Length: {len(body)}\r\n{headers}\r\n"
        )
        self.connection.answer(head.encode() + body)


Handler = Callable[[HttpRequest], None]


class Connection(asyncio.Protocol):
    """One connection: requests out of bytes, in turn."""

    def __init__(self, handle: Handler, register: set[Connection]) -> None:
        self._handle = handle
        self._register = register
        self._buffer = b""
        self._busy = False
        self._continued = False
        self._last = False
        self.transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        if not isinstance(transport, asyncio.Transport):
            raise TypeError("a connection is a stream")
        self.transport = transport
        self._register.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self.transport = None
        self._register.discard(self)

    def data_received(self, data: bytes) -> None:
        self._buffer = self._buffer + data if self._buffer else data
        self._proceed()

    def answer(self, data: bytes) -> None:
        """Send a complete response and continue with the next request."""
        self._busy = False
        if self.transport is None:
            return
        self.transport.write(data)
        if self._last:
            self.transport.close()
            return
        if self._buffer:
            self._proceed()

    def cut(self, data: bytes) -> None:
        """Send the beginning of a response and end the connection."""
        if self.transport is not None:
            self.transport.write(data)
            self.transport.close()

    def reset(self) -> None:
        """Abort the connection, so that the client gets an error."""
        if self.transport is not None:
            self.transport.abort()

    def _proceed(self) -> None:
        while self._buffer and not self._busy and self._next():
            pass

    def _next(self) -> bool:
        """Remove one complete request from the buffer, if there is one."""
        end = self._buffer.find(b"\r\n\r\n")
        if end < 0:
            return False
        head, start = self._buffer[:end], end + 4
        if not self._continued and _EXPECTS.search(head) and self.transport is not None:
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            self._continued = True
        if _CHUNKED.search(head):
            found = unchunk(self._buffer, start)
            if found is None:
                return False
            body, finish = found
        else:
            length = _LENGTH.search(head)
            finish = start + (int(length[1]) if length else 0)
            if len(self._buffer) < finish:
                return False
            body = self._buffer[start:finish]
        raw, self._buffer = self._buffer[start:finish], self._buffer[finish:]
        self._busy, self._continued = True, False
        self._last = bool(_CLOSES.search(head))
        self._handle(HttpRequest(self, head, body, raw))
        return True


def unchunk(data: bytes, start: int) -> tuple[bytes, int] | None:
    """Return a chunked body and its end, None while it is incomplete."""
    parts: list[bytes] = []
    while True:
        line = data.find(b"\r\n", start)
        if line < 0:
            return None
        size = int(data[start:line].split(b";")[0], 16)
        start = line + 2
        if size == 0:
            end = data.find(b"\r\n\r\n", line)
            return None if end < 0 else (b"".join(parts), end + 4)
        if len(data) < start + size + 2:
            return None
        parts.append(data[start : start + size])
        start += size + 2


async def serve(
    handle: Handler, register: set[Connection], port: int
) -> Callable[[], Awaitable[None]]:
    """Listen on loopback and print the address; return a coroutine that serves forever.

    :param register: will hold the connections that are open.
    :param port: 0 for one that is free.
    """
    loop = asyncio.get_running_loop()
    server = await loop.create_server(
        lambda: Connection(handle, register), "127.0.0.1", port, backlog=4096
    )
    print(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", flush=True)
    return server.serve_forever
