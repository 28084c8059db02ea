"""Telling a worker which queues of the embedded broker got messages."""

from __future__ import annotations

import logging
import math
import select
import sqlite3
import threading
from collections.abc import Callable, Iterable

from qdo.brokers.embedded_fork import unforked
from qdo.doorbell import Doorbell
from qdo.errors import DatabaseError
from qdo.storage import translate

log = logging.getLogger(__name__)

LOOK_SECONDS = 5.0
"""A look without a ring: a sender may have died between its commit and the ring."""

_CHANGED = "SELECT head, app, name FROM queues WHERE head > ? ORDER BY head"
_NEWEST = "SELECT max(head) FROM queues"


class Listener:
    """Waits for the doorbell on a thread (a greenlet under gevent), and for due messages.

    :param move: moves messages that are due into their queues; returns the seconds until it
        has more to do, None while there is nothing.
    """

    def __init__(
        self,
        connection: sqlite3.Connection,
        path: str,
        app: str,
        bells: str,
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
        self._stopping = False
        self._closed = False
        self._closing = threading.Lock()  # so that none rings a bell that is closed
        # First the bell, then the look: what is sent from here on is announced.
        self._bell = Doorbell(bells)
        try:
            with unforked:
                (newest,) = connection.execute(_NEWEST).fetchone()
        except sqlite3.Error as error:
            self._bell.close()
            raise translate(path, error) from error
        self._seen: int = newest or 0
        self._thread = threading.Thread(target=self._run, name="qdo-doorbell", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End it; no call of `wake` follows. Idempotent."""
        self._stopping = True
        if self._thread.is_alive():
            with self._closing:
                if not self._closed:
                    self._bell.ring_self()
            if threading.current_thread() is not self._thread:
                self._thread.join()

    def step(self) -> float:
        """Move what is due, look once, wake for what changed; return how long to wait."""
        left = self._move()
        names = self._changed()
        if names and not self._stopping:
            self._wake(names)
        return self._look_seconds if left is None else min(left, self._look_seconds)

    def _run(self) -> None:
        poll = select.poll()
        poll.register(self._bell.fileno(), select.POLLIN)
        try:
            while not self._stopping:
                # Rounded up: a moment too early, nothing would be due.
                poll.poll(math.ceil(self._step_or_warn() * 1000))
                self._bell.drain()
        finally:
            with self._closing:
                self._closed = True
                self._bell.close()

    def _step_or_warn(self) -> float:
        try:
            return self.step()
        except DatabaseError as error:
            log.warning("%s; looking again in %g s", error, self._look_seconds)
            return self._look_seconds

    def _changed(self) -> list[str]:
        names: list[str] = []
        try:
            with unforked:
                changed = self._connection.execute(_CHANGED, (self._seen,)).fetchall()
        except sqlite3.Error as error:
            raise translate(self._path, error) from error
        for head, app, name in changed:
            self._seen = head
            if app == self._app:
                names.append(name)
        return names
