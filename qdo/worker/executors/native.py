"""Native threads beside an event loop: gevent's patches stand aside here.

In a worker process the standard `threading` makes greenlets. What follows is for real threads
of the operating system, and for what they have to tell the loop.
"""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Callable
from typing import Any

import gevent
from gevent import monkey
from gevent._hub_local import get_hub_if_exists
from gevent.event import Event

start_thread: Any = monkey.get_original("_thread", "start_new_thread")
allocate_lock: Any = monkey.get_original("_thread", "allocate_lock")
native_sleep: Any = monkey.get_original("time", "sleep")

_set_async_exception: Any = ctypes.pythonapi.PyThreadState_SetAsyncExc
_set_async_exception.argtypes = (ctypes.c_ulong, ctypes.py_object)


def raise_in_thread(ident: int, kind: type[BaseException]) -> None:
    """Have an exception raised at a thread's next step of Python; calls into C go on."""
    _set_async_exception(ident, ctypes.py_object(kind))


def take_back(ident: int) -> None:
    """Take back what `raise_in_thread` asked for, if it has not been raised yet."""
    _set_async_exception(ident, ctypes.py_object())


def leave_gevent() -> None:
    """End the event loop that gevent gave this thread, if code on it waited in its manner."""
    hub = get_hub_if_exists()
    if hub is not None and not hub.dead:
        hub.destroy(destroy_loop=True)


class Mailbox:
    """Runs small functions on the event loop that made it, handed over by any thread."""

    def __init__(self) -> None:
        self._posted: deque[Callable[[], object]] = deque()
        self._async = gevent.get_hub().loop.async_()
        self._async.start(self._deliver)

    def post(self, function: Callable[[], object]) -> None:
        """Have `function` called on the event loop soon; it must not block. Never blocks."""
        self._posted.append(function)
        self._async.send()

    def _deliver(self) -> None:
        # One at a time: another thread may add meanwhile, and its send() calls us again.
        while self._posted:
            self._posted.popleft()()

    def close(self) -> None:
        """Deliver nothing more; no thread posts anything from now on."""
        self._async.stop()
        self._async.close()


class Pending:
    """A job under way elsewhere, as the greenlet that waits for it sees it.

    :ivar error: what the job raised; valid once `ended` is set.
    """

    def __init__(self, mailbox: Mailbox) -> None:
        self.error: BaseException | None = None
        self.ended = Event()
        self._mailbox = mailbox

    def finish(self, error: BaseException | None) -> None:
        """Tell how the job ended; from its thread."""
        self.error = error
        self._mailbox.post(self.ended.set)
