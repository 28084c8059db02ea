"""Dead letters in the embedded broker's file."""

from __future__ import annotations

import itertools
import sqlite3
import time
from collections.abc import Sequence

from qdo.brokers.base import DeadLetterEntry, DeadLetterRecord, Outgoing
from qdo.brokers.embedded_writer import Transaction
from qdo.headers import ID, RETRIED, parsed, with_header
from qdo.message import message_id

_BURY = """
INSERT INTO dead_letters (queue, position, body, key, headers,
                          error, traceback, attempts, worker, fence, dead_at)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT (queue, position) DO NOTHING
"""
_ALL = """
SELECT queues.name, position, body, key, headers,
       error, traceback, attempts, worker, fence, dead_at
FROM dead_letters JOIN queues ON queues.id = dead_letters.queue
WHERE queues.app = :app AND (:queue IS NULL OR queues.name = :queue)
  AND (:position IS NULL OR position = :position)
ORDER BY dead_at, position
"""
_ENTRIES = """
SELECT queues.name, position, key, headers,
       error, attempts, worker, fence, dead_at, length(body)
FROM dead_letters JOIN queues ON queues.id = dead_letters.queue
WHERE queues.app = :app AND (:queue IS NULL OR queues.name = :queue)
  AND (:since IS NULL OR dead_at >= :since) AND (:until IS NULL OR dead_at <= :until)
ORDER BY dead_at, position
"""
_COUNTS = """
SELECT queues.name, count(*) FROM dead_letters JOIN queues ON queues.id = dead_letters.queue
WHERE queues.app = ? GROUP BY dead_letters.queue
"""
_TAKE = """
SELECT dead_letters.queue, body, key, headers
FROM dead_letters JOIN queues ON queues.id = dead_letters.queue
WHERE queues.app = ? AND queues.name = ? AND position = ?
"""
_REMOVE = "DELETE FROM dead_letters WHERE queue = ? AND position = ?"
_DISCARD = """
DELETE FROM dead_letters
WHERE queue = (SELECT id FROM queues WHERE app = ? AND name = ?) AND position = ?
"""


def bury(transaction: Transaction, letter: DeadLetterRecord) -> None:
    """Store a dead letter; doing it twice for one position stores one."""
    values = (
        transaction.queue_id(letter.queue),
        letter.position,
        letter.body,
        letter.key,
        letter.headers,
        _storable(letter.error),
        _storable(letter.traceback),
        letter.attempts,
        letter.worker,
        letter.fence,
        letter.dead_at or time.time(),
    )
    transaction.connection.execute(_BURY, values)


def read(
    connection: sqlite3.Connection, app: str, queue: str | None, position: int | None = None
) -> list[DeadLetterRecord]:
    """Return dead letters, oldest first."""
    found = connection.execute(_ALL, {"app": app, "queue": queue, "position": position})
    return list(itertools.starmap(DeadLetterRecord, found.fetchall()))


def read_entries(
    connection: sqlite3.Connection,
    app: str,
    queue: str | None,
    error: str | None,
    since: float | None,
    until: float | None,
) -> list[DeadLetterEntry]:
    """Return dead letters without bodies and tracebacks, oldest first."""
    chosen = {"app": app, "queue": queue, "since": since, "until": until}
    entries = itertools.starmap(DeadLetterEntry, connection.execute(_ENTRIES, chosen).fetchall())
    # Not by SQLite, which knows upper and lower case of ASCII only.
    sought = None if error is None else error.casefold()
    return [each for each in entries if sought is None or sought in each.error.casefold()]


def count(connection: sqlite3.Connection, app: str) -> dict[str, int]:
    """Return how many dead letters each queue has, of those that have any."""
    return dict(connection.execute(_COUNTS, (app,)).fetchall())


def retry(
    transaction: Transaction, letters: Sequence[tuple[str, int]], node: int
) -> list[int | None]:
    """Move dead letters to the end of their queues; return the new positions."""
    return [_retry(transaction, queue, position, node) for queue, position in letters]


def _retry(transaction: Transaction, queue: str, position: int, node: int) -> int | None:
    execute = transaction.connection.execute
    found = execute(_TAKE, (transaction.app, queue, position)).fetchone()
    if found is None:
        return None
    queue_id, body, key, headers = found
    message = Outgoing(queue, body, key, retried_headers(headers, message_id(position, node)))
    (moved,) = transaction.append((message,))
    execute(_REMOVE, (queue_id, position))
    return moved


def retried_headers(headers: str | None, own_id: str) -> str | None:
    """Return the headers of a message that is sent again: its first id, and how often."""
    known = parsed(headers) or {}
    before = known.get(RETRIED, "")
    times = int(before) if before.isdecimal() else 0
    return with_header(headers, qdo_id=known.get(ID, own_id), qdo_retried=str(times + 1))


def discard(transaction: Transaction, letters: Sequence[tuple[str, int]]) -> list[bool]:
    """Delete dead letters; return for each whether it existed."""
    execute = transaction.connection.execute
    return [execute(_DISCARD, (transaction.app, *each)).rowcount > 0 for each in letters]


def _storable(text: str) -> str:
    """Return text with stray surrogates, which have no UTF-8, spelt out."""
    return text.encode("utf-8", "backslashreplace").decode()
