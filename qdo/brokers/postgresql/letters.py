"""Dead letters and delayed messages in tables of the PostgreSQL schema."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import asdict
from typing import Any

from qdo.brokers.base import DelayedMessage, DelayedMessages
from qdo.brokers.dead_letters import DeadLetterRecord, SqlDeadLetters
from qdo.brokers.postgresql.reader import PostgresqlTables
from qdo.brokers.request_checks import storable_text
from qdo.encoding import ID, LEFT_ON_SERVER, parsed
from qdo.positions import message_id
from qdo.postgresql.session import PostgresqlConnection
from qdo.queues import check_queue_name

_BURY = """
SELECT {{schema}}.bury(%(app)s, %(queue)s, %(position)s, {message}, %(error)s, %(traceback)s,
    %(attempts)s, %(worker)s, %(fence)s, %(dead_at)s)
"""
_STORE = _BURY.format(message="%(body)b, %(key)s, %(headers)s")
_OF_APP = "FROM {schema}.dead_letters JOIN {schema}.queues ON queues.id = queue WHERE app = %(app)s"
_ALL = f"""
SELECT name, position, body, key, headers, error, traceback, attempts, worker, fence, dead_at
{_OF_APP} AND (%(queue)s::text IS NULL OR name = %(queue)s)
  AND (%(position)s::bigint IS NULL OR position = %(position)s) ORDER BY dead_at, position
"""
_ENTRIES = f"""
SELECT name, position, key, headers, error, attempts, worker, fence, dead_at, octet_length(body)
{_OF_APP} AND (%(queue)s::text IS NULL OR name = %(queue)s)
  AND (%(since)s::float8 IS NULL OR dead_at >= %(since)s)
  AND (%(until)s::float8 IS NULL OR dead_at <= %(until)s) ORDER BY dead_at, position
"""
_COUNTS = f"SELECT name, count(*) {_OF_APP} GROUP BY name"
_TAKE = f"""
SELECT body, key, headers {_OF_APP} AND name = %(queue)s AND position = %(position)s
FOR UPDATE OF dead_letters
"""
_MINE = "queue = (SELECT id FROM {schema}.queues WHERE app = %(app)s AND name = %(queue)s)"
_STORE_LEFT = f"""
{_BURY.format(message="body, key, headers")}
FROM {{schema}}.messages WHERE {_MINE} AND position = %(position)s
"""
_REMOVE = f"DELETE FROM {{schema}}.dead_letters WHERE {_MINE} AND position = %(position)s"  # noqa: S608 - constants
_SURPLUS = f"""
DELETE FROM {{schema}}.dead_letters WHERE {_MINE} AND position <= (
    SELECT position FROM {{schema}}.dead_letters WHERE {_MINE}
    ORDER BY position DESC LIMIT 1 OFFSET %(keep)s)
"""  # noqa: S608 - constants
_EXPIRED = f"DELETE FROM {{schema}}.dead_letters WHERE {_MINE} AND dead_at < %(before)s"  # noqa: S608 - constants
_RESEND = (
    "SELECT {schema}.append(%(app)s, ARRAY[%(queue)s], ARRAY[%(key)s::text],"
    " ARRAY[%(headers)s::text], ARRAY[%(body)b::bytea], NULL)"
)
_FREE = "SELECT {schema}.free_key(%s, %s, %s, %s, %s)"
_OF_QUEUE = """
FROM {schema}.delayed WHERE queue = (
    SELECT id FROM {schema}.queues WHERE app = %(app)s AND name = %(queue)s)
"""
_FIND = f"""
SELECT number, due, key, headers, body {_OF_QUEUE}
  AND (%(patterns)s::text[] IS NULL OR headers LIKE ANY (%(patterns)s))
