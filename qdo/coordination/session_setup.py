"""Set up a new session before its worker registers, and check the server's version and the broker.

Some versions of ZooKeeper may lose acknowledged transactions if a follower dies while it
synchronizes with a new leader. The bugs are ZOOKEEPER-4643, -4646, -4685 and -4785, and in 3.9.3
ZOOKEEPER-4925. They do not affect a single server.

The functions raise CoordinatorUnreachableError after their timeout, or if the session is lost.
"""

from __future__ import annotations

import contextlib
import logging
import re
import socket
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from kazoo.exceptions import (
    InvalidACLError,
    KazooException,
    NoAuthError,
    NodeExistsError,
    NoNodeError,
)
from kazoo.retry import KazooRetry

from qdo.coordination.access import NodeRights, acl_rejected
from qdo.coordination.bulk_reads import connection_lost
from qdo.coordination.client import Client
from qdo.coordination.protocol.lease import Lease
from qdo.coordination.znodes.layout import Layout
from qdo.coordination.znodes.values import encode, load
from qdo.errors import NodeRefusedError, OpenTreeError, UsageError
from qdo.postgresql.url import split_chroot
from qdo.system.clock import clock
from qdo.text import hide_credentials

_Result = TypeVar("_Result")
SAFE = "3.8.4 and later of 3.8, 3.9.2, and 3.9.4 and later"
_VERSION = re.compile(r"version: (\d+)\.(\d+)\.(\d+)")
_MODE = re.compile(r"Mode: (\w+)")
_MOST_BYTES = 65_536
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class BrokerNode:
    """The broker file that the workers of an app use."""

    id: str  # a random number in the file, also in its copies
    address: str  # the first worker's address of the file
    host: str

    @classmethod
    def parse(cls, data: bytes | None) -> BrokerNode:
        value, _ = load(data)
        return cls(*(str(value.get(key, "unknown")) for key in ("id", "address", "host")))

    def encode(self) -> bytes:
        return encode({"id": self.id, "address": self.address, "host": self.host})


def prepare_session(client: Client, layout: Layout, timeout_seconds: float) -> Lease:
    """Create the persistent nodes; return the lease of the session."""
    return _retried(partial(_prepare, client, layout), client, layout, timeout_seconds)


def check_rights(client: Client, layout: Layout, timeout_seconds: float) -> None:
    """If the settings require it, reject nodes that accounts without a role can change.

    :raises OpenTreeError: an account without a role can change a node.
    :raises NodeRefusedError: this account may not read the rights of a node.
    """
    rights = client.access.rights
    if rights is not None and rights.required:
        check = partial(_check_rights, client, layout, rights)
        _retried(check, client, layout, timeout_seconds)


def _check_rights(client: Client, layout: Layout, rights: NodeRights) -> None:
    # `qdo admin acl apply` sets the rights of these nodes last. So if these nodes have the right
    # ACLs, all nodes have.
    for path in (layout.root, *layout.persistent):
        with contextlib.suppress(NoNodeError):
            stranger = rights.stranger(client.get_acls(path)[0])
            if stranger is not None:
                raise OpenTreeError(path=path, account=stranger)


def check_broker(
    client: Client, layout: Layout, broker: BrokerNode, timeout_seconds: float
) -> None:
    """Raise UsageError if this worker does not use the broker file of the app's first worker."""
    read = partial(_first_broker, client, layout, broker)
    first = _retried(read, client, layout, timeout_seconds)
    # Workers with different files would share queues by name, but each would miss the messages in
    # the other files.
    if first.id != broker.id:
        app = layout.root.rpartition("/")[2]
        raise UsageError(
            reason=f"the messages of app {app!r} are in the file that a worker on host "
            f"{first.host} opened as {first.address}, and {broker.address} on host {broker.host} "
            "is another file; start this worker with the same broker; workers on several machines "
            "need a broker that they reach over the network, such as SQS. To change to another "
            "file, stop all workers of the app and run `qdo admin broker file --reset`",
            app=app,
        )


def check_fleet(
    client: Client,
    layout: Layout,
    claim: Callable[[str, str], str],
    coordinator: str,
    host: str,
    timeout_seconds: float,
) -> None:
    """Raise UsageError if the workers of another coordinator process the app.

    :param claim: `QueueCatalog.claim_app` of the broker.
    :param coordinator: the address of this coordinator.
    :param host: the name of this host, for the error.
    """
    # A fleet is known by the creation of its root. Another coordinator, or another namespace, has
    # neither the owners nor the positions of the app, so its workers would run all messages again.
    stat = _retried(partial(_root_stat, client, layout), client, layout, timeout_seconds)
    mine = f"{stat.czxid:x}-{stat.ctime:x}"
    here = f"{hide_credentials(coordinator)} (host {host})"
    chroot = split_chroot(coordinator)[1]
    root = f"/{chroot}{layout.root}" if chroot else layout.root
    known, _, where = claim(f"{mine} {here}"[:200], root).partition(" ")
    if known != mine:
        app = layout.root.rpartition("/")[2]
        raise UsageError(
            reason=f"the messages of app {app!r} belong to the fleet at {where}, and this worker's"
            f" coordinator is another one, {here}: it has no positions, and would run all"
            " messages again; set `coordinator` and `namespace` to those of the fleet. If you have"
            " moved the positions, set `fleet` to NULL in the row of the app in the broker's table"
            " `apps`, see docs/upgrading.rst",
            app=app,
            coordinator=where,
        )


