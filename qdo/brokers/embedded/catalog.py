"""The queues of one app in the embedded broker's file."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Mapping

from qdo.brokers.catalog import NO_BACKLOG, Backlog, QueueCatalog
from qdo.brokers.embedded.fork_guard import unforked
from qdo.brokers.embedded.query import INTEGER, MAYBE_INTEGER, TEXT, Query
from qdo.system.sqlite import translated

MAX_QUEUES = 1000
"""In one query: forks wait for its end."""

_NAMES = Query("SELECT name FROM queues WHERE app = ? ORDER BY name", TEXT)
_BACKLOGS = Query(
    """
SELECT queues.name, queues.head, queues.sent, queues.delayed, first.position, first.number
FROM json_each(:after) AS asked
CROSS JOIN queues ON queues.app = :app AND queues.name = asked.key
LEFT JOIN messages AS first ON first.queue = queues.id AND first.position = (
    SELECT position FROM messages
    WHERE queue = queues.id AND position > asked.value ORDER BY position LIMIT 1)
""",
    TEXT,
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
        return self.backlogs({queue: after})[queue]

    def backlogs(self, after: Mapping[str, int]) -> dict[str, Backlog]:
        found = dict.fromkeys(after, NO_BACKLOG)
        asked = list(after.items())
        for start in range(0, len(asked), MAX_QUEUES):
            part = json.dumps(dict(asked[start : start + MAX_QUEUES]))
            with unforked, translated(self._path):
                rows = _BACKLOGS.all(self._reading, {"app": self._app, "after": part})
            for queue, head, sent, delayed, oldest, number in rows:
                count = 0 if oldest is None else sent - number + 1
                found[queue] = Backlog(count=count, oldest=oldest, head=head, delayed=delayed)
        return found
