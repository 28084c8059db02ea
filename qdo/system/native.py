"""Native threads, even in a process in which gevent has replaced threads with greenlets.

Waiting for the disk, or for a lock between processes, blocks a native thread and all its greenlets.
Therefore such waits need a separate thread.

`run_parallel` is the exception: it uses threads of the standard library, which are greenlets after
gevent has patched the process.
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

# Maximum number of concurrent calls in `run_parallel`.
AT_ONCE = 8

_T = TypeVar("_T")
_R = TypeVar("_R")


def check_no_eventlet() -> None:
    """Raise UsageError in a process with eventlet, whose locks block native threads."""
    patcher: Any = sys.modules.get("eventlet.patcher")
    if patcher is not None and patcher.is_monkey_patched("thread"):
        raise UsageError(
            reason="eventlet must not patch a process that uses qdo, because a call would wait "
            "forever; use gevent, or processes of their own"
        )


def original(module: str, name: str, patched: Any) -> Any:
    """Return the original of an object that gevent has replaced, or `patched` without gevent."""
    monkey: Any = sys.modules.get("gevent.monkey")
    return patched if monkey is None else monkey.get_original(module, name)


def start_thread(function: Callable[..., None], *args: Any) -> int:
    """Run `function` on a native daemon thread; return the ident of the thread."""
    ident: int = original("_thread", "start_new_thread", _thread.start_new_thread)(function, args)
    return ident


_on_death: list[Callable[[str], None]] = []


@contextlib.contextmanager
def reported_deaths(report: Callable[[str], None]) -> Iterator[None]:
    """Call `report` with the name of each guarded thread that dies within the block."""
    _on_death.append(report)
    try:
        yield
    finally:
        _on_death.remove(report)


def guarded(name: str, function: Callable[[], None]) -> Callable[[], None]:
    """Wrap the function of a thread that must not die before its process.

    The wrapper logs and reports an error of the function (see `reported_deaths`).
    """

    def run() -> None:
        try:
            function()
        except Exception:  # noqa: BLE001 - after any error, the process must end
            _log.critical("the thread %r died; a worker process stops", name, exc_info=True)
            for report in _on_death:
                report(name)

    return run


def inbox() -> queue.SimpleQueue[Any]:
    """Return a queue whose get() blocks a native thread and whose put() never blocks."""
    return _queue.SimpleQueue()


def native_lock() -> Any:
    """Return a lock between any threads. The holder must not switch greenlets."""
    return original("_thread", "allocate_lock", _thread.allocate_lock)()


def native_rlock() -> Any:
    """Return a reentrant `native_lock`. All greenlets of a thread count as one owner."""
    return original("_thread", "RLock", _thread.RLock)()


def sleep(seconds: float) -> None:
    """Block the calling native thread."""
    original("time", "sleep", time.sleep)(seconds)


_set_async_exception: Any = ctypes.pythonapi.PyThreadState_SetAsyncExc
_set_async_exception.argtypes = (ctypes.c_ulong, ctypes.py_object)


def raise_in_thread(ident: int, kind: type[BaseException]) -> None:
    """Raise an exception at the next Python step of a thread. A running C call first ends."""
    _set_async_exception(ident, ctypes.py_object(kind))


def cancel_raise(ident: int) -> None:
    """Cancel an exception from `raise_in_thread` that the thread has not raised yet."""
    _set_async_exception(ident, ctypes.py_object())


class Settable(Protocol):
    """A signal that a native thread sets once."""

    def set(self) -> None:
        """Let the waiting thread, greenlet or coroutine continue."""


class Signal(Settable, Protocol):
    """A signal that one thread or greenlet waits for."""

    def wait(self) -> None:
        """Wait until the signal is set. Under gevent, let other greenlets run."""


def signal() -> Signal:
    """Return a signal for the calling thread or greenlet."""
    monkey: Any = sys.modules.get("gevent.monkey")
    if monkey is not None and monkey.is_module_patched("threading"):
        return _GreenletSignal()
    return _ThreadSignal()


class LoopSignal:
    """A signal for a coroutine of the running asyncio loop, which awaits `future`."""

    __slots__ = ("_loop", "future")

    def __init__(self) -> None:
        import asyncio  # importing asyncio is slow, and most senders do not need it

        self._loop = asyncio.get_running_loop()
        self.future: asyncio.Future[None] = self._loop.create_future()

    def set(self) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed, so no coroutine waits anymore
            self._loop.call_soon_threadsafe(self._finish)

    def _finish(self) -> None:
        if not self.future.done():  # a timeout, for example, cancels only the future
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
    """A signal that uses a watcher of the event loop. With a lock of gevent, a loop that waits for
    nothing else would end with LoopExit."""

    __slots__ = ("_event", "_watcher")

    def __init__(self) -> None:
        import gevent
        import gevent.event

        self._event: Any = gevent.event.Event()
        self._watcher: Any = gevent.get_hub().loop.async_()
        self._watcher.start(self._event.set)

    def set(self) -> None:
        with contextlib.suppress(ValueError):  # the interrupted thread has ended its loop
            self._watcher.send()

    def wait(self) -> None:
        try:
            self._event.wait()
        finally:
            self._watcher.stop()


def run_parallel(act: Callable[[_T], _R], items: Sequence[_T]) -> list[_R]:
    """Call `act` for each item, several items at a time. Return the results in order."""
    if len(items) < 2:
        return list(map(act, items))
    with ThreadPoolExecutor(min(AT_ONCE, len(items))) as pool:
        return list(pool.map(act, items))
