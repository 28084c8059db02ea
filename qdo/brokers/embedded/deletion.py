"""Deleting a queue from the embedded broker's file."""

from __future__ import annotations

from qdo.brokers.embedded.query import INTEGER, Query
from qdo.brokers.embedded.transaction import Transaction
from qdo.errors import QueueNotEmptyError

_FIND = Query(
    "SELECT id, head, delayed FROM queues WHERE app = ? AND name = ?", INTEGER, INTEGER, INTEGER
)
_WAITING = Query("SELECT count(*) FROM messages WHERE queue = ? AND position > ?", INTEGER)
_DEAD = Query("SELECT count(*) FROM dead_letters WHERE queue = ?", INTEGER)
_KEEP_HEAD = """
INSERT INTO queues (app, name, head, sent, largest) VALUES ('', 'deleted', ?, 0, 0)
ON CONFLICT (app, name) DO UPDATE SET head = max(head, excluded.head)
"""
"""The next position in the file follows the largest `head`, also one of a deleted queue."""

_DELETE = (
    "DELETE FROM messages WHERE queue = ?",
    "DELETE FROM delayed WHERE queue = ?",
    "DELETE FROM dedup WHERE queue = ?",
    "DELETE FROM dead_letters WHERE queue = ?",
    "DELETE FROM queues WHERE id = ?",
)


def check_empty(transaction: Transaction, queue: str, last: int) -> None:
    """Raise QueueNotEmptyError if a queue has messages after `last`, or dead letters."""
    connection = transaction.connection
    found = _FIND.first(connection, (transaction.app, queue))
    if found is None:
        return
    number, _, delayed = found
    (waiting,) = _WAITING.only(connection, (number, last))
    (dead,) = _DEAD.only(connection, (number,))
    if waiting or delayed or dead:
        raise QueueNotEmptyError(queue=queue, waiting=waiting, delayed=delayed, dead_letters=dead)


def delete(transaction: Transaction, queue: str, last: int) -> None:
    """Delete a queue, if it exists; see `Broker.delete_queue`."""
    check_empty(transaction, queue, last)
    execute = transaction.connection.execute
    found = _FIND.first(transaction.connection, (transaction.app, queue))
    if found is None:
        return
    number, head, _ = found
    execute(_KEEP_HEAD, (head,))
    for statement in _DELETE:
        execute(statement, (number,))
