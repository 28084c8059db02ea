"""Wait for the start of a job on another thread, and for its end, deadline or abort."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

import gevent
from gevent.event import Event

from qdo.backoff import Backoff
from qdo.message import Message
from qdo.system.home_loop import LoopMailbox
from qdo.text import describe
from qdo.worker.executors.base import JobAborted, NotStarted, timed_out

if TYPE_CHECKING:
    from qdo.jobs.job import Job

# Seconds after an interruption at which the log names a job that still runs.
GRACE_SECONDS = 2.0

# Delays between attempts to start a process, a thread or a loop.
START_BACKOFF = Backoff(0.1, 5.0, jitter=0.0)

_T = TypeVar("_T")

_log = logging.getLogger(__name__)


def started(
    start: Callable[[], _T | None],
    what: str,
    job: Job,
    message: Message,
    may_start: Callable[[Message], bool],
    *failures: type[Exception],
) -> _T:
    """Return the process or thread that `start` returns; repeat `start` after None.

    :param failures: errors of `start` that are not the message's fault. The function retries
      `start` after a delay.
    :raises NotStarted: the worker may no longer process the queue.
    """
    attempts = 0
    while True:
        try:
            found = start()
        except failures as error:
            # A lack of threads, processes or descriptors is not a failure of the message. The
            # message waits while the worker may process its queue.
            attempts += 1
            delay = START_BACKOFF.delay(attempts, 0.0)
            _log.error(
                "cannot start %s of job %s, retrying in %.1f s; message %s of queue %s waits: %s",
                what,
                job.name,
                delay,
                message.id,
                message.queue,
                describe(error),
            )
            gevent.sleep(delay)
        else:
            if found is not None:
                return found
        if not may_start(message):
            raise NotStarted


class TurnWait:
    """Waits in one greenlet for the end of one job.

    :param interrupt: raises `interruption` in the job; called at the job's deadline and at an
      abort.
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
        """Wait for the end of the job; raise its exception, JobTimeoutError or JobAborted."""
        # Never return before the job ends, because the queue must not continue while the job runs.
        # A job that returns after its deadline has succeeded, and its message is done.
        if not self._wait(self._job.timeout_seconds):
            if self._aborted is None:
                self._late = True
                self._interrupt()
            if not self._wait(GRACE_SECONDS):
                self._log_stuck()
                while not self._wait(None):
                    pass
        error = self._pending.error
        # Break the reference cycle between a frame and its error. Otherwise both would live until
        # the next garbage collection.
        self._pending.error = None
        if self._aborted is not None:
            raise self._aborted
        if error is None:
            return
        if self._late and isinstance(error, self._interruption):
            raise timed_out(self._job, self._message) from error
        raise error

    def _wait(self, seconds: float | None) -> bool:
        """Return whether the job ended within the time and without an abort."""
        try:
            return bool(self._pending.ended.wait(seconds))
        except JobAborted as error:
            self._aborted = error
            self._interrupt()
            return False

    def _log_stuck(self) -> None:
        _log.warning(
            "queue %s: job %s was interrupted at message %s and is still running: it is in a call"
            " that Python cannot interrupt, and its queue or key waits for it; end it with its"
            " process (`qdo action WORKER restart`); executor='process' can kill such a job",
            self._message.queue,
            self._job.name,
            self._message.id,
        )


class Pending:
    """A job on another thread. After `ended` is set, `error` is valid; None if the job returned."""

    def __init__(self, mailbox: LoopMailbox) -> None:
        self.error: BaseException | None = None
        self.ended = Event()
        self._mailbox = mailbox

    def finish(self, error: BaseException | None) -> None:
        """Report the end of the job. Call this on the job's thread."""
        self.error = error
        self._mailbox.post(self.ended.set)
