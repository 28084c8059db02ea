"""Reading a queue of the embedded broker."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence

from qdo.brokers.embedded.fork_guard import unforked
from qdo.brokers.embedded.query import BLOB, INTEGER, MAYBE_TEXT, Query
from qdo.system.sqlite import ReplacedFileCheck, translate

FETCH_BYTES = 32 * 1024 * 1024
"""Largest size of all bodies in one fetch. The first body may be larger."""

_FIND = Query("SELECT id FROM queues WHERE app = ? AND name = ?", INTEGER)
_LARGEST = Query("SELECT largest FROM queues WHERE id = ?", INTEGER)
_FETCH = Query(
    "SELECT position, body, key, headers FROM messages"
    " WHERE queue = ? AND position > ? ORDER BY position LIMIT ?",
    INTEGER,
    BLOB,
    MAYBE_TEXT,
    MAYBE_TEXT,
)
_SIZES = Query(
    "SELECT length(body) FROM messages WHERE queue = ? AND position > ? ORDER BY position LIMIT ?",
    INTEGER,
)

Rows = Sequence[tuple[int, bytes, "str | None", "str | None"]]


class EmbeddedReader:
    """Reads one queue after a position."""

    __slots__ = ("_after", "_app", "_connection", "_id", "_name", "_path", "_watch")

    def __init__(
        self,
        connection: sqlite3.Connection,
        path: str,
        watch: ReplacedFileCheck,
        app: str,
        name: str,
        after: int,
    ) -> None:
        self._connection = connection
        self._path = path
        self._watch = watch
        self._app = app
        self._name = name
        self._after = after
        self._id: int | None = None

    def fetch(self, limit: int) -> Rows:
        """Return the next rows as SQLite made them, at most `limit`.

        Returns fewer if large bodies would use too much memory.
        """
        try:
            with unforked:
                rows: Rows = self._fetch(limit)
        except sqlite3.Error as error:
            raise translate(self._path, error) from error
        if rows:
            self._after = rows[-1][0]
        else:
            self._watch.check()  # a deleted file would look like an empty queue forever
        return rows

    def close(self) -> None:
        """Do nothing: a reader holds nothing between fetches."""

    def _fetch(self, limit: int) -> Rows:
        connection = self._connection
        if self._id is None:
            found = _FIND.first(connection, (self._app, self._name))
            if found is None:
                return []
            (self._id,) = found
        found = _LARGEST.first(connection, (self._id,))
        if found is None:
            self._id = None  # the queue was deleted
            return []
        if found[0] * limit > FETCH_BYTES:
            limit = self._fitting(limit)
        rows = connection.execute(_FETCH.sql, (self._id, self._after, limit)).fetchall()
        # Half the time of `_FETCH.all`, which is 5 % of a message without work.
        for position, body, key, headers in rows:
            if (
                type(position) is not int
                or type(body) is not bytes
                or (key is not None and type(key) is not str)
                or (headers is not None and type(headers) is not str)
            ):
                return _FETCH.checked(rows)
        return rows

    def _fitting(self, limit: int) -> int:
        """Return how many of the next `limit` rows fit; SQLite knows sizes without reading."""
        size = 0
        count = 0
        for (length,) in _SIZES.each(self._connection, (self._id, self._after, limit)):
            size += length
            if size > FETCH_BYTES and count:
                break
            count += 1
        return max(count, 1)
