"""The queues of one app in the embedded broker's file."""

from __future__ import annotations

import sqlite3

from qdo.brokers.catalog import Backlog, QueueCatalog
from qdo.brokers.embedded.fork_guard import unforked
from qdo.brokers.embedded.query import INTEGER, MAYBE_INTEGER, TEXT, Query
from qdo.system.sqlite import translated

_NAMES = Query("SELECT name FROM queues WHERE app = ? ORDER BY name", TEXT)
_BACKLOG = Query(
    """
SELECT queues.head, queues.sent, queues.delayed, first.position, first.number FROM queues
LEFT JOIN messages AS first ON first.queue = queues.id AND first.position = (
    SELECT position FROM messages
    WHERE queue = queues.id AND position > :after ORDER BY position LIMIT 1)
WHERE queues.app = :app AND queues.name = :queue
""",
    INTEGER,
    INTEGER,
    INTEGER,
    MAYBE_INTEGER,
    MAYBE_INTEGER,
)


class EmbeddedCatalog(QueueCatalog):
    """Safe to use from several threads."""

    def __init__(self, reading: sqlite3.Connection, path: str, app: str) -> None:
        self._reading = reading
        self._path = path
        self._app = app

    def names(self) -> list[str]:
        with unforked, translated(self._path):
            return [name for (name,) in _NAMES.all(self._reading, (self._app,))]

    def backlog(self, queue: str, after: int) -> Backlog:
        with unforked, translated(self._path):
            found = _BACKLOG.first(
                self._reading, {"app": self._app, "queue": queue, "after": after}
            )
        if found is None:
            return Backlog(count=0, oldest=None, head=0)
        head, sent, delayed, oldest, number = found
        count = 0 if oldest is None else sent - number + 1
        return Backlog(count=count, oldest=oldest, head=head, delayed=delayed)
