"""A client of the coordinator: ZooKeeper, a PostgreSQL database, or a file on this machine.

==========================================  ==================================================
address                                     far side
==========================================  ==================================================
``zookeeper://h1:2181,h2:2181/a/b``         ZooKeeper servers; ``/a/b`` is prefixed to all paths
``postgresql://USER@HOST/DB?chroot=/a``     a schema of PostgreSQL; other options as of a broker
``sqlite:PATH``, ``sqlite:PATH?chroot=/a``  a SQLite file shared by processes on this machine
==========================================  ==================================================

All coordinators have the same client class: kazoo's client with a few additions. So code for this
class, including kazoo's recipes, works with every coordinator.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import ssl
from dataclasses import dataclass
from typing import Any, cast

from kazoo.client import KazooClient
from kazoo.exceptions import (
    AuthFailedError,
    ConnectionDropped,
    ConnectionLoss,
    InvalidACLError,
    KazooException,
    NoAuthError,
    NodeExistsError,
    SessionClosedRequireSaslError,
    SessionExpiredError,
)
from kazoo.protocol.connection import _CONNECTION_DROP, CLOSE_RESPONSE, ConnectionHandler
from kazoo.protocol.serialization import Close, Connect, Create, Exists, Watch
from kazoo.protocol.states import EVENT_TYPE_MAP, KeeperState
from kazoo.retry import ForceRetryError

from qdo.coordination.access import ANYBODY, Access, acl_rejected, hide_digests
from qdo.coordination.extra_operations import TreeWatchers
from qdo.errors import (
    CoordinatorAccountError,
    CoordinatorDatabaseError,
    CoordinatorTlsError,
    CoordinatorUnreachableError,
    NodeRefusedError,
    QdoError,
    SettingsError,
)
from qdo.postgresql.url import SchemaAddress, coordinator_address
from qdo.system.clock import clock
from qdo.text import describe, hide_credentials

# The share of the session timeout that an attempt to connect to one server may take. kazoo allows
# the whole timeout, so the session would end before kazoo tries a second server. If all servers are
# slow, the share doubles after each failed round, up to 1.
CONNECT_SHARE = 0.25
# After this number of session timeouts without a connection, the client changes its way to resume
# the session. It first asks a server for a new session, and then tries to resume the old session at
# this server. The lease of the old session ended a timeout ago. An attempt with a late response
# would keep the old session, and its ownership of queues, alive at the servers. A server that
# grants only a new session has lost the old session, perhaps with all data.
DOUBT_TIMEOUTS = 2.0
_log = logging.getLogger(__name__)
_NETWORK = "zookeeper://"
_FILE = "sqlite:"
DATABASE = "postgresql://"
_HANDLERS = {
    "threading": ("kazoo.handlers.threading", "SequentialThreadingHandler"),
    "gevent": ("kazoo.handlers.gevent", "SequentialGeventHandler"),
}
# kazoo's defaults let the pauses between attempts grow to an hour.
_RETRY = {"max_tries": -1, "delay": 0.05, "backoff": 2, "max_delay": 0.5}


class NetworkConnection(ConnectionHandler):
    """kazoo's connection, which also records the session timeout that the server granted.

    :ivar server: the HOST:PORT of the last server that the connection tried.
    :ivar tls_fault: the TLS error of the last attempt to connect, or None.
    """

    last_fault: str | None = None
    tls_fault: str | None = None
    waits_until = 0.0
    client: Any
    _socket: Any
    _failed_rounds = 0
    _reason = ""

    def __init__(self, client: Any, retry: Any, logger: Any, sasl_options: Any) -> None:
        cast(Any, super()).__init__(client, retry, logger=logger, sasl_options=sasl_options)
        self.server: str | None = None
        self._host = ""
        self.handler = _TransportHandler(client)

    def prepare(self) -> None:
        """Do nothing, because a server's faults appear when the client connects."""

    def _expand_client_hosts(self) -> Any:
        servers = cast(Any, super())._expand_client_hosts()
        # Try the previous server last, because it may be down.
        return sorted(servers, key=lambda each: f"{each[1]}:{each[2]}" == self.server)

    def _connect_loop(self, retry: Any) -> Any:
        try:
            return cast(Any, super())._connect_loop(retry)
        except ForceRetryError:  # no server is left to try
            if self._failed_rounds == 0 and self.client.lost_at is not None:
                _log.warning(
                    "no server of %s resumes the session: %s; trying them again, each with a longer"
                    " limit",
                    self.client.address.url,
                    self._reason or "the name of no server can be resolved",
                )
            self._failed_rounds += 1
            raise

    def _connect(self, host: str, hostip: str, port: int) -> Any:
        self.server = f"{hostip}:{port}"
        self._host = host
        granted = False
        try:
            if self.client.is_in_doubt():
                self._get_session(hostip, port)
                granted = True
            timeouts = cast(Any, super())._connect(host, hostip, port)
        except Exception as error:
            self._reason = f"{self.server}: {describe(error)}"
            self._explain(error)
            if granted:
                _log.warning(
                    "%s grants sessions, but does not resume this one (%s): it has lost it, or all"
                    " its data",
                    self.server,
                    describe(error),
                )
                raise SessionExpiredError from error
            raise
        # Keep the count until now, because the time to connect may end during the next attempt.
        self.tls_fault = None
        self._failed_rounds = -1  # the round ends with this connection
        return timeouts

    def _get_session(self, hostip: str, port: int) -> None:
        """Get a new session from a server, and end the new session."""
        driver = cast(Any, super())
        seconds = self.connect_seconds
        asked = Connect(0, 0, int(1000 * self.client.timeout_seconds), 0, bytes(16), False)
        with self._socket_error_handling():
            address = hostip, port
            self._socket = self.handler.create_connection(address, self._host, seconds)
            try:
                self._socket.setblocking(0)
                driver._invoke(seconds, asked)
                driver._submit(Close(), seconds, 1)
            finally:
                self._socket.close()
                self._socket = None

    def _explain(self, error: Exception) -> None:
        if isinstance(error, ConnectionDropped) and isinstance(error.__context__, ssl.SSLError):
            self.tls_fault = _tls_reason(error.__context__)
        if isinstance(error, SessionClosedRequireSaslError):
            # Servers with enforce.auth.enabled send this code after a wrong password. kazoo does
            # not know the code, and kazoo's thread would end with a traceback.
            raise AuthFailedError("the servers reject the account") from error

    @property
    def connect_seconds(self) -> float:
        """The time that an attempt to connect to one server may take."""
        share = CONNECT_SHARE * 2.0 ** min(2, max(0, self._failed_rounds))
        return share * float(self.client.timeout_seconds)

    def command(self, word: bytes) -> str:
        """Send a four-letter command through a separate connection, as kazoo does."""
        # kazoo passes the port as the name of the server, which TLS rejects.
        connection = self.handler.create_connection(
            address=self._socket.getpeername()[:2],
            hostname=self._host,
            timeout=CONNECT_SHARE * self.client.timeout_seconds,
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
            timeout = self.connect_seconds
        answer = cast(Any, super())._invoke(timeout, request, xid)
        if isinstance(request, Connect):
            granted = answer[0].time_out
            if granted > 0:  # 0 means that the old session has ended
                self.client.connected_to = self.server
                self.client.negotiated_timeout_seconds = granted / 1000.0
                self.client.heard_at = began
        return answer


class _TransportHandler:
    """kazoo's handler, with TLS and a shorter time limit for connecting to one server."""

    # kazoo's TLS also trusts the certificate authorities of the operating system. kazoo's TLS also
    # waits for the network even if TLS has already decrypted further responses.

    def __init__(self, client: Any) -> None:
        self._client = client
        self._handler = client.handler
        tls = client.access.tls
        self._context = None if tls is None else tls.context()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._handler, name)

    def create_connection(self, address: Any, hostname: str, timeout: float, **options: Any) -> Any:
        limit = min(timeout, self._client._connection.connect_seconds)
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
        # One TLS record may contain several responses.
        more = self._handler.select(reading, [], [], 0)[0]
        return [*ready, *(each for each in more if each not in ready)], [], []


