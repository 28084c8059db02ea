"""Read a queue of the embedded broker, and wake a worker when its queues receive messages."""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Callable, Iterable, Sequence

from qdo.brokers.embedded.schema import Query
from qdo.brokers.embedded.writer import EmbeddedTables
from qdo.errors import DatabaseError
from qdo.system.files import Rights
from qdo.system.fork_guard import unforked
from qdo.system.logs import RetryLog
from qdo.system.sqlite import translate
from qdo.system.wakeup_pipes import PipeThread

# The maximum size of all bodies in one fetch. The first body may be larger.
FETCH_BYTES = 32 * 1024 * 1024

_FIND = Query("SELECT id FROM queues WHERE app = ? AND name = ?", "i")
_LARGEST = Query("SELECT largest FROM queues WHERE id = ?", "i")
_FETCH = Query(
    "SELECT position, body, key, headers FROM messages"
    " WHERE queue = ? AND position > ? ORDER BY position LIMIT ?",
    "ibTT",
)
_SIZES = Query(
    "SELECT length(body) FROM messages WHERE queue = ? AND position > ? ORDER BY position LIMIT ?",
    "i",
)

Rows = Sequence[tuple[int, bytes, "str | None", "str | None"]]
log = logging.getLogger(__name__)
# The maximum time between looks, because a sender may die between its commit and the wakeup.
LOOK_SECONDS = 5.0
CHANGED = Query("SELECT head, app, name FROM queues WHERE head > :seen ORDER BY head", "itt")
_NEWEST = Query("SELECT max(head) FROM queues", "I")


class EmbeddedReader:
    __slots__ = ("_after", "_app", "_connection", "_id", "_name", "_path", "_watch")

    def __init__(self, tables: EmbeddedTables, name: str, after: int) -> None:
        self._connection = tables.reading
        self._path = tables.path
        self._watch = tables.watch
        self._app = tables.app
        self._name = name
        self._after = after
        self._id: int | None = None

    def fetch(self, limit: int) -> Rows:
        """Return the next rows in SQLite's form; fewer if their bodies need too much memory."""
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
        # This check takes half the time of `_FETCH.all`, and saves 5 % of the time of an empty job.
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
        """Return how many of the next `limit` rows fit, without reading the bodies."""
        size = 0
        count = 0
        for (length,) in _SIZES.each(self._connection, (self._id, self._after, limit)):
            size += length
            if size > FETCH_BYTES and count:
                break
            count += 1
        return max(count, 1)


class CommitListener:
    """Waits for wakeups and due messages on a thread (a greenlet under gevent).

    :param wake: a function that the listener calls with the names of queues with new messages.
    :param move: a function that moves due messages into their queues. It returns the seconds until
        the next message is due, or None if there are no delayed messages.
    """

    def __init__(
        self,
        tables: EmbeddedTables,
        wakeups: str,
        wake: Callable[[Iterable[str]], None],
        move: Callable[[], float | None],
    ) -> None:
        self._tables = tables
        self._wake = wake
        self._move = move
        self._retries = RetryLog(log, f"file {tables.path}")
        # Open the pipe before the first look, or the listener could miss a message after the look.
        self._pipe = PipeThread(wakeups, Rights.of(tables.path), self._step_or_warn)
        try:
            ((newest,),) = tables.read(_NEWEST)
        except DatabaseError:
            self._pipe.stop()
            raise
        self._seen: int = newest or 0
        self._pipe.start()

    def stop(self) -> None:
        """Stop listening; the listener does not call `wake` afterwards. Idempotent."""
        self._pipe.stop()

    def step(self) -> float:
        """Move due messages and wake changed queues; return the seconds to wait."""
        left = self._move()
        names = self._changed()
        if names and not self._pipe.stopping:
            self._wake(names)
        return LOOK_SECONDS if left is None else min(left, LOOK_SECONDS)

    def _step_or_warn(self) -> float:
        try:
            pause = self.step()
        except DatabaseError as error:
            self._retries.failed(error, LOOK_SECONDS)
            return LOOK_SECONDS
        self._retries.succeeded()
        return pause

    def _changed(self) -> list[str]:
        names: list[str] = []
        for head, app, name in self._tables.read(CHANGED, seen=self._seen):
            self._seen = head
            if app == self._tables.app:
                names.append(name)
        return names
