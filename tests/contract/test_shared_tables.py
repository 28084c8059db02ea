"""The tables that qdo puts into databases of users: each keeps the rows of its apps apart."""

from __future__ import annotations

import contextlib
import re
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy
from sqlalchemy import Engine, MetaData, create_engine, inspect, text

from qdo import App, Message
from qdo.brokers.registry import open_broker
from qdo.errors import UsageError
from qdo.history.tables import METADATA
from qdo.idempotency import FencedWrites, ProcessedMessages, ProofTable
from qdo.message import Origin
from qdo.outbox import Outbox
from qdo.state import KeyedState
from tests.support.paths import ROOT

OF_BROKERS = ("brokers/", "postgresql/", "coordination/")
"""Their tables are in schemas and files of their own."""


def message(app: str, position: int, fence: int = 1) -> Message:
    return Message("q", position, None, fence=fence, origin=Origin(app), id=str(position))


def count(table: KeyedState, session: Any, each: Message) -> bool:
    with table.of(session, each) as state:
        state["count"] = state.get("count", 0) + 1
        return state.new


USES: dict[type[ProofTable], Callable[[Any, Any, Message], Any]] = {
    KeyedState: count,
    FencedWrites: lambda table, session, each: bool(table.admit(session, each)),
    ProcessedMessages: lambda table, session, each: table.record(session, each),
}
OLD = {
    KeyedState: """
        CREATE TABLE qdo_state (scope VARCHAR(200) NOT NULL, name VARCHAR(200) NOT NULL,
            fence BIGINT NOT NULL, positions TEXT NOT NULL, value TEXT NOT NULL,
            PRIMARY KEY (scope, name));
        INSERT INTO qdo_state VALUES ('q', '', 1, '{"5": 1}', '{"count": 7}')""",
    FencedWrites: f"""
        CREATE TABLE qdo_writes (queue VARCHAR(200) NOT NULL, part VARCHAR(200) NOT NULL,
            fence BIGINT NOT NULL, position VARCHAR(100) NOT NULL, PRIMARY KEY (queue, part));
        INSERT INTO qdo_writes VALUES ('q', '', 1, '{1:0100d}')""",
    ProcessedMessages: """
        CREATE TABLE qdo_done_messages (queue VARCHAR(200) NOT NULL, id VARCHAR(200) NOT NULL,
            done_at BIGINT NOT NULL, PRIMARY KEY (queue, id));
        INSERT INTO qdo_done_messages VALUES ('q', '1', 1)""",
}
"""The tables of the version without the column `app`: message 1 is done."""


@pytest.fixture(params=["sqlite3", "sqlalchemy", "postgresql"])
def begin(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[[], Any]]:
    """Begins a transaction."""

    @contextlib.contextmanager
    def connecting() -> Iterator[Any]:
        with contextlib.closing(sqlite3.connect(tmp_path / "app.db")) as connection, connection:
            yield connection

    if request.param == "sqlite3":
        yield connecting
    elif request.param == "sqlalchemy":
        engine = create_engine(f"sqlite:///{tmp_path}/app.db")
        yield engine.begin
        engine.dispose()
    else:
        database = request.getfixturevalue("postgresql")

        @contextlib.contextmanager
        def transaction() -> Iterator[Any]:
            with database.connect() as connection, connection.transaction():
                yield connection

        yield transaction


def run(session: Any, script: str) -> None:
    wrap = text if isinstance(session, sqlalchemy.Connection) else str
    for statement in script.split(";\n"):
        session.execute(wrap(statement))


