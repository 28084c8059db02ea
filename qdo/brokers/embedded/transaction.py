"""One write transaction of the embedded broker, which appends messages of many senders."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from qdo.brokers.base import Outgoing
from qdo.brokers.embedded.query import INTEGER, MAYBE_INTEGER, Query
from qdo.errors import QueueLimitError

_FIND_QUEUE = Query(
    "SELECT id, head, sent, largest FROM queues WHERE app = ? AND name = ?",
    INTEGER,
    INTEGER,
    INTEGER,
    INTEGER,
)
_ADD_QUEUE = "INSERT INTO queues (app, name, head, sent, largest) VALUES (?, ?, 0, 0, 0)"
_NEWEST = Query("SELECT max(head) FROM queues", MAYBE_INTEGER)
_LARGEST_ID = Query("SELECT coalesce(max(id), 0) FROM queues", INTEGER)
_COUNT_QUEUES = Query("SELECT count(*) FROM queues WHERE app = ?", INTEGER)
_TOUCH_QUEUE = "UPDATE queues SET head = ?, sent = ?, largest = ? WHERE id = ?"
_ADD_MESSAGE = (
    "INSERT INTO messages (queue, position, number, body, key, headers) VALUES (?, ?, ?, ?, ?, ?)"
)


@dataclass(slots=True)
class _Tail:
    """The newest end of a queue within one transaction."""

    id: int
    head: int
    sent: int
    largest: int


class Transaction:
    """The operations of a call that holds the write lock.

    :ivar rings: whether listeners must be woken after the commit.
    """

    def __init__(
        self,
        connection: sqlite3.Connection,
        app: str,
        clock: Callable[[], int],
        max_queues: int | None = None,
    ) -> None:
        self.connection = connection
        self.rings = False
        self._app = app
        self._clock = clock
        self._began = clock()
        self._max_queues = max_queues
        self._newest: int | None = None
        self._tails: dict[str, _Tail] = {}
        self._rows: list[tuple[int, int, int, bytes, str | None, str | None]] = []

    def append(self, messages: Sequence[Outgoing]) -> range:
        """Add messages after all others in the file; return their positions."""
        first = self._next_position()
        for position, message in enumerate(messages, first):
            tail = self._tails.get(message.queue) or self._tail(message.queue)
            tail.head = position
            tail.sent += 1
            if len(message.body) > tail.largest:
                tail.largest = len(message.body)
            self._rows.append(
                (tail.id, position, tail.sent, message.body, message.key, message.headers)
            )
        self._newest = first + len(messages) - 1
        self.rings = True
        return range(first, first + len(messages))

    def queue_id(self, name: str) -> int:
        """Return the number of a queue; create the queue if it does not exist."""
        return self._tail(name).id

    def now(self) -> int:
        """Return the time at which the transaction began, as a position.

        Of two messages with the same due time, the second must not be sent at once while the
        first is delayed.
        """
        return self._began

    @property
    def app(self) -> str:
        """The app that owns the queues."""
        return self._app

    def flush(self) -> None:
        """Write the appended messages."""
        self.connection.executemany(_ADD_MESSAGE, self._rows)
        self.connection.executemany(
            _TOUCH_QUEUE,
            [(tail.head, tail.sent, tail.largest, tail.id) for tail in self._tails.values()],
        )

    def _next_position(self) -> int:
        if self._newest is None:
            (newest,) = _NEWEST.only(self.connection)
            self._newest = newest or 0
        # Positions increase even if the clock was set back: order matters more than time.
        return max(self._clock(), self._newest + 1)

    def _tail(self, name: str) -> _Tail:
        tail = self._tails.get(name)
        if tail is None:
            found = _FIND_QUEUE.first(self.connection, (self._app, name))
            if found is None:
                self._check_room(name)
                self.connection.execute(_ADD_QUEUE, (self._app, name))
                found = _FIND_QUEUE.only(self.connection, (self._app, name))
            tail = self._tails[name] = _Tail(*found)
        return tail

    def _check_room(self, queue: str) -> None:
        """Raise QueueLimitError if another queue would be one too many."""
        if self._max_queues is None:
            return
        # Counting takes 10 ms for 100,000 queues. There are never more than the largest id.
        (largest,) = _LARGEST_ID.only(self.connection)
        if largest < self._max_queues:
            return
        (count,) = _COUNT_QUEUES.only(self.connection, (self._app,))
        if count >= self._max_queues:
            raise QueueLimitError(queue=queue, limit=self._max_queues)
