"""The connections of an app to its coordinator, apart from those of its workers."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from qdo.errors import UsageError

if TYPE_CHECKING:
    from qdo.coordination.client import Client
    from qdo.coordination.znodes.layout import Layout
    from qdo.settings.settings import Settings


class Closable(Protocol):
    """A connection that belongs to one process."""

    @property
    def pid(self) -> int: ...

    @property
    def over(self) -> bool: ...

    def close(self) -> None: ...


_Opened = TypeVar("_Opened", bound=Closable)
_Used = TypeVar("_Used")


class ProcessConnection(Generic[_Opened, _Used]):
    """A connection that is opened at its first use, again after a fork, and when it is over.

    :param open: opens it.
    """

    def __init__(self, app: str, open: Callable[[], _Opened]) -> None:
        self._app = app
        self._open = open
        self._lock = threading.Lock()
        self._opened: _Opened | None = None
        self._inherited: list[_Opened] = []
        self._stand_in: _Used | None = None
        _connections.add(self)

    def get(self) -> _Opened | _Used:
        """Return the connection of this process.

        :raises CoordinatorUnreachableError: the coordinator does not respond.
        """
        if self._stand_in is not None:
            return self._stand_in
        opened = self._opened
        if opened is not None and opened.pid == os.getpid() and not opened.over:
            return opened
        from qdo.system.home_loop import at_home

        return at_home(self._get)

    def _get(self) -> _Opened:
        with self._lock:
            opened = self._opened
            if opened is not None and opened.pid != os.getpid():
                # A forked child must not close its parent's connection.
                self._inherited.append(opened)
                opened = None
            if opened is None or opened.over:
                opened = self._opened = self._open()
            return opened

    @contextmanager
    def override(self, stand_in: _Used) -> Iterator[None]:
        """Use something else until the block ends, for `qdo.testing`."""
        if self._stand_in is not None:
            raise UsageError(
                reason=f"app {self._app!r} is being tested by another TestKit; close that first"
            )
        self._stand_in = stand_in
        try:
            yield
        finally:
            self._stand_in = None

    def close(self) -> None:
        """Close the connection; the next use opens it again."""
        with self._lock:
            opened, self._opened = self._opened, None
        if opened is not None and opened.pid == os.getpid():
            opened.close()

    def renew_lock(self) -> None:
        """Replace the lock, which another thread of the parent may have held."""
        self._lock = threading.Lock()


_connections: weakref.WeakSet[Any] = weakref.WeakSet()


def _renew_locks() -> None:
    for connection in list(_connections):
        connection.renew_lock()


os.register_at_fork(after_in_child=_renew_locks)


def open_client(settings: Settings, app: str) -> tuple[Client, Layout]:
    """Return a connected client of an app's coordinator.

    :raises CoordinatorUnreachableError: it does not respond in time.
    """
    # Imported late: most senders need no coordinator.
    from qdo.coordination.client import connect
    from qdo.coordination.side import fitting_handler
    from qdo.coordination.znodes.layout import Layout
    from qdo.settings.coordinator_access import coordinator_access
    from qdo.settings.hosts import share_files

    share_files(settings)
    layout = Layout.of(app, settings.namespace)
    client = connect(
        settings.coordinator,
        access=coordinator_access(settings, layout),
        handler=fitting_handler(),
        session_timeout_seconds=settings.session_timeout_seconds,
    )
    client.open(settings.connect_seconds)
    return client, layout