def _tls_reason(error: ssl.SSLError) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return str(error.verify_message).rstrip(".")
    return str(error.reason or error).replace("_", " ").lower()


@dataclass(frozen=True, slots=True)
class Address:
    """The address of a coordinator."""

    url: str
    # The hosts of ZooKeeper servers; "localhost:0" for a database.
    hosts: str
    # The path of a SQLite file, or None.
    path: str | None
    # The PostgreSQL schema, or None.
    database: SchemaAddress | None
    chroot: str

    @classmethod
    def parse(cls, url: str) -> Address:
        """Parse an address; raise SettingsError if it is not valid."""
        path: str | None = None
        database: SchemaAddress | None = None
        if url.startswith(_NETWORK):
            hosts, slash, chroot = url.removeprefix(_NETWORK).partition("/")
        elif url.startswith(_FILE):
            path, _, option = url.removeprefix(_FILE).partition("?chroot=")
            slash = "/"
            chroot = option.strip("/")
            hosts = "localhost:0"
        elif url.startswith(DATABASE):
            database, chroot = coordinator_address(url)
            slash = "/"
            hosts = "localhost:0"
        else:
            raise _bad_address(url)
        if not hosts or path == "":
            raise _bad_address(url)
        return cls(url, hosts, path, database, f"{slash}{chroot}".rstrip("/"))

    @property
    def has_servers(self) -> bool:
        """Whether the address names ZooKeeper servers."""
        return self.path is None and self.database is None


