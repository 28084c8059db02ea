"""The tables of a history, and the statements that write them.

Every statement may be repeated or delayed. Rows have natural keys and contain totals. A write
replaces a row only if its totals include at least as many attempts.

There is no version number, because a released table never changes. Newer workers create missing
tables, and older workers ignore unknown tables. If qdo needs other columns, a new version adds a
table with a new name.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import (
    BigInteger,
    Column,
    Connection,
    Float,
    Index,
    Integer,
    MetaData,
    Table,
    Text,
    and_,
    delete,
    exists,
    inspect,
    or_,
)
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.exc import DBAPIError

from qdo.history.recorder import BUCKETS

METADATA = MetaData()
# Columns for the classes of durations.
DURATIONS = tuple(f"d{index}" for index in range(BUCKETS))
MINUTES = Table(
    "qdo_minutes",
    METADATA,
    Column("app", Text, primary_key=True),
    Column("queue", Text, primary_key=True),
    Column("minute", BigInteger, primary_key=True),
    Column("worker", Text, primary_key=True),
    Column("attempts", BigInteger, nullable=False),
    Column("done", BigInteger, nullable=False),
    Column("failed", BigInteger, nullable=False),
    Column("retried", BigInteger, nullable=False),
    Column("dead_lettered", BigInteger, nullable=False),
    Column("busy_seconds", Float(53), nullable=False),
    *(Column(name, BigInteger, nullable=False) for name in DURATIONS),
    Index("qdo_minutes_by_time", "app", "minute"),
)
RUNS = Table(
    "qdo_runs",
    METADATA,
    Column("app", Text, primary_key=True),
    Column("worker", Text, primary_key=True),
    Column("number", BigInteger, primary_key=True),
    Column("queue", Text, nullable=False),
    Column("id", Text, nullable=False),
    Column("attempt", Integer, nullable=False),
    Column("outcome", Text, nullable=False),
    Column("error", Text),
    Column("seconds", Float(53)),
    Column("at", Float(53), nullable=False),
    Index("qdo_runs_by_time", "app", "at"),
)
ACTIONS = Table(
    "qdo_actions",
    METADATA,
    Column("app", Text, primary_key=True),
    Column("id", Text, primary_key=True),
    Column("at", Float(53), nullable=False),
    Column("by", Text, nullable=False),
    Column("account", Text, nullable=False),
    Column("command", Text, nullable=False),
    Column("target", Text, nullable=False),
    Column("before", Text),
    Column("after", Text),
    Column("reason", Text, nullable=False),
    Index("qdo_actions_by_time", "app", "at"),
)
OWNERS = Table(
    "qdo_owners",
    METADATA,
    Column("app", Text, primary_key=True),
    Column("queue", Text, primary_key=True),
    Column("fence", BigInteger, primary_key=True),
    Column("worker", Text, primary_key=True),
    Column("owner", Text, nullable=False),
    Column("host", Text, nullable=False),
    Column("pid", BigInteger, nullable=False),
    Column("claimed", Float(53), nullable=False),
    Column("ended", Float(53)),
    Column("why", Text),
    Index("qdo_owners_by_time", "app", "claimed"),
)
_KEY = ("app", "queue", "minute", "worker")


def create(connection: Connection) -> None:
    if is_created(connection):
        return
    if connection.dialect.name != "postgresql":
        METADATA.create_all(connection)
        return
    try:
        with connection.begin_nested():
            METADATA.create_all(connection)
    except DBAPIError:
        # If another process has just created the tables, the creation fails even with IF NOT
        # EXISTS. A lock would not help, because another role could hold the lock.
        METADATA.create_all(connection)


def is_created(connection: Connection, *tables: Table) -> bool:
    found = inspect(connection)
    return all(found.has_table(each.name) for each in tables or METADATA.tables.values())


def write_minutes(connection: Connection, rows: Sequence[dict[str, Any]]) -> None:
    """Store totals of minutes. Never replace a row with an older row."""
    insert = _insert(connection, MINUTES)
    new = insert.excluded
    values = {each.name: new[each.name] for each in MINUTES.columns if each.name not in _KEY}
    statement = insert.on_conflict_do_update(
        index_elements=list(_KEY), set_=values, where=new.attempts >= MINUTES.c.attempts
    )
    connection.execute(statement, list(rows))


def write_once(connection: Connection, table: Table, rows: Sequence[dict[str, Any]]) -> None:
    """Store new rows of a table. Leave existing rows unchanged."""
    statement = _insert(connection, table).on_conflict_do_nothing()
    connection.execute(statement, list(rows))


def write_owners(connection: Connection, rows: Sequence[dict[str, Any]]) -> None:
    """Store claims and their ends. A delayed write of a claim does not remove its end."""
    insert = _insert(connection, OWNERS)
    new = insert.excluded
    statement = insert.on_conflict_do_update(
        index_elements=list(OWNERS.primary_key.columns.keys()),
        set_={"ended": new.ended, "why": new.why},
        where=new.ended.is_not(None),
    )
    connection.execute(statement, list(rows))


def delete_older(connection: Connection, app: str, limit: float, actions_limit: float) -> None:
    """Delete rows of an app that are older than a Unix time. Actions have a separate limit."""
    minutes = MINUTES.c
    runs = RUNS.c
    actions = ACTIONS.c
    connection.execute(delete(MINUTES).where(minutes.app == app, minutes.minute < limit))
    connection.execute(delete(RUNS).where(runs.app == app, runs.at < limit))
    connection.execute(delete(ACTIONS).where(actions.app == app, actions.at < actions_limit))
    # A claim without an end is open, or its worker died before recording the end. In the second
    # case, a later claim follows unless an operator has deleted the queue.
    own = OWNERS.c
    later = OWNERS.alias()
    followed = exists().where(
        later.c.app == own.app,
        later.c.queue == own.queue,
        later.c.fence > own.fence,
        later.c.claimed < limit,
    )
    unended = and_(own.ended.is_(None), or_(followed, own.claimed < actions_limit))
    connection.execute(
        delete(OWNERS).where(own.app == app, own.claimed < limit, or_(own.ended < limit, unended))
    )


def _insert(connection: Connection, table: Table) -> Any:
    kinds: dict[str, Any] = {"postgresql": postgresql.insert, "sqlite": sqlite.insert}
    return kinds[connection.dialect.name](table)
