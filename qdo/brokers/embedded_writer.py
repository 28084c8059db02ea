"""The one place that writes to the embedded broker's file: group commit.

A native thread takes all calls that have come in while it was busy and commits them
together: one transaction, one sync, one ring of the doorbell. A call that comes alone is
committed at once; nothing waits for a timer. When a group fails, each of its calls is tried
in a transaction of its own, so that each gets its own error.
"""

from __future__ import annotations

import os
import queue
import sqlite3
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from qdo import doorbell
from qdo.brokers.base import Outgoing
from qdo.brokers.embedded_fork import ForkGuard, unforked
from qdo.brokers.embedded_gate import Gate
from qdo.brokers.embedded_native import (
    LoopSignal,
    Settable,
    inbox,
    native_lock,
    signal,
    start_thread,
)
from qdo.brokers.embedded_schema import MESSAGES
from qdo.errors import UsageError
from qdo.message import position_now
from qdo.storage import FileWatch, open_database, translate, translated

T = TypeVar("T")

GROUP_BYTES = 16 * 1024 * 1024
"""A group takes no further call once its bodies are this big."""

_FIND_QUEUE = "SELECT id, head, sent, largest FROM queues WHERE app = ? AND name = ?"
_ADD_QUEUE = "INSERT INTO queues (app, name, head, sent, largest) VALUES (?, ?, 0, 0, 0)"
_TOUCH_QUEUE = "UPDATE queues SET head = ?, sent = ?, largest = ? WHERE id = ?"
_ADD_MESSAGE = (
    "INSERT INTO messages (queue, position, number, body, key, headers) VALUES (?, ?, ?, ?, ?, ?)"
)


@dataclass(slots=True)
class _Tail:
    """The newest end of a queue, within one transaction."""

    id: int
    head: int
    sent: int
    largest: int


class Transaction:
    """What a call may do while it holds the write lock."""

    def __init__(self, connection: sqlite3.Connection, app: str, clock: Callable[[], int]) -> None:
        self.connection = connection
        self.rings = False
        self._app = app
        self._clock = clock
        self._newest: int | None = None
        self._tails: dict[str, _Tail] = {}
        self._rows: list[tuple[int, int, int, bytes, str | None, str | None]] = []

    def append(self, messages: Sequence[Outgoing]) -> range:
        """Add messages behind everything in the file; return their positions."""
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
        """Return the number of a queue, making the queue if it is missing."""
        return self._tail(name).id

    def now(self) -> int:
        """Return the present as a position."""
        return self._clock()

    @property
    def app(self) -> str:
        """The app whose queues these are."""
        return self._app

    def flush(self) -> None:
        """Write what was added."""
        self.connection.executemany(_ADD_MESSAGE, self._rows)
        self.connection.executemany(
            _TOUCH_QUEUE,
            [(tail.head, tail.sent, tail.largest, tail.id) for tail in self._tails.values()],
        )

    def _next_position(self) -> int:
        if self._newest is None:
            (newest,) = self.connection.execute("SELECT max(head) FROM queues").fetchone()
            self._newest = newest or 0
        # Never back, even when the clock is: order is worth more than the right time.
        return max(self._clock(), self._newest + 1)

    def _tail(self, name: str) -> _Tail:
        tail = self._tails.get(name)
        if tail is None:
            found = self.connection.execute(_FIND_QUEUE, (self._app, name)).fetchone()
            if found is None:
                self.connection.execute(_ADD_QUEUE, (self._app, name))
                found = self.connection.execute(_FIND_QUEUE, (self._app, name)).fetchone()
            tail = self._tails[name] = _Tail(*found)
        return tail


class _Call(Generic[T]):
    """One caller's work, and what came of it."""

    __slots__ = ("done", "error", "result", "size", "work")

    def __init__(self, work: Callable[[Transaction], T], size: int, done: Settable) -> None:
        self.work = work
        self.size = size
        self.done = done
        self.result: T | None = None
        self.error: BaseException | None = None

    def outcome(self) -> T:
        """Return the result, or raise the error."""
        if self.error is not None:
            raise self.error
        return self.result  # type: ignore[return-value]


