"""Forking a process that has SQLite files open.

SQLite notes, per process and file, which locks it holds. A forked child inherits the notes but
not the locks. Its own connections would rely on them: the last connection of the parent would
delete the log under the child, and a transaction that was under way at the fork would keep the
child from writing for ever. So no fork happens within a transaction, and the child takes the
locks that its notes speak of.

SQLite's own mutexes are copied as they are. One that another thread held at the fork, if only
to read, is never released in the child. So no fork happens while a connection is in use, either.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import weakref
from collections.abc import Callable

from qdo.brokers.embedded_native import native_lock, native_rlock

# https://www.sqlite.org/fileformat2.html#the_lock_byte_page: the shared lock of a database, and
# the one of its log's index by which SQLite knows that somebody uses it.
_DATABASE_LOCK = (0x40000002, 510)
_INDEX_LOCK = (128, 1)

unforked = native_rlock()
"""Keeps forks out of what is done with a connection: opening, closing, and each use of one for
reading. The writing connection has a guard instead: others need not wait for its commits.

Held from the first opening of a file until that has a guard; never while waiting for another
thread. A fork takes it first and then the guards, so who holds a guard must not ask for it.
"""

_kept: list[int] = []
"""Never closed: closing any descriptor of a file gives up all locks of the process on it."""


class ForkGuard:
    """Keeps forks out of the transactions on a file: to be held around each of them.

    To be made while `unforked` is held, which also keeps the forks of two threads apart.

    :param forget: called in a forked child, and in its children: more than once.
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
        """Take note that the file is closed: forks are none of its business any more.

        To be called while it is held. A fork that waits for it meanwhile finds it closed.
        """
        self._closed = True

    def begin_in_child(self) -> None:
        """Take the locks that SQLite takes for its own, and let go of the rest."""
        self._lock.release()
        if self._closed:
            return
        self._forget()
        for path, (start, length) in (
            (self._path, _DATABASE_LOCK),
            (f"{self._path}-shm", _INDEX_LOCK),
        ):
            # If it is gone, so that there is nothing to share, `FileWatch` will say so.
            with contextlib.suppress(FileNotFoundError):
                descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
                _kept.append(descriptor)
                fcntl.lockf(descriptor, fcntl.LOCK_SH, length, start)


_guards: set[weakref.ref[ForkGuard]] = set()
_held: list[ForkGuard] = []
"""Those held for the fork under way."""


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
