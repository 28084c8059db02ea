"""Lets native threads call functions on the thread of a worker's event loop.

Objects of gevent, and clients that use these objects, belong to one event loop. A job in a thread
or on the asyncio loop must not use them. The job's thread has a separate event loop, which runs
only while the thread waits and ends with the thread.

Only a process with a worker's event loop imports gevent, because commands start faster without
gevent.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial, partialmethod
from typing import Any, TypeVar

from qdo.system.clock import clock
from qdo.system.native import native_lock, sleep

_log = logging.getLogger(__name__)

# Maximum time until the worker can interrupt a job that waits for a call.
LOOK_SECONDS = 0.5
# Pause of a thread whose event loop lacks a system resource, such as a descriptor.
PAUSE_SECONDS = 1.0

_Result = TypeVar("_Result")
# The event loop, the ident of its thread, and a function that returns a native thread's ident.
_home: tuple[Any, int, Callable[[], int]] | None = None
_logged_at = 0.0


@contextlib.contextmanager
def home_loop() -> Iterator[None]:
    """Let `at_home` use the event loop of this thread until the block ends.

    Meanwhile, native threads may start programs with `gevent.subprocess`.
    """
    import gevent
    from gevent import core, monkey, subprocess

    global _home
    get_ident = monkey.get_original("_thread", "get_ident")
    hub = _tolerant(gevent.get_hub())
    loop = hub.loop
    before = _home
    _home = (hub, get_ident(), get_ident)
    on_error = getattr(core, "set_syserr_cb", lambda callback: None)  # libuv lacks this function
    on_error(partial(_await_descriptor, loop._handle_syserr))
    popen: Any = subprocess.Popen
    execute_child = popen._execute_child
    popen._execute_child = partialmethod(_execute_child_at_home, execute_child)
    try:
        yield
    finally:
        popen._execute_child = execute_child
        on_error(loop._handle_syserr)
        _home = before


def _execute_child_at_home(process: Any, execute_child: Callable[..., None], *args: Any) -> None:
    """Start a program of this thread from the worker's event loop."""
    # gevent learns of the ends of all children on that loop, and if it forked elsewhere, it could
    # miss the end of a short program. The pipes still belong to this thread.
    import gevent

    own = process._loop

    def execute() -> None:
        process._loop = gevent.get_hub().loop
        execute_child(process, *args)

    at_home(execute)
    if own is not process._loop:
        process.result.wait(0)  # notifications of the end belong to this thread from now on
        # Without an active watcher, gevent takes a wait for the end for an endless one.
        watcher = own.async_()
        watcher.start(lambda: None)
        process.rawlink(lambda ended: watcher.close())


def at_home(
    function: Callable[..., _Result], *args: Any, undo: Callable[[_Result], object] | None = None
) -> _Result:
    """Call a function in a greenlet of the worker's event loop, and wait for its result.

    Without such a loop, or on the thread of the loop, call the function directly.

    :param undo: a function to call with the result if the waiting thread is interrupted and does
        not get the result. For example, it releases a lock that `function` has just acquired.
    """
    home = _home
    if home is None or home[1] == home[2]():
        return function(*args)
    import gevent

    hub = home[0]
    done = native_lock()
    done.acquire()
    results: list[_Result] = []
    errors: list[BaseException] = []
    greenlets: list[Any] = []

    def run() -> None:
        try:
            results.append(function(*args))
        except BaseException as error:  # noqa: BLE001 - the waiting thread raises it
            errors.append(error)
        finally:
            done.release()

    def give_up() -> None:
        gevent.killall(greenlets)  # waits, because it may have a result
        if results and undo is not None:
            undo(results[0])

    hub.loop.run_callback_threadsafe(lambda: greenlets.append(gevent.spawn(run)))
    try:
        while not done.acquire(timeout=LOOK_SECONDS):
            pass  # an interruption of the job raises its exception here
    except BaseException:
        hub.loop.run_callback_threadsafe(lambda: gevent.spawn(give_up))
        raise
    if errors:
        raise errors[0]
    return results[0]


def check_descriptors(count: int = 4) -> None:
    """Raise OSError unless this process can open `count` more descriptors."""
    opened: list[int] = []
    try:
        while len(opened) < count:
            opened.extend(os.pipe())
    finally:
        for fd in opened:
            os.close(fd)


def own_hub() -> Any:
    """Return the event loop of this native thread; raise OSError without free descriptors."""
    import gevent

    check_descriptors()
    return _tolerant(gevent.get_hub())


def _tolerant(hub: Any) -> Any:
    import gevent

    # By default, gevent raises a greenlet's SystemExit in the main greenlet. A job must not end the
    # program.
    hub.SYSTEM_ERROR = (SystemError,)
    hub.NOT_ERROR = (gevent.GreenletExit,)
    return hub


def _await_descriptor(default: Callable[[str, int], None], message: str, number: int) -> None:
    """Pause before libev retries a system call, such as a call that opens a descriptor."""
    # libev retries immediately and forever. In ten seconds, the errors of threads filled 200 MB.
    global _logged_at
    if _home is None or _home[1] == _home[2]():
        default(message, number)
        return
    if clock() - _logged_at >= PAUSE_SECONDS:
        _logged_at = clock()
        reason = os.strerror(number)
        _log.error("a thread waits, retrying every %g s: %s: %s", PAUSE_SECONDS, message, reason)
    sleep(PAUSE_SECONDS)


def leave_gevent() -> None:
    """End the event loop that gevent made for this thread, if any."""
    from gevent._hub_local import get_hub_if_exists

    hub = get_hub_if_exists()
    if hub is not None and not hub.dead:
        hub.destroy(destroy_loop=True)


def stay_in_gevent() -> None:
    """Run the event loop of this thread, if any, until the process ends."""
    # The loop runs the threads of pools that jobs used. Python waits for these threads when it
    # exits.
    from gevent._hub_local import get_hub_if_exists

    hub = get_hub_if_exists()
    if hub is not None and not hub.dead:
        hub.wait(hub.loop.async_())


class LoopMailbox:
    """Runs small functions from any thread on the event loop of the mailbox's creator."""

    def __init__(self) -> None:
        import gevent

        self._posted: deque[Callable[[], object]] = deque()
        self._async = gevent.get_hub().loop.async_()
        self._async.start(self._deliver)

    def post(self, function: Callable[[], object]) -> None:
        """Call `function`, which must not block, on the event loop soon. Never blocks."""
        self._posted.append(function)
        self._async.send()

    def _deliver(self) -> None:
        # Deliver all posted functions. If another thread posts more, its send() calls this method
        # again.
        while self._posted:
            self._posted.popleft()()

    def close(self) -> None:
        """Stop deliveries. No thread may post functions afterwards."""
        self._async.stop()
        self._async.close()
