"""Runs a job in the greenlet that has the turn of its queue."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import gevent

from qdo.message import Message
from qdo.worker.executors.base import Executor, JobCall, JobInterrupt, timed_out

if TYPE_CHECKING:
    from qdo.app import Job


class GreenletExecutor(Executor):
    """Calls the job directly: the turn's greenlet is the job's greenlet.

    Jobs that wait (sockets, sleep, locks) let the others run, because the process is
    monkey-patched. A job that computes holds them all up; the watchdog names it. Its deadline
    is looked at by the event loop, so only a job that waits meets with it.
    """

    def bind(self, job: Job) -> JobCall:
        """Return the function itself: one more frame per message would cost 8 % of the rate."""
        return job.function if job.timeout_seconds is None else _timed(job, job.timeout_seconds)

    def close(self) -> None:
        """Do nothing: a greenlet ends with its turn."""


def _timed(job: Job, seconds: float) -> JobCall:
    """Return a call that raises JobInterrupt in the job once its time is over."""
    function = job.function

    def call(message: Message, context: Any) -> None:
        message.limit(seconds)
        interrupt = JobInterrupt(f"{seconds:g} s are over")
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
