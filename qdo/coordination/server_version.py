"""Versions of ZooKeeper that may lose acknowledged transactions.

If a follower dies while it synchronizes with a new leader, an ensemble of these versions may come
back without transactions that it had acknowledged: ZOOKEEPER-4643, -4646, -4685 and -4785, and in
3.9.3 alone ZOOKEEPER-4925. A single server is not affected.
"""

from __future__ import annotations

import logging
import re
import socket
from dataclasses import dataclass

from kazoo.exceptions import KazooException

from qdo.coordination.client import Client

SAFE = "3.8.4 and later of 3.8, 3.9.2, and 3.9.4 and later"
_VERSION = re.compile(r"version: (\d+)\.(\d+)\.(\d+)")
_MODE = re.compile(r"Mode: (\w+)")
_MOST_BYTES = 65_536

_log = logging.getLogger(__name__)


def is_safe(version: tuple[int, int, int]) -> bool:
    """Return whether an ensemble of this version keeps what it has acknowledged."""
    if version[:2] == (3, 9):
        return version >= (3, 9, 2) and version != (3, 9, 3)
    return version >= (3, 8, 4)


def warn_of_server(client: Client) -> None:
    """Log a warning if the client's server is part of an ensemble of an unsafe version.

    Says nothing if the server does not allow the command `srvr`.
    """
    if client.address.path is not None:
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
    """What one server of the address says of itself.

    :ivar version: None if the server does not tell, as is `mode`: it may not allow `srvr`.
    :ivar mode: "leader", "follower", "observer" or "standalone".
    :ivar fault: why the server cannot be reached, None if it can.
    """

    host: str
    version: tuple[int, int, int] | None = None
    mode: str | None = None
    fault: str | None = None


def read_server(host: str, timeout_seconds: float) -> ServerReport:
    """Ask one server for its version and mode, on a connection of its own without TLS.

    :param host: HOST, HOST:PORT or [ADDRESS]:PORT.
    """
    name, colon, port = host.rpartition(":")
    if not colon or not port.isdigit():
        name, port = host, "2181"
    answer = b""
    try:
        with socket.create_connection((name.strip("[]"), int(port)), timeout_seconds) as connection:
            connection.sendall(b"srvr")
            while len(answer) < _MOST_BYTES and (data := connection.recv(4096)):
                answer += data
    except OSError as error:
        return ServerReport(host, fault=error.strerror or type(error).__name__)
    text = answer.decode(errors="replace")
    found, mode = _VERSION.search(text), _MODE.search(text)
    version = (int(found[1]), int(found[2]), int(found[3])) if found else None
    return ServerReport(host, version, mode[1] if mode else None)
