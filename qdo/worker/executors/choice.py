"""Gives each job its executor."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from qdo.errors import UsageError
from qdo.message import Message
from qdo.placement import ASYNCIO, kind_of
from qdo.settings import Settings
from qdo.worker.executors.base import Executor, JobCall
from qdo.worker.executors.greenlet import GreenletExecutor

if TYPE_CHECKING:
    from qdo.app import Job


class Executors(Executor):
    """The executors of one worker, each made when the first job needs it.

    :param target: the app as MODULE:APP, for processes to import it; "" when it was made around
        the job that the settings name; None when nobody knows where it comes from.
    :param may_start: asked before a job starts that had to wait for its place.
    """

    def __init__(
        self,
        settings: Settings,
        target: str | None,
        may_start: Callable[[Message], bool],
    ) -> None:
        self._settings = settings
        self._target = target
        self._may_start = may_start
        self._made: dict[str, Executor] = {}

    def check(self, jobs: Iterable[Job]) -> None:
        """Raise UsageError unless every job can run where it is told to."""
        for job in jobs:
            kind = kind_of(job, self._settings.executor)
            if kind == "process" and self._target is None:
                raise UsageError(
                    reason=f"job {job.name} with executor 'process' must be imported by its "
                    "processes: run it with `qdo-worker MODULE:APP`, or give Worker(target=...)"
                )
            if job.memory_mib is not None and not os.path.exists("/proc/self/statm"):
                raise UsageError(
                    reason=f"job {job.name}: memory_mib is watched in /proc, which this system "
                    "does not have: leave it out, or run the worker on Linux"
                )

    def bind(self, job: Job) -> JobCall:
        """Return the call of the job's own executor."""
        kind = kind_of(job, self._settings.executor)
        executor = self._made.get(kind)
        if executor is None:
            executor = self._made[kind] = self._make(kind)
        return executor.bind(job)

    def under_way(self) -> int:
        """Return how many jobs run outside the event loop's thread."""
        return sum(executor.under_way() for executor in self._made.values())

    def close(self) -> None:
        """End every executor."""
        for executor in self._made.values():
            executor.close()

    def _make(self, kind: str) -> Executor:
        # Imported when needed: a worker without such jobs does not pay for them.
        if kind == "thread":
            from qdo.worker.executors.thread import ThreadExecutor

            return ThreadExecutor()
        if kind == ASYNCIO:
            from qdo.worker.executors.aio import AsyncioExecutor

            return AsyncioExecutor()
        if kind == "process":
            from qdo.worker.executors.process import ProcessExecutor

            return ProcessExecutor(self._settings, self._target or "", self._may_start)
        return GreenletExecutor()
