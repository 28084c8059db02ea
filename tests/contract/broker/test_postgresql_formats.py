"""Formats of PostgreSQL's schema: upgrades under load, the version before, and refused schemas."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import psycopg
import pytest

from qdo.broker_errors import (
    SchemaDiffersError,
    SchemaMissingError,
    SchemaNewerError,
    SchemaOlderError,
)
from qdo.brokers.base import Outgoing
from qdo.brokers.registry import open_broker
from qdo.cli.commands.setup import KINDS
from qdo.errors import QdoError, UsageError
from qdo.postgresql import schema
from qdo.postgresql.schema import FORMAT
from qdo.postgresql.session import connect
from qdo.postgresql.url import postgresql_address
from tests.support.postgresql.schema import frozen, prepared
from tests.support.postgresql.server import PostgresqlDatabase
from tests.support.processes import wait_until

NEXT = "ALTER TABLE {schema}.dead_letters ADD owner text;"
DROP = "DROP FUNCTION IF EXISTS {schema}.newest(bigint, bigint);"
REPLACED = "FUNCTION {schema}.newest(of_queue bigint, after bigint"
PARTS = r"""
SELECT proname || '(' || pg_get_function_identity_arguments(oid) || ')',
    regexp_replace(prosrc, '--[^\n]*|\s', '', 'g'), proacl::text
FROM pg_proc WHERE pronamespace = 'qdo'::regnamespace
UNION ALL SELECT relname, relkind::text, relacl::text || reloptions::text
FROM pg_class WHERE relnamespace = 'qdo'::regnamespace AND relname !~ '[0-9]' AND relkind <> 'i'
UNION ALL SELECT indexname, indexdef, '' FROM pg_indexes
WHERE schemaname = 'qdo' AND tablename !~ '[0-9]'
UNION ALL SELECT conrelid::regclass || '.' || conname, pg_get_constraintdef(oid), ''
FROM pg_constraint
WHERE connamespace = 'qdo'::regnamespace AND conrelid::regclass::text !~ '[0-9]'
UNION ALL SELECT tgrelid::regclass || '.' || tgname, pg_get_triggerdef(oid), tgenabled::text
FROM pg_trigger WHERE tgrelid::regclass::text ~ '^qdo' AND tgrelid::regclass::text !~ '[0-9]'
    AND NOT tgisinternal
UNION ALL SELECT attrelid::regclass || '.' || attname, atttypid::regtype::text, attnotnull::text
FROM pg_attribute JOIN pg_class ON pg_class.oid = attrelid
WHERE relnamespace = 'qdo'::regnamespace AND relname !~ '[0-9]' AND relkind IN ('r', 'v', 'p')
    AND attnum > 0
"""
SEND = "SELECT qdo.append('app', ARRAY['q'], NULL, NULL, ARRAY[convert_to(%s, 'UTF8')], NULL)"
READ = """
SELECT position, convert_from(body, 'UTF8')::integer FROM qdo.messages
JOIN qdo.queues ON id = queue WHERE name = 'q' AND position > %s ORDER BY position
"""
KILL = """
SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity
WHERE datname = current_database() AND pid <> pg_backend_pid()
"""
WAITS = """
SELECT FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()
"""


@pytest.fixture
def next_version(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Let this process be the next version: a column more, and a function with a parameter more."""

    def use(text: str = NEXT + DROP, oldest: int = FORMAT) -> None:
        own = schema._text
        monkeypatch.setattr(schema, "FORMAT", FORMAT + 1)
        monkeypatch.setattr(schema, "OLDEST_CLIENT", oldest)
        monkeypatch.setattr(
            schema,
            "_text",
            lambda name: (
                text
                if name == f"format-{FORMAT + 1}.sql"
                else own(name).replace(REPLACED, f"{REPLACED}, more text DEFAULT ''")
            ),
        )

    return use


