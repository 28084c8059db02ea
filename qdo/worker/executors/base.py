"""Where a job runs, behind one interface.

=========  =====================================  =========================================
executor   a job runs                             at the end of its time (`timeout_seconds`)
=========  =====================================  =========================================
greenlet   in the greenlet of its queue's turn    JobInterrupt is raised where it waits
thread     in a native thread                     JobInterrupt is raised at its next step of
                                                  Python; a call into C is not reached
process    in a child process                     the process is killed
asyncio    on an asyncio loop of its own thread   its task is cancelled
=========  =====================================  =========================================

Whatever the executor, the call returns only when nothing of the job runs any more: until then
its queue starts no other message and is not given back. An aborted call (`JobAborted`) obeys
the same rule.
"""

from __future__ import annotations

import abc
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

from qdo.errors import JobTimeoutError
from qdo.message import Message
from qdo.stopping import JobInterrupt as JobInterrupt

if TYPE_CHECKING:
    from qdo.app import Job

JobCall: TypeAlias = Callable[[Message, Any], Any]
"""A job as the pipeline calls it: message and context in; what it returns is ignored, what
it raises says how the attempt ended."""


class NotStarted(BaseException):
    """The job was not started: when its place was free, the queue might not be worked on."""


class Executor(abc.ABC):
    """Runs jobs: in the calling greenlet, in threads, in processes."""

    @abc.abstractmethod
    def bind(self, job: Job) -> JobCall:
        """Return what the pipeline calls for every message.

        The call blocks only its greenlet. It returns when the job has ended and raises what
        the job raised, `JobTimeoutError` when its time was over, `JobCrashedError` when its
        process died, `NotStarted` when it could not start it while that was allowed. Bound
        once per job and worker, not per message.
        """

    def under_way(self) -> int:
        """Return how many jobs run outside the event loop's thread."""
        return 0

    @abc.abstractmethod
    def close(self) -> None:
        """End what was started for running jobs; no call is made after it."""


def timed_out(job: Job, message: Message) -> JobTimeoutError:
    """Return the error of an attempt whose time was over."""
    return JobTimeoutError(job=job.name, id=message.id, seconds=job.timeout_seconds)