def _bad_address(url: str) -> SettingsError:
    return SettingsError(
        name="coordinator",
        reason="must be zookeeper://HOST:PORT,HOST:PORT, postgresql://USER@HOST/DATABASE or"
        f" sqlite:PATH, got {hide_credentials(url)!r}",
    )


class Client(KazooClient):
    """kazoo's client, for a coordinator on the network or in a file.

    :ivar may_look_on: whether the client only shows nodes to people, so that read access suffices.
    :ivar negotiated_timeout_seconds: the session timeout that the coordinator granted; None before
        the first connection. The granted timeout may differ from the requested timeout.
    :ivar heard_at: a time on `qdo.system.clock.clock`; None if unknown. After this time, the leader
        of the servers received the request for the present connection of the session.
    :ivar connected_to: the HOST:PORT of the last ZooKeeper server that accepted the session.
    :ivar lost_at: the time on `qdo.system.clock.clock` at which the present session lost its
        connection; None without a session, and while the session is connected.
    :ivar session_over: whether the coordinator has ended the session, or confirmed its end.
    """

    _connection: Any
    _conn_retry: Any
    _state: Any
    chroot: str

    def __init__(
        self,
        address: Address,
        *,
        access: Access = ANYBODY,
        may_look_on: bool = False,
        **options: Any,
    ) -> None:
        self.address = address
        self.access = access
        self.may_look_on = may_look_on
        self.negotiated_timeout_seconds: float | None = None
        self.heard_at: float | None = None
        self.session_over = False
        self._rejected = False
        self.drop_reason = ""
        self.connected_to: str | None = None
        self.lost_at: float | None = None
        self.tree_watchers = TreeWatchers()
        # kazoo has no types, so this class casts super() to Any.
        options.update(access.options())
        cast(Any, super()).__init__(hosts=f"{address.hosts}{address.chroot}", **options)
        self.logger.addFilter(hide_digests)  # all clients share the logger and the filter
        self._calling: Any = self.handler.lock_object()
        retry = self._conn_retry.copy()
        if address.has_servers:
            sasl = options.get("sasl_options")
            self._connection = NetworkConnection(self, retry, self.logger, sasl)
        else:
            # Clients of ZooKeeper servers need no library of a database.
            from qdo.coordination.sql.connection import StoreConnection, opener

            timeout = float(cast(Any, self)._session_timeout) / 1000
            server, opened = opener(
                address.path, address.database, timeout, access.app, for_people=may_look_on
            )
            self._connection = StoreConnection(self, retry, server, opened, logger=self.logger)

    def _call(self, request: Any, async_object: Any) -> Any:
        """Queue an operation for kazoo's thread, for one caller at a time."""
        # kazoo wakes its connection with one byte for each operation. After about 280 pending
        # bytes, the next write blocks, and gevent lets no second greenlet write to the same socket.
        # kazoo would take gevent's error for a closed connection and report a failure, but still
        # send the operation.
        with self._calling:
            return cast(Any, super())._call(request, async_object)

    def drop_connection(self, reason: str) -> None:
        """Drop the connection; a reconnection within its timeout continues the session."""
        self.drop_reason = reason
        self._call(_CONNECTION_DROP, self.handler.async_result())

    @property
    def server(self) -> str:
        return self.connected_to or self._connection.server or self.address.url

    def lost_server(self) -> str:
        """Return the server of the lost connection, with the reason if the client dropped it."""
        reason = self.drop_reason
        self.drop_reason = ""
        return f"{self.server} ({reason})" if reason else self.server

    @property
    def timeout_seconds(self) -> float:
        """The granted session timeout; before the first connection, the requested timeout."""
        return self.negotiated_timeout_seconds or float(cast(Any, self)._session_timeout) / 1000.0

    def is_in_doubt(self) -> bool:
        """Return whether the connection was lost too long ago to resume the session everywhere."""
        patience = DOUBT_TIMEOUTS * self.timeout_seconds
        return self.lost_at is not None and clock() - self.lost_at > patience

    def _session_callback(self, state: Any) -> None:
        if state is not KeeperState.CONNECTED:
            self.tree_watchers.clear()
        if state is not KeeperState.CONNECTING:
            self.lost_at = None
        elif self._state is KeeperState.CONNECTED:
            self.lost_at = clock()
        if state is KeeperState.EXPIRED_SESSION:
            self.session_over = True
        if state is KeeperState.AUTH_FAILED:
            self._rejected = True  # set this before callers of `open` wake
        cast(Any, super())._session_callback(state)

    def open(self, timeout_seconds: float = 15.0) -> None:
        """Connect, and create the chroot if the address has one.

        :raises CoordinatorUnreachableError: the client could not connect within `timeout_seconds`.
            The method stops the client within this time, even if the network drops every packet.
        :raises CoordinatorAccountError: the coordinator rejects the account.
        :raises NodeRefusedError: the chroot is missing, and this account may not create it.
        :raises DatabaseError: the client cannot use the file of an embedded coordinator.
        :raises UsageError: the database lacks the schema, or the account lacks a right.
        """
        deadline = clock() + timeout_seconds
        self._connection.prepare()
        try:
            started = self.start_async()
            while not started.wait(timeout=max(0.0, deadline - clock())):
                # After a failover, a database delays new sessions. Add this delay to the timeout.
                if (later := self._connection.waits_until + timeout_seconds) <= deadline:
                    break
                deadline = later
            if not self.connected:  # perhaps lost again, because kazoo logs in after connecting
                raise ConnectionLoss
            self._make_chroot(deadline)
        except (KazooException, self.handler.timeout_exception) as error:
            self._abandon()
            raise self._open_error(error, timeout_seconds) from error
        except BaseException:  # for example a job's deadline or Ctrl-C
            self._abandon()
            raise

    def _make_chroot(self, deadline: float) -> None:
        # Do not touch an existing chroot, because this account may have no rights on the nodes
        # above. Send a request even without a chroot, because a server that requires accounts
        # refuses only the first request, not the session.
        if self._answer(Exists(self.chroot or "/", None), deadline):
            return
        # Do not use ensure_path("/"), because it would create only the last part of the chroot.
        parts = self.chroot.split("/")[1:]
        for depth in range(1, len(parts) + 1):
            path = "/" + "/".join(parts[:depth])
            if self._answer(Exists(path, None), deadline):
                continue
            with contextlib.suppress(NodeExistsError):
                self._answer(Create(path, b"", self.access.acl_of("/"), 0), deadline)

    def _answer(self, request: Any, deadline: float) -> Any:
        answer = self.handler.async_result()
        self._call(request, answer)
        return self.answer_to(answer, max(0.001, deadline - clock()))

    def answer_to(self, pending: Any, timeout_seconds: float) -> Any:
        """Return the result of an operation, or raise its error.

        :param pending: the `async_result` of the operation, from the handler.
        :raises BaseException: no response arrived; the class is the handler's `timeout_exception`.
        """
        # Do not use `get(timeout=...)`, because with gevent it raises `gevent.Timeout`. Callers
        # expect the handler's `timeout_exception`.
        pending.wait(timeout_seconds)
        if not pending.ready():
            raise self.handler.timeout_exception(f"no answer within {timeout_seconds:g} s")
        return pending.get()

    def create_async(
        self, path: str, value: bytes = b"", acl: Any = None, *rest: Any, **options: Any
    ) -> Any:
        """Create a node; by default with the access control list from `access`."""
        acl = acl or self.access.acl_of(path)
        return cast(Any, super()).create_async(path, value, acl, *rest, **options)

    def _abandon(self) -> None:
        # Stop in the background, because `stop` waits for a connection attempt that may hang.
        self._stopped.set()
        self.handler.spawn(self._give_up)

    def _open_error(self, error: Exception, timeout_seconds: float) -> QdoError:
        if self._rejected or isinstance(error, (AuthFailedError, SessionClosedRequireSaslError)):
            known = self.access.account is not None
            account = self.access.account_name() if known else "clients without an account"
            return CoordinatorAccountError(url=self.address.url, account=account)
        if isinstance(error, InvalidACLError):
            return acl_rejected()
        if isinstance(error, NoAuthError):
            return NodeRefusedError(path=self.chroot, account=self.access.account_name())
        return self._unreachable(timeout_seconds)

    def _unreachable(self, timeout_seconds: float) -> CoordinatorUnreachableError:
        if tls_fault := self._connection.tls_fault:
            return CoordinatorTlsError(url=self.address.url, reason=tls_fault)
        fault = self._connection.last_fault
        if fault is not None:  # a database's error names the remedy
            return CoordinatorDatabaseError(url=self.address.url, reason=fault)
        reason = f"no server answered within {timeout_seconds:g} s"
        return CoordinatorUnreachableError(url=self.address.url, reason=reason)

    def _give_up(self) -> None:
        self._safe_close()
        self.close()

    def detach(self) -> None:
        """Stop without ending the session, so another client may resume it before its timeout."""
        self._stopped.set()
        self.drop_connection("the client leaves its session")
        self._give_up()

    def command(self, cmd: bytes = b"ruok") -> str:
        """Send a four-letter command; an embedded coordinator supports only a few."""
        if not self.connected:
            raise ConnectionLoss("No connection to the coordinator")
        return str(self._connection.command(cmd))


def connect(
    url: str,
    *,
    access: Access = ANYBODY,
    handler: Any = None,
    session_timeout_seconds: float = 10.0,
    client_id: tuple[int, bytes] | None = None,
    **options: Any,
) -> Client:
    """Return a client for the coordinator at `url`, without opening it; see `Client.open`.

    :param handler: "threading" (the default), "gevent", or a handler object of kazoo.
    :param session_timeout_seconds: the requested session timeout.
    :param client_id: the id and password of a session to resume; see `KazooClient.client_id`.
    :param options: `may_look_on` of `Client`, and other options of `KazooClient`.
    :raises SettingsError: `url` is not the address of a coordinator.
    """
    address = Address.parse(url)
    chosen = _handler(handler)
    retry = {**_RETRY, "sleep_func": chosen.sleep_func}
    options.setdefault("connection_retry", retry)
    options.setdefault("command_retry", retry)
    return Client(
        address,
        access=access,
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
