"""Opening a coordinator that cannot be had: one clear error, in the time given."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from pathlib import Path

import gevent
import pytest

from qdo.coordination import transactions
from qdo.coordination.client import Address, Client, connect
from qdo.coordination.protocol.machine import NoResponse, Op, Response, SetOp
from qdo.errors import (
    CoordinatorUnreachableError,
    DatabaseCorruptError,
)
from tests.support.coordinator_process import connected
from tests.support.zookeeper import free_ports


@pytest.mark.parametrize("handler", ["threading", "gevent"])
@pytest.mark.parametrize("accepts", [False, True])
def test_a_server_that_does_not_answer(handler: str, accepts: bool) -> None:
    """Whether it accepts connections or not; a session timeout of minutes does not matter."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1] if accepts else free_ports(1)[0]
        client = connect(
            f"zookeeper://127.0.0.1:{port}", handler=handler, session_timeout_seconds=600
        )
        with pytest.raises(CoordinatorUnreachableError):
            client.open(0.5)


def test_an_interrupted_opening_ends_its_attempts() -> None:
    """A job is stopped at its deadline in the first use of a lock."""
    client = connect(f"zookeeper://127.0.0.1:{free_ports(1)[0]}", handler="gevent")
    with pytest.raises(gevent.Timeout), gevent.Timeout(0.05):
        client.open(30)
    attempts = client._connection._connection_routine
    attempts.join(20)
    assert attempts.dead


def test_a_change_whose_answer_never_comes_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its request may be what ends each connection."""
    with connected(f"sqlite:{tmp_path / 'coordination.db'}", handler="threading") as client:
        client.create("/a", b"")
        real = transactions.commit

        def commit(client: Client, ops: Sequence[Op]) -> Response:
            return NoResponse() if isinstance(ops[0], SetOp) else real(client, ops)

        monkeypatch.setattr(transactions, "commit", commit)
        monkeypatch.setattr(transactions, "CHANGE_SECONDS", 0.2)
        with pytest.raises(CoordinatorUnreachableError):
            transactions.change(client, "/a", lambda node: [SetOp("/a", b"1", 0)], root="/a")
        assert client.get("/a")[0] == b""


def test_damaged_file(tmp_path: Path) -> None:
    path = tmp_path / "c.db"
    path.write_bytes(b"garbage" * 1000)
    with pytest.raises(DatabaseCorruptError):
        connect(f"sqlite:{path}").open(5)
    assert path.read_bytes() == b"garbage" * 1000


def test_addresses() -> None:
    """Addresses as users write them, and their meaning."""
    network = Address.parse("zookeeper://h1:2181,h2/a/b/")
    assert (network.hosts, network.path, network.chroot) == ("h1:2181,h2", None, "/a/b")
    assert Address.parse("zookeeper://h1").chroot == ""
    file = Address.parse("sqlite:some/folder/c.db")
    assert (file.path, file.chroot) == ("some/folder/c.db", "")
    assert Address.parse("sqlite:c.db?chroot=/a/b").chroot == "/a/b"
