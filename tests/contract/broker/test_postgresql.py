"""What the PostgreSQL broker adds to the contract of all brokers."""

from __future__ import annotations

import asyncio
import json
import queue
import re
import sqlite3
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psycopg
import pytest
import sqlalchemy
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session
from sqlalchemy.pool import NullPool

from qdo.app import App
from qdo.broker_errors import PostgresqlRightsError
from qdo.brokers.base import Broker, Outgoing, SendOptions
from qdo.brokers.dead_letters import DeadLetterRecord
from qdo.brokers.postgresql import broker as module
from qdo.brokers.postgresql.broker import PostgresqlBroker
from qdo.brokers.postgresql.reader import END, Fetch
from qdo.brokers.registry import open_broker
from qdo.encoding import parsed, unreadable_reason, with_header
from qdo.errors import UnsupportedError, UsageError
from qdo.positions import LATEST_SECONDS, message_id
from qdo.postgresql.schema import grants
from qdo.settings.settings import Settings
from qdo.settings.vaults import marks_of
from tests.support.fakes.key_files import key, write_keys
from tests.support.postgresql.schema import prepared
from tests.support.postgresql.server import PostgresqlDatabase
from tests.support.processes import wait_until
from tests.support.shared_servers import SharedPostgresql


@pytest.fixture
def broker(postgresql_url: str) -> Iterator[Broker]:
    made = open_broker(postgresql_url, "app")
    yield made
    made.close()


UNBOUND = "ALTER TABLE qdo.{} DROP CONSTRAINT bounds"
"""Lets a row in as if an earlier format had."""


@pytest.mark.parametrize("largest", [0, -5, 2**31 - 1])
def test_a_wrong_size_of_the_largest_body_stops_no_queue(
    broker: Broker, postgresql_url: str, largest: int
) -> None:
    """It is a hint for the number of rows in a fetch, and an administrator may change the row."""
    broker.send_many([Outgoing(name, b"1") for name in ("a", "b", "b")])
    with psycopg.connect(postgresql_url) as connection:
        connection.execute(UNBOUND.format("queues").encode())
        connection.execute("UPDATE qdo.queues SET largest = %s WHERE name = 'a'", [largest])
    readers = [broker.reader(name, 0) for name in ("a", "b")]
    assert [len(reader.fetch(10)) for reader in readers] == [1, 2]
    with ThreadPoolExecutor(20) as pool:  # some fetches become one query
        found = pool.map(lambda name: broker.reader(name, 0).fetch(1)[0][1], ["a", "b"] * 50)
        assert set(found) == {b"1"}


def test_times_of_dead_letters_have_dates(broker: Broker, postgresql_url: str) -> None:
    """A worker in another language may write any number."""
    with psycopg.connect(postgresql_url) as connection:
        connection.execute(UNBOUND.format("dead_letters").encode())
        for number, at in enumerate(("NaN", "Infinity", "-Infinity", "1e308", "-1"), start=1):
            connection.execute(
                "SELECT qdo.bury('app', 'q', %s, ''::bytea, NULL, NULL, '', '', 1, '', 1, %s)",
                [number, at],
            )
    for letter in (*broker.dead_letters.find(), *broker.dead_letters.records()):
        assert 0 <= letter.dead_at < LATEST_SECONDS
    found = broker.dead_letters.get("q", 1)
    assert found is not None
    assert found.dead_at == 0


def _bodies(app: App, queue: str = "q") -> list[bytes]:
    return [row[1] for row in app.broker.reader(queue, 0).fetch(100)]


@pytest.fixture
def app(postgresql_url: str) -> Iterator[App]:
    with App("shop", broker=postgresql_url) as made:
        yield made


def _psycopg(postgresql_url: str) -> Any:
    return psycopg.connect(postgresql_url)


def _sqlalchemy(postgresql_url: str) -> Any:
    url = postgresql_url.replace("postgresql://", "postgresql+psycopg://")
    return sqlalchemy.create_engine(url, poolclass=NullPool).connect()


def _session(postgresql_url: str) -> Any:
    url = postgresql_url.replace("postgresql://", "postgresql+psycopg://")
    return Session(sqlalchemy.create_engine(url, poolclass=NullPool))


