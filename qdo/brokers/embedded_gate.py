"""Taking the write lock of a file in turn with other processes."""

from __future__ import annotations

import fcntl
import os
import sqlite3
import time
from collections.abc import Callable

from qdo.brokers.embedded_native import sleep
from qdo.errors import DatabaseBusyError
from qdo.storage import is_busy

BUSY_SECONDS = 30.0
GATE_SECONDS = 1.0
"""Longest wait at the gate; a process that was stopped in it must not stop all others."""
_EAGER_SECONDS = 0.05
_EAGER_PAUSE_SECONDS = 0.0001
_PATIENT_PAUSE_SECONDS = 0.001


class Gate:
    """Lets one process at a time try for the write lock.

    SQLite lets waiting writers sleep up to 100 ms and take their chance, and a process that
    commits without pause keeps the others out. At the gate only one process tries, often; the
    one that just had the lock must come through the gate again, behind the one already there.
    The gate is for fairness only: who writes is decided by SQLite's lock.
    """

    def __init__(self, path: str, folder: str) -> None:
        """Make the gate of the database `path` in `folder`."""
        self._path = path
        os.makedirs(folder, exist_ok=True)
        self._file = os.open(
            os.path.join(folder, ".gate"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666
        )

    def begin(self, connection: sqlite3.Connection) -> None:
        """Begin a transaction that holds the write lock; blocks the native thread.

        :raises DatabaseBusyError: the lock was not to be had for BUSY_SECONDS.
        """
        entered = _repeat(self._enter, GATE_SECONDS)
        try:
            if not _repeat(lambda: _begin(connection), BUSY_SECONDS):
                raise DatabaseBusyError(path=self._path, seconds=BUSY_SECONDS)
        finally:
            if entered:
                fcntl.flock(self._file, fcntl.LOCK_UN)

    def close(self) -> None:
        """Let go of the file; idempotent."""
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
    """Repeat `attempt` until it succeeds or the time is over.

    A commit takes less than a millisecond, so the pauses begin short and stay so: with pauses
    that double, four processes that send without pause take 12 ms for the slowest 1 % of their
    sends, with these 6 ms. A longer wait means that somebody is stopped.
    """
    began = time.monotonic()
    while not attempt():
        waited = time.monotonic() - began
        if waited >= seconds:
            return False
        sleep(_EAGER_PAUSE_SECONDS if waited < _EAGER_SECONDS else _PATIENT_PAUSE_SECONDS)
    return True
