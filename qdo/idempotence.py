"""Writes that count once: what was done before, or comes too late, changes nothing.

A message may run again after a crash, and a frozen worker may write after its queue has a new
owner (see the page "Idempotence" of the documentation). Both can be told apart from a first run
only where the write lands, and only if the proof stands in the same transaction as the write.
There are two kinds of proof:

- `FencedWrites`: a row for each queue with fence and position of its last write. It does not
  grow, and also refuses former owners. It relies on the order of the queue, and on positions
  that last: not with SQS.
- `DoneMessages`: a row for each message id. It needs no order and knows a message again that got
  a new position, as a dead letter does that is sent again. It grows, and is tidied by age.

They work in a transaction of the app: in a SQLAlchemy session or connection, or in one of the
standard library's sqlite3. The SQL is what SQLite and PostgreSQL have in common. SQLAlchemy is
imported only where a session comes from it (``pip install 'qdo[sql]'``).
"""

from __future__ import annotations

import enum
import re
import sqlite3
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from qdo.errors import UnsupportedError, UsageError
from qdo.message import Message

SqlSession: TypeAlias = Any
"""A SQLAlchemy `Session` or `Connection`, or a `sqlite3.Connection`, in a transaction."""

DIALECTS = ("sqlite", "postgresql")
MAX_NAME = 200
"""Characters of a queue, a part or an id."""
POSITION_DIGITS = 100
"""Width of a stored position: text with zeros before it, for those of Kinesis are wider than any
integer of a database, and texts of one length compare as their numbers do."""

Parameters: TypeAlias = Mapping[str, Any]


class Write(enum.Enum):
    """What became of a write; true only where it may be made.

    NEW: nothing of this or a later message was written: write.
    REPEATED: this message was written before: change nothing, the message is done.
    STALE: the queue was claimed by another worker, which has written since: change nothing. The
    message runs, or ran, at the new owner.
    """

    NEW = "new"
    REPEATED = "repeated"
    STALE = "stale"

    def __bool__(self) -> bool:
        return self is Write.NEW


class FencedWrites:
    """Decides about writes by `message.fence` and `message.position`.

    :param table: name of the table, of letters, digits and underscores.
    :raises UsageError: it cannot be the name of a table.
    """

    def __init__(self, table: str = "qdo_writes") -> None:
        self.table = _table(table)
        self.schema = f"""
            CREATE TABLE IF NOT EXISTS {table} (
                queue VARCHAR({MAX_NAME}) NOT NULL,
                part VARCHAR({MAX_NAME}) NOT NULL,
                fence BIGINT NOT NULL,
                position VARCHAR({POSITION_DIGITS}) NOT NULL,
                PRIMARY KEY (queue, part)
            )
        """
        """The statement that makes the table, for tools that make all tables of an app."""
        self._advance = f"""
            INSERT INTO {table} (queue, part, fence, position)
            VALUES (:queue, :part, :fence, :position)
            ON CONFLICT (queue, part) DO UPDATE
            SET fence = excluded.fence, position = excluded.position
            WHERE excluded.fence >= {table}.fence AND excluded.position > {table}.position
        """
        # Even a repetition shows that the queue has a new owner: from here on its former one,
        # which may have got further than what was recorded, is refused.
        self._take_over = f"""
            UPDATE {table} SET fence = :fence
            WHERE queue = :queue AND part = :part AND fence < :fence
        """
        self._reset = f"UPDATE {table} SET fence = 0"
        self._stale = f"""
            SELECT 1 FROM {table} WHERE queue = :queue AND part = :part AND fence > :fence
        """

    def create(self, session: SqlSession) -> None:
        """Make the table unless it exists; call it once, where the app makes its own."""
        _execute(session, self.schema, {})

    def admit(self, session: SqlSession, message: Message, part: str = "") -> Write:
        """Say whether the message may be written, and take note that it is.

        Call it first in the transaction that holds the write: both are committed together, or
        neither. The row stays locked to its end, so that two owners decide one after the other.

        :param part: what is counted apart from the rest of the queue, such as the message's key
            where keys run in parallel, or the name of one of several sinks.
        :raises UsageError: `part` has more than 200 characters.
        :raises UnsupportedError: the database is neither SQLite nor PostgreSQL, or the message
            has another position each time it is delivered, as with SQS.
        """
        if not message.lasting:
            raise UnsupportedError(
                broker="a broker such as SQS, where positions do not last,",
                what="tell repeated messages from new ones by their position",
                remedy="use qdo.idempotence.DoneMessages, which goes by message.id",
            )
        if len(part) > MAX_NAME:
            raise UsageError(reason=f"part={part!r:.60}... has more than {MAX_NAME} characters")
        row = {
            "queue": message.queue,
            "part": part,
            "fence": message.fence,
            "position": f"{message.position:0{POSITION_DIGITS}d}",
        }
        if _execute(session, self._advance, row).rowcount:
            return Write.NEW
        if _execute(session, self._take_over, row).rowcount:
            return Write.REPEATED
        stale = _execute(session, self._stale, row).fetchone() is not None
        return Write.STALE if stale else Write.REPEATED

    def reset_fences(self, session: SqlSession) -> int:
        """Forget every fence but no position; return how many rows there are.

        For an app that moves to another coordinator, whose fences may be smaller: while no
        worker runs.
        """
        return int(_execute(session, self._reset, {}).rowcount)


