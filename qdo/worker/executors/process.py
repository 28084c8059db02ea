"""Runs jobs in child processes, for code that computes, leaks, crashes or is not trusted.

Each job has processes of its own: one per message under way, at most `executor_processes`, made
when needed and kept. A process is killed with SIGKILL when its message's time is over, when it
takes more than `memory_mib`, and when the worker aborts; whatever its code does, it ends then, and
only then is the attempt over. Another one is made for the next message.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import gevent
from gevent.lock import BoundedSemaphore

from qdo.describe import describe
from qdo.errors import JobCrashedError
from qdo.message import Message
from qdo.settings import Settings
from qdo.worker.executors import remote
from qdo.worker.executors.base import Executor, JobCall, NotStarted, timed_out
from qdo.worker.executors.spawned import Gone, Spawned, TooLarge

if TYPE_CHECKING:
    from qdo.app import Job

START_PAUSE_SECONDS = 0.1
START_PAUSE_MAX_SECONDS = 5.0
"""Pauses between attempts to start a process: the first, and the longest; they double."""

_log = logging.getLogger(__name__)


class ProcessExecutor(Executor):
    """The processes of every job.

    :param target: the app as MODULE:APP, "" for the job named in the settings.
    :param may_start: asked before a message is given to a process: waiting for one may have
        taken longer than the queue's claim or the lease lasts.
    """

    def __init__(
        self, settings: Settings, target: str, may_start: Callable[[Message], bool]
    ) -> None:
        self._settings = settings
        self._target = target
        self._may_start = may_start
        self._pools: list[_Pool] = []

    def bind(self, job: Job) -> JobCall:
        """Return a call that hands the message to a process and waits for its answer."""
        pool = _Pool(
            job,
            lambda: Spawned(self._settings, self._target, job.queues),
            self._settings.executor_processes,
            self._may_start,
        )
        self._pools.append(pool)

        def call(message: Message, context: Any) -> None:
            pool.run(message)

        return call

    def under_way(self) -> int:
        """Return how many messages are in processes now."""
        return sum(pool.under_way for pool in self._pools)

    def close(self) -> None:
        """End every process: idle ones leave the job context first."""
        gevent.joinall([gevent.spawn(pool.close) for pool in self._pools])


class _Pool:
    """The processes of one job."""

    def __init__(
        self,
        job: Job,
        start: Callable[[], Spawned],
        limit: int,
        may_start: Callable[[Message], bool],
    ) -> None:
        self.under_way = 0
        self._job = job
        self._start = start
        self._may_start = may_start
        self._places = BoundedSemaphore(limit)
        self._idle: list[Spawned] = []
        self._leaving: set[Any] = set()

    def run(self, message: Message) -> None:
        """Run the job for a message; raise how the attempt ended, unless it is done."""
        with self._places:
            self.under_way += 1
            try:
                error = self._attempt(message)
            finally:
                self.under_way -= 1
        if error is not None:
            raise error

    def close(self) -> None:
        """End the idle processes and wait for those that leave."""
        while self._idle:
            self._let_go(self._idle.pop())
        gevent.joinall(list(self._leaving))

    # --- one message ---------------------------------------------------------------------

    def _attempt(self, message: Message) -> BaseException | None:
        seconds = self._job.timeout_seconds
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
                    # It died while it was idle; no part of this message was run.
                    _log.warning(
                        "an idle process of job %s was found dead: %s (%s)",
                        self._job.name,
                        spawned.bury(),
                        describe(error),
                    )
                    continue
                said = spawned.answer(self._job.memory_mib)
            except Gone as error:
                over.close()
                return self._crashed(message, f"{spawned.bury()} ({error})", error)
            except TooLarge as error:
                over.close()
                spawned.kill()
                reason = f"it took more than {self._job.memory_mib} MiB, its memory_mib"
                return self._crashed(message, reason, error)
            except BaseException as error:
                over.close()
                spawned.kill()
                if error is over:
                    return timed_out(self._job, message)
                raise
            finally:
                over.close()
            self._give_back(spawned)
            return remote.load(said)

    def _crashed(self, message: Message, reason: str, cause: Exception) -> JobCrashedError:
        error = JobCrashedError(job=self._job.name, id=message.id, reason=reason)
        error.__cause__ = cause
        return error

    # --- processes -------------------------------------------------------------------------

    def _take(self, message: Message) -> Spawned:
        """Return an idle process or a new one.

        One that cannot be started is not the message's fault: it waits, in its place, for as
        long as its queue may be worked on.

        :raises NotStarted: that is over.
        """
        pause = START_PAUSE_SECONDS
        while self._may_start(message):
            if self._idle:
                return self._idle.pop()
            try:
                spawned = self._started()
            except (Gone, OSError) as error:
                _log.error(
                    "a process of job %s cannot be started, tried again in %.1f s, message %s"
                    " of queue %s waits: %s",
                    self._job.name,
                    pause,
                    message.id,
                    message.queue,
                    describe(error),
                )
                gevent.sleep(pause)
                pause = min(2 * pause, START_PAUSE_MAX_SECONDS)
            else:
                self._idle.append(spawned)
        raise NotStarted

    def _started(self) -> Spawned:
        spawned = self._start()
        try:
            spawned.await_ready()
        except Gone as error:
            raise Gone(f"{spawned.bury()} ({error})") from error
        except BaseException:
            spawned.kill()
            raise
        _log.info("process %d started for job %s", spawned.pid, self._job.name)
        return spawned

    def _give_back(self, spawned: Spawned) -> None:
        recycle_after, memory_mib = self._job.recycle_after, self._job.memory_mib
        if recycle_after is not None and spawned.served >= recycle_after:
            _log.info("process %d has served %d messages", spawned.pid, spawned.served)
        elif memory_mib is not None and spawned.is_over(memory_mib):
            _log.info("process %d has grown over %d MiB", spawned.pid, memory_mib)
        else:
            self._idle.append(spawned)
            return
        self._let_go(spawned)

    def _let_go(self, spawned: Spawned) -> None:
        """Have a process end by itself, beside everything else."""
        greenlet = gevent.spawn(spawned.leave)
        self._leaving.add(greenlet)
        greenlet.rawlink(self._leaving.discard)
