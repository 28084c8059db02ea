"""Telling a worker which queues of the embedded broker got messages."""

from __future__ import annotations

import logging
import select
import sqlite3
import threading
from collections.abc import Callable, Iterable

from qdo.doorbell import Doorbell
from qdo.errors import DatabaseError
from qdo.storage import translate

log = logging.getLogger(__name__)

LOOK_SECONDS = 5.0
"""A look without a ring: a sender may have died between its commit and the ring."""

_CHANGED = "SELECT head, app, name FROM queues WHERE head > ? ORDER BY head"
_NEWEST = "SELECT max(head) FROM queues"


class Listener:
    """Waits for the doorbell on a thread (a greenlet under gevent)."""

    def __init__(
        self,
        connection: sqlite3.Connection,
        path: str,
        app: str,
        bells: str,
        wake: Callable[[Iterable[str]], None],
        look_seconds: float,
    ) -> None:
        self._connection = connection
        self._path = path
        self._app = app
        self._wake = wake
        self._look_seconds = look_seconds
        self._stopping = False
        # First the bell, then the look: what is sent from here on is announced.
        self._bell = Doorbell(bells)
        try:
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
            self._bell.ring_self()
            if threading.current_thread() is not self._thread:
                self._thread.join()

    def step(self) -> None:
        """Look once, and wake for what changed."""
        names = self._changed()
        if names and not self._stopping:
            self._wake(names)

    def _run(self) -> None:
        poll = select.poll()
        poll.register(self._bell.fileno(), select.POLLIN)
        try:
            while not self._stopping:
                poll.poll(self._look_seconds * 1000)
                self._bell.drain()
                self._step_or_warn()
        finally:
            self._bell.close()

    def _step_or_warn(self) -> None:
        try:
            self.step()
        except DatabaseError as error:
            log.warning("%s; looking again in %g s", error, self._look_seconds)

    def _changed(self) -> list[str]:
        names: list[str] = []
        try:
            for head, app, name in self._connection.execute(_CHANGED, (self._seen,)).fetchall():
                self._seen = head
                if app == self._app:
                    names.append(name)
        except sqlite3.Error as error:
            raise translate(self._path, error) from error
        return names
