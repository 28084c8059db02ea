"""Running blocking calls without stopping the greenlets of the process.

Waiting for a lock or for the disk blocks a native thread. In a process whose threads gevent
has replaced by greenlets that would stop all of them, so such calls go to a native thread
of their own; elsewhere the calling thread makes them itself, which is quicker.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

T = TypeVar("T")


class Native(Protocol):
    """Makes blocking calls."""

    def call(self, function: Callable[[], T]) -> T:
        """Return what `function` returns, having blocked nobody but the caller."""

    def lock(self) -> Any:
        """Return a lock between native threads."""

    def sleep(self, seconds: float) -> None:
        """Block the calling native thread."""

    def close(self) -> None:
        """Let go of the threads."""


def native() -> Native:
    """Return what suits this process; gevent is not imported where it is not in use."""
    monkey: Any = sys.modules.get("gevent.monkey")
    if monkey is not None and monkey.is_module_patched("threading"):
        return _OnThreadPool()
    return _Direct()


class _Direct:
    def call(self, function: Callable[[], T]) -> T:
        return function()

    def lock(self) -> Any:
        return threading.Lock()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def close(self) -> None:
        """Nothing is held."""


class _OnThreadPool:
    """One native thread for each hub that calls, apart from gevent's own pool: name look-ups
    that hang may take up all of that one."""

    def __init__(self) -> None:
        self._pools: dict[Any, Any] = {}

    def call(self, function: Callable[[], T]) -> T:
        import gevent

        hub: Any = gevent.get_hub()
        pool = self._pools.get(hub)
        if pool is None:
            from gevent.threadpool import ThreadPool

            pool = self._pools.setdefault(hub, ThreadPool(1, hub=hub))
        result: T = pool.apply(function)
        return result

    def lock(self) -> Any:
        import gevent.monkey

        return gevent.monkey.get_original("threading", "Lock")()

    def sleep(self, seconds: float) -> None:
        import gevent.monkey

        gevent.monkey.get_original("time", "sleep")(seconds)

    def close(self) -> None:
        import gevent

        pool = self._pools.pop(gevent.get_hub(), None)
        if pool is not None:
            pool.kill()
        self._pools.clear()
