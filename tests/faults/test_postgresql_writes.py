"""PostgreSQL accepts no writes: its disk is full, it is read-only, or a standby takes over."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psycopg
import pytest

from qdo.broker_errors import (
    PostgresqlFullError,
    PostgresqlReadOnlyError,
    PostgresqlUnansweredError,
    PostgresqlUnreachableError,
)
from qdo.brokers.base import Broker, Outgoing, Reader
from qdo.brokers.registry import open_broker
from qdo.coordination.client import connect
from qdo.errors import CoordinatorDatabaseError
from qdo.positions import format_position
from tests.support.brokers import rows
from tests.support.cli import QDO, WORKER, command
from tests.support.postgresql import commands
from tests.support.postgresql.schema import prepared
from tests.support.postgresql.server import PostgresqlDatabase, PostgresqlServer
from tests.support.postgresql.standby import catch_up, promote, standby_of, stop_replication, url_of
from tests.support.processes import wait_until

LOST = (PostgresqlUnansweredError, PostgresqlUnreachableError, PostgresqlReadOnlyError)
HOUR_TICKS = 3600 * 10_000_000


@pytest.fixture
def small_disk(postgresql_server: PostgresqlServer) -> Iterator[Path]:
    """A file system of 32 MiB that belongs to the server."""
    folder = commands.new_folder()
    mount = ["mount", "-t", "tmpfs", "-o", "size=32m,mode=777", "tmpfs", str(folder)]
    if subprocess.run(mount, check=False, capture_output=True).returncode:
        folder.rmdir()
        pytest.skip("mounting a file system needs root")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)
    folder.rmdir()


def test_a_full_disk_loses_nothing(postgresql_server: PostgresqlServer, small_disk: Path) -> None:
    """Senders get one error; readers go on; once there is space, senders do, too."""
    address = postgresql_server.address
    place = small_disk / "space"
    place.mkdir()
    commands.hand_over(place)
    with address.connect() as connection:
        connection.execute(f"CREATE TABLESPACE small LOCATION '{place}'")
        connection.execute("CREATE DATABASE small TABLESPACE small")
    try:
        with contextlib.closing(open_broker(prepared(address.url("small")), "app")) as broker:
            sent = _fill(broker, small_disk / "filler")
            assert [row.body for row in rows(broker, "q")] == sent
            (small_disk / "filler").unlink()
            broker.send(Outgoing("q", b"last"))
            assert [row.body for row in rows(broker, "q")] == [*sent, b"last"]
    finally:
        address.drop_database("small")
        with address.connect() as connection:
            connection.execute("DROP TABLESPACE small")


def _fill(broker: Broker, filler: Path) -> list[bytes]:
    """Fill the disk, then send until the server notices; return what was sent."""
    sent = [b"first"]
    broker.send(Outgoing("q", sent[0]))
    with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(8192))
    with contextlib.suppress(PostgresqlFullError):
        for number in range(1000):  # the pages that the table has already take some
            body = b"%d" % number + bytes(1000)
            broker.send(Outgoing("q", body))
            sent.append(body)
    with pytest.raises(PostgresqlFullError):
        broker.send(Outgoing("q", os.urandom(100_000)))
    return sent


def test_a_read_only_server_is_told(database: PostgresqlDatabase) -> None:
    with (
        contextlib.closing(open_broker(database.url(), "app")) as broker,
        database.connect() as operator,
    ):
        broker.send(Outgoing("q", b"1"))
        try:
            _set_read_only(operator, "on")
            for _ in range(2):  # on the old connection, then at a new one
                with pytest.raises(PostgresqlReadOnlyError):
                    broker.send(Outgoing("q", b"2"))
        finally:
            _set_read_only(operator, "off")
        broker.send(Outgoing("q", b"3"))
        assert [row.body for row in rows(broker, "q")] == [b"1", b"3"]


@pytest.mark.parametrize("place", ["standby", "primary of standbys", "set so"])
def test_all_that_need_a_writable_server_name_it(
    database: PostgresqlDatabase, request: pytest.FixtureRequest, tmp_path: Path, place: str
) -> None:
    """Senders, coordinator, commands and workers, each with one text and its remedy."""
    url = database.url()
    if place == "set so":
        with database.connect() as sql:
            statement = f"ALTER DATABASE {database.name} SET default_transaction_read_only = on"
            sql.execute(statement.encode())
    else:
        url = request.getfixturevalue("standby").address.url(database.name)
        url += "?target_session_attrs=primary" if place != "standby" else ""
    with pytest.raises(PostgresqlReadOnlyError) as error:
        open_broker(url, "app")
    known = str(error.value)
    with pytest.raises(CoordinatorDatabaseError) as fault:
        connect(url).open(1.0)
    (tmp_path / "shop.py").write_text("import qdo\napp = qdo.App('shop')\napp.job('q')(print)\n")
    options = {"QDO_BROKER": url, "QDO_COORDINATOR": url, "QDO_CONNECT_SECONDS": "1"}
    said = [str(fault.value)]
    for argv, code in (
        ((*QDO, "queues", "--app", "shop"), 3),
        ((*QDO, "send", "--app", "shop", "q", "1"), 3),
        ((*QDO, "admin", "broker", "init"), 3),
        ((*QDO, "doctor", "--app", "shop"), 1),
        ((*WORKER, "shop:app"), 3),
    ):
        ended = command(*argv, cwd=tmp_path, env=options)
        assert ended.code == code
        said.append(ended.out + ended.err)
    assert [known in text for text in said] == [True] * 6, said


def _set_read_only(operator: psycopg.Connection[Any], value: str) -> None:
    operator.execute("SET default_transaction_read_only = off")
    operator.execute(f"ALTER SYSTEM SET default_transaction_read_only = {value}")
    operator.execute("SELECT pg_reload_conf()")
    wait_until(lambda: _read_only(operator) == value, "the server has read its configuration")


def _read_only(operator: psycopg.Connection[Any]) -> str:
    """Return the setting of the file, which the session itself overrides."""
    query = "SELECT reset_val FROM pg_settings WHERE name = 'default_transaction_read_only'"
    (found,) = operator.execute(query).fetchone() or ("",)
    return str(found)


@pytest.fixture
def standby(postgresql_server: PostgresqlServer) -> Iterator[PostgresqlServer]:
    """A hot standby of the server."""
    with standby_of(postgresql_server) as server:
        yield server


def test_a_standby_takes_over(
    database: PostgresqlDatabase, postgresql_server: PostgresqlServer, standby: PostgresqlServer
) -> None:
    """Senders, readers and listeners go on with the other server that their address names."""
    woken: set[str] = set()
    url = url_of(database.url(), postgresql_server, standby, postgresql_server)
    with contextlib.closing(open_broker(url, "app")) as broker:
        broker.listen(woken.update)
        reader = broker.reader("q", 0)
        broker.send(Outgoing("q", b"1"))
        assert [body for _, body, *_ in reader.fetch(10)] == [b"1"]
        catch_up(postgresql_server, standby)
        postgresql_server.stop("immediate")
        with pytest.raises(LOST):
            broker.send(Outgoing("q", b"2"))
        with pytest.raises(LOST):
            broker.send(Outgoing("q", b"3"))
        promote(standby)
        woken.clear()
        broker.send(Outgoing("q", b"4"))
        wait_until(lambda: "q" in woken, "the listener continues")
        assert [body for _, body, *_ in _read(reader)] == [b"4"]


def test_a_standby_that_lacks_the_last_commits(
    database: PostgresqlDatabase,
    postgresql_server: PostgresqlServer,
    standby: PostgresqlServer,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The log tells what is lost; new positions follow the lost ones, whatever the clock says."""
    woken: set[str] = set()
    url = url_of(database.url(), postgresql_server, postgresql_server, standby)
    with contextlib.closing(open_broker(url, "app")) as broker:
        broker.listen(woken.update)
        broker.send(Outgoing("kept", b"1"))
        catch_up(postgresql_server, standby)
        stop_replication(postgresql_server, standby)
        with database.connect() as fast:  # the clock of the primary is an hour ahead
            fast.execute("SELECT qdo.reserve(%s)", (HOUR_TICKS,))
        broker.send(Outgoing("lost", b"2"))
        ((lost, *_),) = broker.reader("lost", 0).fetch(10)
        wait_until(lambda: "lost" in woken, "the listener has seen its position")
        postgresql_server.stop("immediate")
        promote(standby)
        wait_until(lambda: format_position(lost) in caplog.text, "the loss is reported")
        other_url = standby.address.url(database.name)
        with contextlib.closing(open_broker(other_url, "app")) as other:
            other.send(Outgoing("lost", b"3"))
            ((later, body, *_),) = other.reader("lost", 0).fetch(10)
        assert (later > lost, body) == (True, b"3")


def _read(reader: Reader) -> Sequence[tuple[Any, ...]]:
    """Fetch, once more after the error of a lost connection."""
    with contextlib.suppress(PostgresqlUnreachableError):
        return reader.fetch(10)
    return reader.fetch(10)
