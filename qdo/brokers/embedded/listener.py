"""Waking a worker when queues of the embedded broker receive messages."""

from __future__ import annotations

import logging
import math
import select
import sqlite3
import threading
from collections.abc import Callable, Iterable

from qdo.brokers.embedded.fork_guard import unforked
from qdo.brokers.embedded.query import INTEGER, MAYBE_INTEGER, TEXT, Query
from qdo.errors import DatabaseError
from qdo.system.files import Rights
from qdo.system.logs import RetryLog
from qdo.system.native import guarded
from qdo.system.sqlite import translate
from qdo.system.wakeup_pipes import WakeupPipe

log = logging.getLogger(__name__)

LOOK_SECONDS = 5.0
"""Time between looks without a wakeup: a sender may die between commit and wakeup."""

_CHANGED = Query(
    "SELECT head, app, name FROM queues WHERE head > ? ORDER BY head", INTEGER, TEXT, TEXT
)
_NEWEST = Query("SELECT max(head) FROM queues", MAYBE_INTEGER)


class CommitListener:
    """Waits for wakeups and due messages on a thread (a greenlet under gevent).

    :param wake: called with the names of the queues that received messages.
    :param move: moves due messages into their queues; returns the seconds until more are due, None
        without delayed messages.
    """

    def __init__(
        self,
        connection: sqlite3.Connection,
        path: str,
        app: str,
        wakeups: str,
        wake: Callable[[Iterable[str]], None],
        look_seconds: float,
        move: Callable[[], float | None],
    ) -> None:
        self._connection = connection
        self._path = path
        self._app = app
        self._wake = wake
        self._look_seconds = look_seconds
        self._move = move
        self._retries = RetryLog(log, f"file {path}")
        self._stopping = False
        self._closed = False
        self._closing = threading.Lock()  # so that `stop` does not notify a closed pipe
        # First the pipe, then the look: no message after the look goes unnoticed.
        self._pipe = WakeupPipe(wakeups, Rights.of(path))
        try:
            with unforked:
                (newest,) = _NEWEST.only(connection)
        except sqlite3.Error as error:
            self._pipe.close()
            raise translate(path, error) from error
        self._seen: int = newest or 0
        self._thread = threading.Thread(
            target=guarded("doorbell", self._run), name="qdo-doorbell", daemon=True
        )
        self._thread.start()

    def stop(self) -> None:
        """Stop listening; `wake` is not called afterwards. Idempotent."""
        self._stopping = True
        if self._thread.is_alive():
            with self._closing:
                if not self._closed:
                    self._pipe.ring_self()
            if threading.current_thread() is not self._thread:
                self._thread.join()

    def step(self) -> float:
        """Move due messages and wake changed queues; return the seconds to wait."""
        left = self._move()
        names = self._changed()
        if names and not self._stopping:
            self._wake(names)
        return self._look_seconds if left is None else min(left, self._look_seconds)

    def _run(self) -> None:
        poll = select.poll()
        poll.register(self._pipe.fileno(), select.POLLIN)
        try:
            while not self._stopping:
                # Rounded up: if it woke a moment too early, no message would be due.
                poll.poll(math.ceil(self._step_or_warn() * 1000))
                self._pipe.drain()
        finally:
            with self._closing:
                self._closed = True
                self._pipe.close()

    def _step_or_warn(self) -> float:
        try:
            pause = self.step()
        except DatabaseError as error:
            self._retries.failed(error, self._look_seconds)
            return self._look_seconds
        self._retries.succeeded()
        return pause

    def _changed(self) -> list[str]:
        names: list[str] = []
        try:
            with unforked:
                changed = _CHANGED.all(self._connection, (self._seen,))
        except sqlite3.Error as error:
            raise translate(self._path, error) from error
        for head, app, name in changed:
            self._seen = head
            if app == self._app:
                names.append(name)
        return names
