"""The interface of the executors, which run jobs.

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
does not start another message of the queue and does not release the queue. An aborted call
(`JobAborted`) follows the same rule.
"""

from __future__ import annotations

import abc
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, TypeAlias

from qdo.errors import JobTimeoutError
from qdo.message import Batch, Message
from qdo.outcomes import JobInterrupt as JobInterrupt

if TYPE_CHECKING:
    from qdo.jobs.job import Job

# A job as a function of message and context. An exception determines the outcome of the attempt.
JobCall: TypeAlias = Callable[[Message, Any], Any]

# Called on the thread that starts the job, when nothing can prevent the start anymore.
OnStart: TypeAlias = Callable[[Message], None]


# Maximum seconds of computing in the job context. For the executor `process`, maximum seconds for
# importing the app and entering the context.
START_SECONDS = 600.0


class NotStarted(BaseException):
    """The job did not start, because the worker may no longer process its queue."""


def check_lease(message: Message | Batch) -> None:
    """Raise NotStarted if the lease has ended after the worker's decision to start a message."""
    # Middleware may wait for a long time after the decision. For example, qdo's own middleware
    # waits for documents.
    if not message._leased():
        raise NotStarted


class Executor(abc.ABC):
    """Runs jobs in the calling greenlet, in threads or in processes."""

    @abc.abstractmethod
    def bind(self, job: Job, on_start: OnStart | None = None) -> JobCall:
        """Return the function that the pipeline calls for every message.

        The call blocks only its greenlet, and returns when the job has ended. The call raises the
        job's exception, `JobTimeoutError` after a timeout, or `JobCrashedError` after the death of
        the process. If the job could not start in the allowed time, the call raises `NotStarted`.
        The worker binds a job only once, not for each message.

        :param on_start: called with every message whose job starts.
        """

    def kind(self, job: Job) -> str:
        """Return the name of a job's executor. A process gets large bodies as `JsonText`."""
        return "greenlet"

    def under_way(self) -> int:
        """Return the number of jobs that run outside the event loop's thread."""
        return 0

    def wait(self, awaitable: Awaitable[Any]) -> Any:
        """Await on the loop of async jobs; return the result. Blocks only the calling greenlet."""
        raise NotImplementedError

    @abc.abstractmethod
    def close(self) -> None:
        """End the threads and processes of jobs; no call may follow."""


def timed_out(job: Job, message: Message) -> JobTimeoutError:
    """Return the error of an attempt that timed out."""
    return JobTimeoutError(job=job.name, id=message.id, seconds=job.timeout_seconds)


class JobAborted(BaseException):
    """Ends a job that the worker must not wait for; its message has not failed."""


class AttemptEnded(JobAborted):
    """Ends the attempt of a message that an operator skips or dead-letters."""


class MessageExpired(JobAborted):
    """Ends the job of a message that the broker took back and will redeliver."""
