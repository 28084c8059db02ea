"""Delayed messages and deduplication keys of the embedded broker, for senders and operators.

A delayed message waits in a separate table until it is due. Then a listener moves the message into
its queue, where it gets its position. The move is one transaction, so after a crash the message is
in exactly one of the two tables.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

from qdo.brokers.base import DelayedMessage, DelayedMessages, Outgoing, SendOptions
from qdo.brokers.dead_letters import refused_when_due
from qdo.brokers.embedded.dead_letters import store_letter
from qdo.brokers.embedded.schema import Query
from qdo.brokers.embedded.writer import EmbeddedTables, Transaction
from qdo.brokers.streams import key_hash
from qdo.encoding import with_header
from qdo.errors import DatabaseError, QdoError
from qdo.positions import message_id, position_of_time, time_of_position

log = logging.getLogger(__name__)

# The limits of one transaction that moves messages and so blocks other writers. The first message
# may be larger.
MOVE_MESSAGES = 1000
MOVE_BYTES = 8 * 1024 * 1024
# The number of expired keys to delete for each new key, so expired keys never accumulate.
TRIM = 16
# The delay before a retry after the listener failed to move due messages.
RETRY_SECONDS = 5.0
# The minimum time between two checks for an earlier due time. With a busy sender, a check at every
# wakeup would make listening 8 % more expensive.
LOOK_PAUSE_SECONDS = 0.01
_SECOND = 10_000_000

_SENT = Query("SELECT id FROM dedup WHERE queue = ? AND key = ? AND until > ?", "t")
_REMEMBER = "INSERT OR REPLACE INTO dedup (queue, key, id, until) VALUES (?, ?, ?, ?)"
_FREE = "DELETE FROM dedup WHERE queue = ? AND key = ? AND id = ?"
_TRIM = """
DELETE FROM dedup WHERE (queue, key) IN (
    SELECT queue, key FROM dedup WHERE until <= ? ORDER BY until LIMIT ?)
"""
_NEXT = Query("SELECT due FROM delayed WHERE app = :app ORDER BY due LIMIT 1", "i")
_STORE = """
INSERT INTO delayed (app, due, queue, id, key, headers, body) VALUES (?, ?, ?, ?, ?, ?, ?)
"""
_COUNT = "UPDATE queues SET delayed = delayed + ? WHERE id = ?"
_DUE = Query(
    """
SELECT delayed.number, delayed.queue, queues.name, delayed.id,
       delayed.key, delayed.headers, delayed.body
