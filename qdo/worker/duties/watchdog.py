"""Detects a job that blocks the event loop, and names it while it does so.

While the loop is blocked, the process sends no heartbeat and no checkpoint, and all its other
queues wait. A timer of the loop stores the time in `LoopWatchdog.beat`, and a native thread
checks it. Turns record nothing for this: the thread reads the job from the main thread's stack.
"""

from __future__ import annotations

import _thread
import logging
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType
from typing import Any

import gevent

from qdo.system.clock import clock as boot_clock
from qdo.system.native import guarded, native_lock, original, start_thread
from qdo.worker.engine.pipeline import running_in

_log = logging.getLogger(__name__)
_get_ident: Any = original("_thread", "get_ident", _thread.get_ident)

LIMIT_SECONDS = 1.0
"""A loop that has not run for this long is blocked; shorter with short session timeouts."""
CHECKS = 4
"""Number of checks within the limit."""


@dataclass(frozen=True, slots=True)
class BlockedLoop:
    """A finding of the watchdog.

    :ivar kind: "blocked": the loop has not run for `seconds`; "over": it runs again after
        `seconds`; "stopped": the whole process did not run (SIGSTOP, suspend, overloaded
        machine).
    :ivar what: the message and the job in flight.
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
    ) -> BlockedLoop | None:
        """Compare the clock with the loop's last beat; return a finding if there is a new one.

        :param cpu: processor time of the process so far, in seconds.
        :param look: returns the message and job in flight, and the stack.
        """
        slept, self._checked_at = now - self._checked_at, now
        burnt, self._cpu = cpu - self._cpu, cpu
        if slept > self._limit and burnt < slept / 2 and self._blocked_since is None:
            # This thread did not run either, and the process used no processor time.
            return BlockedLoop("stopped", slept)
        if now - beat < self._limit:
            since, self._blocked_since = self._blocked_since, None
            return None if since is None else BlockedLoop("over", beat - since)
        if self._blocked_since is not None:
            return None
        self._blocked_since = beat
        return BlockedLoop("blocked", now - beat, *look())


class LoopWatchdog:
    """Watches the event loop of the thread that made it, from a native thread.

    :ivar beat: clock time at which the loop last ran.
    :param tick: called on the native thread at every check.
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
        self._stopping = native_lock()
        self._ended = native_lock()
        self._blocked_by = "no job"
        self.beat = clock()
        self._timer = gevent.get_hub().loop.timer(self._limit / CHECKS, self._limit / CHECKS)

    def start(self) -> None:
        """Start watching."""
        self._stopping.acquire()
        self._ended.acquire()
        self._timer.start(self._store_beat)
        start_thread(guarded("watchdog", self._run))

    def stop(self) -> None:
        """Stop watching; returns when the thread has ended."""
        self._timer.stop()
        self._timer.close()
        self._stopping.release()
        self._ended.acquire()

    def _store_beat(self) -> None:
        self.beat = self._clock()

    def _run(self) -> None:
        try:
            watch = Watch(self._limit, self._clock(), time.process_time())
            while not self._stopping.acquire(timeout=self._limit / CHECKS):
                self._tick()
                report = watch.check(self._clock(), time.process_time(), self.beat, self._look)
                if report is not None:
                    self._report(report)
        finally:
            self._ended.release()

    def _look(self) -> tuple[str, str]:
        frame = sys._current_frames().get(self._watched)
        return _describe_message(frame), "".join(traceback.format_stack(frame))

    def _report(self, report: BlockedLoop) -> None:
        if report.kind == "blocked":
            self._blocked_by = report.what
            _log.warning(
                "the event loop has been blocked for %.1f s by %s; all other queues are waiting,"
                " and they are lost if this exceeds the session timeout. Make the job yield, or"
                ' run it with executor="thread" or "process". Stack:\n%s',
                report.seconds,
                report.what,
                report.stack,
            )
        elif report.kind == "over":
            _log.warning(
                "the event loop runs again after %.1f s, blocked by %s",
                report.seconds,
                self._blocked_by,
            )
        else:
            _log.warning("this process did not run for %.1f s; continuing", report.seconds)


def _describe_message(frame: FrameType | None) -> str:
    found = running_in(frame)
    if found is None:
        return "no message in flight"
    message, job = found
    return f"queue {message.queue}, message {message.id}, job {job}"
