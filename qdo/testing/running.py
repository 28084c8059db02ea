"""Runs jobs of every kind in the thread of the test.

The executors of a worker differ in what holds up what, and in what a crash takes along; for a
message and its outcome they are the same. So here every job is called in line, also those for
`thread` and `process`, and ``async def`` jobs on a loop that runs only for them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from qdo.errors import UsageError
from qdo.message import Batch, Message
from qdo.placement import is_async, kind_of
from qdo.testing.clock import Clock
from qdo.testing.faults import Point
from qdo.worker.executors.base import Executor, JobCall, JobInterrupt, timed_out

if TYPE_CHECKING:
    from qdo.app import Job


class Stage(Protocol):
    """What jobs run in: a process of the kit."""

    clock: Clock

    def starting(self, message: Message) -> None: ...

    def reach(self, point: Point, queue: str) -> None: ...


class InlineExecutor(Executor):
    """Calls jobs directly.

    :param default: the setting `executor`.
    """

    def __init__(self, stage: Stage, default: str) -> None:
        self._stage = stage
        self._default = default
        self._in_hand: list[_Run] = []
        self._loop: asyncio.AbstractEventLoop | None = None

    def bind(self, job: Job) -> JobCall:
        """Return a call with a fault point before and behind.

        :raises UsageError: options of the job do not go together.
        """
        kind_of(job, self._default)
        stage = self._stage
        function = self._in_loop(job.function) if is_async(job.function) else job.function

        def call(message: Message, context: Any) -> None:
            given: Message | Batch = message
            for each in given if isinstance(given, Batch) else (given,):
                stage.starting(each)
            stage.reach("before-job", message.queue)
            if job.timeout_seconds is not None:
                message.limit(job.timeout_seconds)
            run = _Run(job, message)
            self._in_hand.append(run)
            try:
                function(message, context)
            except BaseException as error:
                stage.reach("after-job", message.queue)
                if error is not run.interrupt:
                    raise
                raise timed_out(job, message) from error
            else:
                stage.reach("after-job", message.queue)
            finally:
                self._in_hand.remove(run)

        return call

    def spend(self, seconds: float) -> None:
        """Let time pass within the job in hand, at most until it is interrupted.

        :raises UsageError: no job runs.
        """
        if not self._in_hand:
            raise UsageError(reason="spend() is for jobs that run: use advance() between runs")
        run, clock = self._in_hand[-1], self._stage.clock
        deadline = run.message.deadline
        if deadline is not None and clock.passed() + seconds > deadline:
            clock.move_to(deadline)
            kind = asyncio.CancelledError if is_async(run.job.function) else JobInterrupt
            run.interrupt = kind(f"{run.job.timeout_seconds:g} s are over")
            raise run.interrupt
        clock.move(seconds)

    def close(self) -> None:
        """End the loop."""
        if self._loop is not None:
            self._loop.close()
            self._loop = None

    def _in_loop(self, function: Callable[..., Any]) -> JobCall:
        """Return a plain function that runs a coroutine function to its end."""

        def run(message: Message, context: Any) -> None:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
            error = self._loop.run_until_complete(_outcome(function, message, context))
            if error is not None:
                raise error

        return run


class _Run:
    """A job in hand.

    :ivar interrupt: what ended it at its deadline.
    """

    def __init__(self, job: Job, message: Message) -> None:
        self.job = job
        self.message = message
        self.interrupt: BaseException | None = None


async def _outcome(
    function: Callable[..., Any], message: Message, context: Any
) -> BaseException | None:
    """Return what a coroutine raised: a loop treats some errors as its own."""
    try:
        await function(message, context)
    except BaseException as error:  # noqa: BLE001 - it is raised again by the caller
        return error
    return None


def check_no_loop(any_async: bool) -> None:
    """Raise UsageError where ``async def`` jobs could not be run."""
    if not any_async:
        return
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return
    raise UsageError(
        reason="the kit runs 'async def' jobs on a loop of its own, and cannot within a"
        " coroutine: call it from a plain test function"
    )
