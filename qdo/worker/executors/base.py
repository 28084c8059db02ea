"""The interface of executors, which run jobs.

=========  =====================================  =========================================
executor   a job runs                             when its `timeout_seconds` are over
=========  =====================================  =========================================
greenlet   in the greenlet of its queue's turn    JobInterrupt is raised where it waits
thread     in a native thread                     JobInterrupt is raised at its next step of
                                                  Python; a call into C is not interrupted
process    in a child process                     the process is killed
asyncio    on an asyncio loop in its own thread   its task is cancelled
=========  =====================================  =========================================

With every executor, the call returns only when no part of the job still runs. Until then the worker
starts no other message of the queue and does not release it. An aborted call (`JobAborted`) follows
the same rule.
"""

from __future__ import annotations

import abc
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

from qdo.errors import JobTimeoutError
from qdo.message import Batch, Message
from qdo.outcomes import JobInterrupt as JobInterrupt

if TYPE_CHECKING:
    from qdo.jobs.job import Job

# A job as a function of message and context. The pipeline ignores its return value; an exception
# determines the outcome of the attempt.
JobCall: TypeAlias = Callable[[Message, Any], Any]

# Called on the thread that starts the job, once nothing can prevent the start.
OnStart: TypeAlias = Callable[[Message], None]


# How long a process may compute in its job context. For the executor `process`, how long a process
# may take to import the app and enter the context.
START_SECONDS = 600.0


class NotStarted(BaseException):
    """The job was not started, because its queue could no longer be processed."""


def check_lease(message: Message | Batch) -> None:
    """Raise NotStarted if the worker's lease has ended since its decision to start a message."""
    # Middleware may wait long after the decision. qdo's own middleware waits for documents.
    if not message._leased():
        raise NotStarted


class Executor(abc.ABC):
    """Runs jobs: in the calling greenlet, in threads, in processes."""

    @abc.abstractmethod
    def bind(self, job: Job, on_start: OnStart | None = None) -> JobCall:
        """Return the call for every message, for the pipeline.

        The call blocks only its greenlet. It returns when the job has ended. It raises the job's
        exception, `JobTimeoutError` after a timeout, or `JobCrashedError` after the death of the
        process. It raises `NotStarted` if the job could not start while that was allowed. A job is
        bound once per worker, not per message.

        :param on_start: called for every message whose job starts.
        """

    def kind(self, job: Job) -> str:
        """Return the name of a job's executor; a process accepts large bodies as `JsonText`."""
        return "greenlet"

    def under_way(self) -> int:
        """Return how many jobs are running outside the event loop's thread."""
        return 0

    @abc.abstractmethod
    def close(self) -> None:
        """End the threads and processes of jobs; no call may follow."""


def timed_out(job: Job, message: Message) -> JobTimeoutError:
    """Return the error of an attempt that timed out."""
    return JobTimeoutError(job=job.name, id=message.id, seconds=job.timeout_seconds)


class JobAborted(BaseException):
    """Ends a job for which the worker cannot wait; its message has not failed."""


class AttemptEnded(JobAborted):
    """Ends the attempt of a message that an operator skips or makes a dead letter."""


class MessageExpired(JobAborted):
    """Ends the job of a message that the broker took back and will deliver again."""
