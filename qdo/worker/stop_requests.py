"""The reasons for a worker to stop: signals, jobs, limits."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from typing import Any

import gevent
from gevent.event import Event

from qdo.system.home_loop import home_loop
from qdo.system.native import reported_deaths
from qdo.text import pluralize

_log = logging.getLogger(__name__)


class StopRequests:
    """Why and how urgently a worker should stop.

    :ivar signals: number of stop signals: 1 drains, 2 aborts running jobs, 3 exits immediately.
    :ivar finished: the worker has reached a limit, or with `burst` the end of all queues.
    :ivar dead_thread: name of a native thread that died and that the worker needs.
    :ivar wakeup: set with each request. Other parts of the worker may set it as well, to make
        the main greenlet look.
    :param exit: ends the process at once; None: nothing does.
    """

    def __init__(self, exit: Callable[[int], object] | None = None) -> None:
        self._exit = exit
        self.signals = 0
        self.finished = False
        self.dead_thread: str | None = None
        self.wakeup = Event()
        self._async: Any = None
        self._open = contextlib.ExitStack()

    def open(self) -> None:
        """Wake the event loop of this thread from now on; other threads' calls run on it."""
        self._async = gevent.get_hub().loop.async_()
        self._async.start(self.wakeup.set)
        self._open.enter_context(reported_deaths(self._thread_died))
        self._open.enter_context(home_loop())

    def close(self) -> None:
        """Undo `open`."""
        self._open.close()
        self._async.stop()
        self._async.close()
        self._async = None

    def signal(self) -> None:
        """Count a stop signal. Only sets flags: for signal handlers, and any thread."""
        self.signals += 1
        if self._async is not None:
            self._async.send()

    def _thread_died(self, name: str) -> None:
        self.dead_thread = name
        if self._async is not None:
            self._async.send()

    def request(self, reason: str) -> None:
        """Drain because a job requested it, unless the worker drains already."""
        if not self.signals:
            _log.warning("a job requested that this worker stops: %s", reason)
            self.signal()

    def finish(self, reason: str) -> None:
        """Drain and end the worker without a stop signal."""
        _log.info("%s", reason)
        self.finished = True
        self.wakeup.set()

    def exit_if_demanded(self) -> None:
        """Exit even if the event loop is blocked; runs on the watchdog's thread."""
        if self.signals >= 3 and self._exit is not None:
            _log.error(
                "third stop signal: exiting immediately; messages since the last checkpoint"
                " are repeated"
            )
            self._exit(1)

    def exit_if_stuck(self, under_way: int) -> None:
        """Exit the process if jobs still run in threads, which cannot be stopped.

        Closing the session would free their queues while their messages still run. The parent
        closes it after it has reaped this process.
        """
        if under_way and self._exit is not None:
            _log.error(
                "%s did not stop; exiting immediately without closing the job context. The parent"
                " releases the queues when this process is gone",
                pluralize(under_way, "job"),
            )
            self._exit(1)
