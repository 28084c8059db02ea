"""Write to the embedded broker's file, with group commit and a fair write lock.

One native thread makes all writes of a process.

The thread commits the calls of a group together, with one transaction, one sync and one wakeup. If
a group fails, the thread retries each call in a separate transaction, and each call gets its own
error.
"""

from __future__ import annotations

import fcntl
import os
import sqlite3
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

from qdo.brokers.base import Outgoing
from qdo.brokers.embedded.schema import MESSAGES, Query, Row
from qdo.brokers.grouped_calls import GroupedCall, GroupedCalls
from qdo.brokers.streams import ShardMap, keyless_error
from qdo.errors import DatabaseBusyError, QueueLimitError
from qdo.positions import new_id, position_now
from qdo.queues import stream_named
from qdo.system import wakeup_pipes
from qdo.system.files import Rights, make_folder, open_file, opened_folder
from qdo.system.fork_guard import ForkGuard, unforked
from qdo.system.native import sleep
from qdo.system.sqlite import ReplacedFileCheck, is_busy, open_database, translate, translated

BUSY_SECONDS = 30.0
# The maximum wait at the gate, because a process suspended inside must not block all others.
GATE_SECONDS = 1.0
_EAGER_SECONDS = 0.05
_EAGER_PAUSE_SECONDS = 0.0001
_PATIENT_PAUSE_SECONDS = 0.001
_FIND_QUEUE = Query(
    "SELECT id, head, sent, largest, root FROM queues WHERE app = ? AND name = ?", "iiiiI"
)
_ADD_QUEUE = "INSERT INTO queues (app, name, head, sent, largest) VALUES (?, ?, 0, 0, 0)"
_NEWEST = Query("SELECT max(head) FROM queues", "I")
_LARGEST_ID = Query("SELECT coalesce(max(id), 0) FROM queues", "i")
_COUNT_QUEUES = Query("SELECT count(*) FROM queues WHERE app = ?", "i")
_TOUCH_QUEUE = "UPDATE queues SET head = ?, sent = ?, largest = ? WHERE id = ?"
# The next position in the file follows the largest `head`, even of a deleted queue.
KEEP_HEAD = """
INSERT INTO queues (app, name, head, sent, largest) VALUES ('', 'deleted', ?, 0, 0)
ON CONFLICT (app, name) DO UPDATE SET head = max(head, excluded.head)
"""
_OPEN_SHARDS = Query(
    """
SELECT low, queue FROM streams WHERE app = ? AND stream = ? AND end_position IS NULL ORDER BY low
""",
    "tt",
)
_ADD_MESSAGE = (
    "INSERT INTO messages (queue, position, number, body, key, headers) VALUES (?, ?, ?, ?, ?, ?)"
)
T = TypeVar("T")


class FairWriteLock:
    """Lets one process at a time try to acquire the write lock."""

    # In SQLite, waiting writers sleep for up to 100 ms, so a process that commits without a pause
    # starves the others. Only the process inside the gate tries to lock, at short intervals. A
    # process that has released the lock enters the gate after the process that already waits there.
    # The gate only adds fairness; SQLite's lock still decides which process writes.

    def __init__(self, path: str, folder: str) -> None:
        self._path = path
        self._file = -1
        if not os.access(path, os.W_OK):
            return  # SQLite refuses to write
        rights = Rights.of(path)
        make_folder(folder, rights)
        with opened_folder(folder) as at:
            self._file = open_file(".gate", os.O_RDWR, rights, at)

    def begin(self, connection: sqlite3.Connection) -> None:
        """Begin a transaction with the write lock; raise DatabaseBusyError after BUSY_SECONDS."""
        entered = self._file >= 0 and _repeat(self._enter, GATE_SECONDS)
        try:
            if not _repeat(lambda: _begin(connection), BUSY_SECONDS):
                raise DatabaseBusyError(path=self._path, seconds=BUSY_SECONDS)
        finally:
            if entered:
                fcntl.flock(self._file, fcntl.LOCK_UN)

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _enter(self) -> bool:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True


def _begin(connection: sqlite3.Connection) -> bool:
    try:
        connection.execute("BEGIN IMMEDIATE")
    except sqlite3.OperationalError as error:
        if is_busy(error):
            return False
        raise
    return True


