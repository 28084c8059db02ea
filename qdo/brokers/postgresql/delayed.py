"""The delayed messages of a PostgreSQL schema, for operators."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from qdo.brokers.base import DelayedMessage, DelayedMessages
from qdo.brokers.postgresql.reader import Fetches
from qdo.brokers.postgresql.session import PostgresqlConnection
from qdo.brokers.postgresql.writer import PostgresqlWriter
from qdo.encoding import ID, parsed

_OF_QUEUE = """
FROM {schema}.delayed WHERE queue = (
    SELECT id FROM {schema}.queues WHERE app = %(app)s AND name = %(queue)s)
"""
_FIND = f"""
SELECT number, due, key, headers, body {_OF_QUEUE}
  AND (%(patterns)s::text[] IS NULL OR headers LIKE ANY (%(patterns)s))
ORDER BY due, number LIMIT %(limit)s
"""  # nosec B608 # constants
_NUMBERS = f"SELECT number {_OF_QUEUE}"  # nosec B608 # constants
_LOCK = "SELECT pg_advisory_xact_lock(7108, hashtext(%s))"
"""The lock of `move_due`: it reads the messages that are due before it deletes them."""
_REMOVE = f"DELETE {_OF_QUEUE} AND number = ANY (%(numbers)s) RETURNING number"  # nosec B608 # constants


class PostgresqlDelayedMessages(DelayedMessages):
    """The delayed messages of one app. Safe to use from several threads."""

    def __init__(self, fetches: Fetches, writer: PostgresqlWriter, schema: str, app: str) -> None:
        self._fetches = fetches
        self._writer = writer
        self._schema = schema
        self._app = app

    def find(
        self, queue: str, limit: int, ids: Collection[str] | None = None
    ) -> list[DelayedMessage]:
        patterns = None if ids is None else [f"%{_escaped(each)}%" for each in ids]
        rows = self._read(_FIND, queue=queue, patterns=patterns, limit=limit)
        found = [
            DelayedMessage(number, _id_in(headers), due, key, headers, body)
            for number, due, key, headers, body in rows
        ]
        return [each for each in found if ids is None or each.id in ids]

    def numbers(self, queue: str) -> list[int]:
        return [number for (number,) in self._read(_NUMBERS, queue=queue)]

    def discard(self, queue: str, numbers: Collection[int]) -> set[int]:
        parameters = {"app": self._app, "queue": queue, "numbers": list(numbers)}
        remove = _REMOVE.format(schema=self._schema)

        def work(connection: PostgresqlConnection) -> set[int]:
            with connection.transaction():
                connection.execute(_LOCK, (self._app,))
                # A statement of its own: it sees what was moved while this waited.
                return {number for (number,) in connection.execute(remove, parameters)}

        return self._writer.run(work)

    def _read(self, query: str, **wanted: Any) -> list[Any]:
        statement = query.format(schema=self._schema)
        parameters = {"app": self._app, **wanted}
        return self._fetches.run(
            lambda connection: connection.execute(statement, parameters).fetchall()
        )


def _id_in(headers: str | None) -> str:
    """Return the id that the sender of a delayed message has stored in a header."""
    return str((parsed(headers) or {}).get(ID, ""))


def _escaped(text: str) -> str:
    """Return a text that LIKE takes literally."""
    return text.replace("\\", "\\\\").replace("%", "\\%").replace("_", "\\_")
