"""Waiting for a job that runs on another thread: its deadline, and its abortion."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from qdo.message import Message
from qdo.worker.executors.base import timed_out
from qdo.worker.executors.native import Pending
from qdo.worker.slot import JobAborted

if TYPE_CHECKING:
    from qdo.app import Job

GRACE_SECONDS = 2.0
"""A job that has not ended so long after it was told to is named in the log."""

_log = logging.getLogger(__name__)


class Wait:
    """The wait of one greenlet for the end of one job.

    :param interrupt: raises `interruption` in the job; called at its deadline and on abortion.
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
        """Return when the job has returned, and raise what it raised.

        Returns in no other way: as long as the job runs its queue must not go on. A job that
        returns although its time was over has done its work: its message is done.

        :raises JobTimeoutError: it was stopped by its deadline.
        :raises JobAborted: the worker could not wait longer; the job has ended all the same.
        """
        if not self._wait(self._job.timeout_seconds):
            self._late = True
            self._interrupt()
            if not self._wait(GRACE_SECONDS):
                self._name()
                self._wait(None)
        error = self._pending.error
        # A frame keeps an error, the error its frames: let go, or both live until a collection.
        self._pending.error = None
        if self._aborted is not None:
            raise self._aborted
        if error is None:
            return
        if self._late and isinstance(error, self._interruption):
            raise timed_out(self._job, self._message) from error
        raise error

    def _wait(self, seconds: float | None) -> bool:
        """Return whether the job ended in time; once aborted there is no other end."""
        while True:
            try:
                ended = self._pending.ended.wait(None if self._aborted else seconds)
                return bool(ended)
            except JobAborted as error:
                self._aborted = error
                self._interrupt()

    def _name(self) -> None:
        _log.warning(
            "queue %s: job %s does not end, message %s had %g s: it is in a call that Python"
            " cannot stop, and its queue waits for it; only executor='process' can kill it",
            self._message.queue,
            self._job.name,
            self._message.id,
            self._job.timeout_seconds,
        )