FROM delayed JOIN queues ON queues.id = delayed.queue
WHERE delayed.app = ? AND delayed.due <= ? ORDER BY delayed.due, delayed.number LIMIT ?
""",
    "iittTTb",
)
_REMOVE = "DELETE FROM delayed WHERE number = ?"
_COLUMNS = "itiTTb"
_OF_QUEUE = """
FROM delayed WHERE app = :app
AND queue = (SELECT id FROM queues WHERE app = :app AND name = :queue AND delayed > 0)
"""
_FIND = Query(
    f"SELECT number, id, due, key, headers, body {_OF_QUEUE} ORDER BY due, number LIMIT :limit",
    _COLUMNS,
)
_FIND_ID = Query(
    f"SELECT number, id, due, key, headers, body {_OF_QUEUE} AND id = :id",
    _COLUMNS,
)
_NUMBERS = Query(f"SELECT number {_OF_QUEUE}", "i")
_REMOVE_OF_QUEUE = f"DELETE {_OF_QUEUE} AND number = :number"
_COUNT_REMOVED = "UPDATE queues SET delayed = delayed - ? WHERE app = ? AND name = ?"


def send_with_options(
    transaction: Transaction, messages: Sequence[Outgoing], node: int
) -> list[str]:
    """Add messages, some with send options, in the given order; return their ids."""
    return [_send(transaction, message, node) for message in messages]


def _send(transaction: Transaction, message: Outgoing, node: int) -> str:
    options = message.terms
    if options is None or options.dedup_key is None:
        return _store(transaction, message, options, node)
    queue, key = _dedup_place(transaction, message, options.dedup_key)
    execute = transaction.connection.execute
    now = transaction.now()
    sent = _SENT.first(transaction.connection, (queue, key, now))
    if sent is not None:
        return str(sent[0])
    execute(_TRIM, (now, TRIM))
    new = _store(transaction, message, options, node)
    until = now + round(options.dedup_seconds * _SECOND)
    execute(_REMEMBER, (queue, key, new, until))
    return new


def _dedup_place(transaction: Transaction, message: Outgoing, key: str) -> tuple[int, str]:
    tail = transaction.tail_for(message)
    if tail.root is not None and message.key is not None:
        key = key_hash(message.key) + key  # unique for each message key, even after a split
    return tail.root or tail.id, key


def _store(
    transaction: Transaction, message: Outgoing, options: SendOptions | None, node: int
) -> str:
    if options is not None and options.due is not None:
        now = transaction.now()
        due = position_of_time(options.due_at(time_of_position(now)) or 0.0)
        if due > now:
            return _delay(transaction, message, due)
    return message_id(transaction.append((message,))[0], node)


def _delay(transaction: Transaction, message: Outgoing, due: int) -> str:
    # A delayed message has no position yet, so its id is random.
    queue = transaction.tail_for(message).id
    execute = transaction.connection.execute
    earliest = _NEXT.first(transaction.connection, {"app": transaction.app})
    # Listeners sleep until the earliest due time, so only an earlier message wakes them.
    transaction.rings = transaction.rings or earliest is None or due < earliest[0]
    identifier = transaction.new_id(message)
    values = (transaction.app, due, queue, identifier, message.key, message.headers, message.body)
    execute(_STORE, values)
    execute(_COUNT, (1, queue))
    return identifier


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
    """Move due messages into their queues, in order of due time; return their number."""
    # The next transaction moves the messages beyond the limits of this one.
    due = _take(transaction, now)
    if not due:
        return 0  # another listener moved them and woke the owners
    for each in due:
        message = each.outgoing()
        try:
            transaction.append((message,))
        except QdoError as error:
            store_letter(transaction, refused_when_due(message, transaction.reserve(), error))
    transaction.connection.executemany(_REMOVE, [(each.number,) for each in due])
    for queue, count in Counter(each.queue for each in due).items():
        transaction.connection.execute(_COUNT, (-count, queue))
    return len(due)


def _take(transaction: Transaction, now: int) -> list[_Due]:
    taken: list[_Due] = []
    size = 0
    found = _DUE.each(transaction.connection, (transaction.app, now, MOVE_MESSAGES))
    with contextlib.closing(found):  # end the query before deleting its rows
        for row in found:
            taken.append(_Due(*row))
            size += len(taken[-1].body)
            if size > MOVE_BYTES:
                break
    return taken


class DelayScheduler:
    """Moves delayed messages of an app into their queues when they are due."""

    def __init__(self, tables: EmbeddedTables, clock: Callable[[], int]) -> None:
        self._tables = tables
        self._clock = clock
        self._not_before = 0.0
        self._look_at = 0.0
        self._next: int | None = None

    def step(self) -> float | None:
        """Move due messages; return the seconds until the next due time, or None."""
        # Check before taking the write lock, because another listener may have moved the messages.
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
            self._tables.change(
                lambda transaction: move_due(transaction, self._clock()), MOVE_BYTES
            )
            return self._look(now)
        except DatabaseError as error:
            log.warning(
                "delayed messages were not moved; retrying in %g s: %s", RETRY_SECONDS, error
            )
            self._not_before = time.monotonic() + RETRY_SECONDS
            return RETRY_SECONDS

    def _look(self, now: float) -> float | None:
        """Find the next due time; return the seconds until then, or None."""
        self._look_at = now + LOOK_PAUSE_SECONDS
        rows = self._tables.read(_NEXT)
        self._next = rows[0][0] if rows else None
        return self._left()

    def _left(self) -> float | None:
        return None if self._next is None else max(0.0, (self._next - self._clock()) / _SECOND)


class EmbeddedDelayedMessages(DelayedMessages):
    """The delayed messages of one app. Safe to use from several threads."""

    def __init__(self, tables: EmbeddedTables) -> None:
        self._tables = tables

    def find(
        self, queue: str, limit: int, ids: Collection[str] | None = None
    ) -> list[DelayedMessage]:
        if ids is None:
            rows = self._tables.read(_FIND, queue=queue, limit=limit)
        else:
            matches = (self._tables.read(_FIND_ID, queue=queue, id=each) for each in ids)
            rows = list(itertools.chain.from_iterable(matches))[:limit]
        return list(itertools.starmap(DelayedMessage, rows))

    def numbers(self, queue: str) -> list[int]:
        return [number for (number,) in self._tables.read(_NUMBERS, queue=queue)]

    def discard(self, queue: str, numbers: Collection[int]) -> set[int]:
        return self._tables.change(lambda transaction: self._discard(transaction, queue, numbers))

    def _discard(self, transaction: Transaction, queue: str, numbers: Collection[int]) -> set[int]:
        execute = transaction.connection.execute
        of = {"app": transaction.app, "queue": queue}
        gone = {
            each for each in numbers if execute(_REMOVE_OF_QUEUE, {**of, "number": each}).rowcount
        }
        execute(_COUNT_REMOVED, (len(gone), transaction.app, queue))
        return gone

    def free(self, queue: str, key: str | None, unique: str, id: str) -> None:
        def work(transaction: Transaction) -> None:
            place = _dedup_place(transaction, Outgoing(queue, b"", key), unique)
            transaction.connection.execute(_FREE, (*place, id))

        self._tables.change(work)
