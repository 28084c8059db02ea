"""Opening a client of the coordinator, over the network or in a file of this machine.

==========================================  ==================================================
address                                     far side
==========================================  ==================================================
``zookeeper://h1:2181,h2:2181/a/b``         ZooKeeper servers; ``/a/b`` is prefixed to all paths
``sqlite:PATH``, ``sqlite:PATH?chroot=/a``  a SQLite file shared by the processes of this machine
==========================================  ==================================================

Both give the same class: kazoo's client with a few additions. Everything built on it, kazoo's
recipes included, works on either.
"""

from __future__ import annotations

import contextlib
import importlib
import time
from dataclasses import dataclass
from typing import Any, cast

from kazoo.client import KazooClient
from kazoo.exceptions import ConnectionLoss, KazooException, NodeExistsError
from kazoo.protocol.connection import ConnectionHandler
from kazoo.protocol.serialization import Connect, Create
from kazoo.security import OPEN_ACL_UNSAFE

from qdo.coordination.lease import clock
from qdo.errors import CoordinatorUnreachableError, SettingsError

_NETWORK = "zookeeper://"
_FILE = "sqlite:"
_HANDLERS = {
    "threading": ("kazoo.handlers.threading", "SequentialThreadingHandler"),
    "gevent": ("kazoo.handlers.gevent", "SequentialGeventHandler"),
}
# kazoo's own default lets the pauses between attempts grow to an hour.
_RETRY = {"max_tries": -1, "delay": 0.05, "backoff": 2, "max_delay": 0.5}


@dataclass(frozen=True, slots=True)
class Address:
    """Where a coordinator is: `hosts` of ZooKeeper servers, or the `path` of a file."""

    url: str
    hosts: str
    path: str | None
    chroot: str

    @classmethod
    def parse(cls, url: str) -> Address:
        """Read an address as users write it; raise SettingsError for anything else."""
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
        reason=f"{url!r} is no coordinator; write zookeeper://HOST:PORT,HOST:PORT or sqlite:PATH",
    )


class Client(KazooClient):
    """kazoo's client, for a coordinator on the network or in a file.

    :ivar address: where the coordinator is.
    :ivar negotiated_timeout_seconds: the session time-out that the coordinator granted, which
        may differ from the one asked for; None before the first connection.
    :ivar heard_at: a time since which the leader of the servers has heard of the session: when
        the present connection was asked for, on `qdo.coordination.lease.clock`; None unknown.
    """

    _connection: Any
    _conn_retry: Any
    chroot: str

    def __init__(self, address: Address, **options: Any) -> None:
        self.address = address
        self.negotiated_timeout_seconds: float | None = None
        self.heard_at: float | None = None
        # kazoo has no types: here and below, super() is taken for Any.
        cast(Any, super()).__init__(hosts=f"{address.hosts}{address.chroot}", **options)
        self._calling: Any = self.handler.lock_object()
        retry = self._conn_retry.copy()
        if address.path is None:
            self._connection = _NetworkConnection(self, retry, logger=self.logger)
        else:
            # Imported here, so that who only talks to servers needs no SQLite.
            from qdo.coordination.embedded import EmbeddedConnection

            self._connection = EmbeddedConnection(self, retry, address.path, logger=self.logger)

    def _call(self, request: Any, async_object: Any) -> Any:
        """Queue a request; one caller at a time.

        kazoo wakes its connection with a byte for each. Once some 280 of them wait the next one
        blocks, and gevent lets no second greenlet write to the same socket: kazoo would take
        that for a closed connection, report the request as failed, and still send it.
        """
        with self._calling:
            return cast(Any, super())._call(request, async_object)

    def open(self, timeout_seconds: float = 15.0) -> None:
        """Connect, and make the chroot if the address has one.

        :raises CoordinatorUnreachableError: no connection within `timeout_seconds`; the client
            is stopped then, within that time even where the network swallows every packet.
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
        # Not with ensure_path("/"), which makes the last part of the chroot only.
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
        # Stopping waits for a connection attempt that may be stuck: not at our caller's cost.
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

    def command(self, cmd: bytes = b"ruok") -> str:
        """Send a four-letter command to the server; an embedded coordinator knows few."""
        if self.address.path is None:
            return str(cast(Any, super()).command(cmd))
        if not self.connected:
            raise ConnectionLoss("No connection to the coordinator")
        return str(self._connection.command(cmd))


class _NetworkConnection(ConnectionHandler):
    """kazoo's connection, which keeps the session time-out that the server granted."""

    last_fault: str | None = None
    client: Any

    def __init__(self, client: Any, retry: Any, logger: Any) -> None:
        cast(Any, super()).__init__(client, retry, logger=logger)

    def prepare(self) -> None:
        """Do nothing: what can be wrong with a server shows on connecting."""

    def _invoke(self, timeout: float, request: Any, xid: int | None = None) -> Any:
        began = clock()
        answer = cast(Any, super())._invoke(timeout, request, xid)
        if isinstance(request, Connect):
            granted = answer[0].time_out
            if granted > 0:  # 0: the session to be resumed has ended
                self.client.negotiated_timeout_seconds = granted / 1000.0
                self.client.heard_at = began
        return answer


def connect(
    url: str,
    *,
    handler: Any = None,
    session_timeout_seconds: float = 10.0,
    client_id: tuple[int, bytes] | None = None,
    **options: Any,
) -> Client:
    """Return a client for the coordinator at `url`, not started yet; see `Client.open`.

    :param handler: "threading" (the default), "gevent", or a handler object of kazoo's.
    :param session_timeout_seconds: asked for; see `Client.negotiated_timeout_seconds`.
    :param client_id: id and password of a session to resume, as `KazooClient.client_id`.
    :param options: further options of `KazooClient`.
    :raises SettingsError: `url` is no address of a coordinator.
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
