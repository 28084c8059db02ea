"""Native threads, also in a process whose threads gevent has replaced by greenlets.

Waiting for a lock between processes or for the disk blocks a native thread. In a process
with greenlets that would stop all of them, so it must happen on a thread of its own.
"""

from __future__ import annotations

import _thread
import contextlib
import queue
import sys
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import asyncio


def original(module: str, name: str, patched: Any) -> Any:
    """Return what gevent put a greenlet's version in place of; `patched` where it did not.

    gevent is not imported where it is not in use.
    """
    monkey: Any = sys.modules.get("gevent.monkey")
    return patched if monkey is None else monkey.get_original(module, name)


def start_thread(function: Callable[[], None]) -> None:
    """Run `function` on a native thread that does not keep the process alive."""
    original("_thread", "start_new_thread", _thread.start_new_thread)(function, ())


def inbox() -> queue.SimpleQueue[Any]:
    """Return a queue whose get() blocks a native thread and whose put() blocks nobody."""
    made: queue.SimpleQueue[Any] = original("queue", "SimpleQueue", queue.SimpleQueue)()
    return made


def native_lock() -> Any:
    """Return a lock for moments in which no greenlet is switched, between any threads."""
    return original("_thread", "allocate_lock", _thread.allocate_lock)()


def native_rlock() -> Any:
    """Return such a lock that a thread, with all its greenlets, may take more than once."""
    return original("_thread", "RLock", _thread.RLock)()


def sleep(seconds: float) -> None:
    """Block the calling native thread."""
    original("time", "sleep", time.sleep)(seconds)


class Settable(Protocol):
    """Set once by a native thread."""

    def set(self) -> None:
        """Let the waiting one go on."""


class Signal(Settable, Protocol):
    """Waited for by one thread or greenlet."""

    def wait(self) -> None:
        """Wait until it is set; under gevent other greenlets run meanwhile."""


def signal() -> Signal:
    """Return a signal for the calling thread or greenlet."""
    monkey: Any = sys.modules.get("gevent.monkey")
    if monkey is not None and monkey.is_module_patched("threading"):
        return _GreenletSignal()
    return _ThreadSignal()


class LoopSignal:
    """Waited for by a coroutine of the running asyncio loop, as `future`."""

    __slots__ = ("_loop", "future")

    def __init__(self) -> None:
        import asyncio  # takes a while, and most senders do without

        self._loop = asyncio.get_running_loop()
        self.future: asyncio.Future[None] = self._loop.create_future()

    def set(self) -> None:
        with contextlib.suppress(RuntimeError):  # the loop was closed: nobody waits any more
            self._loop.call_soon_threadsafe(self._finish)

    def _finish(self) -> None:
        if not self.future.done():  # cancelled, as by a time-out; what was begun goes on
            self.future.set_result(None)


class _ThreadSignal:
    __slots__ = ("_lock",)

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()

    def set(self) -> None:
        self._lock.release()

    def wait(self) -> None:
        self._lock.acquire()


class _GreenletSignal:
    """A watcher of the event loop: gevent's locks can be released by another thread too, but
    a loop with nothing else to wait for would give up with LoopExit."""

    __slots__ = ("_event", "_watcher")

    def __init__(self) -> None:
        import gevent
        import gevent.event

        self._event: Any = gevent.event.Event()
        self._watcher: Any = gevent.get_hub().loop.async_()
        self._watcher.start(self._event.set)

    def set(self) -> None:
        self._watcher.send()

    def wait(self) -> None:
        try:
            self._event.wait()
        finally:
            self._watcher.stop()