def test_every_table_has_the_app_in_its_key() -> None:
    """Or numbers its rows, as the outbox does, which selects those of its app."""
    modules = {
        str(path.relative_to(ROOT / "qdo"))
        for path in (ROOT / "qdo").rglob("*.py")
        if re.search(r"CREATE TABLE|\bTable\(\n", path.read_text())
    }
    own = {each for each in modules if not each.startswith(OF_BROKERS)}
    assert own == {"history/tables.py", "idempotency.py", "outbox.py"}, "add new tables below"
    kinds = {each for each in ProofTable.__subclasses__() if "Fence" not in each.__name__}
    kinds |= {each for each in ProofTable.__subclasses__() for each in each.__subclasses__()}
    assert kinds == set(USES)
    engine = create_engine("sqlite://")
    with engine.begin() as connection:
        for kind in USES:
            kind().create(connection)  # type: ignore[call-arg]
        METADATA.create_all(connection)
        Outbox(App("shop"), engine).create(connection)
        found = inspect(connection)
        for table in found.get_table_names():
            assert "app" in {each["name"] for each in found.get_columns(table)}
            key = found.get_pk_constraint(table)["constrained_columns"]
            assert key[0] == "app" or key == ["place"], table
    engine.dispose()


@pytest.mark.parametrize("kind", USES)
def test_apps_share_a_table_but_no_row(kind: Any, begin: Callable[[], Any]) -> None:
    """With equal names of queues, equal ids, and fences and positions of their own."""
    table, use = kind(), USES[kind]
    with begin() as session:
        table.create(session)
        assert [use(table, session, message("shop", 7, 9)) for _ in range(2)] == [True, False]
        for app in ("bank", "/staging/shop"):
            assert [use(table, session, message(app, 7, 2)) for _ in range(2)] == [True, False]
    with begin() as session:
        if kind is KeyedState:
            assert table.read(session, "q", app="bank") == {"count": 1}
        refused = table.forget if kind is ProcessedMessages else table.reset_fences
        given = (0.0,) if kind is ProcessedMessages else ()
        with pytest.raises(UsageError, match="app must be given"):
            refused(session, *given)
        assert refused(session, *given, app="bank") <= 1


@pytest.mark.parametrize("created", [True, False], ids=["create", "first use"])
@pytest.mark.parametrize("kind", USES)
def test_an_older_table_becomes_that_of_its_first_app(
    kind: Any, created: bool, begin: Callable[[], Any]
) -> None:
    """In one transaction: a rollback leaves the old table."""
    table, use = kind(), USES[kind]
    with begin() as session:
        run(session, OLD[kind])
    if created:
        with begin() as session:
            table.create(session)
            table.create(session)
    with contextlib.suppress(LookupError), begin() as session:
        use(table, session, message("shop", 1))
        raise LookupError
    with begin() as session:
        assert not use(table, session, message("shop", 1)), "it is known"
        assert use(table, session, message("shop", 2))
        if kind is KeyedState:
            assert table.read(session, "q") == {"count": 8}
    with begin() as session:
        assert use(kind(), session, message("bank", 1))


@pytest.fixture(params=["sqlite", "postgresql"])
def engine(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Engine]:
    url = f"sqlite:///{tmp_path}/app.db"
    if request.param == "postgresql":
        url = request.getfixturevalue("postgresql_url").replace(":", "+psycopg:", 1)
    engine = create_engine(url)
    yield engine
    engine.dispose()


def test_each_app_relays_its_own_rows(engine: Engine, tmp_path: Path) -> None:
    """An older table gets the new columns; its rows are those of the first app that relays."""
    shop, bank = (Outbox(App(name), engine) for name in ("shop", "bank"))
    with engine.begin() as connection:
        old = Outbox(App("old"), engine, metadata=(metadata := MetaData())).table
        metadata.create_all(connection)
        for column in ("app", "refused"):
            connection.execute(text(f"ALTER TABLE qdo_outbox DROP COLUMN {column}"))
        row = {"id": "1", "queue": "q", "body": b"0"}
        connection.execute(sqlalchemy.insert(old).values(row))
    with contextlib.suppress(LookupError), engine.begin() as connection:
        bank.send(connection, "q", 1)
        raise LookupError
    with engine.begin() as connection:
        bank.send(connection, "q", 1)
        shop.send(connection, "q", 2)
    with contextlib.ExitStack() as closing:
        for outbox, app, bodies in ((shop, "shop", [b"0", b"2"]), (bank, "bank", [b"1"])):
            broker = open_broker(f"sqlite:{tmp_path}/messages.db", app)
            closing.callback(broker.close)
            assert outbox.relay(broker) == len(bodies)
            assert [body for _, body, _, _ in broker.reader("q", 0).fetch(9)] == bodies
