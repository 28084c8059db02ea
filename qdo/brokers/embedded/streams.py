"""Streams in the embedded broker's file."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from qdo.brokers.embedded.schema import Query, Row
from qdo.brokers.embedded.writer import EmbeddedTables, Transaction
from qdo.brokers.streams import StreamShard, StreamStore, sealed_error, taken_error

_ALL = (
    "SELECT stream, queue, low, high, parents, end_position, hidden FROM streams WHERE app = :app"
)
_SHARDS = Query(f"{_ALL} AND (:stream IS NULL OR stream = :stream) ORDER BY number", "tttttIi")
_RESHARDED = Query(
    f"{_ALL} AND stream IN (SELECT stream FROM streams WHERE app = :app AND hidden)"  # noqa: S608
    " ORDER BY number",
    "tttttIi",
)
_STORE = """
INSERT INTO streams (app, stream, queue, low, high, parents, hidden) VALUES (?, ?, ?, ?, ?, ?, ?)
"""
_END = "UPDATE streams SET end_position = ? WHERE app = ? AND queue = ? AND end_position IS NULL"
_OPEN = "UPDATE streams SET hidden = 0 WHERE app = ? AND queue = ?"


def _shard(row: Row) -> StreamShard:
    stream, queue, low, high, parents, end, hidden = row
    names = tuple(filter(None, parents.split("/")))
    return StreamShard(stream, queue, low, high, names, end, bool(hidden))


class EmbeddedStreams(StreamStore):
    """The streams of one app. Safe to use from several threads."""

    def __init__(self, tables: EmbeddedTables) -> None:
        super().__init__()
        self._tables = tables

    def shards(self, stream: str | None = None) -> list[StreamShard]:
        return list(map(_shard, self._tables.read(_SHARDS, stream=stream)))

    def resharded(self) -> list[StreamShard]:
        return list(map(_shard, self._tables.read(_RESHARDED)))

    def add(self, shards: Sequence[StreamShard]) -> None:
        self._tables.change(lambda transaction: _add(transaction, shards))

    def open(self, queues: Collection[str]) -> None:
        rows = [(self._tables.app, queue) for queue in queues]
        self._tables.change(lambda transaction: transaction.connection.executemany(_OPEN, rows))


def _add(transaction: Transaction, shards: Sequence[StreamShard]) -> None:
    app = transaction.app
    execute = transaction.connection.execute
    parents = shards[0].parents
    of_stream = {"app": app, "stream": shards[0].stream}
    if not parents and _SHARDS.first(transaction.connection, of_stream) is not None:
        return
    root = None
    for parent in parents:
        tail = transaction.tail(parent)
        root = tail.root
        if root is None or not execute(_END, (tail.head, app, parent)).rowcount:
            raise sealed_error(parent)
    for each in shards:
        if transaction.exists(each.queue):
            raise taken_error(each.queue)
        root = transaction.make_shard(each.queue, root)
        about = each.stream, each.queue, each.low, each.high, "/".join(parents), each.hidden
        execute(_STORE, (app, *about))
