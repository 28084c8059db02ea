"""Opening a coordinator that cannot be had: one clear error, in the time given."""

from __future__ import annotations

import socket
import sqlite3
import time
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
    DatabaseError,
    DatabaseNewerError,
    NotAQdoDatabaseError,
    SettingsError,
)
from tests.support.coordinator_process import connected
from tests.support.zookeeper import free_ports

HANDLERS = ("threading", "gevent")


@pytest.mark.parametrize("handler", HANDLERS)
def test_refused_connections(handler: str) -> None:
    """A port that refuses connections."""
    begun = time.monotonic()
    with pytest.raises(CoordinatorUnreachableError):
        connect(
            f"zookeeper://127.0.0.1:{free_ports(1)[0]}", handler=handler, session_timeout_seconds=60
        ).open(0.5)
    assert time.monotonic() - begun < 20


@pytest.mark.parametrize("handler", HANDLERS)
def test_listener_that_never_answers(handler: str) -> None:
    """A port that accepts connections and never answers: the session timeout does not matter."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        begun = time.monotonic()
        with pytest.raises(CoordinatorUnreachableError):
            connect(
                f"zookeeper://127.0.0.1:{server.getsockname()[1]}",
                handler=handler,
                session_timeout_seconds=60,
            ).open(0.5)
        assert time.monotonic() - begun < 20


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


def test_file_of_another_program(tmp_path: Path) -> None:
    path = tmp_path / "c.db"
    with sqlite3.connect(path) as database:
        database.execute("CREATE TABLE t (x)")
    database.close()
    with pytest.raises(NotAQdoDatabaseError):
        connect(f"sqlite:{path}").open(5)


def test_file_of_a_newer_version(tmp_path: Path) -> None:
    path = tmp_path / "c.db"
    with connected(f"sqlite:{path}"):
        pass  # makes the file
    database = sqlite3.connect(path)
    database.execute("PRAGMA user_version = 99")
    database.close()
    with pytest.raises(DatabaseNewerError) as raised:
        connect(f"sqlite:{path}").open(5)
    assert raised.value.details["found"] == 99


def test_folder_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DatabaseError):
        connect(f"sqlite:{tmp_path}/file/c.db").open(5)


@pytest.mark.parametrize(
    "url", ["", "http://host", "zookeeper://", "sqlite:", "zk:2181", "zookeeper:///chroot"]
)
def test_bad_address(url: str) -> None:
    with pytest.raises(SettingsError) as raised:
        connect(url)
    assert raised.value.details["name"] == "coordinator"


def test_addresses() -> None:
    """Addresses as users write them, and their meaning."""
    network = Address.parse("zookeeper://h1:2181,h2/a/b/")
    assert (network.hosts, network.path, network.chroot) == ("h1:2181,h2", None, "/a/b")
    assert Address.parse("zookeeper://h1").chroot == ""
    file = Address.parse("sqlite:some/folder/c.db")
    assert (file.path, file.chroot) == ("some/folder/c.db", "")
    assert Address.parse("sqlite:c.db?chroot=/a/b").chroot == "/a/b"
