"""The PostgreSQL servers that other tests use."""

from __future__ import annotations

from collections.abc import Iterator

import psycopg
import pytest

from tests.support.postgresql.server import (
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


def test_a_server_that_cannot_start_says_why() -> None:
    server = PostgresqlServer(durable=False, settings={"max_connections": "many"})
    try:
        with pytest.raises(RuntimeError, match="invalid value for parameter"):
            server.start()
    finally:
        server.close()
