"""The queues of one app in a PostgreSQL schema."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from qdo.brokers.catalog import NO_BACKLOG, Backlog, QueueCatalog
from qdo.brokers.postgresql.reader import Fetches
from qdo.brokers.postgresql.session import PostgresqlConnection

COUNTED = 1_000_000
"""Waiting messages that are counted; a longer backlog is approximate. Counting takes 0.2 s for as
many."""
MAX_QUEUES = 1000
"""In one query. With 150 million messages it would take 30 s, and the server would seem gone."""

_NEW_NAMES = """
SELECT pg_snapshot_xmax(pg_current_snapshot())::text::bigint,
    ARRAY(SELECT pg_snapshot_xip(pg_current_snapshot())::text::bigint),
    ARRAY(SELECT name FROM {schema}.queues WHERE app = %s
        AND (xid >= %s OR xid = ANY (%s::bigint[])) ORDER BY name)
"""
_COUNT = "SELECT count(*) FROM {schema}.queues WHERE app = %s"
_BACKLOGS = """
SELECT queues.name,
    greatest(trimmed, (SELECT position FROM {schema}.messages WHERE queue = queues.id
        ORDER BY position DESC LIMIT 1)),
    (SELECT position FROM {schema}.messages WHERE queue = queues.id
        AND position > greatest(asked.after, trimmed) ORDER BY position LIMIT 1),
    (SELECT count(*) FROM (SELECT FROM {schema}.messages WHERE queue = queues.id
        AND position > greatest(asked.after, trimmed) LIMIT {most}) AS counted),
    (SELECT count(*) FROM {schema}.delayed WHERE queue = queues.id)
FROM unnest(%(names)b::text[], %(afters)b::bigint[]) AS asked(name, after)
JOIN {schema}.queues ON app = %(app)s AND queues.name = asked.name
"""


class PostgresqlCatalog(QueueCatalog):
    """Safe to use from several threads."""

    def __init__(self, fetches: Fetches, schema: str, app: str) -> None:
        self._fetches = fetches
        self._app = app
        self._new_names = _NEW_NAMES.format(schema=schema)
        self._count = _COUNT.format(schema=schema)
        self._backlogs = _BACKLOGS.format(schema=schema, most=COUNTED + 1)
        self._known: set[str] = set()
        self._sorted: list[str] = []
        self._next_xid = 0
        self._running: list[int] = []

    def names(self) -> list[str]:
        """Return the names of all queues. Only those that are new are read from the server."""
        return self._fetches.run(self._read_names)

    def _read_names(self, connection: PostgresqlConnection) -> list[str]:
        count = len(self._known) + self._add_new(connection)
        (total,) = connection.execute(self._count, (self._app,)).fetchone() or (0,)
        # A queue was deleted; or a crash of the server took back transaction ids, and a new queue
        # got one that was seen before.
        if total != count:
            self._known, self._sorted, self._next_xid, self._running = set(), [], 0, []
            self._add_new(connection)
        if len(self._sorted) != len(self._known):
            self._sorted = sorted(self._known)
        return self._sorted.copy()

    def _add_new(self, connection: PostgresqlConnection) -> int:
        """Add the queues of transactions that were not visible before; return their number."""
        before = len(self._known)
        found = connection.execute(
            self._new_names, (self._app, self._next_xid, self._running)
        ).fetchone()
        if found is not None:
            self._next_xid, self._running, names = found
            self._known.update(names)
        return len(self._known) - before

    def backlog(self, queue: str, after: int) -> Backlog:
        return self.backlogs({queue: after})[queue]

    def backlogs(self, after: Mapping[str, int]) -> dict[str, Backlog]:
        found = dict.fromkeys(after, NO_BACKLOG)
        names, afters = list(after), list(after.values())
        for start in range(0, len(names), MAX_QUEUES):
            part = slice(start, start + MAX_QUEUES)
            found.update(self._fetches.run(partial(self._read, names[part], afters[part])))
        return found

    def _read(
        self, names: list[str], afters: list[int], connection: PostgresqlConnection
    ) -> dict[str, Backlog]:
        parameters = {"app": self._app, "names": names, "afters": afters}
        return {
            queue: Backlog(
                count=min(count, COUNTED),
                oldest=oldest,
                head=head,
                delayed=delayed,
                approximate=count > COUNTED,
            )
            for queue, head, oldest, count, delayed in connection.execute(
                self._backlogs, parameters
            )
        }