ORDER BY due, number LIMIT %(limit)s
"""
_NUMBERS = f"SELECT number {_OF_QUEUE}"
_REMOVE_DELAYED = f"DELETE {_OF_QUEUE} AND number = ANY (%(numbers)s) RETURNING number"


class PostgresqlDeadLetters(SqlDeadLetters):
    """The dead letters of one app."""

    queries = _ALL, _ENTRIES, _COUNTS

    def __init__(self, tables: PostgresqlTables) -> None:
        super().__init__(tables.read)
        self._tables = tables
        self._sql = tables.sql

    def store(self, record: DeadLetterRecord) -> None:
        check_queue_name(record.queue)
        values = {
            **asdict(record),
            "app": self._tables.app,
            "error": storable_text(record.error),
            "traceback": storable_text(record.traceback),
            "dead_at": record.dead_at or time.time(),
        }
        statement = self._sql(_STORE_LEFT if record.headers == LEFT_ON_SERVER else _STORE)
        self._tables.writer.run(
            lambda connection: connection.execute(statement, values),
            len(record.body),
            frozenset({record.queue}),
        )

    def prune(self, queue: str, *, keep: int | None = None, before: float | None = None) -> int:
        total = 0
        if keep is not None:
            total += self._delete(_SURPLUS, queue=queue, keep=keep)
        if before is not None:
            total += self._delete(_EXPIRED, queue=queue, before=before)
        return total

    def retry(self, keys: Sequence[tuple[str, int]]) -> list[int | None]:
        def work(connection: PostgresqlConnection) -> list[int | None]:
            with connection.transaction():
                return [self._retry(connection, *key) for key in keys]

        return self._tables.writer.run(work)

    def discard(self, keys: Sequence[tuple[str, int]]) -> list[bool]:
        def work(connection: PostgresqlConnection) -> list[bool]:
            with connection.transaction():
                return [self._remove(connection, *key) for key in keys]

        return self._tables.writer.run(work)

    def _remove(self, connection: PostgresqlConnection, queue: str, position: int) -> bool:
        key = {"app": self._tables.app, "queue": queue, "position": position}
        return connection.execute(self._sql(_REMOVE), key).rowcount > 0

    def _retry(self, connection: PostgresqlConnection, queue: str, position: int) -> int | None:
        key: dict[str, Any] = {"app": self._tables.app, "queue": queue, "position": position}
        found = connection.execute(self._sql(_TAKE), key).fetchone()
        if found is None:
            return None
        body, message_key, headers = found
        letter = DeadLetterRecord(queue, position, body, message_key, headers, "", "", 0, "", 0)
        again = self.headers_again(letter, message_id(position, self._tables.node))
        message = {**key, "key": message_key, "headers": again, "body": body}
        (moved,) = connection.execute(self._sql(_RESEND), message).fetchone() or (None,)
        self._remove(connection, queue, position)
        return moved

    def _delete(self, query: str, **wanted: Any) -> int:
        statement = self._sql(query)
        parameters = {"app": self._tables.app, **wanted}
        return self._tables.writer.run(
            lambda connection: connection.execute(statement, parameters).rowcount
        )


class PostgresqlDelayedMessages(DelayedMessages):
    """The delayed messages of one app."""

    def __init__(self, tables: PostgresqlTables) -> None:
        self._tables = tables

    def find(
        self, queue: str, limit: int, ids: Collection[str] | None = None
    ) -> list[DelayedMessage]:
        patterns = None if ids is None else [f"%{_escaped(each)}%" for each in ids]
        rows = self._tables.read(_FIND, queue=queue, patterns=patterns, limit=limit)
        found = [
            DelayedMessage(number, _id_in(headers), due, key, headers, body)
            for number, due, key, headers, body in rows
        ]
        return [each for each in found if ids is None or each.id in ids]

    def numbers(self, queue: str) -> list[int]:
        return [number for (number,) in self._tables.read(_NUMBERS, queue=queue)]

    def discard(self, queue: str, numbers: Collection[int]) -> set[int]:
        parameters = {"app": self._tables.app, "queue": queue, "numbers": list(numbers)}
        remove = self._tables.sql(_REMOVE_DELAYED)

        def work(connection: PostgresqlConnection) -> set[int]:
            return {number for (number,) in connection.execute(remove, parameters)}

        return self._tables.writer.run(work)

    def free(self, queue: str, key: str | None, unique: str, id: str) -> None:
        parameters = (self._tables.app, queue, key, unique, id)
        statement = self._tables.sql(_FREE)
        self._tables.writer.run(
            lambda connection: connection.execute(statement, parameters), queues=frozenset({queue})
        )


def _id_in(headers: str | None) -> str:
    """Return the id of a delayed message, which its sender stored in a header."""
    return str((parsed(headers) or {}).get(ID, ""))


def _escaped(text: str) -> str:
    """Return a text that LIKE matches literally."""
    return text.replace("\\", "\\\\").replace("%", "\\%").replace("_", "\\_")
