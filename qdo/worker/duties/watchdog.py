"""Detects and names a job while it blocks the event loop.

While the loop is blocked, the process sends no heartbeats and no checkpoints, and its other queues
wait. A timer of the loop stores the time in `LoopWatchdog.beat`, and a native thread checks this
time. The thread reads the blocking job from the main thread's stack. A job context may block the
loop for much longer, because the process does not have a session yet.

The process also stores the time and the finding in memory that its parent shares. The parent keeps
the session of a blocked process alive. When the job has blocked the loop for longer than its limit,
the parent kills the process (`qdo.worker.supervisor.blocked`).
"""

from __future__ import annotations

import _thread
import logging
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import gevent

from qdo.system.clock import clock as boot_clock
from qdo.system.native import guarded, native_lock, original, start_thread
from qdo.system.processes import waited_seconds
from qdo.worker.engine.jobs import BoundJob
from qdo.worker.engine.pipeline import running_in
from qdo.worker.executors.base import START_SECONDS
from qdo.worker.shared_memory import LoopState

_log = logging.getLogger(__name__)
_get_ident: Any = original("_thread", "get_ident", _thread.get_ident)

# Seconds without a run after which the loop is blocked. Short session timeouts shorten the limit.
LIMIT_SECONDS = 1.0
# Number of checks within the limit.
CHECKS = 4
# Time for which a job without a time limit may block the loop, in session timeouts.
PATIENCE = 3.0
# Seconds after the limit at which the process exits by itself if its parent has not killed it.
OVERDUE_SECONDS = 5.0
_CONTEXT = "the job context"


def block_limit(timeout_seconds: float | None, session_timeout_seconds: float) -> float:
    """Return the seconds for which a job may block the loop before the parent kills its process."""
    if timeout_seconds is None:
        return PATIENCE * session_timeout_seconds
    # Allow at least the session timeout, because the coordinator does not notice a shorter block.
    return max(timeout_seconds, session_timeout_seconds)


@dataclass(frozen=True, slots=True)
class BlockedLoop:
    """A finding of the watchdog."""

    # "blocked": the loop has not run for `seconds`. "over": the loop runs again after `seconds`.
    # "stopped": the process or the loop's thread could not run (SIGSTOP, suspend, overload).
    kind: str
    seconds: float
    blocked_by: str = ""
    stack: str = ""


class Watch:
    """The watchdog's decisions, without I/O. `blocked_seconds` is the age of the current block."""

    def __init__(self, limit_seconds: float, now: float, cpu: float) -> None:
        self._limit = limit_seconds
        self._checked_at = now
        self._cpu = cpu
        self._blocked_since: float | None = None
        self._stopped_until = 0.0
        self._stopped_seconds = 0.0
        self._waited = self._starved_seconds = 0.0
        self._beat = self._starved_beat = 0.0
        self.blocked_seconds = 0.0

    def check(
        self,
        now: float,
        cpu: float,
        beat: float,
        look: Callable[[float], tuple[str, str]],
        waited: float = 0.0,
    ) -> BlockedLoop | None:
        """Compare the clock with the loop's last beat; return a new finding, if any.

        :param cpu: seconds of processor time of the process so far.
        :param look: returns the message and job in flight, and the stack. The argument is the last
          beat before the block.
        :param waited: seconds for which the loop's thread has waited for a processor so far.
        """
        slept = now - self._checked_at
        self._checked_at = now
        self.blocked_seconds = 0.0
        burnt = cpu - self._cpu
        self._cpu = cpu
        starved = waited - self._waited
        self._waited = waited
        if slept > self._limit and burnt < slept / 2:
            # The watchdog's thread did not run either, and the process used little processor time.
            self._stopped_until = now
            self._stopped_seconds += slept
            return BlockedLoop("stopped", slept)
        before = self._starved_seconds
        self._starved_seconds = before + starved if beat == self._beat else 0.0
        self._beat = beat
        if now - beat < self._limit:
            stopped = self._stopped_seconds + before
            self._stopped_seconds = 0.0
            since = self._blocked_since
            self._blocked_since = None
            return None if since is None else BlockedLoop("over", beat - since - stopped)
        blocked = now - beat - self._stopped_seconds - self._starved_seconds
        if self._blocked_since is not None:
            self.blocked_seconds = blocked
            return None
        if now - self._stopped_until < self._limit:
            return None
        found = look(beat)  # the parent reads the finding and counts the whole time
        if blocked < self._limit:
            return self._starving(beat)
        self._blocked_since = beat
        return BlockedLoop("blocked", blocked, *found)

    def _starving(self, beat: float) -> BlockedLoop | None:
        # Report only once for each beat that the machine does not run the loop.
        if self._starved_seconds < self._limit or self._starved_beat == beat:
            return None
        self._starved_beat = beat
        return BlockedLoop("stopped", self._starved_seconds)


