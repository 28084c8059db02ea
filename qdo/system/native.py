"""Native threads, even in a process whose threads gevent has replaced by greenlets.

Waiting for a lock between processes or for the disk blocks a native thread. In a process
with greenlets that would block all of them: such waits need a thread of their own.

Several requests run at the same time, with or without gevent. The standard library's threads are
greenlets once gevent has patched the process.
"""

from __future__ import annotations

import _queue
import _thread
import contextlib
import ctypes
import logging
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from qdo.errors import UsageError

if TYPE_CHECKING:
    import asyncio


_log = logging.getLogger(__name__)

# Calls of `run_parallel` at the same time.
AT_ONCE = 8

_T = TypeVar("_T")
_R = TypeVar("_R")


def check_no_eventlet() -> None:
    """Raise UsageError in a process that eventlet has patched: its locks stop native threads."""
    patcher: Any = sys.modules.get("eventlet.patcher")
    if patcher is not None and patcher.is_monkey_patched("thread"):
        raise UsageError(
            reason="eventlet must not patch a process that uses qdo, because a call would wait "
            "forever; use gevent, or processes of their own"
        )


def original(module: str, name: str, patched: Any) -> Any:
    """Return the original of an object that gevent patched, else `patched`."""
    monkey: Any = sys.modules.get("gevent.monkey")
    return patched if monkey is None else monkey.get_original(module, name)


def start_thread(function: Callable[..., None], *args: Any) -> int:
    """Run `function` on a native thread that does not keep the process alive; return its ident."""
    ident: int = original("_thread", "start_new_thread", _thread.start_new_thread)(function, args)
    return ident


_on_death: list[Callable[[str], None]] = []


@contextlib.contextmanager
def reported_deaths(report: Callable[[str], None]) -> Iterator[None]:
    """Within the block, call `report` on each guarded thread that dies, with its name."""
    _on_death.append(report)
    try:
        yield
    finally:
        _on_death.remove(report)


def guarded(name: str, function: Callable[[], None]) -> Callable[[], None]:
    """Return the function for a thread that must live as long as its process needs it.

    If it raises an error, that is logged and reported: see `reported_deaths`.
    """

    def run() -> None:
        try:
            function()
        except Exception:  # noqa: BLE001 - whatever it was, its process must not run on
            _log.critical("the thread %r died; a worker process stops", name, exc_info=True)
            for report in _on_death:
                report(name)

    return run


def inbox() -> queue.SimpleQueue[Any]:
    """Return a queue whose get() blocks a native thread and whose put() never blocks."""
    return _queue.SimpleQueue()


def native_lock() -> Any:
    """Return a lock between any threads, to be held only while no greenlet is switched."""
    return original("_thread", "allocate_lock", _thread.allocate_lock)()


def native_rlock() -> Any:
    """Return a reentrant `native_lock`; all greenlets of a thread count as one owner."""
    return original("_thread", "RLock", _thread.RLock)()


def sleep(seconds: float) -> None:
    """Block the calling native thread."""
    original("time", "sleep", time.sleep)(seconds)


_set_async_exception: Any = ctypes.pythonapi.PyThreadState_SetAsyncExc
_set_async_exception.argtypes = (ctypes.c_ulong, ctypes.py_object)


def raise_in_thread(ident: int, kind: type[BaseException]) -> None:
    """Raise an exception at the next Python step of a thread; calls into C code continue."""
    _set_async_exception(ident, ctypes.py_object(kind))


def cancel_raise(ident: int) -> None:
    """Cancel an exception of `raise_in_thread` that the thread has not raised yet."""
    _set_async_exception(ident, ctypes.py_object())


class Settable(Protocol):
    """Set once by a native thread."""

    def set(self) -> None:
        """Let the waiting thread, greenlet or coroutine continue."""


class Signal(Settable, Protocol):
    """One thread or greenlet waits for it."""

    def wait(self) -> None:
        """Wait until it is set; under gevent, let other greenlets run."""


def signal() -> Signal:
    """Return a signal for the calling thread or greenlet."""
    monkey: Any = sys.modules.get("gevent.monkey")
    if monkey is not None and monkey.is_module_patched("threading"):
        return _GreenletSignal()
    return _ThreadSignal()


class LoopSignal:
    """A coroutine of the running asyncio loop waits for it, as `future`."""

    __slots__ = ("_loop", "future")

    def __init__(self) -> None:
        import asyncio  # slow to import, and most senders do not need it

        self._loop = asyncio.get_running_loop()
        self.future: asyncio.Future[None] = self._loop.create_future()

    def set(self) -> None:
        with contextlib.suppress(RuntimeError):  # the loop was closed: nothing waits anymore
            self._loop.call_soon_threadsafe(self._finish)

    def _finish(self) -> None:
        if not self.future.done():  # cancelled, as by a timeout; the work itself continues
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
    """Uses a watcher of the event loop. Another thread can also release gevent's locks, but a
    loop without anything else to wait for would end with LoopExit."""

    __slots__ = ("_event", "_watcher")

    def __init__(self) -> None:
        import gevent
        import gevent.event

        self._event: Any = gevent.event.Event()
        self._watcher: Any = gevent.get_hub().loop.async_()
        self._watcher.start(self._event.set)

    def set(self) -> None:
        with contextlib.suppress(ValueError):  # its thread was interrupted, and has ended its loop
            self._watcher.send()

    def wait(self) -> None:
        try:
            self._event.wait()
        finally:
            self._watcher.stop()


def run_parallel(act: Callable[[_T], _R], items: Sequence[_T]) -> list[_R]:
    """Call `act` for each item, several at a time; return the results in order."""
    if len(items) < 2:
        return list(map(act, items))
    with ThreadPoolExecutor(min(AT_ONCE, len(items))) as pool:
        return list(pool.map(act, items))
