"""A TCP proxy that cuts connections after a number of bytes."""

from __future__ import annotations

import contextlib
import select
import socket
import threading
from typing import Literal

Direction = Literal["request", "answer"]
READY = b"Z\0\0\0\5I"
"""The end of each answer outside a transaction, ReadyForQuery."""
_POLL_SECONDS = 0.05


class CuttingProxy:
    """Forwards TCP connections to a port of 127.0.0.1.

    :ivar port: where it listens.
    :ivar upstream: that port; another server may take over.
    :ivar refusing: whether it closes new connections at once.
    :ivar late_seconds: how much later each answer arrives.
    :ivar cut_ports: local ports of the connections to the server that it has cut, less those that
        the system has given to a new one.
    """

    def __init__(self, upstream: int) -> None:
        self.refusing = False
        self.late_seconds = 0.0
        self.cut_ports: set[int] = set()
        self.upstream = upstream
        self._direction: Direction = "request"
        self._left: int | None = None
        self._forwarded = {"request": 0, "answer": 0}
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        self._latest: dict[int, bytes] = {}
        """By local port, of each connection to the server: the end of its latest answer, b"" after
        a request."""
        self._over = threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def connect(self) -> socket.socket:
        """Return a connection to the server."""
        return socket.create_connection(("127.0.0.1", self.upstream))

    def cut_after(self, direction: Direction, count: int) -> None:
        """Cut one connection once `count` more bytes of a direction have been forwarded."""
        with self._lock:
            self._direction, self._left = direction, count

    def forget(self) -> None:
        """Cut nothing, and count from zero."""
        with self._lock:
            self._left = None
            self._forwarded = {"request": 0, "answer": 0}

    def forwarded(self, direction: Direction) -> int:
        """Return the number of bytes since `forget`."""
        return self._forwarded[direction]

    @property
    def server_ports(self) -> list[int]:
        """Local ports of the open connections to the server."""
        return list(self._latest)

    def resting(self) -> bool:
        """Return whether each request has been answered, and its answer forwarded."""
        return all(latest.endswith(READY) for latest in list(self._latest.values()))

    def cut_all(self) -> None:
        """Cut all open connections."""
        for each in list(self._open):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close everything."""
        self._over.set()
        self._threads[0].join()
        for thread in self._threads[1:]:
            while thread.is_alive():  # it may not have connected yet
                self.cut_all()
                thread.join(_POLL_SECONDS)
        self._listener.close()

    def _accept(self) -> None:
        while not self._over.is_set():
            if not select.select([self._listener], [], [], _POLL_SECONDS)[0]:
                continue
            client = self._listener.accept()[0]
            if self.refusing:
                client.close()
                continue
            thread = threading.Thread(target=self._forward, args=(client,))
            self._threads.append(thread)
            thread.start()

    def _forward(self, client: socket.socket) -> None:
        with client, contextlib.ExitStack() as stack:
            try:
                server = self.connect()
            except OSError:
                return
            stack.enter_context(server)
            self.cut_ports.discard(server.getsockname()[1])
            self._open |= {client, server}
            with contextlib.suppress(OSError):
                while self._pump(client, server):
                    pass
            self._latest.pop(server.getsockname()[1], None)
            self._open -= {client, server}

    def _pump(self, client: socket.socket, server: socket.socket) -> bool:
        """Forward what has arrived; return False at the end of the connection."""
        for source in select.select([client, server], [], [])[0]:
            data = source.recv(65536)
            if not data:
                return False
            direction: Direction = "request" if source is client else "answer"
            if direction == "answer":
                self._over.wait(self.late_seconds)
            allowed = self._allowed(direction, len(data))
            (server if source is client else client).sendall(data[:allowed])
            port = server.getsockname()[1]
            self._latest[port] = b"" if source is client else data[-len(READY) :]
            if allowed < len(data) or self._left == 0:
                with self._lock:
                    self._left = None
                self.cut_ports.add(port)
                return False
        return True

    def _allowed(self, direction: Direction, size: int) -> int:
        with self._lock:
            self._forwarded[direction] += size
            if self._left is None or direction != self._direction:
                return size
            allowed = min(size, self._left)
            self._left -= allowed
            return allowed


def cutting(upstream: int) -> contextlib.closing[CuttingProxy]:
    """Run a proxy during the block."""
    return contextlib.closing(CuttingProxy(upstream))
