"""The tables of the embedded broker, and a class of queries that check the types of columns.

`messages` is one B-tree in the order in which workers read it, and contains the bodies. On 2 cores,
a process fetches 2.0 million rows of 100 bytes per second from 16 queues in turn. From a table with
a separate index, it fetches 0.9 million rows.

Writers assign positions under the write lock, and positions always increase in the whole file. The
next position follows `max(head)`. `head` is the newest position of a queue, so one index search
finds the queues that changed since an earlier look.

A delayed message gets its position when it is due and moves into its queue. `queues.delayed` holds
the number of delayed messages for backlog queries. `dedup` stores the message of each deduplication
key until the key expires.

`number` numbers the messages of a queue. The broker deletes only the oldest messages, so the
numbers have no gaps, and the difference of two numbers is a count.

SQLite never reuses an id (AUTOINCREMENT). So a reader's id of a queue, and a number that a command
deletes, never refer to a later row.

`Query` checks the type of each column that it reads, because SQLite stores a value of any type in
any column. In a damaged file a number may be a text, and later code would fail. So every query
names the expected types, and reports another type as damage, like damage that SQLite finds.
"""

from __future__ import annotations

import contextlib
import re
import sqlite3
from collections.abc import Generator, Iterable, Mapping, Sequence
from types import NoneType
from typing import Any

from qdo.system.sqlite import DamagedRowError, Format

# See `qdo.brokers.requests`. SQLite refuses a value of another type than its column. Times are
# Unix times in seconds. `rank` is the priority of a due request, and the due time of any other
# waiting request. So one index gives both the next request by priority and the next due time. `due`
# keeps the requested time. Failed requests stay for a long time, so the index of expiring requests
# excludes them.
REQUESTS = re.sub(
    r"(\w+) (TEXT|INTEGER|REAL|BLOB)((?: NOT NULL)?(?: DEFAULT \S+)?),\n",
    lambda found: (
        f"{found[0][:-2]} CHECK (typeof({found[1]}) IN ('{found[2].lower()}', 'null')),\n"
    ),
    """
    CREATE TABLE requests (
        number INTEGER PRIMARY KEY AUTOINCREMENT,
        app TEXT NOT NULL,
        id TEXT NOT NULL,
        pool TEXT NOT NULL,
        state INTEGER NOT NULL DEFAULT 0,
        priority INTEGER NOT NULL,
        due REAL NOT NULL,
        rank REAL NOT NULL,
        owner TEXT NOT NULL DEFAULT '',
        take INTEGER NOT NULL DEFAULT 0,
        failed INTEGER NOT NULL DEFAULT 0,
        crashed INTEGER NOT NULL DEFAULT 0,
        asked REAL NOT NULL,
        started REAL NOT NULL DEFAULT 0,
        keep REAL NOT NULL,
        until REAL NOT NULL DEFAULT 0,
        digest BLOB NOT NULL,
        reply TEXT,
        mark TEXT,
        note TEXT,
        error TEXT,
        outcome TEXT,
        result_headers TEXT,
        result BLOB,
        headers TEXT,
        body BLOB NOT NULL,
        parent TEXT,
        deadline REAL NOT NULL DEFAULT 0,
        UNIQUE (app, id)
    );
    CREATE INDEX requests_steps ON requests (app, parent) WHERE parent IS NOT NULL;
    CREATE INDEX requests_late ON requests (app, deadline) WHERE deadline > 0 AND state < 3;
    CREATE INDEX requests_waiting ON requests (app, pool, rank, number) WHERE state = 0;
    CREATE INDEX requests_held ON requests (app, owner, pool) WHERE state IN (1, 2);
    CREATE INDEX requests_over ON requests (app, until)
        WHERE state = 3 AND outcome IS NOT 'failed' AND parent IS NULL;
    CREATE INDEX requests_failed ON requests (app, pool, number)
        WHERE state = 3 AND outcome = 'failed' AND parent IS NULL;
""",
)
# The table has a row for each present or past shard; see `qdo.brokers.streams`. `parents` is a JSON
# array. In the table `queues`, `root` is the id of the first queue of a shard's stream; NULL for
# other queues.
STREAMS = """
    CREATE TABLE streams (
        number INTEGER PRIMARY KEY AUTOINCREMENT,
        app TEXT NOT NULL,
        stream TEXT NOT NULL,
        queue TEXT NOT NULL,
        low TEXT NOT NULL,
        high TEXT NOT NULL,
        parents TEXT NOT NULL,
        end_position INTEGER,
        hidden INTEGER NOT NULL,
        UNIQUE (app, queue)
    );
    CREATE INDEX streams_by_name ON streams (app, stream);
    CREATE INDEX streams_hidden ON streams (app) WHERE hidden;
"""

