"""PostgreSQL refuses a login, a right or a write: one clear error each, and all resumes."""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import Iterator

import psycopg.sql
import pytest

from qdo.broker_errors import (
    PostgresqlConnectionsError,
    PostgresqlError,
    PostgresqlLoginError,
    PostgresqlRightsError,
    PostgresqlUnreachableError,
    PostgresqlUnsuitableError,
    SchemaMissingError,
)
from qdo.brokers.base import Outgoing, SendOptions
from qdo.brokers.registry import open_broker, schema_of
from qdo.errors import QdoError, SettingsError, UsageError
from qdo.positions import position_now
from qdo.postgresql.schema import PARTITION_SECONDS
from tests.support.brokers import rows
from tests.support.postgresql.pgbouncer import PgBouncer
from tests.support.postgresql.schema import prepared
from tests.support.postgresql.server import PostgresqlDatabase, PostgresqlServer
from tests.support.processes import wait_until
from tests.support.zookeeper import free_ports


def refused(url: str, kind: type[QdoError], exit_code: int) -> QdoError:
    """Open a broker; check the class of the error, its exit code and that it is one line."""
    with pytest.raises(kind) as caught:
        open_broker(url, "app").close()
    assert type(caught.value) is kind
    assert caught.value.exit_code == exit_code
    assert "\n" not in str(caught.value)
    return caught.value


def test_a_pooler_that_the_address_does_not_name(postgresql: PostgresqlDatabase) -> None:
    """Its clients share a connection of the server, and the statements that each prepares."""
    with contextlib.ExitStack() as stack:
        pooler = PgBouncer(postgresql.server, settings={"default_pool_size": "1"})
        stack.enter_context(pooler)

        def use() -> None:
            opened = [open_broker(pooler.address.url(postgresql.name), "app") for _ in range(2)]
            for each in opened:
                stack.callback(each.close)
            for each in opened * 5:
                each.send(Outgoing("a", b"1"))

        with pytest.raises(PostgresqlUnsuitableError) as raised:
            use()
        assert "pooler=transaction" in raised.value.details["reason"]


# --- logins and addresses -----------------------------------------------------------


def test_a_wrong_password_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    server = PostgresqlServer(auth="scram-sha-256", durable=False)
    try:
        server.start()
        with server.address.connect() as connection:
            connection.execute("CREATE ROLE sender LOGIN PASSWORD 'right'")
        url = server.address.url("postgres", user="sender")
        monkeypatch.setenv("PGPASSWORD", "wrong")
        assert "wrong" not in str(refused(url, PostgresqlLoginError, 2))
        monkeypatch.delenv("PGPASSWORD")
        monkeypatch.setenv("PGPASSFILE", "/dev/null")
        refused(url, PostgresqlLoginError, 2)
        monkeypatch.setenv("PGPASSWORD", "right")
        refused(url, SchemaMissingError, 2)
    finally:
        server.close()


def test_an_unknown_role_is_refused(postgresql: PostgresqlDatabase) -> None:
    refused(postgresql.url("nobody_here"), PostgresqlLoginError, 2)


def test_a_missing_schema_is_told(postgresql: PostgresqlDatabase) -> None:
    error = refused(postgresql.url(schema="other"), SchemaMissingError, 2)
    assert error.details["schema"] == "other"


def test_a_missing_database_is_told(postgresql: PostgresqlDatabase) -> None:
    error = refused(postgresql.server.url("not_there"), PostgresqlUnsuitableError, 2)
    assert error.details["name"] == "not_there"


def test_a_reserved_word_is_no_schema(postgresql: PostgresqlDatabase) -> None:
    with pytest.raises(PostgresqlUnsuitableError):
        prepared(postgresql.url(schema="order"))
    with pytest.raises(SettingsError):
        prepared(postgresql.url(schema="pg_a"))


@pytest.mark.parametrize("option", ["sslmode=banana", "port=x", "target_session_attrs=no"])
def test_wrong_parameters_are_refused(option: str) -> None:
    refused(f"postgresql://postgres@127.0.0.1/db?{option}", PostgresqlUnsuitableError, 2)


def test_an_unreachable_server_is_told() -> None:
    (port,) = free_ports(1)
    url = f"postgresql://postgres@127.0.0.1:{port}/db"
    error = refused(url, PostgresqlUnreachableError, 3)
    assert error.details["server"] == f"127.0.0.1:{port}/db"


