"""The requests of an app in memory: the statements of the embedded broker, without its file."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar, cast

from qdo.brokers.base import Outgoing
from qdo.brokers.embedded.requests import EmbeddedRequests
from qdo.brokers.embedded.schema import REQUESTS
from qdo.brokers.embedded.writer import Transaction, Writer

T = TypeVar("T")


class RequestContents:
    """The requests of an app, and their listeners. The connection is shared under a lock."""

    def __init__(self) -> None:
        self.listeners: dict[object, Callable[[], None]] = {}
        self.connection = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
        self.connection.executescript(REQUESTS)


class MemoryWriter:
    """Runs changes one after the other, each in a transaction."""

    def __init__(
        self,
        contents: RequestContents,
        lock: AbstractContextManager[Any],
        clock: Callable[[], int],
    ) -> None:
        self.clock = clock
        self._contents = contents
        self._lock = lock
        self.wakes: list[Callable[[], None]] = []

    def run(self, work: Callable[[Transaction], T], size: int = 0) -> T:
        """Run a change; wake listeners of messages and of requests once the lock is free."""
        connection, listeners = self._contents.connection, self._contents.listeners
        with self._lock:
            transaction = Transaction(connection, "", self.clock)
            connection.execute("BEGIN")
            try:
                result = work(transaction)
            except BaseException:
                self.wakes.clear()
                connection.execute("ROLLBACK")
                raise
            connection.execute("COMMIT")
            wakes, self.wakes = self.wakes, []
            wakes += listeners.values() if transaction.wakes_takers else ()
        for wake in wakes:
            wake()
        return result


class MemoryRequests(EmbeddedRequests):
    """The requests of one app. Safe to use from several threads.

    :param send: stores messages with the lock held; returns a function that wakes the listeners
        of their queues, to be called without the lock.
    """

    def __init__(
        self,
        contents: RequestContents,
        lock: AbstractContextManager[Any],
        clock: Callable[[], int],
        send: Callable[[Sequence[Outgoing]], Callable[[], None]],
    ) -> None:
        self._memory = MemoryWriter(contents, lock, clock)
        writer = cast(Writer, self._memory)
        super().__init__(contents.connection, ":memory:", "", writer, 0, lambda message: 0)
        self._contents = contents
        self._lock = lock
        self._sent = send

    @contextlib.contextmanager
    def _reads(self) -> Iterator[sqlite3.Connection]:
        with self._lock:
            yield self._reading

    def _send(self, transaction: Transaction, messages: Sequence[Outgoing]) -> None:
        self._memory.wakes.append(self._sent(messages))

    def listen(self, wake: Callable[[], None]) -> Callable[[], None]:
        key = object()
        with self._lock:
            self._contents.listeners[key] = wake

        def stop() -> None:
            with self._lock:
                self._contents.listeners.pop(key, None)

        return stop