def _repeat(attempt: Callable[[], bool], seconds: float) -> bool:
    """Repeat `attempt` until it succeeds; return False after `seconds`."""
    # A commit takes less than a millisecond, so all pauses are short. With short pauses, the
    # slowest 1 % of the sends of four busy processes take 6 ms; with doubling pauses, 12 ms. A
    # longer wait means that a process is suspended.
    began = time.monotonic()
    while not attempt():
        waited = time.monotonic() - began
        if waited >= seconds:
            return False
        sleep(_EAGER_PAUSE_SECONDS if waited < _EAGER_SECONDS else _PATIENT_PAUSE_SECONDS)
    return True


@dataclass(slots=True)
class Tail:
    """The current end of a queue in one transaction; see `schema.STREAMS` for shards."""

    id: int
    head: int
    sent: int
    largest: int
    root: int | None


class Transaction:
    """A transaction that holds the write lock, and its operations on queues.

    :ivar rings: whether to wake the listeners of queues after the transaction.
    :ivar wakes_takers: whether to wake the listeners of requests after the transaction.
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
        self.wakes_takers = False
        self.app = app
        self._clock = clock
        self._began = clock()
        self._max_queues = max_queues
        self._newest: int | None = None
        self._tails: dict[str, Tail] = {}
        self._shards: dict[str, Tail] = {}  # separate, because messages for shards need checks
        self._maps: dict[str, ShardMap] = {}  # by stream, until a split
        self._rows: list[tuple[int, int, int, bytes, str | None, str | None]] = []

    def append(self, messages: Sequence[Outgoing]) -> range:
        """Add messages after all other messages in the file; return their positions."""
        first = self._next_position()
        for position, message in enumerate(messages, first):
            tail = self._tails.get(message.queue) or self.tail_for(message)
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

    def tail_for(self, message: Outgoing) -> Tail:
        """Return the end of the queue that gets a message; in a stream, this is an open shard."""
        # If the message names a sealed, deleted or wrong shard, the open shard of its key gets it.
        name = message.queue
        tail = self._find(name)
        if tail is not None and tail.root is None:
            return tail
        stream = stream_named(name)
        if stream is None:
            return self.tail(name)
        if (known := self._maps.get(stream)) is None:
            rows = _OPEN_SHARDS.all(self.connection, (self.app, stream))
            known = self._maps[stream] = ShardMap.of(rows)
        if not known.queues:
            return self.tail(name)
        if message.key is None:
            raise keyless_error(name)
        return self.tail(known.queue_of(message.key))

    def now(self) -> int:
        """Return the time at which the transaction began, as a position."""
        # All messages of a transaction need the same time. If two messages have the same due time,
        # the second must not be due when the first is delayed.
        return self._began

    def new_id(self, message: Outgoing) -> str:
        """Return the id of a delayed message, which has no position yet."""
        return new_id()

    def flush(self) -> None:
        self.connection.executemany(_ADD_MESSAGE, self._rows)
        self.connection.executemany(
            _TOUCH_QUEUE,
            [
                (tail.head, tail.sent, tail.largest, tail.id)
                for tail in (*self._tails.values(), *self._shards.values())
            ],
        )

    def _next_position(self) -> int:
        if self._newest is None:
            (newest,) = _NEWEST.only(self.connection)
            self._newest = newest or 0
        # Positions increase even if the clock was set back, because order matters more than time.
        return max(self._clock(), self._newest + 1)

    def reserve(self) -> int:
        """Return a position that no message gets."""
        position = self._newest = self._next_position()
        self.connection.execute(KEEP_HEAD, (position,))  # later positions are higher
        return position

    def tail(self, name: str) -> Tail:
        """Return the end of a queue; create the queue if it does not exist."""
        tail = self._find(name)
        if tail is None:
            self._check_room(name)
            self.connection.execute(_ADD_QUEUE, (self.app, name))
            found = _FIND_QUEUE.only(self.connection, (self.app, name))
            tail = self._tails[name] = Tail(*found)
        return tail

    def _find(self, name: str) -> Tail | None:
        tail = self._tails.get(name) or self._shards.get(name)
        if tail is None:
            found = _FIND_QUEUE.first(self.connection, (self.app, name))
            if found is None:
                return None
            tail = Tail(*found)
            (self._tails if tail.root is None else self._shards)[name] = tail
        return tail

    def exists(self, name: str) -> bool:
        return self._find(name) is not None

    def make_shard(self, name: str, root: int | None) -> int:
        """Create a shard's queue in a stream, a new one if `root` is None; return the root."""
        self._maps.clear()
        tail = self._shards[name] = self.tail(name)
        del self._tails[name]
        tail.root = tail.id if root is None else root
        self.connection.execute("UPDATE queues SET root = ? WHERE id = ?", (tail.root, tail.id))
        return tail.root

    def _check_room(self, queue: str) -> None:
        if self._max_queues is None:
            return
        # Do not count if the largest id, an upper bound of the count, is small enough. Counting
        # 100,000 queues takes 10 ms.
        (largest,) = _LARGEST_ID.only(self.connection)
        if largest < self._max_queues:
            return
        (count,) = _COUNT_QUEUES.only(self.connection, (self.app,))
        if count >= self._max_queues:
            raise QueueLimitError(queue=queue, limit=self._max_queues)


