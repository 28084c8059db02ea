"""Route each job to its executor, run jobs in greenlets, and count messages for `max_messages`."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Awaitable, Callable, Iterable
from typing import TYPE_CHECKING, Any

import gevent

from qdo.errors import UsageError
from qdo.jobs.options import ASYNCIO, kind_of
from qdo.message import Batch, Message
from qdo.settings.settings import Settings
from qdo.worker.executors.base import (
    Executor,
    JobCall,
    JobInterrupt,
    NotStarted,
    OnStart,
    timed_out,
)

if TYPE_CHECKING:
    from qdo.jobs.job import Job


# Seconds for which a computing thread keeps Python's global lock after the event loop requests the
# lock. The loop requests the lock several times per message. With Python's default of 5 ms, a
# computing job delayed messages of other queues by up to 3 s. With 0.5 ms, the delay was at most
# 0.3 s.
SWITCH_SECONDS = 0.0005


class GreenletExecutor(Executor):
    """Calls the job directly, in the turn's greenlet."""

    # Jobs that wait (sockets, sleep, locks) let other jobs run, because the process is
    # monkey-patched. A computing job blocks all jobs, and the watchdog names this job. The event
    # loop checks deadlines, so a deadline interrupts only a waiting job.

    def bind(self, job: Job, on_start: OnStart | None = None) -> JobCall:
        """Return the job's function, wrapped if there is a timeout or `on_start`."""
        call = job.function if job.timeout_seconds is None else _timed(job, job.timeout_seconds)
        return call if on_start is None else _announced(call, on_start)

    def close(self) -> None:
        """Do nothing, because a job's greenlet ends with its turn."""


def _announced(inner: JobCall, on_start: OnStart) -> JobCall:
    def call(message: Message, context: Any) -> None:
        on_start(message)
        inner(message, context)

    return call


def _timed(job: Job, seconds: float) -> JobCall:
    """Return a call that raises JobInterrupt in the job after its time limit."""
    function = job.function

    def call(message: Message, context: Any) -> None:
        message.limit(seconds)
        interrupt = JobInterrupt(f"the job's timeout of {seconds:g} s is over")
        timer = gevent.Timeout.start_new(seconds, interrupt)
        try:
            function(message, context)
        except JobInterrupt as error:
            if error is not interrupt:
                raise
            raise timed_out(job, message) from error
        finally:
            timer.close()

    return call


class ExecutorRouter(Executor):
    """Binds each job of one worker to its executor, which it creates at the first such job.

    :param target: see `ProcessContext`.
    :param may_start: returns whether a message may still start. Executors call `may_start` just
      before a job starts, because the claim or the lease may have ended.
    """

    def __init__(
        self, settings: Settings, target: str | None, may_start: Callable[[Message], bool]
    ) -> None:
        self._settings = settings
        self._target = target
        self._may_start = may_start
        self._folder = os.getcwd()
        self._made: dict[str, Executor] = {}

    def check(self, jobs: Iterable[Job]) -> None:
        """Raise UsageError if a job cannot run in its executor."""
        for job in jobs:
            kind = self.kind(job)
            if kind == "process":
                # Import now, because an import during a turn would block the event loop for too
                # long on a busy machine.
                importlib.import_module("qdo.worker.executors.process")
            if kind == "process" and self._target is None:
                raise UsageError(
                    reason=f"job {job.name} with executor 'process' must be imported by its "
                    "processes: run it with `qdo-worker MODULE:APP`, or give Worker a "
                    "ProcessContext(target=...)"
                )
            if job.memory_mib is not None and not os.path.exists("/proc/self/statm"):
                raise UsageError(
                    reason=f"job {job.name}: memory_mib needs /proc, which this system "
                    "does not have: omit it, or run the worker on Linux"
                )

    def bind(self, job: Job, on_start: OnStart | None = None) -> JobCall:
        kind = self.kind(job)
        executor = self._made.get(kind)
        if executor is None:
            executor = self._made[kind] = self._make(kind)
        return executor.bind(job, on_start)

    def kind(self, job: Job) -> str:
        return kind_of(job, self._settings.executor)

    def under_way(self) -> int:
        return sum(executor.under_way() for executor in self._made.values())

    def wait(self, awaitable: Awaitable[Any]) -> Any:
        if ASYNCIO not in self._made:
            self._made[ASYNCIO] = self._make(ASYNCIO)
        return self._made[ASYNCIO].wait(awaitable)

    def close(self) -> None:
        for executor in self._made.values():
            executor.close()

    def _make(self, kind: str) -> Executor:
        # Import on demand, so that a worker loads only the executors of its jobs.
        if kind in ("thread", ASYNCIO):
            sys.setswitchinterval(SWITCH_SECONDS)
        if kind == "thread":
            from qdo.worker.executors.thread import ThreadExecutor

            return ThreadExecutor(self._may_start)
        if kind == ASYNCIO:
            from qdo.worker.executors.aio import AsyncioExecutor

            return AsyncioExecutor(self._may_start)
        if kind == "process":
            from qdo.worker.executors.process import ProcessExecutor

            target = self._target or ""
            return ProcessExecutor(self._settings, target, self._folder, self._may_start)
        return GreenletExecutor()


class LimitedExecutor(Executor):
    """Starts jobs of another executor for at most `most` messages, then calls `on_reached`."""

    def __init__(self, inner: Executor, most: int, on_reached: Callable[[], None]) -> None:
        self._inner = inner
        self._left = most
        self._unstarted = most
        self._on_reached = on_reached
        self._loop = gevent.get_hub().loop

    def bind(self, job: Job, on_start: OnStart | None = None) -> JobCall:

        def started(message: Message) -> None:
            if on_start is not None:
                on_start(message)
            self._loop.run_callback_threadsafe(self._count_start, _count(message))

        inner = self._inner.bind(job, started)

        def call(message: Message, context: Any) -> None:
            if self._left <= 0:
                raise NotStarted
            count = _count(message)
            self._left -= count
            try:
                inner(message, context)
            except NotStarted:
                self._left += count
                raise

        return call

    def _count_start(self, count: int) -> None:
        # Count at the start, not in the call, because an earlier drain would keep the last messages
        # from starting.
        self._unstarted -= count
        if self._unstarted <= 0:
            self._on_reached()

    def kind(self, job: Job) -> str:
        return self._inner.kind(job)

    def under_way(self) -> int:
        return self._inner.under_way()

    def close(self) -> None:
        self._inner.close()


def _count(message: Message | Batch) -> int:
    return len(message) if isinstance(message, Batch) else 1  # a batch may exceed the limit
