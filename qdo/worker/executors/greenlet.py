"""Runs a job in the greenlet of its queue's turn."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import gevent

from qdo.message import Message
from qdo.worker.executors.base import Executor, JobCall, JobInterrupt, OnStart, timed_out

if TYPE_CHECKING:
    from qdo.jobs.job import Job


class GreenletExecutor(Executor):
    """Calls the job directly: the turn's greenlet is the job's greenlet.

    Jobs that wait (sockets, sleep, locks) let other jobs run, because the process is
    monkey-patched. A job that computes blocks them all; the watchdog names it. The event loop
    checks the deadline, so it interrupts only a job that waits.
    """

    def bind(self, job: Job, on_start: OnStart | None = None) -> JobCall:
        """Return the function itself: another frame per message would cost 8 % of the rate."""
        call = job.function if job.timeout_seconds is None else _timed(job, job.timeout_seconds)
        return call if on_start is None else _announced(call, on_start)

    def close(self) -> None:
        """Do nothing: a job's greenlet ends with its turn."""


def _announced(inner: JobCall, on_start: OnStart) -> JobCall:
    def call(message: Message, context: Any) -> None:
        on_start(message)
        inner(message, context)

    return call


def _timed(job: Job, seconds: float) -> JobCall:
    """Return a call that raises JobInterrupt in the job once its time is over."""
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
