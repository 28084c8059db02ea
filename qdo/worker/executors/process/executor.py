"""Runs jobs in child processes, for code that computes, leaks, crashes or is not trusted.

Each job has processes of its own: one per message in flight, at most `executor_processes`, started
on demand and reused. A process is killed with SIGKILL when its message's time is over, when it
uses more than `memory_mib`, and when the worker aborts. Its code cannot prevent that. The attempt
is over only when everything that it has started has ended, too (`keeper`). Another process is
started for the next message.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import gevent
from gevent.lock import BoundedSemaphore

from qdo.backoff import Backoff
from qdo.errors import BodyDecodeError, JobCrashedError
from qdo.message import Message
from qdo.settings.settings import Settings
from qdo.text import describe, one_line, pluralize
from qdo.worker.executors.base import Executor, JobCall, NotStarted, OnStart, timed_out
from qdo.worker.executors.process import errors as remote
from qdo.worker.executors.process.child import JobProcess, MessageUnread, ProcessExited, TooLarge

if TYPE_CHECKING:
    from qdo.jobs.job import Job

START_BACKOFF = Backoff(0.1, 5.0, jitter=0.0)
"""Delays between attempts to start a process."""

_log = logging.getLogger(__name__)


class ProcessExecutor(Executor):
    """The processes of every job.

    :param target: the app as MODULE:APP, "" for the job named in the settings.
    :param may_start: checked before a message is sent to a process: the queue's claim or the
        lease may have ended during the wait for one.
    """

    def __init__(
        self, settings: Settings, target: str, may_start: Callable[[Message], bool]
    ) -> None:
        self._settings = settings
        self._target = target
        self._may_start = may_start
        self._pools: list[_Pool] = []

    def bind(self, job: Job, on_start: OnStart | None = None) -> JobCall:
        """Return a call that sends the message to a process and waits for its answer."""
        pool = _Pool(
            job,
            lambda: JobProcess(self._settings, self._target, job.queues),
            self._settings.executor_processes,
            self._may_start,
            on_start,
        )
        self._pools.append(pool)

        def call(message: Message, context: Any) -> None:
            pool.run(message)

        return call

    def under_way(self) -> int:
        """Return how many messages are in flight in processes."""
        return sum(pool.under_way for pool in self._pools)

    def close(self) -> None:
        """End every process; idle ones leave the job context first."""
        gevent.joinall([gevent.spawn(pool.close) for pool in self._pools])


class _Pool:
    """The processes of one job."""

    def __init__(
        self,
        job: Job,
        start: Callable[[], JobProcess],
        limit: int,
        may_start: Callable[[Message], bool],
        on_start: OnStart | None,
    ) -> None:
        self.under_way = 0
        self._on_start = on_start
        self._job = job
        self._start = start
        self._may_start = may_start
        self._permits = BoundedSemaphore(limit)
        self._idle: list[JobProcess] = []
        self._leaving: set[Any] = set()

    def run(self, message: Message) -> None:
        """Run the job for a message; raise the error of an attempt that failed."""
        with self._permits:
            self.under_way += 1
            try:
                error = self._attempt(message)
            finally:
                self.under_way -= 1
        if error is not None:
            raise error

    def close(self) -> None:
        """End the idle processes and wait for those that are ending."""
        while self._idle:
            self._end(self._idle.pop())
        gevent.joinall(list(self._leaving))

    # --- one message ---------------------------------------------------------------------

    def _attempt(self, message: Message) -> BaseException | None:
        seconds = self._job.timeout_seconds
        on_start = self._on_start
        while True:
            spawned = self._take(message)
            over = gevent.Timeout(seconds)
            try:
                if seconds is not None:
                    message.limit(seconds)
                    over.start()
                try:
                    spawned.give(message)
                except OSError as error:
                    self._log_dead(spawned, error)
                    continue
                if on_start is not None:
                    on_start(message)
                    on_start = None
                answer = spawned.answer(self._job.memory_mib)
            except ProcessExited as error:
                over.close()
                # A message that kills every process while it is read counts with a new process.
                if isinstance(error, MessageUnread) and spawned.served > 1:
                    self._log_dead(spawned, error)
                    continue
                return self._crashed(message, f"{spawned.reap()} ({error})", error)
            except TooLarge as error:
                over.close()
                spawned.kill()
                reason = f"it used more than its memory_mib, {self._job.memory_mib} MiB"
                return self._crashed(message, reason, error)
            except BaseException as error:
                over.close()
                spawned.kill()
                if error is over:
                    return timed_out(self._job, message)
                raise
            finally:
                over.close()
            self._keep(spawned)
            if "undecodable" in answer:
                reason = one_line(answer["undecodable"])
                return BodyDecodeError(queue=message.queue, id=message.id, reason=reason)
            return remote.load(answer)

    def _log_dead(self, spawned: JobProcess, error: Exception) -> None:
        """Log that a process died while it was idle: the job did not run for the message."""
        _log.warning(
            "an idle process of job %s was found dead, trying another: %s (%s)",
            self._job.name,
            spawned.reap(),
            describe(error),
        )

    def _crashed(self, message: Message, reason: str, cause: Exception) -> JobCrashedError:
        error = JobCrashedError(job=self._job.name, id=message.id, reason=reason)
        error.__cause__ = cause
        return error

    # --- processes -------------------------------------------------------------------------

    def _take(self, message: Message) -> JobProcess:
        """Return an idle process or a new one.

        If none can be started, this does not count as a failure of the message: it waits as long
        as its queue may be processed.

        :raises NotStarted: the queue may not be processed anymore.
        """
        failures = 0
        while self._may_start(message):
            if self._idle:
                return self._idle.pop()
            try:
                spawned = self._started()
            except (ProcessExited, OSError) as error:
                failures += 1
                delay = START_BACKOFF.delay(failures, 0.0)
                _log.error(
                    "cannot start a process of job %s, retrying in %.1f s; message %s"
                    " of queue %s waits: %s",
                    self._job.name,
                    delay,
                    message.id,
                    message.queue,
                    describe(error),
                )
                gevent.sleep(delay)
            else:
                self._idle.append(spawned)
        raise NotStarted

    def _started(self) -> JobProcess:
        spawned = self._start()
        try:
            spawned.await_ready()
        except ProcessExited as error:
            raise ProcessExited(f"{spawned.reap()} ({error})") from error
        except BaseException:
            spawned.kill()
            raise
        _log.info("process %d started for job %s", spawned.pid, self._job.name)
        return spawned

    def _keep(self, spawned: JobProcess) -> None:
        """Keep a process for the next message, unless it reached a limit."""
        recycle_after, memory_mib = self._job.recycle_after, self._job.memory_mib
        if recycle_after is not None and spawned.served >= recycle_after:
            served = pluralize(spawned.served, "message")
            _log.info("process %d has run %s; replacing it", spawned.pid, served)
        elif memory_mib is not None and spawned.is_over(memory_mib):
            _log.info("process %d has grown over %d MiB; replacing it", spawned.pid, memory_mib)
        else:
            self._idle.append(spawned)
            return
        self._end(spawned)

    def _end(self, spawned: JobProcess) -> None:
        """End a process in the background."""
        greenlet = gevent.spawn(spawned.leave)
        self._leaving.add(greenlet)
        greenlet.rawlink(self._leaving.discard)
