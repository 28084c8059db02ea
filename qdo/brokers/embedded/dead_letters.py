"""Dead letters in the embedded broker's file."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from qdo.brokers.base import Outgoing
from qdo.brokers.dead_letters import DeadLetterRecord, SqlDeadLetters, retried_headers
from qdo.brokers.embedded.schema import Query
from qdo.brokers.embedded.writer import EmbeddedTables, Transaction
from qdo.encoding import utf8_text
from qdo.positions import message_id, time_of_position
from qdo.queues import check_queue_name

_STORE = """
INSERT INTO dead_letters (queue, position, body, key, headers,
                          error, traceback, attempts, worker, fence, dead_at)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT (queue, position) DO NOTHING
"""
_ALL = Query(
    """
SELECT queues.name, position, body, key, headers,
       error, traceback, attempts, worker, fence, dead_at
FROM dead_letters JOIN queues ON queues.id = dead_letters.queue
WHERE queues.app = :app AND (:queue IS NULL OR queues.name = :queue)
  AND (:position IS NULL OR position = :position)
ORDER BY dead_at, position
""",
    "tibTTttitir",
)
_ENTRIES = Query(
    """
SELECT queues.name, position, key, headers,
       error, attempts, worker, fence, dead_at, length(body)
FROM dead_letters JOIN queues ON queues.id = dead_letters.queue
WHERE queues.app = :app AND (:queue IS NULL OR queues.name = :queue)
  AND (:since IS NULL OR dead_at >= :since) AND (:until IS NULL OR dead_at <= :until)
ORDER BY dead_at, position
""",
    "tiTTtitiri",
)
_COUNTS = Query(
    """
SELECT queues.name, count(*) FROM dead_letters JOIN queues ON queues.id = dead_letters.queue
WHERE queues.app = :app GROUP BY dead_letters.queue
""",
    "ti",
)
_TAKE = Query(
    """
SELECT dead_letters.queue, body, key, headers
FROM dead_letters JOIN queues ON queues.id = dead_letters.queue
WHERE queues.app = ? AND queues.name = ? AND position = ?
""",
    "ibTT",
)
_REMOVE = "DELETE FROM dead_letters WHERE queue = ? AND position = ?"
_DISCARD = """
DELETE FROM dead_letters
WHERE queue = (SELECT id FROM queues WHERE app = ? AND name = ?) AND position = ?
"""
_SURPLUS = Query(
    """
SELECT position FROM dead_letters
WHERE queue = :queue AND position <= (SELECT position FROM dead_letters WHERE queue = :queue
                                      ORDER BY position DESC LIMIT 1 OFFSET :keep)
LIMIT :chunk
""",
    "i",
)
# An index for searches by time. Without the index, SQLite would read each body to reach `dead_at`.
_EXPIRED = Query(
    """
SELECT position FROM dead_letters INDEXED BY dead_letters_by_time
WHERE dead_at < :before AND queue = :queue
LIMIT :chunk
""",
    "i",
)
_QUEUE_ID = Query("SELECT id FROM queues WHERE app = :app AND name = :name", "i")
# The number of dead letters that one transaction deletes; other writers wait for its end.
PRUNED_AT_ONCE = 1000


def store_letter(transaction: Transaction, record: DeadLetterRecord) -> None:
    values = (
        transaction.tail(record.queue).id,
        record.position,
        record.body,
        record.key,
        record.headers,
        utf8_text(record.error),
        utf8_text(record.traceback),
        record.attempts,
        record.worker,
        record.fence,
        record.dead_at or time_of_position(transaction.now()),
    )
    transaction.connection.execute(_STORE, values)


class EmbeddedDeadLetters(SqlDeadLetters):
    """The dead letters of one app. Safe to use from several threads."""

    queries = _ALL, _ENTRIES, _COUNTS

    def __init__(self, tables: EmbeddedTables) -> None:
        super().__init__(tables.read)
        self._tables = tables

    def store(self, record: DeadLetterRecord) -> None:
        check_queue_name(record.queue)
        self._tables.change(lambda transaction: store_letter(transaction, record), len(record.body))

    def prune(self, queue: str, *, keep: int | None = None, before: float | None = None) -> int:
        total = 0
        for (number,) in self._read(_QUEUE_ID, name=queue):
            if keep is not None:
                total += self._delete(queue, _SURPLUS, queue=number, keep=keep)
            if before is not None:
                total += self._delete(queue, _EXPIRED, queue=number, before=before)
        return total

    def _delete(self, name: str, query: Query, **values: Any) -> int:
        total = 0
        # Look without the write lock, because most calls find no letters to delete.
        while letters := self._read(query, chunk=PRUNED_AT_ONCE, **values):
            total += sum(self.discard([(name, position) for (position,) in letters]))
        return total

    def retry(self, keys: Sequence[tuple[str, int]]) -> list[int | None]:
        node = self._tables.node
        return self._tables.change(
            lambda transaction: [_retry(transaction, *key, node) for key in keys]
        )

    def discard(self, keys: Sequence[tuple[str, int]]) -> list[bool]:
        return self._tables.change(
            lambda transaction: [_discard(transaction, *key) for key in keys]
        )


def _retry(transaction: Transaction, queue: str, position: int, node: int) -> int | None:
    execute = transaction.connection.execute
    found = _TAKE.first(transaction.connection, (transaction.app, queue, position))
    if found is None:
        return None
    queue_id, body, key, headers = found
    message = Outgoing(queue, body, key, retried_headers(headers, message_id(position, node)))
    (moved,) = transaction.append((message,))
    execute(_REMOVE, (queue_id, position))
    return moved


def _discard(transaction: Transaction, queue: str, position: int) -> bool:
    parameters = (transaction.app, queue, position)
    return transaction.connection.execute(_DISCARD, parameters).rowcount > 0
