"""A database on the PostgreSQL server that tests may stop."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.postgresql.schema import prepared
from tests.support.postgresql.server import PostgresqlDatabase, PostgresqlServer


@pytest.fixture
def database(postgresql_server: PostgresqlServer) -> Iterator[PostgresqlDatabase]:
    """A database with the schema; the server runs again at the end."""
    address = postgresql_server.address
    found = PostgresqlDatabase(address, address.create_database())
    prepared(found.url())
    yield found
    if not postgresql_server.is_running:
        postgresql_server.start()
    address.drop_database(found.name)
