"""Idempotent writes: a repeated or late write changes nothing.

A message may run again after a crash. A frozen worker may write after its queue has a new owner
(see the page "Idempotency" of the documentation). Only the database that stores the write can
recognize both cases, with a proof in the transaction of the write. There are two kinds of proof:

- `FencedWrites`: one row per queue with the fence and the position of its last write. The table
  does not grow, and it also rejects writes of former owners. This proof requires an ordered queue
  with stable positions, so it does not support SQS.
- `ProcessedMessages`: one row per message id. This proof requires no order. It also recognizes a
  message with a new position, such as a dead letter that was sent again. The table grows, but the
  app can delete old rows.

Apps may share a table, because its key contains the name of the app (`message.app`). Both kinds
work in a transaction of the app, with a SQLAlchemy session or connection, or a connection of
psycopg 3 or of the standard library's sqlite3. SQLite and PostgreSQL use the same SQL. qdo imports
SQLAlchemy only for SQLAlchemy's sessions (``pip install 'qdo-queues[sql]'``).
"""

from __future__ import annotations

import enum
import math
import re
import sqlite3
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from qdo.errors import UnsupportedError, UsageError
from qdo.message import Message

__all__ = ["FencedWrites", "ProcessedMessages", "Write"]

# A SQLAlchemy `Session` or `Connection`, a `psycopg.Connection`, or a `sqlite3.Connection`, in a
# transaction.
SqlSession: TypeAlias = Any

DIALECTS = ("sqlite", "postgresql")
# Maximum number of characters of a queue, a part or an id.
MAX_NAME = 200
# Width of a stored position, which is a text with leading zeros. Positions of Kinesis exceed the
# integers of databases, and texts of equal length compare like numbers.
POSITION_DIGITS = 100
_PARAMETER = re.compile(r":(\w+)")
_COLUMNS = """
SELECT attname FROM pg_attribute
WHERE attrelid = to_regclass(:table) AND attnum > 0 AND NOT attisdropped
"""
_PRIMARY_KEY = """
SELECT quote_ident(conname) FROM pg_constraint
WHERE conrelid = to_regclass(:table) AND contype = 'p'
"""


class Write(enum.Enum):
    """The decision about a write. Only NEW is true and allows the write.

    NEW: neither this message nor a later message has been written. The job must write. REPEATED:
    this message has been written before. The job must change nothing, and the message is done.
    STALE: another worker has since claimed the queue and written. The job must change nothing. The
    new owner runs the message or has already run it.
    """

    NEW = "new"
    REPEATED = "repeated"
    STALE = "stale"

    def __bool__(self) -> bool:
        return self is Write.NEW


class ProofTable:
    """A table in the app's database that proves which messages have been processed.

    :param table: name of the table, of letters, digits and underscores.
    :param columns: the columns after `app`.
    :param key: the columns of the primary key after `app`.
    :ivar schema: the statement that creates the table, for tools that create all tables of an app.
    """

    def __init__(self, table: str, columns: str, key: str) -> None:
        if re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]{0,62}", table) is None:
            raise UsageError(
                reason="the name of a table must have 1 to 63 letters, digits and underscores and "
                f"not begin with a digit, got {table!r}"
            )
        self.table = table
        self._key = f"PRIMARY KEY (app, {key})"
        self._columns = f"(app TEXT NOT NULL, {columns}, {self._key})"
        self.schema = f"CREATE TABLE IF NOT EXISTS {table} {self._columns}"
        self._apps: set[str] = set()
        """Those that have used the table, as it is now, in this process."""
        self._changed = False  # True after a migration, which a rollback may undo

    def create(self, session: SqlSession) -> None:
        """Create the table unless it exists. Call this method where the app creates its own tables.

        The call adds the column `app` to a table of an older version.
        """
        execute(session, self.schema, {})
        self._add_app(session)

    def _use(self, session: SqlSession, app: str) -> None:
        """Prepare the first use by an app in this process."""
        if app in self._apps:
            return
        self._add_app(session)
        # Assign rows that are older than the column `app` to the first app that uses the table.
        adopt = f"UPDATE {self.table} SET app = :app WHERE app = ''"  # noqa: S608 - __init__ checks it
        if execute(session, adopt, {"app": app}).rowcount:
            self._changed = True
        if not self._changed:
            self._apps.add(app)

    def _only_app(self, session: SqlSession, app: str | None) -> str:
        """Return the given app, or the only app in the table; raise UsageError for several apps."""
        self._add_app(session)
        if app is not None:
            return app
        ends = [f"(SELECT {each}(app) FROM {self.table})" for each in ("min", "max")]  # noqa: S608 - __init__ checks it
        first, last = execute(session, f"SELECT {', '.join(ends)}", {}).fetchone()
        if first != last:
            raise UsageError(
                reason=f"app must be given, because table {self.table} has rows of several apps, "
                f"such as {first!r} and {last!r}"
            )
        return first or ""

    def _add_app(self, session: SqlSession) -> None:
        table = self.table
        old = [] if self._apps else self._stored_columns(session)
        if not old or "app" in old:
            return
        self._changed = True
        if not _is_sqlite(session):
            execute(session, f"LOCK TABLE {table} IN ACCESS EXCLUSIVE MODE", {})
            if "app" not in self._stored_columns(session):
                (name,) = execute(session, _PRIMARY_KEY, {"table": table}).fetchone()
                add = f"ADD COLUMN app TEXT NOT NULL DEFAULT '', DROP CONSTRAINT {name}"
                execute(session, f"ALTER TABLE {table} {add}, ADD {self._key}", {})
            return
        execute(session, "SAVEPOINT qdo_app", {})
        execute(session, f"DELETE FROM {table} WHERE 0", {})  # noqa: S608 - locks the file
        if "app" not in self._stored_columns(session):
            names = ", ".join(old)
            new = f"{table}_with_app"
            execute(session, f"CREATE TABLE {new} {self._columns}", {})
            copy = f"INSERT INTO {new} (app, {names}) SELECT '', {names} FROM {table}"  # noqa: S608 - __init__ checks it
            execute(session, copy, {})
            execute(session, f"DROP TABLE {table}", {})
            execute(session, f"ALTER TABLE {new} RENAME TO {table}", {})
        execute(session, "RELEASE qdo_app", {})

    def _stored_columns(self, session: SqlSession) -> list[str]:
        query = "SELECT name FROM pragma_table_info(:table)" if _is_sqlite(session) else _COLUMNS
        return [name for (name,) in execute(session, query, {"table": self.table}).fetchall()]


