"""Waits for a job on another thread, for its deadline and for its abortion."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from gevent.event import Event

from qdo.message import Message
from qdo.system.home_loop import LoopMailbox
from qdo.worker.executors.base import JobAborted, timed_out

if TYPE_CHECKING:
    from qdo.jobs.job import Job

GRACE_SECONDS = 2.0
"""How long after an interruption the log names a job that has not ended."""

_log = logging.getLogger(__name__)


class TurnWait:
    """The wait of one greenlet for the end of one job.

    :param interrupt: raises `interruption` in the job; called at its deadline and when aborted.
    """

    def __init__(
        self,
        job: Job,
        message: Message,
        pending: Pending,
        interrupt: Callable[[], object],
        interruption: type[BaseException],
    ) -> None:
        self._job = job
        self._message = message
        self._pending = pending
        self._interrupt = interrupt
        self._interruption = interruption
        self._late = False
        self._aborted: JobAborted | None = None

    def run(self) -> None:
        """Wait until the job has ended, and raise its exception.

        It never returns earlier: while the job runs, its queue must not continue. A job that
        returns after its deadline has succeeded: its message is done.

        :raises JobTimeoutError: the deadline stopped the job.
        :raises JobAborted: the worker could not wait longer; the job has also ended.
        """
        if not self._wait(self._job.timeout_seconds):
            self._late = True
            self._interrupt()
            if not self._wait(GRACE_SECONDS):
                self._log_stuck()
                self._wait(None)
        error = self._pending.error
        # A frame refers to an error, and the error to its frames: without this, both would live
        # until the next garbage collection.
        self._pending.error = None
        if self._aborted is not None:
            raise self._aborted
        if error is None:
            return
        if self._late and isinstance(error, self._interruption):
            raise timed_out(self._job, self._message) from error
        raise error

    def _wait(self, seconds: float | None) -> bool:
        """Return whether the job ended in time; once aborted, wait without a limit."""
        while True:
            try:
                ended = self._pending.ended.wait(None if self._aborted else seconds)
                return bool(ended)
            except JobAborted as error:
                self._aborted = error
                self._interrupt()

    def _log_stuck(self) -> None:
        _log.warning(
            "queue %s: job %s is still running, message %s had %g s: it is in a call that Python"
            " cannot interrupt, and its queue waits for it; only executor='process' can kill it",
            self._message.queue,
            self._job.name,
            self._message.id,
            self._job.timeout_seconds,
        )


class Pending:
    """A job that runs on another thread; `error`, None if it returned, is valid once it `ended`."""

    def __init__(self, mailbox: LoopMailbox) -> None:
        self.error: BaseException | None = None
        self.ended = Event()
        self._mailbox = mailbox

    def finish(self, error: BaseException | None) -> None:
        """Report how the job ended; called on its thread."""
        self.error = error
        self._mailbox.post(self.ended.set)