class Writer:
    """Commits the calls of one process for one app, in groups.

    :ivar commits: how many transactions were committed.
    """

    def __init__(
        self, path: str, app: str, bells: str, clock: Callable[[], int] = position_now
    ) -> None:
        self.commits = 0
        self._begun = 0  # calls, counted by the callers
        self._ended_calls = 0  # counted by the writing thread
        self._path = path
        self._app = app
        self._bells = bells
        self._clock = clock
        self._pid = os.getpid()
        self._closed = False
        self._closing = native_lock()  # so that no call comes behind the last
        self._ended: Settable | None = None
        self._calls: queue.SimpleQueue[_Call[Any] | None] = inbox()
        with unforked:
            self._connection = open_database(path, MESSAGES)
            try:
                with translated(path):
                    # The gate waits in its own way.
                    self._connection.execute("PRAGMA busy_timeout = 0")
                    self._connection.execute("PRAGMA secure_delete = OFF")
                    self._watch = FileWatch(path)
                    self._gate = Gate(path, bells)
                    self._fork_guard = ForkGuard(path, self._gate.close)
            except BaseException:
                self._connection.close()
                raise
        start_thread(self._run)

    @property
    def waiting(self) -> int:
        """How many calls have not ended."""
        return self._begun - self._ended_calls

    def run(self, work: Callable[[Transaction], T], size: int = 0) -> T:
        """Run `work` in a transaction and return its result once that is on disk.

        `work` runs on the writing thread, and twice when a group with it has failed.

        :param size: bytes that it adds, roughly.
        """
        done = signal()
        call = _Call(work, size, done)
        self._put(call)
        done.wait()
        return call.outcome()

    async def arun(self, work: Callable[[Transaction], T], size: int = 0) -> T:
        """Do as `run` for a coroutine, whose loop goes on meanwhile.

        A thread per call would only wait, and their number limit how many share a commit.
        """
        done = LoopSignal()
        call = _Call(work, size, done)
        self._put(call)
        await done.future
        return call.outcome()

    def _put(self, call: _Call[Any]) -> None:
        if self._pid != os.getpid():
            raise UsageError(
                reason="this broker was opened before the process forked; open one in each process"
            )
        with self._closing:
            if self._closed:
                raise UsageError(reason="this broker was closed; open another")
            self._begun += 1
            self._calls.put(call)

    def close(self) -> None:
        """Finish what was begun and close the file; idempotent."""
        with self._closing:
            if self._closed or self._pid != os.getpid():
                return
            self._closed = True
            ended = self._ended = signal()
            self._calls.put(None)
        ended.wait()

    # --- on the writing thread --------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._step():
                pass
        finally:
            with self._fork_guard:
                self._connection.close()
                self._gate.close()
                self._fork_guard.close()
            if self._ended is not None:
                self._ended.set()

    def _step(self) -> bool:
        """Commit the next group; return whether to go on."""
        calls, closing = self._take()
        if calls:
            error = self._attempt(calls)
            if error is not None:
                self._attempt_each(calls, error)
            self._ended_calls += len(calls)
        return not closing

    def _take(self) -> tuple[list[_Call[Any]], bool]:
        """Wait for a call; return it with those right behind it, and whether to close."""
        calls: list[_Call[Any]] = []
        size = 0
        call = self._calls.get()
        while call is not None:
            calls.append(call)
            size += call.size
            if size > GROUP_BYTES:
                return calls, False
            try:
                call = self._calls.get_nowait()
            except queue.Empty:
                return calls, False
        return calls, True

    def _attempt_each(self, calls: list[_Call[Any]], error: BaseException) -> None:
        for call in calls:
            failure = self._attempt([call]) if len(calls) > 1 else error
            if failure is not None:
                call.error = failure
                call.done.set()

    def _attempt(self, calls: list[_Call[Any]]) -> BaseException | None:
        """Commit `calls` in one transaction; return what went wrong."""
        try:
            with self._fork_guard:
                rings = self._commit(calls)
        except sqlite3.Error as error:
            translation = translate(self._path, error)
            translation.__cause__ = error
            return translation
        except BaseException as error:  # noqa: BLE001 - it is raised where the call was made
            return error
        self.commits += 1
        if rings:
            doorbell.ring(self._bells)
        for call in calls:
            call.done.set()
        return None

    def _commit(self, calls: list[_Call[Any]]) -> bool:
        connection = self._connection
        transaction = Transaction(connection, self._app, self._clock)
        self._watch.check()
        self._gate.begin(connection)
        try:
            for call in calls:
                call.result = call.work(transaction)
            transaction.flush()
            connection.execute("COMMIT")
        except BaseException:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            raise
        # Only now is it certain that what was committed is in the file that others open.
        self._watch.check()
        return transaction.rings
