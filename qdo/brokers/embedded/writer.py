"""Group commit: all writes to the embedded broker's file go through one native thread.

The thread commits all calls that arrived while it was busy together: one transaction, one sync, one
wakeup. A single call is committed immediately, without a timer. If a group fails, each of its calls
is retried in a separate transaction, so that each call gets its own error.
"""

from __future__ import annotations

import os
import queue
import sqlite3
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from qdo.brokers.embedded.fork_guard import ForkGuard, unforked
from qdo.brokers.embedded.schema import MESSAGES
from qdo.brokers.embedded.transaction import Transaction
from qdo.brokers.embedded.write_lock import FairWriteLock
from qdo.errors import UsageError
from qdo.positions import position_now
from qdo.system import wakeup_pipes
from qdo.system.native import (
    LoopSignal,
    Settable,
    guarded,
    inbox,
    native_lock,
    signal,
    start_thread,
)
from qdo.system.sqlite import ReplacedFileCheck, open_database, translate, translated

T = TypeVar("T")

GROUP_BYTES = 16 * 1024 * 1024
"""Size of bodies at which a group is complete."""


class _Call(Generic[T]):
    """The work of one caller, and its result."""

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

    :ivar commits: number of committed transactions.
    :param limit: returns the most queues that the app may have, None: any number.
    """

    def __init__(
        self,
        path: str,
        app: str,
        wakeups: str,
        clock: Callable[[], int] = position_now,
        limit: Callable[[], int | None] = lambda: None,
    ) -> None:
        self.commits = 0
        self._begun = 0  # calls, counted by the callers
        self._ended_calls = 0  # counted by the writing thread
        self._path = path
        self._app = app
        self._wakeups = wakeups
        self._clock = clock
        self._limit = limit
        self._pid = os.getpid()
        self._closed = False
        self._closing = native_lock()  # so that no call follows the last one
        self._ended: Settable | None = None
        self._calls: queue.SimpleQueue[_Call[Any] | None] = inbox()
        with unforked:
            self._connection = open_database(path, MESSAGES)
            try:
                with translated(path):
                    # `FairWriteLock` does the waiting.
                    self._connection.execute("PRAGMA busy_timeout = 0")
                    self._connection.execute("PRAGMA secure_delete = OFF")
                    self._watch = ReplacedFileCheck(path)
                    self._gate = FairWriteLock(path, wakeups)
                    self._fork_guard = ForkGuard(path, self._gate.close)
            except BaseException:
                self._connection.close()
                raise
        start_thread(guarded("writer", self._run))

    @property
    def waiting(self) -> int:
        """Number of calls that have not ended."""
        return self._begun - self._ended_calls

    def run(self, work: Callable[[Transaction], T], size: int = 0) -> T:
        """Run `work` in a transaction; return its result once the transaction is on disk.

        `work` runs on the writing thread, and runs again if its group failed.

        :param size: approximate number of bytes that it adds.
        """
        done = signal()
        call = _Call(work, size, done)
        self._put(call)
        done.wait()
        return call.outcome()

    async def arun(self, work: Callable[[Transaction], T], size: int = 0) -> T:
        """Do the same as `run` for a coroutine, without blocking its event loop.

        With a thread per call, the number of threads would limit the size of a group.
        """
        done = LoopSignal()
        call = _Call(work, size, done)
        self._put(call)
        await done.future
        return call.outcome()

    def _put(self, call: _Call[Any]) -> None:
        if self._pid != os.getpid():
            raise UsageError(
                reason="this broker was opened before the process forked; open a broker in each"
                " process"
            )
        with self._closing:
            if self._closed:
                raise UsageError(reason="this broker is closed; open a new one")
            self._begun += 1
            self._calls.put(call)

    def close(self) -> None:
        """Finish the pending calls and close the file. Idempotent."""
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
        """Commit the next group; return False once closed."""
        calls, closing = self._take()
        if calls:
            error = self._attempt(calls)
            if error is not None:
                self._attempt_each(calls, error)
            self._ended_calls += len(calls)
        return not closing

    def _take(self) -> tuple[list[_Call[Any]], bool]:
        """Wait for a call; return it with the calls queued behind it, and whether to close."""
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
        """Commit `calls` in one transaction; return the error, None on success."""
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
            wakeup_pipes.notify_all(self._wakeups)
        for call in calls:
            call.done.set()
        return None

    def _commit(self, calls: list[_Call[Any]]) -> bool:
        connection = self._connection
        transaction = Transaction(connection, self._app, self._clock, self._limit())
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
        # Only now is it certain that the commit is in the file that other processes open.
        self._watch.check()
        return transaction.rings