class FenceTable(ProofTable):
    def reset_fences(self, session: SqlSession, app: str | None = None) -> int:
        """Reset every fence of an app, but no positions; return the number of rows.

        Call this method when an app moves to another coordinator, whose fences may be smaller.
        First stop all workers.

        :param app: the app as in `message.app`; needed if the table has rows of several.
        """
        row = {"app": self._only_app(session, app)}
        reset = f"UPDATE {self.table} SET fence = 0 WHERE app = :app"  # noqa: S608 - __init__ checks it
        return int(execute(session, reset, row).rowcount)


class FencedWrites(FenceTable):
    """Decides about writes by `message.fence` and `message.position`.

    :param table: name of the table, of letters, digits and underscores.
    """

    def __init__(self, table: str = "qdo_writes") -> None:
        columns = f"""
            queue VARCHAR({MAX_NAME}) NOT NULL,
            part VARCHAR({MAX_NAME}) NOT NULL,
            fence BIGINT NOT NULL,
            position VARCHAR({POSITION_DIGITS}) NOT NULL
        """
        super().__init__(table, columns, "queue, part")
        self._advance = f"""
            INSERT INTO {table} (app, queue, part, fence, position)
            VALUES (:app, :queue, :part, :fence, :position)
            ON CONFLICT (app, queue, part) DO UPDATE
            SET fence = excluded.fence, position = excluded.position
            WHERE excluded.fence >= {table}.fence AND excluded.position > {table}.position
        """  # noqa: S608 - __init__ checks it
        # Even a repeated message proves that the queue has a new owner. From now on, reject the
        # former owner, which may be ahead of the recorded progress.
        self._take_over = f"""
            UPDATE {table} SET fence = :fence
            WHERE app = :app AND queue = :queue AND part = :part AND fence < :fence
        """  # noqa: S608 - __init__ checks it
        self._stale = f"""
            SELECT 1 FROM {table}
            WHERE app = :app AND queue = :queue AND part = :part AND fence > :fence
        """  # noqa: S608 - __init__ checks it

    def admit(self, session: SqlSession, message: Message, part: str = "") -> Write:
        """Decide whether to write this message, and record the decision.

        Call this method first in the transaction of the write. Then the decision and the write are
        committed together, or neither. The row stays locked until the end of the transaction, so
        two owners decide one after the other.

        :param part: a part of the queue with a separate order, such as the message's key if keys
            run in parallel, or the name of one of several sinks.
        :raises UsageError: `part` has more than 200 characters, or the session commits each
            statement separately.
        :raises UnsupportedError: the database is neither SQLite nor PostgreSQL, or the message gets
            a new position for each delivery, as with SQS.
        """
        check_proof(session, message)
        if len(part) > MAX_NAME:
            raise UsageError(
                reason=f"part must have at most {MAX_NAME} characters, got {part!r:.60}..."
            )
        self._use(session, message.app)
        row = {
            "app": message.app,
            "queue": message.queue,
            "part": part,
            "fence": message.fence,
            "position": f"{message.position:0{POSITION_DIGITS}d}",
        }
        if execute(session, self._advance, row).rowcount:
            return Write.NEW
        if execute(session, self._take_over, row).rowcount:
            return Write.REPEATED
        stale = execute(session, self._stale, row).fetchone() is not None
        return Write.STALE if stale else Write.REPEATED


