"""Group commit: all writes to the embedded broker's file go through one native thread.

The thread commits the calls of a group together: one transaction, one sync, one wakeup. If a group
fails, each of its calls is retried in a separate transaction, so that each call gets its own error.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar

from qdo.brokers.embedded.fork_guard import ForkGuard, unforked
from qdo.brokers.embedded.schema import MESSAGES
from qdo.brokers.embedded.transaction import Transaction
from qdo.brokers.embedded.write_lock import FairWriteLock
from qdo.brokers.grouped_calls import GroupedCall, GroupedCalls
from qdo.positions import position_now
from qdo.system import wakeup_pipes
from qdo.system.sqlite import ReplacedFileCheck, open_database, translate, translated

T = TypeVar("T")
Work: TypeAlias = Callable[[Transaction], Any]


class Writer(GroupedCalls[Work]):
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
        super().__init__("writer")
        self.commits = 0
        self._path = path
        self._app = app
        self._wakeups = wakeups
        self._clock = clock
        self._limit = limit
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
        self.start()

    def run(self, work: Callable[[Transaction], T], size: int = 0) -> T:
        """Run `work` in a transaction; return its result once the transaction is on disk.

        `work` runs on the writing thread, and runs again if its group failed.

        :param size: approximate number of bytes that it adds.
        """
        result: T = self.call(work, size)
        return result

    async def arun(self, work: Callable[[Transaction], T], size: int = 0) -> T:
        """Do the same as `run` for a coroutine, without blocking its event loop."""
        result: T = await self.acall(work, size)
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
        """Commit `calls` in one transaction; return the error, None on success."""
        try:
            with self._fork_guard:
                rings, results = self._commit(calls)
        except sqlite3.Error as error:
            translation = translate(self._path, error)
            translation.__cause__ = error
            return translation
        except BaseException as error:  # noqa: BLE001 - it is raised where the call was made
            return error
        self.commits += 1
        if rings:
            wakeup_pipes.notify_all(self._wakeups)
        for call, result in zip(calls, results, strict=True):
            call.finish(result)
        return None

    def _commit(self, calls: list[GroupedCall[Work]]) -> tuple[bool, list[Any]]:
        """Return whether listeners must be woken, and the result of each call."""
        connection = self._connection
        transaction = Transaction(connection, self._app, self._clock, self._limit())
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
        # Only now is it certain that the commit is in the file that other processes open.
        self._watch.check()
        return transaction.rings, results
