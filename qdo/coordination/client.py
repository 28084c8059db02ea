"""A client of the coordinator, over the network or in a file on this machine.

==========================================  ==================================================
address                                     far side
==========================================  ==================================================
``zookeeper://h1:2181,h2:2181/a/b``         ZooKeeper servers; ``/a/b`` is prefixed to all paths
``sqlite:PATH``, ``sqlite:PATH?chroot=/a``  a SQLite file shared by processes on this machine
==========================================  ==================================================

Both give the same class: kazoo's client with a few additions. All code built on it, including
kazoo's recipes, works with either.
"""

from __future__ import annotations

import contextlib
import importlib
import time
from dataclasses import dataclass
from typing import Any, cast

from kazoo.client import KazooClient
from kazoo.exceptions import ConnectionDropped, ConnectionLoss, KazooException, NodeExistsError
from kazoo.protocol.connection import _CONNECTION_DROP, CLOSE_RESPONSE, ConnectionHandler
from kazoo.protocol.serialization import Connect, Create
from kazoo.protocol.states import KeeperState
from kazoo.security import OPEN_ACL_UNSAFE

from qdo.errors import CoordinatorUnreachableError, SettingsError
from qdo.system.clock import clock
from qdo.text import hide_credentials

_NETWORK = "zookeeper://"
_FILE = "sqlite:"
_HANDLERS = {
    "threading": ("kazoo.handlers.threading", "SequentialThreadingHandler"),
    "gevent": ("kazoo.handlers.gevent", "SequentialGeventHandler"),
}
# kazoo's own default lets the pauses between attempts grow to an hour.
_RETRY = {"max_tries": -1, "delay": 0.05, "backoff": 2, "max_delay": 0.5}
CONNECT_SHARE = 0.25
"""Share of the session timeout that an attempt to connect to one server may take. kazoo allows all
of it, so one unreachable server would cost a session that the next server would have kept."""


@dataclass(frozen=True, slots=True)
class Address:
    """The address of a coordinator: `hosts` of ZooKeeper servers, or the `path` of a file."""

    url: str
    hosts: str
    path: str | None
    chroot: str

    @classmethod
    def parse(cls, url: str) -> Address:
        """Parse an address; raise SettingsError if it is not valid."""
        if url.startswith(_NETWORK):
            hosts, slash, chroot = url.removeprefix(_NETWORK).partition("/")
            path = None
        elif url.startswith(_FILE):
            path, _, option = url.removeprefix(_FILE).partition("?chroot=")
            slash, chroot, hosts = "/", option.strip("/"), "localhost:0"
        else:
            raise _bad_address(url)
        if not hosts or path == "":
            raise _bad_address(url)
        return cls(url, hosts, path, f"{slash}{chroot}".rstrip("/"))


def _bad_address(url: str) -> SettingsError:
    return SettingsError(
        name="coordinator",
        reason="must be zookeeper://HOST:PORT,HOST:PORT or sqlite:PATH, got "
        f"{hide_credentials(url)!r}",
    )