class DoneMessages:
    """Knows messages again by `message.id`.

    :param table: name of the table, of letters, digits and underscores.
    :param clock: Unix time in seconds.
    :raises UsageError: it cannot be the name of a table.
    """

    def __init__(
        self, table: str = "qdo_done_messages", *, clock: Callable[[], float] = time.time
    ) -> None:
        self.table = _table(table)
        self._clock = clock
        self.schema = f"""
            CREATE TABLE IF NOT EXISTS {table} (
                queue VARCHAR({MAX_NAME}) NOT NULL,
                id VARCHAR({MAX_NAME}) NOT NULL,
                done_at BIGINT NOT NULL,
                PRIMARY KEY (queue, id)
            )
        """
        """The statement that makes the table, for tools that make all tables of an app."""
        self._record = f"""
            INSERT INTO {table} (queue, id, done_at) VALUES (:queue, :id, :done_at)
            ON CONFLICT (queue, id) DO NOTHING
        """
        self._forget = f"DELETE FROM {table} WHERE done_at < :done_at"

    def create(self, session: SqlSession) -> None:
        """Make the table unless it exists; call it once, where the app makes its own."""
        _execute(session, self.schema, {})

    def record(self, session: SqlSession, message: Message) -> bool:
        """Record that the message is done; return False where it was before: change nothing then.

        Call it first in the transaction that holds the message's effects: both are committed
        together, or neither.

        :raises UnsupportedError: the database is neither SQLite nor PostgreSQL.
        """
        row = {"queue": message.queue, "id": message.id, "done_at": int(self._clock())}
        return bool(_execute(session, self._record, row).rowcount)

    def forget(self, session: SqlSession, older_than_seconds: float) -> int:
        """Delete what was recorded longer ago, and return how many rows that were.

        A message that is delivered again after that counts again: keep them for as long as the
        broker keeps messages (`retention_seconds`) and dead letters may be sent again.

        :raises UsageError: the age is negative.
        """
        if older_than_seconds < 0:
            raise UsageError(reason=f"older_than_seconds={older_than_seconds!r} is negative")
        limit = int(self._clock() - older_than_seconds)
        return int(_execute(session, self._forget, {"done_at": limit}).rowcount)


def _table(name: str) -> str:
    if re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]{0,62}", name) is None:
        raise UsageError(
            reason=f"{name!r} cannot be a table: use up to 63 letters, digits and underscores"
        )
    return name


def _execute(session: SqlSession, statement: str, parameters: Parameters) -> Any:
    """Execute a statement on any of the kinds of session; return its cursor or result."""
    if isinstance(session, sqlite3.Connection):
        return session.execute(statement, dict(parameters))
    from sqlalchemy import text

    dialect = _dialect(session)
    if dialect not in DIALECTS:
        raise UnsupportedError(
            broker=f"a database of the kind {dialect}",
            what="make conditional writes with qdo",
            remedy=f"use one of {', '.join(DIALECTS)}, or compare fence and position in the "
            "app's own SQL",
        )
    return session.execute(text(statement), dict(parameters))


def _dialect(session: SqlSession) -> str:
    from sqlalchemy import Connection
    from sqlalchemy.orm import Session

    if isinstance(session, Connection):
        return session.dialect.name
    if isinstance(session, Session):
        return session.get_bind().dialect.name
    raise UsageError(
        reason=f"{type(session).__name__} is no session of SQLAlchemy and no connection of "
        "SQLAlchemy or sqlite3; of an AsyncSession pass on what run_sync gives"
    )
