"""Sharing the write lock of a file fairly among processes."""

from __future__ import annotations

import fcntl
import os
import sqlite3
import time
from collections.abc import Callable

from qdo.errors import DatabaseBusyError
from qdo.system.files import Rights, make_folder, open_file, opened_folder
from qdo.system.native import sleep
from qdo.system.sqlite import is_busy

BUSY_SECONDS = 30.0
GATE_SECONDS = 1.0
"""Longest wait at the gate: a process that is suspended inside must not block all others."""
_EAGER_SECONDS = 0.05
_EAGER_PAUSE_SECONDS = 0.0001
_PATIENT_PAUSE_SECONDS = 0.001


class FairWriteLock:
    """Lets one process at a time try to take the write lock.

    In SQLite, waiting writers sleep for up to 100 ms, and a process that commits without pause
    starves the others. Behind the gate, only one process tries, and it tries often. The process
    that just had the lock must pass the gate again, after the process that is already there. The
    gate only adds fairness: SQLite's lock still decides which process writes.
    """

    def __init__(self, path: str, folder: str) -> None:
        """Create the gate of the database `path` in `folder`."""
        self._path = path
        self._file = -1
        if not os.access(path, os.W_OK):
            return  # SQLite refuses to write
        rights = Rights.of(path)
        make_folder(folder, rights)
        with opened_folder(folder) as at:
            self._file = open_file(".gate", os.O_RDWR, rights, at)

    def begin(self, connection: sqlite3.Connection) -> None:
        """Begin a transaction that holds the write lock; blocks the native thread.

        :raises DatabaseBusyError: the lock was not available for BUSY_SECONDS.
        """
        entered = self._file >= 0 and _repeat(self._enter, GATE_SECONDS)
        try:
            if not _repeat(lambda: _begin(connection), BUSY_SECONDS):
                raise DatabaseBusyError(path=self._path, seconds=BUSY_SECONDS)
        finally:
            if entered:
                fcntl.flock(self._file, fcntl.LOCK_UN)

    def close(self) -> None:
        """Close the file. Idempotent."""
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
    """Repeat `attempt` until it succeeds; return False after `seconds`.

    A commit takes less than a millisecond, so the pauses begin short and stay short. With doubling
    pauses, the slowest 1 % of sends of four busy processes take 12 ms; with these, 6 ms. A longer
    wait means that a process is suspended.
    """
    began = time.monotonic()
    while not attempt():
        waited = time.monotonic() - began
        if waited >= seconds:
            return False
        sleep(_EAGER_PAUSE_SECONDS if waited < _EAGER_SECONDS else _PATIENT_PAUSE_SECONDS)
    return True