class Client(KazooClient):
    """kazoo's client, for a coordinator on the network or in a file.

    :ivar address: the address of the coordinator.
    :ivar may_look_on: a user who may only read the file of the coordinator can read its nodes.
    :ivar negotiated_timeout_seconds: the session timeout that the coordinator granted, which
        may differ from the requested one; None before the first connection.
    :ivar heard_at: a time since which the leader of the servers has heard of the session: the
        time at which the present connection was requested, on `qdo.system.clock.clock`; None if
        unknown.
    :ivar connected_to: HOST:PORT of the last ZooKeeper server that accepted the session.
    :ivar session_over: whether the coordinator has confirmed the end of the session, or ended it.
    """

    _connection: Any
    _conn_retry: Any
    chroot: str

    def __init__(self, address: Address, *, may_look_on: bool = False, **options: Any) -> None:
        self.address = address
        self.may_look_on = may_look_on
        self.negotiated_timeout_seconds: float | None = None
        self.heard_at: float | None = None
        self.session_over = False
        self.drop_reason = ""
        self.connected_to: str | None = None
        # kazoo has no types: here and below, super() is cast to Any.
        cast(Any, super()).__init__(hosts=f"{address.hosts}{address.chroot}", **options)
        self._calling: Any = self.handler.lock_object()
        retry = self._conn_retry.copy()
        if address.path is None:
            self._connection = _NetworkConnection(self, retry, logger=self.logger)
        else:
            # Imported here: clients of ZooKeeper servers do not need SQLite.
            from qdo.coordination.embedded.connection import EmbeddedConnection

            self._connection = EmbeddedConnection(self, retry, address.path, logger=self.logger)

    def _call(self, request: Any, async_object: Any) -> Any:
        """Queue a request; one caller at a time.

        kazoo wakes its connection with one byte for each request. After some 280 pending bytes the
        next write blocks, and gevent does not let a second greenlet write to the same socket. kazoo
        would treat that as a closed connection, report the request as failed, and still send it.
        """
        with self._calling:
            return cast(Any, super())._call(request, async_object)

    def drop_connection(self, reason: str) -> None:
        """Give the connection up. The client connects again, to another server if there is one.

        The session continues if the client connects within the session timeout.
        """
        self.drop_reason = reason
        self._call(_CONNECTION_DROP, self.handler.async_result())

    @property
    def server(self) -> str:
        """The server that the client is connected to, or was last."""
        return self.connected_to or self._connection.server or self.address.url

    def lost_server(self) -> str:
        """Return the server of the lost connection, and the reason if the client dropped it."""
        reason, self.drop_reason = self.drop_reason, ""
        return f"{self.server} ({reason})" if reason else self.server

    def _session_callback(self, state: Any) -> None:
        if state is KeeperState.EXPIRED_SESSION:
            self.session_over = True
        cast(Any, super())._session_callback(state)

    def open(self, timeout_seconds: float = 15.0) -> None:
        """Connect, and create the chroot if the address has one.

        :raises CoordinatorUnreachableError: no connection within `timeout_seconds`. The client is
            then stopped, within that time even if the network drops every packet.
        :raises DatabaseError: the file of an embedded coordinator cannot be used.
        """
        deadline = time.monotonic() + timeout_seconds
        self._connection.prepare()
        try:
            self.start_async().wait(timeout=timeout_seconds)
            if not self.connected:
                raise self._unreachable(timeout_seconds)
            self._make_chroot(deadline)
        except (KazooException, self.handler.timeout_exception) as error:
            self._abandon()
            raise self._unreachable(timeout_seconds) from error
        except CoordinatorUnreachableError:
            self._abandon()
            raise

    def _make_chroot(self, deadline: float) -> None:
        # Not with ensure_path("/"), which creates only the last part of the chroot.
        parts = self.chroot.split("/")[1:]
        answers = []
        for depth in range(1, len(parts) + 1):
            answer = self.handler.async_result()
            path = "/" + "/".join(parts[:depth])
            self._call(Create(path, b"", OPEN_ACL_UNSAFE, 0), answer)
            answers.append(answer)
        for answer in answers:
            with contextlib.suppress(NodeExistsError):
                answer.get(timeout=max(0.001, deadline - time.monotonic()))

    def _abandon(self) -> None:
        # In the background: stopping waits for a connection attempt that may be stuck.
        self._stopped.set()
        self.handler.spawn(self._give_up)

    def _unreachable(self, timeout_seconds: float) -> CoordinatorUnreachableError:
        reason = self._connection.last_fault or "no server answered"
        return CoordinatorUnreachableError(
            url=self.address.url, reason=f"{reason} within {timeout_seconds:g} s"
        )

    def _give_up(self) -> None:
        self._safe_close()
        self.close()

    def detach(self) -> None:
        """Stop without ending the session: it lives on for its timeout, or for another client."""
        self._stopped.set()
        self.drop_connection("the client leaves its session")
        self._give_up()

    def command(self, cmd: bytes = b"ruok") -> str:
        """Send a four-letter command; an embedded coordinator supports only a few."""
        if self.address.path is None:
            return str(cast(Any, super()).command(cmd))
        if not self.connected:
            raise ConnectionLoss("No connection to the coordinator")
        return str(self._connection.command(cmd))


