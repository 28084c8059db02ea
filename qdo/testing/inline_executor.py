"""Runs jobs of every kind in the thread of the test.

With every executor of a worker, a message has the same outcome. Only jobs that block or crash have
different effects. This executor calls every job inline, including jobs for `thread` and `process`.
A separate event loop runs ``async def`` jobs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from qdo.callables import is_async
from qdo.errors import UsageError
from qdo.jobs.options import kind_of
from qdo.message import Batch, Message
from qdo.testing.clock import Clock
from qdo.testing.faults import Reach
from qdo.worker.executors.base import Executor, JobCall, JobInterrupt, OnStart, timed_out

if TYPE_CHECKING:
    from qdo.jobs.job import Job


NO_JOB = "spend() requires a running job; use advance() between runs"


class InlineExecutor(Executor):
    """Calls jobs directly. Calls `starting` with each message before the job."""

    def __init__(
        self, clock: Clock, starting: Callable[[Message], None], reach: Reach, default: str
    ) -> None:
        self._clock = clock
        self._starting = starting
        self._reach = reach
        self._default = default
        self._running: list[_InlineRun] = []
        self._loop: asyncio.AbstractEventLoop | None = None

    def bind(self, job: Job, on_start: OnStart | None = None) -> JobCall:
        """Return a call of a job, with a fault point before and after the job."""
        kind_of(job, self._default)
        reach = self._reach
        function = self._in_loop(job.function) if is_async(job.function) else job.function

        def call(message: Message, context: Any) -> None:
            work: Message | Batch = message
            for each in work if isinstance(work, Batch) else (work,):
                self._starting(each)
            reach("before-job", message.queue)
            if on_start is not None:
                on_start(message)
            if job.timeout_seconds is not None:
                message.limit(job.timeout_seconds)
            run = _InlineRun(job, message)
            self._running.append(run)
            try:
                function(message, context)
            except BaseException as error:
                reach("after-job", message.queue)
                if error is not run.interrupt:
                    raise
                raise timed_out(job, message) from error
            else:
                reach("after-job", message.queue)
            finally:
                self._running.remove(run)

        return call

    def spend(self, seconds: float) -> None:
        """Let time pass within the running job, but not beyond the job's timeout."""
        if not self._running:
            raise UsageError(reason=NO_JOB)
        run = self._running[-1]
        clock = self._clock
        deadline = run.message.deadline
        if deadline is not None and clock.passed() + seconds > deadline:
            clock.move_to(deadline)
            kind = asyncio.CancelledError if is_async(run.job.function) else JobInterrupt
            run.interrupt = kind(f"{run.job.timeout_seconds:g} s are over")
            raise run.interrupt
        clock.move(seconds)

    def wait(self, awaitable: Awaitable[Any]) -> Any:
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
        result, error = self._loop.run_until_complete(_outcome(awaitable))
        if error is not None:
            raise error
        return result

    def close(self) -> None:
        if self._loop is not None:
            self._loop.close()
            self._loop = None

    def _in_loop(self, function: Callable[..., Any]) -> JobCall:
        return lambda message, context: self.wait(function(message, context))


class _InlineRun:
    """A running job. `interrupt` is the exception that ended the job at its deadline."""

    def __init__(self, job: Job, message: Message) -> None:
        self.job = job
        self.message = message
        self.interrupt: BaseException | None = None


async def _outcome(awaitable: Awaitable[Any]) -> tuple[Any, BaseException | None]:
    """Run a job and return its exception, because an event loop handles some exceptions itself."""
    try:
        return await awaitable, None
    except BaseException as error:  # noqa: BLE001 - the caller raises it again
        return None, error


def check_no_loop(any_async: bool, in_thread: bool = False) -> None:
    """Raise UsageError if ``async def`` jobs cannot run because of another event loop."""
    if not any_async:
        return
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        if not in_thread:
            return
    raise UsageError(
        reason="the kit runs 'async def' jobs on its own loop and cannot do so within a"
        " coroutine; await the call with an 'a' before its name, such as kit.arun_until_settled()"
    )