class LoopWatchdog:
    """Watches the event loop of the constructing thread from a native thread.

    :ivar beat: clock time at which the loop last ran.
    :param contact: returns the time at which the coordinator last answered.
    :param tick: called on the native thread at every check.
    :param exit: exits the process at once. With None, the watchdog only reports a blocked loop.
    """

    def __init__(
        self,
        session_timeout_seconds: float,
        state: LoopState,
        timeouts: Iterable[float | None] = (),
        *,
        contact: Callable[[], float] = boot_clock,
        tick: Callable[[], None] = lambda: None,
        exit: Callable[[int], None] | None = None,
        clock: Callable[[], float] = boot_clock,
    ) -> None:
        self._session_timeout = session_timeout_seconds
        self._limit = min(LIMIT_SECONDS, session_timeout_seconds / 10)
        self._state = state
        # The longest limit applies to unknown jobs. A job that holds the GIL stays unknown, because
        # the thread of the watchdog cannot run.
        self._longest = max(
            block_limit(seconds, session_timeout_seconds) for seconds in (None, *timeouts)
        )
        self._contact = contact
        self._tick = tick
        self._exit = exit
        self._clock = clock
        self._watched: int = _get_ident()
        self._native = threading.get_native_id()
        self._starting = True
        self._stopping = native_lock()
        self._ended = native_lock()
        self._blocked_by = "no job"
        self._allowed = self._longest
        self._job: BoundJob | None = None
        self.beat = clock()
        self._timer = gevent.get_hub().loop.timer(self._limit / CHECKS, self._limit / CHECKS)

    def start(self) -> None:
        self._stopping.acquire()
        self._ended.acquire()
        self._store_beat()
        self._timer.start(self._store_beat)
        start_thread(guarded("watchdog", self._run))

    def started(self) -> None:
        """Let the parent also watch the loop, now that the worker has entered the job context."""
        self._starting = False
        self._store_beat()

    def stop(self) -> None:
        """Stop the thread, and wait for its end."""
        self._timer.stop()
        self._timer.close()
        self._stopping.release()
        self._ended.acquire()
        self._state.unwatched()

    def _store_beat(self) -> None:
        self.beat = self._clock()
        if not self._starting:
            self._state.beat(self.beat, self._contact(), self._longest)

    def _run(self) -> None:
        try:
            watch = Watch(self._limit, self._clock(), time.process_time())
            while not self._stopping.acquire(timeout=self._limit / CHECKS):
                self._tick()
                waited = waited_seconds(self._native)
                now = self._clock()
                report = watch.check(now, time.process_time(), self.beat, self._look, waited)
                if report is not None:
                    self._report(report)
                if watch.blocked_seconds > self._allowed + OVERDUE_SECONDS:
                    self._leave()
        finally:
            self._ended.release()

    def _leave(self) -> None:
        """Exit the process, because the job may block forever and the parent does not kill it."""
        if self._exit is None:
            return
        if self._starting:
            _log.error(
                "the job context has computed for more than %g s; this process exits",
                START_SECONDS,
            )
        else:
            _log.error(
                "the event loop is still blocked by %s, and the parent process did not end this"
                " process; exiting",
                self._blocked_by,
            )
        self._exit(1)

    def _look(self, beat: float) -> tuple[str, str]:
        frame = sys._current_frames().get(self._watched)
        stack = "".join(traceback.format_stack(frame))
        if self._starting:
            self._allowed = START_SECONDS
            return _CONTEXT, stack
        running = running_in(frame)
        if running is None:
            self._job = None
            self._allowed = self._longest
            entry = 0
            blocked_by = "code outside of jobs"
        else:
            self._job = job = running.job
            self._allowed = block_limit(job.timeout_seconds, self._session_timeout)
            entry = running.entry
            message = running.message
            blocked_by = f"queue {message.queue}, message {message.id}, job {job.name}"
        self._state.blocked(beat, self._allowed, entry, blocked_by)
        return blocked_by, stack

    def _report(self, report: BlockedLoop) -> None:
        if report.kind == "stopped":
            _log.warning("this process did not run for %.1f s; continuing", report.seconds)
        elif report.kind == "over" and self._blocked_by != _CONTEXT:
            _log.warning(
                "the event loop runs again after %.1f s, blocked by %s",
                report.seconds,
                self._blocked_by,
            )
        elif report.kind == "blocked":
            self._blocked_by = report.blocked_by
            self._report_blocked(report)

    def _report_blocked(self, report: BlockedLoop) -> None:
        if report.blocked_by == _CONTEXT:
            _log.info(
                "the job context has computed for %.1f s; the worker starts once it is entered%s."
                " Stack:\n%s",
                report.seconds,
                self._consequence(),
                report.stack,
            )
            return
        job = self._job
        remedy = "Make the code at the end of the stack yield"
        if job is not None and job.executor == "greenlet":
            remedy = 'Make the job yield, or run it with executor="thread" or "process"'
        _log.warning(
            "the event loop has been blocked for %.1f s by %s; all other queues of this process"
            " are waiting%s. %s. Stack:\n%s",
            report.seconds,
            report.blocked_by,
            self._consequence("" if job is None else " and the attempt has failed"),
            remedy,
            report.stack,
        )

    def _consequence(self, more: str = "") -> str:
        # A process that embeds a worker belongs to the app, and nothing ends it.
        if self._exit is None:
            return ""
        return f", and after {self._allowed:g} s the process is ended{more}"