class _NetworkConnection(ConnectionHandler):
    """kazoo's connection; it keeps the session timeout that the server granted.

    :ivar server: HOST:PORT of the last server that it tried.
    """

    last_fault: str | None = None
    client: Any

    def __init__(self, client: Any, retry: Any, logger: Any) -> None:
        cast(Any, super()).__init__(client, retry, logger=logger)
        self.server: str | None = None
        self.handler = _ImpatientHandler(client)

    def prepare(self) -> None:
        """Do nothing: faults of a server appear on connecting."""

    def _expand_client_hosts(self) -> Any:
        """Return the servers in the order of the next attempts, the last one at the end."""
        found = cast(Any, super())._expand_client_hosts()
        return sorted(found, key=lambda each: f"{each[1]}:{each[2]}" == self.server)

    def _connect(self, host: str, hostip: str, port: int) -> Any:
        self.server = f"{hostip}:{port}"
        return cast(Any, super())._connect(host, hostip, port)

    def _send_request(self, read_timeout: float, connect_timeout: float) -> None:
        if self.client._queue and self.client._queue[0][0] is _CONNECTION_DROP:
            raise ConnectionDropped(self.client.drop_reason)
        cast(Any, super())._send_request(read_timeout, connect_timeout)

    def _read_socket(self, read_timeout: float) -> Any:
        response = cast(Any, super())._read_socket(read_timeout)
        if response == CLOSE_RESPONSE:
            self.client.session_over = True
        return response

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


class _ImpatientHandler:
    """kazoo's handler, with a shorter time limit for connecting to one server."""

    def __init__(self, client: Any) -> None:
        self._client = client
        self._handler = client.handler

    def __getattr__(self, name: str) -> Any:
        return getattr(self._handler, name)

    def create_connection(self, *args: Any, timeout: float, **options: Any) -> Any:
        limit = min(timeout, _connect_seconds(self._client))
        return self._handler.create_connection(*args, timeout=limit, **options)


def _connect_seconds(client: Any) -> float:
    return float(CONNECT_SHARE * client._session_timeout / 1000.0)


def connect(
    url: str,
    *,
    handler: Any = None,
    session_timeout_seconds: float = 10.0,
    client_id: tuple[int, bytes] | None = None,
    **options: Any,
) -> Client:
    """Return a client for the coordinator at `url`, not started yet; see `Client.open`.

    :param handler: "threading" (the default), "gevent", or a handler object of kazoo.
    :param session_timeout_seconds: the requested timeout; see
        `Client.negotiated_timeout_seconds`.
    :param client_id: id and password of a session to resume, as `KazooClient.client_id`.
    :param options: `may_look_on` of `Client`, and further options of `KazooClient`.
    :raises SettingsError: `url` is not an address of a coordinator.
    """
    address = Address.parse(url)
    chosen = _handler(handler)
    retry = {**_RETRY, "sleep_func": chosen.sleep_func}
    options.setdefault("connection_retry", retry)
    options.setdefault("command_retry", retry)
    return Client(
        address,
        handler=chosen,
        timeout=session_timeout_seconds,
        client_id=client_id,
        read_only=False,
        **options,
    )


def _handler(handler: Any) -> Any:
    if handler is not None and not isinstance(handler, str):
        return handler
    module, name = _HANDLERS[handler or "threading"]
    return getattr(importlib.import_module(module), name)()
