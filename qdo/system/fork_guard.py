"""Makes forks safe in a process that has SQLite files open.

SQLite records, per process and file, which locks it holds. A forked child inherits these records
but not the locks. The child's own connections would rely on the missing locks, and the last
connection of the parent would delete the write-ahead log while the child uses the log. A
transaction that was open at the fork would block the child's writes forever. Therefore a fork waits
until transactions end, and the child takes the locks that SQLite has recorded.

A fork also copies the state of SQLite's mutexes. If another thread held a mutex at the fork, even
for reading, the child could never take the mutex. Therefore a fork also waits while a connection is
in use.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import weakref
from collections.abc import Callable

from qdo.system.native import native_lock, native_rlock

# https://www.sqlite.org/fileformat2.html#the_lock_byte_page: the shared lock of a database, and
# the lock on the index of its log, which marks the database as in use.
_DATABASE_LOCK = (0x40000002, 510)
_INDEX_LOCK = (128, 1)

# A lock that delays forks while a thread opens, closes or reads a connection. The connection that
# writes has a `ForkGuard` instead. Therefore readers need not wait for its commits.
#
# Hold this lock from the opening of a file until the file has a guard. Never hold it while waiting
# for another thread. A fork takes this lock first and then the guards. Therefore code that holds a
# guard must not take this lock.
unforked = native_rlock()

# Descriptors that must stay open. Closing any descriptor of a file releases all locks of the
# process on the file.
_kept: list[int] = []


class ForkGuard:
    """Delays forks during the transactions on a file. Hold the guard around each transaction.

    Create the guard while holding `unforked`, which also serializes the forks of several threads.

    :param forget: a function to call in a forked child, and again in the child's own children.
    """

    def __init__(self, path: str, forget: Callable[[], None]) -> None:
        self._path = path
        self._forget = forget
        self._lock = native_lock()
        self._closed = False
        _guards.add(weakref.ref(self, _guards.discard))

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *raised: object) -> None:
        self._lock.release()

    def close(self) -> None:
        """Stop locking the file in forked children, because the file is closed."""
        # Call this method while holding the guard. A fork that waits for the guard then sees that
        # the guard is closed.
        self._closed = True

    def begin_in_child(self) -> None:
        """Take the locks that SQLite has recorded, and release everything else."""
        self._lock.release()
        if self._closed:
            return
        self._forget()
        locks = {self._path: _DATABASE_LOCK, f"{self._path}-shm": _INDEX_LOCK}
        for path, (start, length) in locks.items():
            # If the file is gone, parent and child share nothing, and `ReplacedFileCheck` reports
            # the loss. A user who can only read the file holds no important lock.
            with contextlib.suppress(FileNotFoundError, PermissionError):
                descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
                _kept.append(descriptor)
                fcntl.lockf(descriptor, fcntl.LOCK_SH, length, start)


_guards: set[weakref.ref[ForkGuard]] = set()
# The guards that the current fork holds.
_held: list[ForkGuard] = []


def _before() -> None:
    unforked.acquire()
    for reference in list(_guards):
        guard = reference()
        if guard is not None:
            guard.__enter__()
            _held.append(guard)


def _in_parent() -> None:
    while _held:
        _held.pop().__exit__()
    unforked.release()


def _in_child() -> None:
    try:
        while _held:
            _held.pop().begin_in_child()
    finally:
        unforked.release()


os.register_at_fork(before=_before, after_in_parent=_in_parent, after_in_child=_in_child)