@pytest.mark.parametrize("encoding", ["LATIN1", "SQL_ASCII"])
def test_another_encoding_is_refused(encoding: str, postgresql: PostgresqlDatabase) -> None:
    name = f"test_{uuid.uuid4().hex[:12]}"
    with postgresql.connect() as connection:
        connection.execute(
            f"CREATE DATABASE {name} ENCODING '{encoding}' LOCALE 'C' TEMPLATE template0"
        )
    try:
        url = postgresql.server.url(name)
        assert encoding in refused(url, PostgresqlUnsuitableError, 2).details["reason"]
        with pytest.raises(PostgresqlUnsuitableError):
            prepared(url)
    finally:
        postgresql.server.drop_database(name)


def test_too_many_connections_of_a_role_are_told(postgresql: PostgresqlDatabase, role: str) -> None:
    """It is not a wrong password, and the next attempt may succeed."""
    with postgresql.connect() as connection:
        quoted = psycopg.sql.Identifier(role)
        connection.execute(psycopg.sql.SQL("ALTER ROLE {} CONNECTION LIMIT 0").format(quoted))
    error = refused(postgresql.url(role), PostgresqlConnectionsError, 3)
    assert "too many connections" in error.details["reason"]
    assert "limit of the role" in error.details["remedy"]


@pytest.mark.parametrize("text", ["a\0b", "\ud800"])
def test_texts_that_cannot_be_stored_are_refused(text: str, postgresql: PostgresqlDatabase) -> None:
    with contextlib.closing(open_broker(postgresql.url(), "app")) as broker:
        with pytest.raises(UsageError):
            broker.send(Outgoing("q", b"", key=text))
        broker.send(Outgoing("q", b"kept"))
        assert [row.body for row in rows(broker, "q")] == [b"kept"]


DEFAULTS = {
    "default_transaction_isolation": "serializable",
    "session_replication_role": "replica",
    "search_path": "nowhere",
    "client_encoding": "LATIN1",
    "statement_timeout": "1ms",
    "lock_timeout": "1ms",
    "idle_session_timeout": "200ms",
    "idle_in_transaction_session_timeout": "1ms",
    "synchronous_commit": "off",
}


def test_defaults_of_a_database_change_nothing(bare_database: PostgresqlDatabase) -> None:
    with bare_database.connect() as connection:
        for name, value in DEFAULTS.items():
            connection.execute(
                f"ALTER DATABASE {bare_database.name} SET {name} = '{value}'".encode()
            )
    assert schema_of(bare_database.url()).create(bare_database.url(), PARTITION_SECONDS)
    woken: set[str] = set()
    with contextlib.closing(open_broker(bare_database.url(), "app")) as broker:
        broker.listen(woken.update)
        later = SendOptions(due=time.time() + 0.5, dedup_key="k")
        ids = {broker.send(Outgoing("q", "\u20ac".encode(), "\u20ac", None, later)) for _ in "12"}
        assert len(ids) == 1
        wait_until(lambda: "q" in woken, "it is due")
        with bare_database.connect() as connection:
            connection.execute("SET statement_timeout = 0")
            connection.execute("SET lock_timeout = 0")
            connection.execute("SET idle_in_transaction_session_timeout = 0")
            with pytest.raises(UsageError), connection.transaction():
                broker.send_within(connection, [Outgoing("q", b"no", "\u20ac")])
            connection.execute("SET client_encoding = 'UTF8'")
            with connection.transaction():
                broker.send_within(connection, [Outgoing("q", b"staged", "\u20ac")])
        assert [row.body for row in rows(broker, "q")] == ["\u20ac".encode(), b"staged"]
        broker.trim("q", position_now(), 0.0)
        settings = broker._writer.run(
            lambda connection: connection.execute("SHOW synchronous_commit").fetchone()
        )
        assert settings == ("on",)


def test_a_connection_that_ended_while_idle_is_replaced(
    postgresql: PostgresqlDatabase,
) -> None:
    """As at a restart of the server: nothing was sent, so no outcome is unknown."""
    with contextlib.closing(open_broker(postgresql.url(), "app")) as broker:
        broker.send(Outgoing("q", b"1"))
        reader = broker.reader("q", 0)
        assert len(reader.fetch(9)) == 1
        with postgresql.connect() as connection:
            others = "FROM pg_stat_activity WHERE datname = current_database()"
            others += " AND pid <> pg_backend_pid() AND backend_type = 'client backend'"
            connection.execute(f"SELECT pg_terminate_backend(pid) {others}".encode())
            wait_until(
                lambda: connection.execute(f"SELECT {others}".encode()).fetchone() is None,
                "the sessions have ended",
            )
        broker.send(Outgoing("q", b"2"))
        assert len(reader.fetch(9)) == 1


