"""A record of every change of a request, which triggers write in the transaction that changes it.

They stand outside of qdo: whatever stores a request, takes it or ends it leaves a step.
"""

from __future__ import annotations

import contextlib
import json
import sqlite3
from collections.abc import Iterator
from typing import Any, NamedTuple

import psycopg

from qdo.postgresql.url import postgresql_address

_COLUMNS = "id, pool, state, take, owner, due, outcome, reply"
_NEW = ", ".join(f"NEW.{each}" for each in _COLUMNS.split(", "))
_WHEN = {"new": "INSERT", "step": "UPDATE OF state, take"}
_TABLE = """
CREATE TABLE soak_steps (n {serial}, at {real}, id TEXT, pool TEXT, state INTEGER,
    take INTEGER, owner TEXT, due {real}, outcome TEXT, reply TEXT);
"""
_ADD = f"INSERT INTO soak_steps (at, {_COLUMNS}) VALUES ({{now}}, {_NEW})"  # nosec B608 # constants
_SQLITE_NOW = "(julianday('now') - 2440587.5) * 86400"
_SQLITE = _TABLE.format(serial="INTEGER PRIMARY KEY AUTOINCREMENT", real="REAL") + "".join(
    f"CREATE TRIGGER soak_{name} AFTER {when} ON requests BEGIN"
    f" {_ADD.format(now=_SQLITE_NOW)}; END;"
    for name, when in _WHEN.items()
)
_POSTGRESQL_NOW = "extract(epoch FROM clock_timestamp())"
_POSTGRESQL = f"""
{_TABLE.format(serial="bigserial PRIMARY KEY", real="float8")}
CREATE FUNCTION soak_note() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER
SET search_path = {{schema}} AS $$ BEGIN
{_ADD.format(now=_POSTGRESQL_NOW)}; RETURN NULL; END $$;
""" + "".join(
    f"CREATE TRIGGER soak_{name} AFTER {when} ON requests"
    " FOR EACH ROW EXECUTE FUNCTION soak_note();"
    for name, when in _WHEN.items()
)
_SELECT = f"SELECT at, {_COLUMNS} FROM soak_steps ORDER BY n"  # nosec B608 # constants


class RequestStep(NamedTuple):
    """A state that a request got.

    :ivar at: Unix time in seconds.
    :ivar then: the queue that gets the outcome, "" for none.
    """

    at: float
    id: str
    pool: str
    state: int
    take: int
    owner: str
    due: float
    outcome: str | None
    then: str

    @classmethod
    def of(cls, row: tuple[Any, ...]) -> RequestStep:
        *values, reply = row
        return cls(*values, (json.loads(reply) if reply else {}).get("then") or "")


def record_steps(broker: str) -> None:
    """Add the triggers to the broker of an address."""
    if broker.startswith("sqlite:"):
        with contextlib.closing(sqlite3.connect(broker.removeprefix("sqlite:"))) as file:
            file.executescript(_SQLITE)
        return
    with _schema(broker) as (server, schema):
        server.execute(f"SET search_path = {schema};" + _POSTGRESQL.format(schema=schema))


def read_steps(broker: str) -> list[RequestStep]:
    """Return all steps in the order of their transactions; PostgreSQL may mix those of rows."""
    if broker.startswith("sqlite:"):
        with contextlib.closing(sqlite3.connect(broker.removeprefix("sqlite:"))) as file:
            return [RequestStep.of(row) for row in file.execute(_SELECT)]
    with _schema(broker) as (server, schema):
        server.execute(f"SET search_path = {schema}")
        return [RequestStep.of(row) for row in server.execute(_SELECT)]


@contextlib.contextmanager
def _schema(broker: str) -> Iterator[tuple[psycopg.Connection[Any], str]]:
    address = postgresql_address(broker)
    with psycopg.connect(address.conninfos[0], autocommit=True) as server:
        yield server, address.schema