# The node of the file is random, with the bit that marks random nodes (RFC 4122, section 4.5).
# `due` and `until` are UUIDv1 times, like the positions of messages.
MESSAGES = Format(
    name="message",
    application_id=0x71646F4D,  # "qdoM"
    version=1,
    schema="""
    CREATE TABLE queues (
        id INTEGER PRIMARY KEY AUTOINCREMENT,
        app TEXT NOT NULL,
        name TEXT NOT NULL,
        head INTEGER NOT NULL,
        sent INTEGER NOT NULL,
        largest INTEGER NOT NULL,
        delayed INTEGER NOT NULL DEFAULT 0,
        root INTEGER,
        UNIQUE (app, name)
    );
    CREATE INDEX queues_by_head ON queues (head);
    CREATE TABLE file (
        id INTEGER PRIMARY KEY CHECK (id = 1),
        node INTEGER NOT NULL
    );
    CREATE TABLE messages (
        queue INTEGER NOT NULL,
        position INTEGER NOT NULL,
        number INTEGER NOT NULL,
        body BLOB NOT NULL,
        key TEXT,
        headers TEXT,
        PRIMARY KEY (queue, position)
    ) WITHOUT ROWID;
    CREATE TABLE dead_letters (
        queue INTEGER NOT NULL,
        position INTEGER NOT NULL,
        body BLOB NOT NULL,
        key TEXT,
        headers TEXT,
        error TEXT NOT NULL,
        traceback TEXT NOT NULL,
        attempts INTEGER NOT NULL,
        worker TEXT NOT NULL,
        fence INTEGER NOT NULL,
        dead_at REAL NOT NULL,
        PRIMARY KEY (queue, position)
    );
    CREATE INDEX dead_letters_by_time ON dead_letters (dead_at, position);
    CREATE TABLE delayed (
        number INTEGER PRIMARY KEY AUTOINCREMENT,
        app TEXT NOT NULL,
        due INTEGER NOT NULL,
        queue INTEGER NOT NULL,
        id TEXT NOT NULL,
        key TEXT,
        headers TEXT,
        body BLOB NOT NULL
    );
    CREATE INDEX delayed_by_due ON delayed (app, due, number);
    CREATE TABLE dedup (
        queue INTEGER NOT NULL,
        key TEXT NOT NULL,
        id TEXT NOT NULL,
        until INTEGER NOT NULL,
        PRIMARY KEY (queue, key)
    ) WITHOUT ROWID;
    CREATE INDEX dedup_by_until ON dedup (until);
    INSERT INTO file (id, node) VALUES (1, (random() & 0xFFFFFFFFFFFF) | 0x010000000000);
    """  # noqa: S608 - constants
    + REQUESTS
    + STREAMS,
)
# The types of a column by letter: integer, real, text and blob. A capital letter allows NULL.
_TYPES: dict[str, tuple[type, ...]] = {
    "i": (int,),
    "I": (int, NoneType),
    "r": (float,),
    "R": (float, NoneType),
    "t": (str,),
    "T": (str, NoneType),
    "b": (bytes,),
    "B": (bytes, NoneType),
}

Parameters = Sequence[Any] | Mapping[str, Any]
Row = tuple[Any, ...]


class Query:
    """A SELECT statement, with a letter of `_TYPES` for each column."""

    # The methods raise `sqlite3.Error`, also for a value of another type.
    # `qdo.system.sqlite.translated` converts this error to an error of the file, such as
    # DatabaseCorruptError.

    __slots__ = ("_kinds", "_known", "sql")

    def __init__(self, sql: str, columns: str) -> None:
        self.sql = sql
        self._kinds = tuple((column, _TYPES[each]) for column, each in enumerate(columns))
        self._known: set[tuple[type, ...]] = set()  # valid types of whole rows

    def all(self, connection: sqlite3.Connection, parameters: Parameters = ()) -> list[Row]:
        rows: list[Row] = connection.execute(self.sql, parameters).fetchall()
        return self.checked(rows)

    def checked(self, rows: Iterable[Row]) -> list[Row]:
        return list(map(self._checked, rows))

    def each(self, connection: sqlite3.Connection, parameters: Parameters = ()) -> Generator[Row]:
        """Yield the rows one by one, because the caller may not read all rows."""
        with contextlib.closing(connection.execute(self.sql, parameters)) as cursor:
            yield from map(self._checked, cursor)

    def first(self, connection: sqlite3.Connection, parameters: Parameters = ()) -> Row | None:
        row: Row | None = connection.execute(self.sql, parameters).fetchone()
        return None if row is None else self._checked(row)

    def only(self, connection: sqlite3.Connection, parameters: Parameters = ()) -> Row:
        """Return the first row, which exists in every intact file."""
        row = self.first(connection, parameters)
        if row is None:
            raise DamagedRowError("a row that every file has is missing")
        return row

    def _checked(self, row: Row) -> Row:
        if tuple(map(type, row)) in self._known:
            return row
        for column, kind in self._kinds:
            if type(row[column]) not in kind:
                names = " or ".join(sorted(each.__name__ for each in kind))
                found = type(row[column]).__name__
                raise DamagedRowError(f"a stored value must be {names}, got {found}")
        self._known.add(tuple(map(type, row)))
        return row
