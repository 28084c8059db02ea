"""Streams in the PostgreSQL schema; its functions in `functions.sql` change them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from qdo.brokers.postgresql.reader import Fetches
from qdo.brokers.postgresql.writer import PostgresqlWriter
from qdo.brokers.streams import StreamShard, StreamStore

_ALL = """
SELECT stream, queue, low, high, parents, end_position, hidden FROM {schema}.streams
WHERE app = %s
"""
_SHARDS = f"{_ALL} AND (%s::text IS NULL OR stream = %s) ORDER BY number"
_RESHARDED = f"""
{_ALL} AND stream IN (SELECT stream FROM {{schema}}.streams WHERE app = %s AND hidden)
ORDER BY number
"""  # noqa: S608 - constants


class PostgresqlStreams(StreamStore):
    """The streams of one app. Safe to use from several threads."""

    def __init__(self, fetches: Fetches, writer: PostgresqlWriter, schema: str, app: str) -> None:
        super().__init__()
        self._fetches = fetches
        self._writer = writer
        self._schema = schema
        self._app = app

    def shards(self, stream: str | None = None) -> list[StreamShard]:
        return self._read(_SHARDS, self._app, stream, stream)

    def resharded(self) -> list[StreamShard]:
        return self._read(_RESHARDED, self._app, self._app)

    def _read(self, query: str, *wanted: str | None) -> list[StreamShard]:
        statement = query.format(schema=self._schema)
        rows = self._fetches.run(lambda each: each.execute(statement, wanted).fetchall())
        return [
            StreamShard(stream, queue, low, high, tuple(parents), end, hidden)
            for stream, queue, low, high, parents, end, hidden in rows
        ]

    def add(self, shards: Sequence[StreamShard]) -> None:
        stream = shards[0].stream
        parents = list(shards[0].parents)
        if parents:  # the server finds the same names and ranges by itself
            bound = shards[0].high if len(shards) > 1 else None
            self._run("add_shards", self._app, stream, None, parents, bound, queues=parents)
        else:
            self._run("create_stream", self._app, stream, len(shards))

    def open(self, queues: Collection[str]) -> None:
        self._run("open_shards", self._app, list(queues))

    def _run(self, function: str, *given: Any, queues: Collection[str] = ()) -> None:
        places = ", ".join(["%s"] * len(given))
        statement = f"SELECT {self._schema}.{function}({places})"
        self._writer.run(lambda each: each.execute(statement, given), 0, frozenset(queues))
