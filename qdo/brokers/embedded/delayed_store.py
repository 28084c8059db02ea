"""The delayed messages of the embedded broker, for operators."""

from __future__ import annotations

import itertools
import sqlite3
from collections.abc import Collection

from qdo.brokers.base import DelayedMessage, DelayedMessages
from qdo.brokers.embedded.fork_guard import unforked
from qdo.brokers.embedded.schema import BLOB, INTEGER, MAYBE_TEXT, TEXT, Query
from qdo.brokers.embedded.writer import Transaction, Writer
from qdo.system.sqlite import translated

_KINDS = (INTEGER, TEXT, INTEGER, MAYBE_TEXT, MAYBE_TEXT, BLOB)
_OF_QUEUE = """
FROM delayed WHERE app = :app
AND queue = (SELECT id FROM queues WHERE app = :app AND name = :queue AND delayed > 0)
"""
_FIND = Query(
    f"SELECT number, id, due, key, headers, body {_OF_QUEUE} ORDER BY due, number LIMIT :limit",  # nosec B608 # constants
    *_KINDS,
)
_FIND_ID = Query(
    f"SELECT number, id, due, key, headers, body {_OF_QUEUE} AND id = :id",  # nosec B608 # constants
    *_KINDS,
)
_NUMBERS = Query(f"SELECT number {_OF_QUEUE}", INTEGER)  # nosec B608 # constants
_REMOVE = f"DELETE {_OF_QUEUE} AND number = :number"  # nosec B608 # constants
_COUNT = "UPDATE queues SET delayed = delayed - ? WHERE app = ? AND name = ?"


class EmbeddedDelayedMessages(DelayedMessages):
    """The delayed messages of one app. Safe to use from several threads."""

    def __init__(self, reading: sqlite3.Connection, path: str, app: str, writer: Writer) -> None:
        self._reading = reading
        self._path = path
        self._app = app
        self._writer = writer

    def find(
        self, queue: str, limit: int, ids: Collection[str] | None = None
    ) -> list[DelayedMessage]:
        of = {"app": self._app, "queue": queue}
        with unforked, translated(self._path):
            if ids is None:
                rows = _FIND.all(self._reading, {**of, "limit": limit})
            else:
                found = (_FIND_ID.all(self._reading, {**of, "id": each}) for each in ids)
                rows = list(itertools.chain.from_iterable(found))[:limit]
        return list(itertools.starmap(DelayedMessage, rows))

    def numbers(self, queue: str) -> list[int]:
        with unforked, translated(self._path):
            found = _NUMBERS.all(self._reading, {"app": self._app, "queue": queue})
        return [number for (number,) in found]

    def discard(self, queue: str, numbers: Collection[int]) -> set[int]:
        return self._writer.run(lambda transaction: self._discard(transaction, queue, numbers))

    def _discard(self, transaction: Transaction, queue: str, numbers: Collection[int]) -> set[int]:
        execute = transaction.connection.execute
        of = {"app": self._app, "queue": queue}
        gone = {each for each in numbers if execute(_REMOVE, {**of, "number": each}).rowcount}
        execute(_COUNT, (len(gone), self._app, queue))
        return gone
