"""The PostgreSQL servers that other tests use."""

from __future__ import annotations

from collections.abc import Iterator
from urllib.parse import parse_qs, urlsplit

import psycopg
import pytest

from tests.support.postgresql.pgbouncer import PgBouncer
from tests.support.postgresql.server import (
    PostgresqlAddress,
    PostgresqlDatabase,
    PostgresqlServer,
    ShutdownMode,
)
from tests.support.processes import alive, descendants, stopped


@pytest.fixture
def table(postgresql_server: PostgresqlServer) -> Iterator[PostgresqlDatabase]:
    """A database with one committed row, on the server that tests may kill."""
    address = postgresql_server.address
    database = PostgresqlDatabase(address, address.create_database())
    with database.connect() as connection:
        connection.execute("CREATE TABLE kept AS SELECT 1 AS value")
    yield database
    address.drop_database(database.name)


def rows(database: PostgresqlDatabase) -> list[tuple[int]]:
    """Return the rows that are there, through TCP."""
    with psycopg.connect(database.url()) as connection:
        return connection.execute("SELECT value FROM kept").fetchall()


def test_a_url_is_read_by_libpq() -> None:
    address = PostgresqlAddress(5433, "/run")
    url = address.url("a b", user="o'neil@x", schema="q/d", application_name="a&b")
    assert psycopg.conninfo.conninfo_to_dict(url.replace("schema=q%2Fd&", "")) == {
        "user": "o'neil@x", "host": "127.0.0.1", "port": "5433", "dbname": "a b",
        "application_name": "a&b",
    }  # fmt: skip
    assert parse_qs(urlsplit(url).query)["schema"] == ["q/d"]


def test_a_database_of_the_test_is_empty(bare_database: PostgresqlDatabase) -> None:
    with psycopg.connect(bare_database.url()) as connection:
        found = connection.execute("SELECT count(*) FROM pg_tables WHERE schemaname = 'public'")
        assert found.fetchone() == (0,)


def test_a_dropped_database_ends_its_connections(postgresql: PostgresqlDatabase) -> None:
    name = postgresql.server.create_database()
    with psycopg.connect(postgresql.server.url(name)) as connection:
        postgresql.server.drop_database(name)
        with pytest.raises(psycopg.OperationalError):
            connection.execute("SELECT 1")


def test_what_is_committed_survives_a_kill(
    postgresql_server: PostgresqlServer, table: PostgresqlDatabase
) -> None:
    with table.connect() as connection:
        assert connection.execute("SHOW fsync").fetchone() == ("on",)
    family = [postgresql_server.pid, *descendants(postgresql_server.pid)]
    assert len(family) > 1
    postgresql_server.kill()
    assert not any(map(alive, family))
    with pytest.raises(psycopg.OperationalError):
        rows(table)
    postgresql_server.start()
    assert rows(table) == [(1,)]


@pytest.mark.parametrize("mode", ["fast", "immediate"])
def test_a_server_starts_again_after_a_shutdown(
    mode: ShutdownMode, postgresql_server: PostgresqlServer, table: PostgresqlDatabase
) -> None:
    postgresql_server.restart(mode)
    assert rows(table) == [(1,)]
    recovered = "automatic recovery in progress" in postgresql_server.log.read_text()
    assert recovered or mode == "fast"


def test_a_frozen_server_stays_silent_until_it_thaws(
    postgresql_server: PostgresqlServer, table: PostgresqlDatabase
) -> None:
    with psycopg.connect(table.url()) as connection:
        backend = connection.info.backend_pid
        postgresql_server.freeze()
        try:
            assert stopped(postgresql_server.pid)
            assert stopped(backend)
        finally:
            postgresql_server.thaw()
        assert connection.execute("SELECT value FROM kept").fetchone() == (1,)


def test_scram_asks_tcp_clients_for_a_password() -> None:
    server = PostgresqlServer(auth="scram-sha-256", durable=False)
    try:
        server.start()
        with server.address.connect() as connection:
            connection.execute("CREATE ROLE sender LOGIN PASSWORD 'right'")
        url = server.address.url("postgres", user="sender")
        with psycopg.connect(url, password="right") as connection:
            assert connection.execute("SELECT current_user").fetchone() == ("sender",)
        with pytest.raises(psycopg.OperationalError, match="password authentication failed"):
            psycopg.connect(url, password="wrong")
    finally:
        server.close()
    assert not server.folder.exists()


def test_a_server_that_cannot_start_says_why() -> None:
    server = PostgresqlServer(durable=False, settings={"max_connections": "many"})
    try:
        with pytest.raises(RuntimeError, match="invalid value for parameter"):
            server.start()
    finally:
        server.close()


def test_pgbouncer_gives_connections_to_transactions(postgresql: PostgresqlDatabase) -> None:
    """Two clients take turns with the only connection of the server."""
    pooler = PgBouncer(postgresql.server, settings={"default_pool_size": "1"})
    try:
        pooler.start()
        url = pooler.address.url(postgresql.name)
        with psycopg.connect(url) as one, psycopg.connect(url) as two:
            backends = []
            for client in (one, two):
                backends.append(client.execute("SELECT pg_backend_pid()").fetchone())
                client.commit()
        assert backends[0] == backends[1]
    finally:
        pooler.close()