@pytest.mark.parametrize("connect", [_psycopg, _sqlalchemy, _session])
def test_a_message_is_sent_with_the_transaction(
    app: App, postgresql_url: str, connect: Callable[[str], Any]
) -> None:
    """It exists if, and only if, the transaction commits, with the id that was returned."""
    with connect(postgresql_url) as connection:
        app.send("q", 1, connection=connection)
        connection.rollback()
        first = app.send("q", 2, key="k", headers={"a": "b"}, connection=connection)
        app.send_many([("q", 3), ("r", 4)], connection=connection)
        app.send("q", 0)  # the open transaction holds nobody back
        assert _bodies(app) == [b"0"]
        connection.commit()
    assert _bodies(app) == [b"0", b"2", b"3"]
    assert _bodies(app, "r") == [b"4"]
    row = app.broker.reader("q", 0).fetch(2)[1]
    assert row[2] == "k"
    assert json.loads(row[3] or "") == {"a": "b", "qdo-id": first}


def test_options_hold_within_a_transaction(app: App, postgresql_url: str) -> None:
    """Delays, and deduplication keys when it commits."""
    with _psycopg(postgresql_url) as connection:
        app.send("q", 1, delay_seconds=3600, connection=connection)
        for number in (2, 3):
            app.send("q", number, dedup_key="k", connection=connection)
    assert _bodies(app) == [b"2"]
    assert app.broker.catalog.backlog("q", 0).delayed == 1