def test_refusals_of_a_server_that_was_reached_say_so(postgresql: PostgresqlDatabase) -> None:
    """Such as a lack of memory for locks; the remedy is that of the server."""
    with contextlib.closing(open_broker(postgresql.url(), "app")) as broker:
        with postgresql.connect() as connection:
            connection.execute("ALTER FUNCTION qdo.look RENAME TO hidden")
            connection.execute(
                "CREATE FUNCTION qdo.look(text, bigint, bigint[], bigint) RETURNS void"
                " LANGUAGE plpgsql AS $$BEGIN"
                " RAISE 'out of shared memory' USING ERRCODE = '53200', HINT = 'x'; END$$"
            )
        with pytest.raises(PostgresqlError) as raised:
            broker.listen(lambda names: None)
    assert type(raised.value) is PostgresqlError
    assert raised.value.details["reason"] == "out of shared memory (x)"


def test_long_deduplication_keys_are_stored(postgresql: PostgresqlDatabase) -> None:
    """Their bytes exceed those of an index."""
    options = [SendOptions(dedup_key="\u4e00" * 999 + last) for last in "aab"]
    with contextlib.closing(open_broker(postgresql.url(), "app")) as broker:
        ids = [broker.send(Outgoing("q", b"1", terms=each)) for each in options]
    assert ids[0] == ids[1] != ids[2]


# --- rights -------------------------------------------------------------------------


@pytest.fixture(params=["plain", 'O\'Neil "x"'])
def role(request: pytest.FixtureRequest, postgresql: PostgresqlDatabase) -> Iterator[str]:
    """The name of a role without rights."""
    with postgresql.role(request.param) as name:
        yield name


def test_errors_name_the_grants_until_all_works(postgresql: PostgresqlDatabase, role: str) -> None:
    """An operator who runs each named statement ends with a role that can do everything."""
    granted: list[str] = []
    with postgresql.connect() as owner:
        owner.execute(f"REVOKE CONNECT ON DATABASE {postgresql.name} FROM PUBLIC")
        while (error := _denial(postgresql.url(role))) is not None:
            assert error.details["role"] == role
            granted.append(error.details["remedy"].strip("`"))
            owner.execute(granted[-1].encode())
            assert len(granted) < 30
    assert len(granted) == len(set(granted))
    assert {grant.split(" ON ")[1].split(" TO ")[0] for grant in granted} >= {
        f'DATABASE "{postgresql.name}"', "SCHEMA qdo", "qdo.about", "FUNCTION qdo.append",
        "qdo.messages", "FUNCTION qdo.trim",
    }  # fmt: skip


def test_creating_a_schema_needs_a_right(postgresql: PostgresqlDatabase, role: str) -> None:
    """The error names the grant after which `qdo admin broker init` works."""
    url = postgresql.url(role)
    schema = schema_of(url)
    with postgresql.connect() as owner:
        owner.execute("DROP SCHEMA qdo CASCADE")
        with pytest.raises(PostgresqlRightsError) as raised:
            schema.create(url, PARTITION_SECONDS)
        owner.execute(raised.value.details["remedy"].strip("`").encode())
    assert schema.create(url, PARTITION_SECONDS)


def _denial(url: str) -> PostgresqlRightsError | None:
    """Return the first error of a role, None when it can do everything."""
    try:
        _use_all(url)
    except PostgresqlRightsError as error:
        return error
    return None


def _use_all(url: str) -> None:
    with contextlib.closing(open_broker(url, "app")) as broker:
        broker.send(Outgoing("q", b"1"))
        rows(broker, "q")
        broker.trim("q", 1, 0.0)
        broker.dead_letters.retry([("q", 1)])


# --- positions ----------------------------------------------------------------------


def test_positions_increase_when_the_clock_was_set_back(postgresql: PostgresqlDatabase) -> None:
    """The last position is an hour in the future, as after a step of the server's clock."""
    with contextlib.closing(open_broker(postgresql.url(), "app")) as broker:
        broker.send(Outgoing("q", b"1"))
        with postgresql.connect() as connection:
            connection.execute(
                "SELECT setval('qdo.positions', last_value + 36000000000) FROM qdo.positions"
            )
        reader = broker.reader("q", 0)
        for body in (b"2", b"3"):
            broker.send(Outgoing("q", body))
        broker.send_many([Outgoing("q", b"4"), Outgoing("q", b"5")])
        found = list(reader.fetch(10))
        assert [row[1] for row in found] == [b"1", b"2", b"3", b"4", b"5"]
        positions = [row[0] for row in found]
        assert positions == sorted(set(positions))
        assert positions[1] - positions[0] >= 36_000_000_000
        broker.send(Outgoing("q", b"6"))
        assert [row[1] for row in reader.fetch(10)] == [b"6"]
