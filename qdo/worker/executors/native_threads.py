"""Makes the threads that coroutines start native, although gevent has patched `threading`.

With gevent's patches, a new thread is a greenlet of the thread that starts it. On the thread of the
asyncio loop, it would block all coroutines, and its code would find a running loop: Django's ORM
and `anyio.to_thread` start such threads. Elsewhere threads remain greenlets: a job in a greenlet
may start thousands.
"""

from __future__ import annotations

import _thread
import atexit
import contextlib
import functools
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import gevent
from gevent import monkey

from qdo.system.home_loop import leave_gevent, own_hub
from qdo.system.native import native_lock, original, start_thread

# How long the end of a process waits for native threads.
LEAVING_SECONDS = 1.0

# The locks of native threads, which they hold until they have left gevent.
_leaving: dict[int, Any] = {}
# Native threads whose new threads are native, too.
_starters: set[int] = set()
# The watchers that keep gevent's event loops alive in these threads.
_kept: dict[int, Any] = {}


@atexit.register
def _await_ends() -> None:
    # Python has joined the threads, but they still have to leave gevent. If the interpreter ends
    # meanwhile, the process dies of SIGSEGV or SIGABRT.
    deadline = time.monotonic() + LEAVING_SECONDS
    for left in list(_leaving.values()):
        left.acquire(timeout=max(0.0, deadline - time.monotonic()))


def _ident() -> int:
    ident: int = original("_thread", "get_ident", _thread.get_ident)()
    return ident


@contextlib.contextmanager
def native_threads() -> Iterator[None]:
    """Make the threads native that this thread starts within the block."""
    _patch()
    ident = _ident()
    _starters.add(ident)
    try:
        yield
    finally:
        _starters.discard(ident)
        _kept.pop(ident, None)


def _patch() -> None:
    patched: Any = threading
    # Python 3.13 has another function, and a handle with which threads wait for the end.
    name = "_start_joinable_thread" if sys.version_info >= (3, 13) else "_start_new_thread"
    start = getattr(patched, name)
    if start.__module__ == __name__ or not monkey.is_module_patched("threading"):
        return

    def start_here(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
        if _ident() not in _starters:
            return start(function, *args, **options)
        thread = _NativeThread(function, *(args[0] if name == "_start_new_thread" else ()))
        handle = options.get("handle")
        if handle is not None:
            handle._set_greenlet(thread)
        thread.start()
        return thread if handle is None else handle

    setattr(patched, name, start_here)


class _NativeThread:
    """A native thread that runs a function in a greenlet.

    For Python 3.13, it takes the place of the greenlet in the handle of a `threading.Thread`.
    """

    def __init__(self, function: Callable[..., Any], *args: Any) -> None:
        self._function = functools.partial(function, *args)
        self._begun = native_lock()
        self._begun.acquire()
        self._failure: Exception | None = None
        self._ended = threading.Event()

    @property
    def dead(self) -> bool:
        return self._ended.is_set()

    def join(self, timeout: float | None = None) -> None:
        self._ended.wait(timeout)

    def start(self) -> None:
        _keep_loop()  # this thread waits in it until the new one has begun
        start_thread(self._run)
        self._begun.acquire()
        if self._failure is not None:
            raise RuntimeError("can't start new thread") from self._failure

    def _run(self) -> None:
        left = native_lock()
        left.acquire()
        _leaving[_ident()] = left
        try:
            with native_threads():
                _keep_loop()
                greenlet = gevent.spawn(self._function)
                self._begun.release()
                greenlet.join()
                self._ended.set()
                # The end of the greenlet releases the lock of `Thread.join` in the first round of
                # the loop, and notifies the threads that wait for the lock in the second.
                gevent.sleep(0)
                gevent.sleep(0)
        except OSError as error:  # no descriptor is left for the event loop
            self._failure = error
            self._begun.release()
        finally:
            leave_gevent()
            del _leaving[_ident()]
            left.release()


def _keep_loop() -> None:
    """Keep gevent's event loop of this thread alive, which may wait for other threads only."""
    ident = _ident()
    if ident not in _kept:
        _kept[ident] = watcher = own_hub().loop.async_()
        watcher.start(lambda: None)