@pytest.fixture
def roles(bare_database: PostgresqlDatabase) -> Iterator[list[str]]:
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(bare_database.role(kind)) for kind in KINDS]
        with bare_database.connect() as connection:
            connection.execute("DROP SCHEMA IF EXISTS qdo CASCADE")


@contextlib.contextmanager
def load(database: PostgresqlDatabase, seen: list[int], sent: list[int]) -> Iterator[None]:
    """Send and read messages with SQL, as processes of an older version do."""
    stop = threading.Event()
    sent_all = threading.Event()

    def send() -> None:
        with database.connect() as connection:
            while not stop.is_set():
                connection.execute(SEND, (str(len(sent)),))
                sent.append(len(sent))

    def read() -> None:
        last = 0
        is_over = False
        with database.connect() as connection:
            while not is_over:
                is_over = sent_all.is_set()  # before the last look
                rows = connection.execute(READ, (last,)).fetchall()
                seen.extend(number for _, number in rows)
                last = rows[-1][0] if rows else last

    with ThreadPoolExecutor(2) as threads:
        sending = threads.submit(send)
        reading = threads.submit(read)
        try:
            wait_until(lambda: len(seen) > 20, "the load")
            yield
            before = len(seen)
            wait_until(lambda: len(seen) > before + 20, "the load after it")
        finally:
            stop.set()
            sending.exception()
            sent_all.set()
    sending.result()
    reading.result()


def parts(connection: psycopg.Connection[tuple[object, ...]], roles: list[str]) -> set[object]:
    """Return all parts of the schema, with the rights of roles whose rights were granted again."""
    for kind, role in zip(KINDS, roles, strict=True):
        for statement in schema.grants("qdo", role, kind):
            connection.execute(statement.encode())
    return set(connection.execute(PARTS).fetchall())


def upgraded_and_new(
    database: PostgresqlDatabase, text: str, roles: list[str]
) -> tuple[set[object], set[object]]:
    """Upgrade an old schema under load; return its parts, and those of a new schema."""
    sent: list[int] = []
    seen: list[int] = []
    with database.connect() as connection:
        connection.execute(text.encode())
        with load(database, seen, sent), ThreadPoolExecutor(4) as threads:
            list(threads.map(prepared, [database.url()] * 4))
        assert seen == sent == [*range(len(sent))]
        upgraded = parts(connection, roles)
        connection.execute("DROP SCHEMA qdo CASCADE")
        prepared(database.url())
        return upgraded, parts(connection, roles)


@pytest.mark.parametrize("older", range(1, FORMAT + 1))
def test_each_released_format_is_upgraded_under_load(
    bare_database: PostgresqlDatabase, older: int, roles: list[str]
) -> None:
    """No message is lost or read twice; columns, functions and rights are those of a new schema."""
    upgraded, new = upgraded_and_new(bare_database, frozen(older).read_text("utf-8"), roles)
    assert upgraded == new


@pytest.mark.parametrize(
    ("text", "left"), [(NEXT + DROP, set()), (NEXT, {"newest(of_queue bigint, after bigint)"})]
)
def test_a_function_that_an_upgrade_leaves_is_noticed(
    bare_database: PostgresqlDatabase,
    roles: list[str],
    next_version: Callable[..., None],
    text: str,
    left: set[str],
) -> None:
    """If the text of the next format forgets to drop it."""
    old = schema.script("qdo", 3600)
    next_version(text)
    upgraded, new = upgraded_and_new(bare_database, old, roles)
    assert {name for name, *_ in upgraded ^ new} == left


