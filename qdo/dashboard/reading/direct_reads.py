"""Reads that only some pages need, kept for a few seconds and shared by all clients."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from concurrent.futures import Future, TimeoutError
from typing import Any, TypeVar

from qdo.dashboard.reading.connected_thread import ConnectedThread
from qdo.errors import QdoError, SlowReadError
from qdo.sending.connections import Connections
from qdo.settings.settings import Settings
from qdo.system.clock import clock

KEPT_SECONDS = 5.0
MOST_KEPT = 64
PATIENCE_SECONDS = 10.0

_Result = TypeVar("_Result")


class DirectReads:
    """A thread for reads and actions beside those of the whole app.

    Ten clients that ask for the same within `KEPT_SECONDS` cause one read.

    :param patience_seconds: how long a page waits for a read.
    """

    def __init__(
        self, settings: Settings, name: str, patience_seconds: float = PATIENCE_SECONDS
    ) -> None:
        self._thread = ConnectedThread(settings, name)
        self._patience_seconds = patience_seconds
        self._lock = threading.Lock()
        self._kept: dict[Hashable, tuple[float, Future[Any]]] = {}

    def get(self, key: Hashable, read: Callable[[Connections], _Result]) -> _Result:
        """Return what `read` returns, or returned a moment ago.

        :raises UnreachableError: it takes too long.
        """
        with self._lock:
            began, future = self._kept.get(key, (0.0, None))
            if future is None or clock() - began > KEPT_SECONDS or _has_failed(future):
                self._forget_old()
                future = self._thread.submit(read)
                self._kept[key] = clock(), future
        kept: Future[_Result] = future
        return self._result(kept, self._patience_seconds)

    def run(self, change: Callable[[Connections], _Result]) -> _Result:
        """Change something; what was read before is read again."""
        future = self._thread.submit(change)
        try:
            return self._result(future, 10 * PATIENCE_SECONDS)
        finally:
            with self._lock:
                self._kept.clear()

    def close(self) -> None:
        """End the thread."""
        self._thread.close()

    def _result(self, future: Future[_Result], patience_seconds: float) -> _Result:
        try:
            return future.result(patience_seconds)
        except TimeoutError as error:
            raise SlowReadError(seconds=patience_seconds) from error

    def _forget_old(self) -> None:
        now = clock()
        for key, (began, _) in list(self._kept.items()):
            if now - began > KEPT_SECONDS or len(self._kept) >= MOST_KEPT:
                del self._kept[key]


def _has_failed(future: Future[Any]) -> bool:
    return future.done() and isinstance(future.exception(), QdoError | OSError | RuntimeError)