Work: TypeAlias = Callable[[Transaction], Any]


class Writer(GroupedCalls[Work]):
    """Commits the calls of one process to one app; `limit` returns `Broker.max_queues`."""

    def __init__(
        self,
        path: str,
        app: str,
        wakeups: str,
        clock: Callable[[], int] = position_now,
        limit: Callable[[], int | None] = lambda: None,
    ) -> None:
        super().__init__("writer")
        self._path = path
        self._app = app
        self._wakeups = wakeups
        # A separate folder, because a message must not wake a worker that waits for requests.
        self.request_wakeups = f"{wakeups}/.requests"
        self.clock = clock
        self._limit = limit
        with unforked:
            self._connection = open_database(path, MESSAGES)
            try:
                with translated(path):
                    # SQLite must not wait for the lock, because `FairWriteLock` waits.
                    self._connection.execute("PRAGMA busy_timeout = 0")
                    self._connection.execute("PRAGMA secure_delete = OFF")
                    self._watch = ReplacedFileCheck(path)
                    self._gate = FairWriteLock(path, wakeups)
                    self._fork_guard = ForkGuard(path, self._gate.close)
            except BaseException:
                self._connection.close()
                raise
        self.start()

    def run(self, work: Callable[[Transaction], T], size: int = 0) -> T:
        """Run `work` in a transaction, and again if its group failed; return its result."""
        # The writing thread runs `work`. This method returns after the changes are on disk. `size`
        # is the approximate number of bytes that `work` adds.
        result: T = self.call(work, size)
        return result

    # --- on the writing thread --------------------------------------------------------

    def release(self) -> None:
        with self._fork_guard:
            self._connection.close()
            self._gate.close()
            self._fork_guard.close()

    def handle(self, calls: list[GroupedCall[Work]]) -> None:
        error = self._attempt(calls)
        if error is None:
            return
        for call in calls:
            failure = self._attempt([call]) if len(calls) > 1 else error
            if failure is not None:
                call.fail(failure)

    def _attempt(self, calls: list[GroupedCall[Work]]) -> BaseException | None:
        """Commit `calls` in one transaction; return the error, or None on success."""
        try:
            with self._fork_guard:
                transaction, results = self._commit(calls)
        except sqlite3.Error as error:
            translation = translate(self._path, error)
            translation.__cause__ = error
            return translation
        except BaseException as error:  # noqa: BLE001 - the caller raises it
            return error
        self.commits += 1
        if transaction.rings:
            wakeup_pipes.notify_all(self._wakeups)
        if transaction.wakes_takers:
            wakeup_pipes.notify_all(self.request_wakeups)
        for call, result in zip(calls, results, strict=True):
            call.finish(result)
        return None

    def _commit(self, calls: list[GroupedCall[Work]]) -> tuple[Transaction, list[Any]]:
        """Commit `calls`; return the transaction, with the listeners to wake, and the results."""
        connection = self._connection
        transaction = Transaction(connection, self._app, self.clock, self._limit())
        self._watch.check()
        self._gate.begin(connection)
        try:
            results = [call.work(transaction) for call in calls]
            transaction.flush()
            connection.execute("COMMIT")
        except BaseException:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            raise
        # Only this check proves that the commit reached the file that other processes open.
        self._watch.check()
        return transaction, results


@dataclass(frozen=True, slots=True)
class EmbeddedTables:
    """The tables of one app in a database. Safe to use from several threads."""

    reading: sqlite3.Connection
    # The path of the database file, for errors.
    path: str
    app: str
    # The writer, which makes all changes.
    writer: Writer
    # 48-bit node of message ids.
    node: int
    watch: ReplacedFileCheck

    def read(self, query: Query, **values: Any) -> list[Row]:
        """Return the rows of a query for this app, given its other parameters."""
        with unforked, translated(self.path):
            return query.all(self.reading, {"app": self.app, **values})

    def change(self, work: Callable[[Transaction], T], size: int = 0) -> T:
        """Run `work` in a transaction; see `Writer.run`."""
        return self.writer.run(work, size)
