"""The server of PostgreSQL bounds what each role can store, whichever program it uses."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import psycopg
from psycopg import errors, sql

from qdo.errors import FailureKind
from qdo.postgresql.schema import _FUNCTIONS, grants
from qdo.refusals import sqlstate_kind
from tests.support.postgresql.server import PostgresqlDatabase

UNBOUND = """
SELECT relname || '.' || attname FROM pg_attribute JOIN pg_class ON pg_class.oid = attrelid
WHERE relnamespace = 'qdo'::regnamespace AND relkind IN ('r', 'p') AND NOT relispartition
    AND attnum > 0 AND NOT attisdropped AND attidentity = ''
    AND atttypid::regtype::text NOT IN ('boolean', 'timestamp with time zone')
    AND NOT EXISTS (SELECT FROM pg_constraint
        WHERE conrelid = attrelid AND contype = 'c' AND attnum = ANY (conkey))
"""
UNREACHED = {
    # Written by the owner.
    *("about.format", "about.oldest", "about.tables", "about.functions", "about.node"),
    *("messages.queue", "messages.position", "messages.xid"),  # made by `append`
    *("messages.key", "messages.headers", "messages.body"),  # checked by `append`
    *("sessions.id", "znodes.owner"),  # any number is an id
}
LARGE = "y" * 2_097_152
HOSTILE: dict[str, list[Any]] = {
    "text": ["n" * 10_000, LARGE, "", "a\x01/\u202e", '{"no": json', None],
    "bigint": [-(2**63), 2**63 - 1, None],
    "integer": [-(2**31), 2**31 - 1, None],
    "double precision": ["-Infinity", "Infinity", "NaN", -1e308, 1e308, None],
    "bytea": [b"", LARGE.encode(), None],
    "boolean": [None],
    "jsonb": ["null", f'["{LARGE}"]', '{"a": 1}', None],
    "interval": ["-1 day", "100000000 years", None],
}
USUAL: dict[str, Any] = {
    "of_node": None,
    "lock_ms": 1000,
    "headers": "{}",
    "heads": "{}",
    "replies": "{}",
    "of_mark": "{}",
    "dues": None,
    "shards": 2,
    "priorities": 5,
}
"""Arguments of calls that succeed; others are those of their types."""
BY_TYPE: dict[str, Any] = {
    "text": "a", "bigint": 0, "integer": 0, "double precision": 1.0, "bytea": b"1",
    "boolean": False, "jsonb": "1", "interval": "1 second",
}  # fmt: skip
ARGUMENTS = """
SELECT proargnames, proargtypes::regtype[]::text[] FROM pg_proc
WHERE oid = ('qdo.' || %s)::regprocedure
"""


def test_each_column_has_a_bound(postgresql: PostgresqlDatabase) -> None:
    """Or none can choose its value. A new column needs a CHECK, see the end of `format-1.sql`."""
    with postgresql.connect() as connection:
        found = {name for (name,) in connection.execute(UNBOUND)}
    assert found == UNREACHED


def calls(connection: psycopg.Connection[Any], function: str) -> Iterator[tuple[str, list[Any]]]:
    """Yield a statement and its values for each hostile value of each argument."""
    [(names, types)] = connection.execute(ARGUMENTS, (function,))
    usual: list[Any] = []
    for name, kind in itertools.zip_longest(names[: len(types)], types):
        one = USUAL.get(name, BY_TYPE[kind.removesuffix("[]")])
        usual.append([one] if kind.endswith("[]") else one)
    marks = ", ".join(f"%s::{kind}" for kind in types)
    statement = f"SELECT qdo.{function.partition('(')[0]}({marks})"
    yield statement, usual
    for place, kind in enumerate(types):
        for value in HOSTILE[kind.removesuffix("[]")]:
            values = usual.copy()
            values[place] = [value] if kind.endswith("[]") else value
            yield statement, values


def test_no_sender_stores_what_is_out_of_bounds(postgresql: PostgresqlDatabase) -> None:
    """Each value is taken or refused, for itself, and the session goes on."""
    with postgresql.connect() as owner, postgresql.role() as role:
        for statement in grants("qdo", role, "sender"):
            owner.execute(statement.encode())
        with psycopg.connect(postgresql.conninfo(role), autocommit=True) as sender:
            stored, refusals = 0, list[tuple[str, FailureKind]]()
            for function in _FUNCTIONS["sender"]:
                for statement, values in calls(owner, function):
                    try:
                        sender.execute(statement.encode(), values)
                        stored += 1
                    except errors.Error as error:
                        kind = sqlstate_kind(error.sqlstate or "")
                        refusals.append((f"{statement} {values}"[:300], kind))
            assert sender.execute("SELECT 1").fetchone() == (1,)
        assert [each for each in refusals if each[1] is not FailureKind.REFUSED] == []
        assert stored > len(refusals) / 4 > 10
        columns = owner.execute(
            "SELECT relname, attname FROM pg_attribute JOIN pg_class ON pg_class.oid = attrelid"
            " WHERE relnamespace = 'qdo'::regnamespace AND relkind IN ('r', 'p') AND attnum > 0"
            " AND NOT relispartition AND atttypid IN ('text'::regtype, 'text[]'::regtype)"
        ).fetchall()
        longest = sql.SQL("SELECT coalesce(max(octet_length({}::text)), 0) FROM qdo.{}")
        for table, column in columns:
            query = longest.format(sql.Identifier(column), sql.Identifier(table))
            assert owner.execute(query).fetchone() < (len(LARGE),), f"{table}.{column}"  # type: ignore[operator]
        owner.execute(f"DROP OWNED BY {role}".encode())
