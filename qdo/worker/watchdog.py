"""Notices when a job blocks the event loop, and names it while it does so.

A blocked loop sends no heartbeat and no checkpoint, and holds up every other queue of the
process. A timer of the loop leaves its time in `Watchdog.beat`; a native thread compares. Turns
leave no word of what they run: the thread reads it from the main thread's stack.
"""

from __future__ import annotations

import logging
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType
from typing import Any

import gevent
from gevent import monkey

from qdo.coordination.lease import clock as boot_clock
from qdo.worker.pipeline import running_in

_log = logging.getLogger(__name__)
_start_thread: Any = monkey.get_original("_thread", "start_new_thread")
_allocate_lock: Any = monkey.get_original("_thread", "allocate_lock")
_get_ident: Any = monkey.get_original("_thread", "get_ident")

LIMIT_SECONDS = 1.0
"""A loop that has not turned for so long is blocked; less with short session time-outs."""
CHECKS = 4
"""Looks within the limit."""


@dataclass(frozen=True, slots=True)
class Report:
    """What the watchdog found.

    :ivar kind: "blocked": since `seconds` the loop has not turned; "over": it turns again
        after `seconds`; "stopped": the whole process did not run (SIGSTOP, suspend, a machine
        without time for it).
    :ivar what: the message and the job in hand.
    :ivar stack: the main thread's stack.
    """

    kind: str
    seconds: float
    what: str = ""
    stack: str = ""


class Watch:
    """The decisions of the watchdog: times in, reports out."""

    def __init__(self, limit_seconds: float, now: float, cpu: float) -> None:
        self._limit = limit_seconds
        self._checked_at = now
        self._cpu = cpu
        self._blocked_since: float | None = None

    def check(
        self, now: float, cpu: float, beat: float, look: Callable[[], tuple[str, str]]
    ) -> Report | None:
        """Compare the clock with the loop's last beat.

        :param cpu: processor time of the process so far, in seconds.
        :param look: gives what is in hand and the stack.
        """
        slept, self._checked_at = now - self._checked_at, now
        burnt, self._cpu = cpu - self._cpu, cpu
        if slept > self._limit and burnt < slept / 2 and self._blocked_since is None:
            # This thread did not run either, and nobody used the processor.
            return Report("stopped", slept)
        if now - beat < self._limit:
            since, self._blocked_since = self._blocked_since, None
            return None if since is None else Report("over", beat - since)
        if self._blocked_since is not None:
            return None
        self._blocked_since = beat
        return Report("blocked", now - beat, *look())


class Watchdog:
    """A native thread that watches the event loop of the thread that starts it.

    :ivar beat: clock time at which the loop turned last.
    :param tick: called on the native thread at every look.
    """

    def __init__(
        self,
        session_timeout_seconds: float,
        *,
        tick: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = boot_clock,
    ) -> None:
        self._limit = min(LIMIT_SECONDS, session_timeout_seconds / 10)
        self._tick = tick
        self._clock = clock
        self._watched: int = _get_ident()
        self._stopping = _allocate_lock()
        self._ended = _allocate_lock()
        self._job = "no job"
        self.beat = clock()
        self._timer = gevent.get_hub().loop.timer(self._limit / CHECKS, self._limit / CHECKS)

    def start(self) -> None:
        """Begin to watch."""
        self._stopping.acquire()
        self._ended.acquire()
        self._timer.start(self._turned)
        _start_thread(self._run, ())

    def stop(self) -> None:
        """End it; returns when its thread has ended."""
        self._timer.stop()
        self._timer.close()
        self._stopping.release()
        self._ended.acquire()

    def _turned(self) -> None:
        self.beat = self._clock()

    def _run(self) -> None:
        try:
            watch = Watch(self._limit, self._clock(), time.process_time())
            while not self._stopping.acquire(timeout=self._limit / CHECKS):
                self._tick()
                report = watch.check(self._clock(), time.process_time(), self.beat, self._look)
                if report is not None:
                    self._say(report)
        finally:
            self._ended.release()

    def _look(self) -> tuple[str, str]:
        frame = sys._current_frames().get(self._watched)
        return _named(frame), "".join(traceback.format_stack(frame))

    def _say(self, report: Report) -> None:
        if report.kind == "blocked":
            self._job = report.what
            _log.warning(
                "the event loop has been blocked for %.1f s by %s: no other queue goes on, and"
                " when the session time-out is over the queues are lost; let it yield, or run"
                " it in a thread or process. It stands at:\n%s",
                report.seconds,
                report.what,
                report.stack,
            )
        elif report.kind == "over":
            _log.warning(
                "the event loop turns again after %.1f s, blocked by %s", report.seconds, self._job
            )
        else:
            _log.warning("this process did not run for %.1f s; going on", report.seconds)


def _named(frame: FrameType | None) -> str:
    found = running_in(frame)
    if found is None:
        return "no message in hand"
    message, job = found
    return f"queue {message.queue}, message {message.id}, job {job}"