class ProcessedMessages(ProofTable):
    """Recognizes repeated messages by `message.id`.

    :param table: name of the table, of letters, digits and underscores.
    :param clock: a function that returns the Unix time in seconds.
    """

    def __init__(
        self, table: str = "qdo_done_messages", *, clock: Callable[[], float] = time.time
    ) -> None:
        columns = f"""
            queue VARCHAR({MAX_NAME}) NOT NULL,
            id VARCHAR({MAX_NAME}) NOT NULL,
            done_at BIGINT NOT NULL
        """
        super().__init__(table, columns, "queue, id")
        self._clock = clock
        self._record = f"""
            INSERT INTO {table} (app, queue, id, done_at) VALUES (:app, :queue, :id, :done_at)
            ON CONFLICT (app, queue, id) DO NOTHING
        """  # noqa: S608 - __init__ checks it
        self._forget = f"DELETE FROM {table} WHERE app = :app AND done_at < :done_at"  # noqa: S608 - __init__ checks it

    def record(self, session: SqlSession, message: Message) -> bool:
        """Record that the message is done. Return False if it was done before; then write nothing.

        Call this method first in the transaction of the message's effects. Then the record and the
        effects are committed together, or neither.

        :raises UsageError: the session commits each statement separately.
        :raises UnsupportedError: the database is neither SQLite nor PostgreSQL.
        """
        _check_transaction(session)
        self._use(session, message.app)
        now = int(self._clock())
        row = {"app": message.app, "queue": message.queue, "id": message.id, "done_at": now}
        return bool(execute(session, self._record, row).rowcount)

    def forget(self, session: SqlSession, older_than_seconds: float, app: str | None = None) -> int:
        """Delete the rows of an app that exceed an age; return the number of deleted rows.

        A message that is delivered again after its row was deleted counts as new. Keep rows as long
        as the broker keeps messages (`retention_seconds`) and operators may resend dead letters.

        :param app: the app as in `message.app`; needed if the table has rows of several.
        """
        if not 0 <= older_than_seconds < math.inf:
            raise UsageError(
                reason="older_than_seconds must be a number of at least 0, got "
                f"{older_than_seconds!r}"
            )
        limit = int(self._clock() - older_than_seconds)
        row = {"app": self._only_app(session, app), "done_at": limit}
        return int(execute(session, self._forget, row).rowcount)


def check_proof(session: SqlSession, message: Message) -> None:
    """Raise UsageError or UnsupportedError if a position in the session would prove nothing."""
    _check_transaction(session)
    if not message.stable:
        raise UnsupportedError(
            broker="a broker with unstable positions, such as SQS,",
            what="distinguish repeated messages from new ones by their position",
            remedy="use qdo.idempotency.ProcessedMessages, which uses message.id",
        )


def _check_transaction(session: SqlSession) -> None:
    """Raise UsageError if the proof would be committed without the write."""
    driver = session
    if not isinstance(session, sqlite3.Connection) and not _is_psycopg(session):
        _dialect(session)  # raises an error unless the object is a session
        bound = session.connection() if hasattr(session, "get_bind") else session
        driver = bound.connection.driver_connection
    if isinstance(driver, sqlite3.Connection):
        is_alone = driver.isolation_level is None or getattr(driver, "autocommit", -1) is True
        is_alone = is_alone and not driver.in_transaction
    else:
        is_alone = _is_psycopg(driver) and driver.autocommit and not driver.info.transaction_status
    if is_alone:
        raise UsageError(
            reason="the session must be in a transaction, got a connection that commits each "
            "statement by itself; begin one, and make the writes of the job in it"
        )


def _is_psycopg(session: SqlSession) -> bool:
    psycopg: Any = sys.modules.get("psycopg")
    return psycopg is not None and isinstance(session, psycopg.Connection)


def execute(session: SqlSession, statement: str, parameters: Mapping[str, Any]) -> Any:
    """Execute a statement in any kind of session; return the cursor or result."""
    if isinstance(session, sqlite3.Connection):
        return session.execute(statement, dict(parameters))
    if _is_psycopg(session):
        return session.execute(_PARAMETER.sub(r"%(\1)s", statement), dict(parameters))
    from sqlalchemy import text

    dialect = _dialect(session)
    if dialect not in DIALECTS:
        raise UnsupportedError(
            broker=f"a database of the kind {dialect}",
            what="make conditional writes with qdo",
            remedy=f"use one of {', '.join(DIALECTS)}, or compare fence and position in SQL of "
            "the app",
        )
    return session.execute(text(statement), dict(parameters))


def _is_sqlite(session: SqlSession) -> bool:
    if isinstance(session, sqlite3.Connection):
        return True
    return not _is_psycopg(session) and _dialect(session) == "sqlite"


def _dialect(session: SqlSession) -> str:
    from sqlalchemy import Connection
    from sqlalchemy.orm import Session

    if isinstance(session, Connection):
        return session.dialect.name
    if isinstance(session, Session):
        return session.get_bind().dialect.name
    raise UsageError(
        reason="the session must be a Session or Connection of SQLAlchemy, or a connection of "
        f"psycopg 3 or sqlite3, got {type(session).__name__}; for an AsyncSession use the session "
        "from run_sync"
    )
