"""kazoo's connection to a ZooKeeper server, with TLS and shorter time limits."""

from __future__ import annotations

import contextlib
import ssl
from typing import Any, cast

from kazoo.exceptions import AuthFailedError, ConnectionDropped, SessionClosedRequireSaslError
from kazoo.protocol.connection import _CONNECTION_DROP, CLOSE_RESPONSE, ConnectionHandler
from kazoo.protocol.serialization import Connect, Watch
from kazoo.protocol.states import EVENT_TYPE_MAP

from qdo.system.clock import clock

CONNECT_SHARE = 0.25
"""Share of the session timeout that an attempt to connect to one server may take. kazoo allows all
of it, so one unreachable server would cost a session that the next server would have kept."""


class NetworkConnection(ConnectionHandler):
    """kazoo's connection; it keeps the session timeout that the server granted.

    :ivar server: HOST:PORT of the last server that it tried.
    :ivar tls_fault: why the last attempt failed to connect, if the reason is TLS.
    """

    last_fault: str | None = None
    tls_fault: str | None = None
    client: Any
    _socket: Any

    def __init__(self, client: Any, retry: Any, logger: Any, sasl_options: Any) -> None:
        cast(Any, super()).__init__(client, retry, logger=logger, sasl_options=sasl_options)
        self.server: str | None = None
        self._host = ""
        self.handler = _TransportHandler(client)

    def prepare(self) -> None:
        """Do nothing: faults of a server appear on connecting."""

    def _expand_client_hosts(self) -> Any:
        """Return the servers in the order of the next attempts, the last one at the end."""
        found = cast(Any, super())._expand_client_hosts()
        return sorted(found, key=lambda each: f"{each[1]}:{each[2]}" == self.server)

    def _connect(self, host: str, hostip: str, port: int) -> Any:
        self.server = f"{hostip}:{port}"
        self._host = host
        try:
            timeouts = cast(Any, super())._connect(host, hostip, port)
        except ConnectionDropped as error:
            if isinstance(error.__context__, ssl.SSLError):
                self.tls_fault = _tls_reason(error.__context__)
            raise
        except SessionClosedRequireSaslError as error:
            # Servers with enforce.auth.enabled answer so to a wrong password. kazoo does not know
            # it, and its thread would end with a traceback.
            raise AuthFailedError("the servers reject the account") from error
        # Not sooner: the time to connect may be over during the next attempt.
        self.tls_fault = None
        return timeouts

    def command(self, word: bytes) -> str:
        """Send a four-letter command through a connection of its own, as kazoo does.

        kazoo passes the port as the name of the server, which TLS rejects.
        """
        connection = self.handler.create_connection(
            address=self._socket.getpeername()[:2],
            hostname=self._host,
            timeout=_connect_seconds(self.client),
        )
        with contextlib.closing(connection):
            connection.sendall(word)
            return str(connection.recv(8192), "utf-8", "replace")

    def _send_request(self, read_timeout: float, connect_timeout: float) -> None:
        if self.client._queue and self.client._queue[0][0] is _CONNECTION_DROP:
            raise ConnectionDropped(self.client.drop_reason)
        cast(Any, super())._send_request(read_timeout, connect_timeout)

    def _read_socket(self, read_timeout: float) -> Any:
        response = cast(Any, super())._read_socket(read_timeout)
        if response == CLOSE_RESPONSE:
            self.client.session_over = True
        return response

    def _read_watch_event(self, buffer: Any, offset: int) -> None:
        if self.client.tree_watchers:
            event, _ = Watch.deserialize(buffer, offset)
            if event.type in EVENT_TYPE_MAP:
                self.client.tree_watchers.fire(event.type, event.path, self.client)
        cast(Any, super())._read_watch_event(buffer, offset)

    def _invoke(self, timeout: float, request: Any, xid: int | None = None) -> Any:
        began = clock()
        if isinstance(request, Connect):
            timeout = min(timeout, _connect_seconds(self.client))
        answer = cast(Any, super())._invoke(timeout, request, xid)
        if isinstance(request, Connect):
            granted = answer[0].time_out
            if granted > 0:  # 0: the session to be resumed has ended
                self.client.connected_to = self.server
                self.client.negotiated_timeout_seconds = granted / 1000.0
                self.client.heard_at = began
        return answer


class _TransportHandler:
    """kazoo's handler, with a shorter time limit for connecting to one server, and with TLS.

    kazoo's own TLS also trusts the certificate authorities of the operating system, and waits for
    bytes from the network although TLS has decrypted further answers already.
    """

    def __init__(self, client: Any) -> None:
        self._client = client
        self._handler = client.handler
        tls = client.access.tls
        self._context = None if tls is None else tls.context()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._handler, name)

    def create_connection(self, address: Any, hostname: str, timeout: float, **options: Any) -> Any:
        limit = min(timeout, _connect_seconds(self._client))
        plain = self._handler.create_connection(address=address, timeout=limit)
        if self._context is None:
            return plain
        try:
            return self._context.wrap_socket(plain, server_hostname=hostname)
        except BaseException:
            plain.close()
            raise

    def select(self, reading: Any, *others: Any) -> Any:
        ready = [each for each in reading if getattr(each, "pending", int)()]
        if not ready:
            return self._handler.select(reading, *others)
        # One TLS record may hold several answers.
        more = self._handler.select(reading, [], [], 0)[0]
        return [*ready, *(each for each in more if each not in ready)], [], []


def _tls_reason(error: ssl.SSLError) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return str(error.verify_message).rstrip(".")
    return str(error.reason or error).replace("_", " ").lower()


def _connect_seconds(client: Any) -> float:
    return float(CONNECT_SHARE * client._session_timeout / 1000.0)