def test_listeners_hear_of_the_commit(
    app: App, postgresql_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are notified when the messages can be read."""
    monkeypatch.setattr("qdo.brokers.postgresql.listener.LOOK_SECONDS", 600.0)
    heard: queue.Queue[list[str]] = queue.Queue()
    stop = app.broker.listen(lambda names: heard.put(list(names)))
    with _psycopg(postgresql_url) as connection:
        app.send("q", 1, connection=connection)
    assert heard.get(timeout=10) == ["q"]
    stop()


def test_other_connections_are_refused(
    app: App, postgresql_url: str, shared_postgresql: SharedPostgresql
) -> None:
    """Of other libraries, and to other databases."""
    with pytest.raises(UsageError):
        app.send("q", 1, connection=sqlite3.connect(":memory:"))
    other = shared_postgresql.address.create_database()
    for _ in range(2):  # without a schema, then with one
        with _psycopg(shared_postgresql.address.url(other)) as connection:
            with pytest.raises(UsageError):
                app.send("q", 1, connection=connection)
            connection.rollback()
        prepared(shared_postgresql.address.url(other))
    shared_postgresql.address.drop_database(other)
    assert _bodies(app) == []


@pytest.mark.parametrize("connect", [_psycopg, _sqlalchemy, _session])
def test_transactions_that_cannot_send(
    app: App, postgresql_url: str, connect: Callable[[str], Any]
) -> None:
    """The error names what to do with the transaction, or the right that its role lacks."""
    with connect(postgresql_url) as connection:
        driver = app_driver(connection)
        driver.execute("SET TRANSACTION READ ONLY")
        with pytest.raises(UsageError, match="read-only"):
            app.send("q", 1, connection=connection)
        with pytest.raises(UsageError, match="roll it back"):
            app.send("q", 1, connection=connection)
        connection.rollback()
        driver = app_driver(connection)
        driver.execute("CREATE ROLE guest_of_test")
        driver.execute("GRANT USAGE ON SCHEMA qdo TO guest_of_test")
        driver.execute("SET LOCAL ROLE guest_of_test")
        with pytest.raises(PostgresqlRightsError) as raised:
            app.send("q", 1, connection=connection)
        assert raised.value.details["remedy"].endswith(" TO postgres`")
        connection.rollback()
    assert _bodies(app) == []


@pytest.mark.parametrize("connect", [_psycopg, _sqlalchemy, _session])
def test_a_transaction_that_will_be_prepared_cannot_send(
    app: App, postgresql_url: str, connect: Callable[[str], Any]
) -> None:
    """PostgreSQL would refuse the preparation, after the app has done its work."""
    with connect(postgresql_url) as connection:
        driver = app_driver(connection)
        driver.rollback()
        driver.tpc_begin("order-17")
        with pytest.raises(UsageError):
            app.send("q", 1, connection=connection)
        driver.tpc_rollback()
    assert _bodies(app) == []


def app_driver(connection: Any) -> psycopg.Connection[Any]:
    """Return the connection of psycopg that a connection or session uses."""
    if isinstance(connection, Session):
        connection = connection.connection()
    if isinstance(connection, sqlalchemy.Connection):
        connection = connection.connection.driver_connection
    assert isinstance(connection, psycopg.Connection)
    return connection


def test_other_brokers_do_not_send_within_transactions(tmp_path: Path) -> None:
    """They name the outbox."""
    with App("shop", broker=f"sqlite:{tmp_path / 'm.db'}") as app, pytest.raises(UnsupportedError):
        app.send("q", 1, connection=sqlite3.connect(":memory:"))


def test_asynchronous_sessions_send_within_their_transaction(app: App, postgresql_url: str) -> None:
    """In a function that `run_sync` calls."""

    async def book() -> None:
        url = postgresql_url.replace("postgresql://", "postgresql+psycopg://")
        engine = create_async_engine(url, poolclass=NullPool)
        async with AsyncSession(engine) as session:
            await session.run_sync(lambda each: app.send("q", 1, connection=each))
            await session.rollback()
            await session.run_sync(lambda each: app.send("q", 2, connection=each))
            await session.commit()
        await engine.dispose()

    asyncio.run(book())
    assert _bodies(app) == [b"2"]


BAD_NAMES = [
    "bad/name",
    "line\nfeed",
    "",
    ".",
    "zookeeper",
    "x" * 201,
    "\ue000",
    "\x9f",
    "\U0001f600",
]


def test_senders_with_sql_cannot_make_bad_names(app: App, postgresql_url: str) -> None:
    """A queue that no worker can take and no command can delete."""
    append = "SELECT qdo.append('shop', ARRAY[%s], NULL, NULL, ARRAY[''::bytea], NULL)"
    with _psycopg(postgresql_url) as connection:
        for name in BAD_NAMES:
            with pytest.raises(psycopg.errors.CheckViolation):
                connection.execute(append, (name,))
            connection.rollback()
    assert app.broker.catalog.names() == []


def test_a_row_beyond_the_limits_costs_only_itself(broker: Broker, postgresql_url: str) -> None:
    """An administrator has changed it: it is not read."""
    broker.send_many([Outgoing("q", b"1"), Outgoing("q", b"2", "k")])
    with _psycopg(postgresql_url) as connection:
        connection.execute(
            "UPDATE qdo.messages SET body = convert_to(repeat('x', 67108865), 'UTF8')"
            " WHERE key = 'k'"
        )
    broker.send(Outgoing("q", b"3"))
    reader = broker.reader("q", 0)
    rows = [reader.fetch(1)[0] for _ in range(3)]
    assert [row[1] for row in rows] == [b"1", b"", b"3"]
    assert [unreadable_reason(row[3]) is not None for row in rows] == [False, True, False]


def test_a_larger_body_than_a_worker_reads_stays_on_the_server(broker: PostgresqlBroker) -> None:
    """A sender's SQL makes many of 64 MiB. A dead letter has its body without the worker."""
    large = Outgoing("a", b"x" * 11, "k", '{"x": "y"}')
    broker.send_many([Outgoing("a", b"1"), large, Outgoing("a", b"x" * 10), Outgoing("b", b"2")])
    broker.max_read_bytes = 10
    rows = broker.reader("a", 0).fetch(9)
    wanted = [Fetch("a", 0, 9), Fetch("b", 0, 9)]
    together = broker._fetches.run(lambda each: broker._fetches._fetch_many(each, wanted, 0, END))
    assert [list(rows), [b"2"]] == [together[0], [row[1] for row in together[1]]]
    assert [row[1] for row in rows] == [b"1", b"", b"x" * 10]
    position, body, key, headers = rows[1]
    assert unreadable_reason(headers) is not None
    broker.dead_letters.store(
        DeadLetterRecord("a", position, body, key, headers, "e", "", 1, "", 1)
    )
    (letter,) = broker.dead_letters.records()
    assert (letter.body, letter.key, letter.headers) == (large.body, large.key, large.headers)
    broker.dead_letters.retry([("a", position)])
    broker.max_read_bytes = 11
    assert [row[1] for row in broker.reader("a", rows[2][0]).fetch(9)] == [large.body]


@pytest.mark.parametrize("kind", ["delayed", "staged", "retried"])
def test_ids_in_headers_are_proven(
    kind: str, broker: Broker, postgresql_url: str, tmp_path: Path
) -> None:
    """Workers with a key to sign believe the id that a sender with the key got, and no other."""
    keys = write_keys(tmp_path / "keys", key("s1", "sign"))
    marks = marks_of(Settings(keys=keys, broker=postgresql_url), "app", str)
    assert marks is not None
    broker.dead_letters.marks = lambda: marks
    id = ""
    if kind == "delayed":
        id = broker.send(Outgoing("q", b"1", terms=SendOptions(due=time.time() + 0.2)))
        broker.listen(lambda names: None)
        wait_until(lambda: bool(broker.reader("q", 0).fetch(1)), "it is due")
    elif kind == "staged":
        with _psycopg(postgresql_url) as connection:
            (id,) = broker.send_within(connection, [Outgoing("q", b"1")])
    else:
        broker.dead_letters.store(DeadLetterRecord("q", 1, b"1", None, None, "", "", 1, "w", 1))
        broker.dead_letters.retry([("q", 1)])
        id = message_id(1, broker.id_node)
    ((_, body, _, headers),) = broker.reader("q", 0).fetch(2)
    assert (parsed(marks.proven("q", headers, body)) or {})["qdo-id"] == id
    forged = with_header(headers, qdo_id="forged")
    assert "qdo-id" not in (parsed(marks.proven("q", forged, body)) or {})


@pytest.mark.parametrize("off", [-600, 600])
def test_delays_count_by_the_clock_of_the_server(
    broker: Broker, postgresql: PostgresqlDatabase, off: int
) -> None:
    """Whatever the clock of the sender says; also in a transaction of the app."""
    later = [Outgoing("q", b"1", terms=SendOptions(due=-3600.0))]
    with postgresql.connect() as sql:
        sql.execute(_CLOCK.format(off).encode())
        broker.send_many(later)
        with _psycopg(postgresql.url()) as connection:
            broker.send_within(connection, later)
        waits = sql.execute("SELECT (due - qdo.clock()) / 10000000 FROM qdo.delayed").fetchall()
    assert [3000 < seconds <= 3600 for (seconds,) in waits] == [True, True]


_CLOCK = """
CREATE OR REPLACE FUNCTION qdo.clock() RETURNS bigint LANGUAGE sql AS 'SELECT
    ((extract(epoch FROM clock_timestamp()) + {}) * 10000000)::bigint + 122192928000000000'
"""


def test_more_jobs_than_connections_are_named(
    broker: Broker, shared_postgresql: SharedPostgresql, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With their sum, if all connections of usual roles are too few; and a full server."""
    monkeypatch.setattr(module, "FULL_SHARE", 1.0)
    with shared_postgresql.address.connect() as sql:
        query = "SELECT current_setting(%s)::integer"
        names = "max_connections", "superuser_reserved_connections"
        limit, reserved = (sql.execute(query, (name,)).fetchone()[0] for name in names)  # type: ignore[index]
    warnings = broker.catalog.connection_warnings
    assert warnings([]) == warnings([limit - reserved - 10, 10]) == []
    (warning,) = warnings([limit - reserved - 9, 5, 5])
    assert f"1 x {limit - reserved - 9} + 2 x 5" in warning
    assert warning.startswith(f"{limit - reserved + 1} jobs")
    monkeypatch.setattr(module, "FULL_SHARE", 0.0)
    (full,) = warnings([])
    assert re.match(rf"[1-9]\d* of the {limit - reserved} connections", full)


def test_grants_name_the_role_as_it_is() -> None:
    """Unquoted, the rights of Bob would go to bob, and those of public to everyone."""
    for role in ("Bob", 'a"; DROP TABLE x'):
        quoted = '"' + role.replace('"', '""') + '"'
        *given, idle = grants("qdo", role, "sender")
        assert all(each.endswith(f" TO {quoted}") for each in given)
        assert f"('{quoted}')" in idle
    with pytest.raises(UsageError):
        grants("qdo", "public", "sender")
