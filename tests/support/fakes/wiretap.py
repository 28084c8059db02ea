"""A relay on loopback that keeps every byte of its connections, as a packet capture does."""

from __future__ import annotations

import contextlib
import socket
import threading


class Wiretap:
    """Forwards connections to a server of this machine.

    :ivar port: the port that it listens on.
    """

    def __init__(self, server: int) -> None:
        self._server = server
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._recorded: list[bytearray] = []
        self._sockets: list[socket.socket] = [self._listener]
        self.port = int(self._listener.getsockname()[1])
        threading.Thread(target=self._accept, daemon=True).start()

    def recorded(self) -> bytes:
        """Return all bytes so far: each direction of each connection in one piece."""
        return b"\0".join(bytes(each) for each in list(self._recorded))

    def close(self) -> None:
        for each in self._sockets:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(("127.0.0.1", self._server))
                self._sockets += [client, server]
                for ends in ((client, server), (server, client)):
                    threading.Thread(target=self._forward, args=ends, daemon=True).start()

    def _forward(self, source: socket.socket, target: socket.socket) -> None:
        kept = bytearray()
        self._recorded.append(kept)
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                kept += data
                target.sendall(data)
        with contextlib.suppress(OSError):
            target.shutdown(socket.SHUT_WR)


def tapped(port: int) -> contextlib.closing[Wiretap]:
    """Run a wiretap before a port of this machine during the block."""
    return contextlib.closing(Wiretap(port))