@pytest.mark.parametrize("oldest", [FORMAT, FORMAT + 1])
def test_the_version_before_goes_on_unless_the_schema_refuses_it(
    bare_database: PostgresqlDatabase,
    next_version: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
    oldest: int,
) -> None:
    """Its connections continue; new ones are checked, and its worker hears of a refusal."""
    prepared(bare_database.url())
    heard: list[QdoError] = []
    with (
        contextlib.closing(open_broker(bare_database.url(), "app")) as broker,
        bare_database.connect() as connection,
    ):
        broker.on_unusable = heard.append
        broker.send(Outgoing("q", b"0"))
        next_version(oldest=oldest)
        prepared(bare_database.url())
        monkeypatch.undo()
        broker.send(Outgoing("q", b"1"))
        connection.execute(KILL)
        if oldest == FORMAT:
            broker.send(Outgoing("q", b"2"))
            assert [row[1] for row in broker.reader("q", 0).fetch(9)] == [b"0", b"1", b"2"]
        else:
            with pytest.raises(SchemaNewerError):
                broker.send(Outgoing("q", b"2"))
        assert list(map(type, heard)) == [SchemaNewerError] * (oldest > FORMAT)
        with pytest.raises(SchemaNewerError):  # an older version upgrades nothing
            prepared(bare_database.url())


CHANGES: list[tuple[str, type[QdoError] | None, str | type[QdoError]]] = [
    ("DROP SCHEMA qdo CASCADE", SchemaMissingError, "create"),
    ("UPDATE qdo.about SET format = 0, tables = %(none)s", SchemaOlderError, "upgrade"),
    ("UPDATE qdo.about SET format = 9, oldest = 9", SchemaNewerError, SchemaNewerError),
    ("UPDATE qdo.about SET format = 9", None, SchemaNewerError),
    ("UPDATE qdo.about SET tables = 'other'", SchemaDiffersError, SchemaDiffersError),
    ("ALTER TABLE qdo.about DROP oldest, DROP tables", SchemaDiffersError, SchemaDiffersError),
    ("UPDATE qdo.about SET functions = 'other'", None, "upgrade"),
    ("DROP FUNCTION qdo.append", SchemaDiffersError, "upgrade"),
]
"""A change of a schema, the error of a sender that connects again, and the action of `init`."""


@pytest.mark.parametrize(("change", "error", "init"), CHANGES)
def test_each_other_schema_is_told(
    bare_database: PostgresqlDatabase,
    caplog: pytest.LogCaptureFixture,
    change: str,
    error: type[QdoError] | None,
    init: str | type[QdoError],
) -> None:
    """A sender without a schema, with an older or newer one, or without parts gets the reason."""
    url = bare_database.url()
    address = postgresql_address(url)
    prepared(url)
    with (
        contextlib.closing(open_broker(url, "app")) as broker,
        contextlib.closing(connect(address)) as connection,
    ):
        connection.execute(change.encode(), {"none": schema.tables_digest(0)}, prepare=False)
        with bare_database.connect() as killer:
            killer.execute(KILL)
        with pytest.raises(error) if error else contextlib.nullcontext():
            broker.send(Outgoing("q", b"1"))
        with contextlib.closing(connect(address)) as again:
            if not isinstance(init, str):
                with pytest.raises(init):
                    schema.change(again, address)
                return
            assert schema.change(again, address) == init
        if "format" not in change:
            prepared(url)
            broker.send(Outgoing("q", b"2"))
    assert any("another version of qdo" in each.message for each in caplog.records) == (
        "functions =" in change
    )


def test_only_the_owner_upgrades_and_one_at_a_time(
    bare_database: PostgresqlDatabase, next_version: Callable[..., None]
) -> None:
    prepared(bare_database.url())
    next_version()
    with bare_database.role(options="SUPERUSER LOGIN") as other, pytest.raises(UsageError):
        prepared(bare_database.url(other))
    with bare_database.connect() as connection, ThreadPoolExecutor(1) as threads:
        with connection.transaction():
            connection.execute("LOCK TABLE qdo.about IN SHARE UPDATE EXCLUSIVE MODE")
            upgrade = threads.submit(prepared, bare_database.url())
            with bare_database.connect() as looking:
                wait_until(lambda: looking.execute(WAITS).fetchone() is not None, "a lock")
        upgrade.result()
        assert connection.execute("SELECT format FROM qdo.about").fetchone() == (FORMAT + 1,)