def _retried(
    step: Callable[[], _Result], client: Client, layout: Layout, timeout_seconds: float
) -> _Result:
    # Retry after the loss of the connection, but not after the loss of the session.
    retry = KazooRetry(
        max_tries=-1,
        delay=0.05,
        max_delay=0.5,
        ignore_expire=False,
        sleep_func=client.handler.sleep_func,
        deadline=timeout_seconds,
    )
    try:
        result: _Result = retry(step)
    except InvalidACLError as error:
        raise acl_rejected() from error
    except NoAuthError as error:
        # Do not raise the error for an unreachable coordinator, after which service managers
        # restart the worker forever.
        account = client.access.account_name()
        raise NodeRefusedError(path=layout.root, account=account) from error
    except KazooException as error:
        raise connection_lost(client, error) from error
    return result


def _prepare(client: Client, layout: Layout) -> Lease:
    rights = client.access.rights
    # If there are ACLs, senders may not create the folder of doorbells.
    doorbells = (layout.doorbells,) if rights is not None and rights.accounts else ()
    for path in (*layout.persistent, f"{layout.components}/worker", *doorbells):
        client.ensure_path(path)
    # This transaction proves contact with the leader, from which the lease counts.
    sent_at = clock()
    transaction = client.transaction()
    transaction.check(layout.workers, -1)
    for result in transaction.commit():
        if isinstance(result, NoAuthError):
            raise result
    return Lease(client.negotiated_timeout_seconds or 0.0, client.heard_at or sent_at)


def _first_broker(client: Client, layout: Layout, mine: BrokerNode) -> BrokerNode:
    """Return the broker file of the first worker, which may be this worker."""
    if not client.exists(layout.broker):
        with contextlib.suppress(NodeExistsError):
            client.ensure_path(layout.root)
            client.create(layout.broker, mine.encode())
    return BrokerNode.parse(client.get(layout.broker)[0])


def _root_stat(client: Client, layout: Layout) -> Any:
    client.ensure_path(layout.root)
    return client.get(layout.root)[1]


def is_safe(version: tuple[int, int, int]) -> bool:
    if version[:2] == (3, 9):
        return version >= (3, 9, 2) and version != (3, 9, 3)
    return version >= (3, 8, 4)


def warn_of_server(client: Client) -> None:
    """Log a warning if the client's server is in an ensemble and has an unsafe version.

    If the server does not allow the command `srvr`, do not log.
    """
    if not client.address.has_servers:
        return
    try:
        answer = client.command(b"srvr")
    except (KazooException, OSError, client.handler.timeout_exception):
        return
    found = _VERSION.search(answer)
    if found is None or "Mode: standalone" in answer:
        return
    version = int(found[1]), int(found[2]), int(found[3])
    if not is_safe(version):
        _log.warning(
            "the ZooKeeper servers have version %s, which may lose acknowledged transactions"
            " when a server dies during an election; messages may then be repeated. Upgrade them"
            " to a safe version: %s",
            ".".join(map(str, version)),
            SAFE,
        )


@dataclass(frozen=True, slots=True)
class ServerReport:
    """The description that a server of the address gives of itself.

    The version and mode are None if the server does not report them, for example without `srvr`.
    """

    host: str
    version: tuple[int, int, int] | None = None
    mode: str | None = None  # "leader", "follower", "observer" or "standalone"
    fault: str | None = None  # why the server is unreachable


def read_server(host: str, timeout_seconds: float) -> ServerReport:
    """Ask a server for its version and mode without TLS; `host` may have a port or brackets."""
    name, colon, port = host.rpartition(":")
    if not colon or not port.isdigit():
        name = host
        port = "2181"
    answer = b""
    try:
        with socket.create_connection((name.strip("[]"), int(port)), timeout_seconds) as connection:
            connection.sendall(b"srvr")
            while len(answer) < _MOST_BYTES and (data := connection.recv(4096)):
                answer += data
    except OSError as error:
        return ServerReport(host, fault=error.strerror or type(error).__name__)
    text = answer.decode(errors="replace")
    found = _VERSION.search(text)
    mode = _MODE.search(text)
    version = (int(found[1]), int(found[2]), int(found[3])) if found else None
    return ServerReport(host, version, mode[1] if mode else None)
