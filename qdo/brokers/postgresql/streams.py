"""Streams in the PostgreSQL schema; functions of `functions.sql` change the streams."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from qdo.brokers.postgresql.reader import PostgresqlTables
from qdo.brokers.streams import StreamShard, StreamStore

_ALL = """
SELECT stream, queue, low, high, parents, end_position, hidden FROM {schema}.streams
WHERE app = %(app)s
"""
_SHARDS = f"{_ALL} AND (%(stream)s::text IS NULL OR stream = %(stream)s) ORDER BY number"
_RESHARDED = f"""
{_ALL} AND stream IN (SELECT stream FROM {{schema}}.streams WHERE app = %(app)s AND hidden)
ORDER BY number
"""  # noqa: S608 - constants


def _shard(row: tuple[Any, ...]) -> StreamShard:
    stream, queue, low, high, parents, end, hidden = row
    return StreamShard(stream, queue, low, high, tuple(parents), end, hidden)


class PostgresqlStreams(StreamStore):
    """The streams of one app. Safe to use from several threads."""

    def __init__(self, tables: PostgresqlTables) -> None:
        super().__init__()
        self._tables = tables

    def shards(self, stream: str | None = None) -> list[StreamShard]:
        return list(map(_shard, self._tables.read(_SHARDS, stream=stream)))

    def resharded(self) -> list[StreamShard]:
        return list(map(_shard, self._tables.read(_RESHARDED)))

    def add(self, shards: Sequence[StreamShard]) -> None:
        stream = shards[0].stream
        parents = list(shards[0].parents)
        if parents:  # the server computes the same names and ranges
            bound = shards[0].high if len(shards) > 1 else None
            self._run("add_shards", stream, None, parents, bound, queues=parents)
        else:
            self._run("create_stream", stream, len(shards))

    def open(self, queues: Collection[str]) -> None:
        self._run("open_shards", list(queues))

    def _run(self, function: str, *values: Any, queues: Collection[str] = ()) -> None:
        """Call a function of the schema that changes data and locks `queues`."""
        parameters = (self._tables.app, *values)
        places = ", ".join(["%s"] * len(parameters))
        statement = self._tables.sql(f"SELECT {{schema}}.{function}({places})")
        self._tables.writer.run(
            lambda connection: connection.execute(statement, parameters), 0, frozenset(queues)
        )
