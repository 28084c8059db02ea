"""Sending later, or only once: delayed messages and deduplication keys.

A delayed message stands in a table of its own until it is due. Whoever listens to the file
then moves it into its queue, where it gets its position: one transaction, so that it is never
in both and never in neither, whoever dies meanwhile.
"""

from __future__ import annotations

import logging
import sqlite3
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

from qdo.brokers.base import Outgoing, Terms
from qdo.brokers.embedded_fork import unforked
from qdo.brokers.embedded_writer import Transaction, Writer
from qdo.errors import DatabaseError
from qdo.headers import with_header
from qdo.message import message_id, new_id, position_of_time
from qdo.storage import translated

log = logging.getLogger(__name__)

MOVE_MESSAGES = 1000
MOVE_BYTES = 8 * 1024 * 1024
"""What one transaction moves at most, beyond its first message: others wait for it."""
TRIM = 16
"""Keys that are over and deleted whenever one is stored: the table cannot but shrink."""
RETRY_SECONDS = 5.0
"""Pause after due messages could not be moved."""
LOOK_PAUSE_SECONDS = 0.01
"""Least time between two looks for an earlier due time: a look at every ring of the bell would
make listening to a busy sender 8 % dearer."""
_SECOND = 10_000_000

_SENT = "SELECT id FROM dedup WHERE queue = ? AND key = ? AND until > ?"
_REMEMBER = "INSERT OR REPLACE INTO dedup (queue, key, id, until) VALUES (?, ?, ?, ?)"
_TRIM = """
DELETE FROM dedup WHERE (queue, key) IN (
    SELECT queue, key FROM dedup WHERE until <= ? ORDER BY until LIMIT ?)
"""
_NEXT = "SELECT due FROM delayed WHERE app = ? ORDER BY due LIMIT 1"
_STORE = """
INSERT INTO delayed (app, due, queue, id, key, headers, body) VALUES (?, ?, ?, ?, ?, ?, ?)
"""
_COUNT = "UPDATE queues SET delayed = delayed + ? WHERE id = ?"
_DUE = """
SELECT delayed.number, delayed.queue, queues.name, delayed.id,
       delayed.key, delayed.headers, delayed.body
FROM delayed JOIN queues ON queues.id = delayed.queue
WHERE delayed.app = ? AND delayed.due <= ? ORDER BY delayed.due, delayed.number LIMIT ?
"""
_REMOVE = "DELETE FROM delayed WHERE number = ?"


def send_on_terms(transaction: Transaction, messages: Sequence[Outgoing], node: int) -> list[str]:
    """Add messages of which some have terms, in the given order; return their ids."""
    return [_send(transaction, message, node) for message in messages]


def _send(transaction: Transaction, message: Outgoing, node: int) -> str:
    terms = message.terms
    if terms is None or terms.dedup_key is None:
        return _store(transaction, message, terms, node)
    queue = transaction.queue_id(message.queue)
    execute = transaction.connection.execute
    now = transaction.now()
    sent = execute(_SENT, (queue, terms.dedup_key, now)).fetchone()
    if sent is not None:
        return str(sent[0])
    execute(_TRIM, (now, TRIM))
    made = _store(transaction, message, terms, node)
    until = now + round(terms.dedup_seconds * _SECOND)
    execute(_REMEMBER, (queue, terms.dedup_key, made, until))
    return made


def _store(transaction: Transaction, message: Outgoing, terms: Terms | None, node: int) -> str:
    if terms is not None and terms.due is not None:
        due = position_of_time(terms.due)
        if due > transaction.now():
            return _delay(transaction, message, due)
    return message_id(transaction.append((message,))[0], node)


def _delay(transaction: Transaction, message: Outgoing, due: int) -> str:
    """Store a message for later; its id cannot be made of a position that it has not yet."""
    queue = transaction.queue_id(message.queue)
    execute = transaction.connection.execute
    earliest = execute(_NEXT, (transaction.app,)).fetchone()
    # Who listens sleeps until the earliest: only an earlier one need wake anybody.
    transaction.rings = transaction.rings or earliest is None or due < earliest[0]
    made = new_id()
    values = (transaction.app, due, queue, made, message.key, message.headers, message.body)
    execute(_STORE, values)
    execute(_COUNT, (1, queue))
    return made


class _Due(NamedTuple):
    number: int
    queue: int
    name: str
    id: str
    key: str | None
    headers: str | None
    body: bytes

    def outgoing(self) -> Outgoing:
        return Outgoing(self.name, self.body, self.key, with_header(self.headers, qdo_id=self.id))


def move_due(transaction: Transaction, now: int) -> int:
    """Move what is due into the queues, in the order of due times; return how many.

    Some may be left for the next transaction.
    """
    due = _take(transaction, now)
    if not due:
        return 0  # another listener was first; nobody need be woken
    transaction.append([each.outgoing() for each in due])
    transaction.connection.executemany(_REMOVE, [(each.number,) for each in due])
    for queue, count in Counter(each.queue for each in due).items():
        transaction.connection.execute(_COUNT, (-count, queue))
    return len(due)


def _take(transaction: Transaction, now: int) -> list[_Due]:
    taken: list[_Due] = []
    size = 0
    found = transaction.connection.execute(_DUE, (transaction.app, now, MOVE_MESSAGES))
    for row in found:
        taken.append(_Due(*row))
        size += len(taken[-1].body)
        if size > MOVE_BYTES:
            break
    found.close()
    return taken


class Delays:
    """Moves the delayed messages of an app when they are due."""

    def __init__(
        self,
        connection: sqlite3.Connection,
        path: str,
        app: str,
        writer: Writer,
        clock: Callable[[], int],
    ) -> None:
        self._connection = connection
        self._path = path
        self._app = app
        self._writer = writer
        self._clock = clock
        self._not_before = 0.0
        self._look_at = 0.0
        self._next: int | None = None

    def step(self) -> float | None:
        """Move some of what is due; return the seconds until there is more, None: no more.

        Looks before it takes the write lock: of several listeners one moves a message, and
        the others find it gone.
        """
        now = time.monotonic()
        if now < self._not_before:
            return self._not_before - now
        try:
            if now < self._look_at:
                left = self._left()
                if left is None or left > 0:
                    pause = self._look_at - now
                    return pause if left is None else min(left, pause)
            left = self._look(now)
            if left is None or left > 0:
                return left
            self._writer.run(lambda transaction: move_due(transaction, self._clock()), MOVE_BYTES)
            return self._look(now)
        except DatabaseError as error:
            log.warning("delayed messages wait; tried again in %g s: %s", RETRY_SECONDS, error)
            self._not_before = time.monotonic() + RETRY_SECONDS
            return RETRY_SECONDS

    def _look(self, now: float) -> float | None:
        """Find the next due time; return the seconds that are left."""
        self._look_at = now + LOOK_PAUSE_SECONDS
        with unforked, translated(self._path):
            found = self._connection.execute(_NEXT, (self._app,)).fetchone()
        self._next = None if found is None else found[0]
        return self._left()

    def _left(self) -> float | None:
        return None if self._next is None else max(0.0, (self._next - self._clock()) / _SECOND)
