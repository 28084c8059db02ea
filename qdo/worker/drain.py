"""The reasons for a worker's stop, and steps 2 and 3 of its shutdown (see `worker`)."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from typing import Any

import gevent
from gevent.event import Event

from qdo.coordination.member import Member
from qdo.system.clock import clock
from qdo.system.home_loop import home_loop
from qdo.system.native import reported_deaths
from qdo.text import join_some, pluralize
from qdo.worker.engine.dispatcher import Dispatcher

_log = logging.getLogger(__name__)

# Maximum seconds that the drain waits for the ends of aborted jobs and the releases of queues.
ABORT_SECONDS = 3.0
NAMES_SHOWN = 20


class Drain:
    """Waits at most `seconds` for the messages in flight to finish, and releases all queues.

    :param wakeup: set when a turn ends or a stop signal arrives.
    :param aborted: returns whether a second stop signal has arrived.
    """

    def __init__(
        self, dispatcher: Dispatcher, seconds: float, wakeup: Event, aborted: Callable[[], bool]
    ) -> None:
        self._dispatcher = dispatcher
        self._seconds = seconds
        self._wakeup = wakeup
        self._aborted = aborted
        self._member: Member | None = None
        self._released: Any = None
        self._session_lost = False

    def run(self, member: Member | None, session_lost: bool = False) -> bool:
        """Drain the worker; return whether it has finished and recorded all messages.

        :param member: None if the worker is not registered; only jobs of lost queues may then be
          running.
        :param session_lost: whether the end of the session ended the registration.
        """
        self._member = member
        self._session_lost = session_lost
        _log.info(
            "step 2: waiting up to %g s for %s in flight",
            self._seconds,
            pluralize(len(self._dispatcher.in_flight()), "message"),
        )
        if member is not None:
            member.drain()
            # Release queues one by one, while other messages are still running.
            self._released = gevent.spawn(member.wait_released, self._seconds + ABORT_SECONDS)
            self._released.rawlink(lambda _: self._wakeup.set())
        self._wait(self._seconds, self._aborted)
        if self._is_over():
            return self._log_released()
        self._log_unfinished()
        self._dispatcher.abort()
        self._wait(ABORT_SECONDS, lambda: False)
        self._log_stuck()
        return False

    def _is_over(self) -> bool:
        released = self._released
        return (released is None or released.ready()) and not self._dispatcher.runners

    def _log_released(self) -> bool:
        """Log the result of the drain; return whether the worker has recorded all progress."""
        if self._session_lost:
            _log.warning(
                "step 3: the coordinator session was lost before; the next owners of its queues"
                " repeat the messages since the last checkpoint"
            )
            return False
        if self._released is None or self._released.value:
            _log.info("step 3: all progress is recorded and all queues are released")
            return True
        if not self._log_unreleased():
            _log.warning(
                "step 3: the coordinator session was lost during the drain; the next owners of its"
                " queues repeat the messages since the last checkpoint"
            )
        return False

    def _wait(self, seconds: float, cut_short: Callable[[], bool]) -> None:
        deadline = clock() + seconds
        while not self._is_over() and not cut_short():
            seconds_left = deadline - clock()
            if seconds_left <= 0:
                return
            self._wakeup.wait(seconds_left)
            self._wakeup.clear()

    def _log_unfinished(self) -> None:
        if self._aborted():
            reason = "second stop signal"
        else:
            reason = f"drain_seconds ({self._seconds:g} s) exceeded"
        now = clock()
        for slot in self._dispatcher.in_flight():
            message = slot.message
            if message is not None:
                _log.error(
                    "%s: aborting message %s of queue %s, whose turn has lasted %.1f s; its next"
                    " owner runs it again",
                    reason,
                    message.id,
                    slot.queue,
                    now - slot.started_at,
                )

    def _log_stuck(self) -> None:
        running = [slot.queue for slot in self._dispatcher.in_flight()]
        if running:
            _log.error(
                "jobs did not end when aborted; the next owners of their queues run the messages"
                " again: %s",
                join_some(running, NAMES_SHOWN),
            )
        self._log_unreleased()

    def _log_unreleased(self) -> bool:
        """Log the unreleased queues; return whether there are any."""
        queues = [] if self._member is None else self._member.unreleased()
        if queues:
            _log.warning(
                "step 3: queues not released, they are free once the session is closed: %s",
                join_some(queues, NAMES_SHOWN),
            )
        return bool(queues)


class StopSignals:
    """The reason and the urgency of a worker's stop.

    :ivar signals: number of stop signals. The first drains, the second aborts jobs, and the third
      exits.
    :ivar finished: whether the worker has reached a limit, or, with `burst`, the end of all queues.
    :ivar dead_thread: name of a dead native thread that the worker needs.
    :ivar wakeup: wakes the main greenlet; set at each signal and by other parts.
    :param exit: ends the process at once; None if the process must not end that way.
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
        """Let other threads wake this thread's event loop and run calls on the loop."""
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
        """Count a stop signal. Signal handlers and any thread may call this method."""
        self.signals += 1
        if self._async is not None:
            self._async.send()

    def _thread_died(self, name: str) -> None:
        self.dead_thread = name
        if self._async is not None:
            self._async.send()

    def request(self, reason: str) -> None:
        """Drain at the request of a job, unless the worker is already draining."""
        if not self.signals:  # a second signal would abort the jobs
            _log.warning("a job requested that this worker stops: %s", reason)
            self.signal()

    def finish(self, reason: str) -> None:
        """Drain and end the worker without a stop signal. Any thread may call this method."""
        _log.info("%s", reason)
        self.finished = True
        if self._async is not None:
            self._async.send()

    def exit_if_demanded(self) -> None:
        """Exit after the third signal, even if the loop is blocked; for the watchdog's thread."""
        if self.signals >= 3 and self._exit is not None:
            _log.error(
                "third stop signal: exiting immediately; messages since the last checkpoint"
                " are repeated"
            )
            self._exit(1)

    def outlast_stuck_jobs(self, under_way: Callable[[], int]) -> None:
        """Wait for jobs that still run in threads, which qdo cannot stop, or exit the process.

        :param under_way: returns the number of these jobs.
        """
        # Closing the session would free queues whose jobs still run.
        running = under_way()
        if not running:
            return
        jobs = pluralize(running, "job")
        if self._exit is not None:
            _log.error(
                "%s did not stop; exiting immediately without closing the job context. The parent"
                " releases the queues when this process is gone",
                jobs,
            )
            self._exit(1)
        # The process belongs to the app: this worker may be a thread of a web server.
        _log.error(
            "%s did not stop; this worker keeps its session until they end, because their queues"
            " would otherwise get new owners, which would run the same messages beside them",
            jobs,
        )
        while under_way():
            self.wakeup.wait(ABORT_SECONDS)
            self.wakeup.clear()
        _log.info("the jobs have ended")
