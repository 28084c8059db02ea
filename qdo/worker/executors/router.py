"""Routes each job to its executor."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from qdo.errors import UsageError
from qdo.jobs.options import ASYNCIO, kind_of
from qdo.message import Message
from qdo.settings.settings import Settings
from qdo.worker.executors.base import Executor, JobCall, OnStart
from qdo.worker.executors.greenlet import GreenletExecutor

if TYPE_CHECKING:
    from qdo.jobs.job import Job

SWITCH_SECONDS = 0.0005
"""How long a job that computes in a thread keeps Python's global lock when the event loop asks
for it, which it does several times per message. With the 5 ms that Python allows, messages of
other queues took up to 3 s beside such a job, with 0.5 ms at most 0.3 s."""


class ExecutorRouter(Executor):
    """The executors of one worker, each created when the first job needs it.

    :param target: the app as MODULE:APP, which processes import; "" for an app created for the
        job named in the settings; None if its module is unknown.
    :param may_start: checked on the thread that starts a job, or before a process is given a
        message: the claim or the lease may have ended meanwhile. Any thread may call it.
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
        """Raise UsageError if a job cannot run in its executor."""
        for job in jobs:
            kind = kind_of(job, self._settings.executor)
            if kind == "process" and self._target is None:
                raise UsageError(
                    reason=f"job {job.name} with executor 'process' must be imported by its "
                    "processes: run it with `qdo-worker MODULE:APP`, or give Worker a "
                    "ProcessContext(target=...)"
                )
            if job.memory_mib is not None and not os.path.exists("/proc/self/statm"):
                raise UsageError(
                    reason=f"job {job.name}: memory_mib needs /proc, which this system "
                    "does not have: omit it, or run the worker on Linux"
                )

    def bind(self, job: Job, on_start: OnStart | None = None) -> JobCall:
        """Return the call of the job's executor."""
        kind = kind_of(job, self._settings.executor)
        executor = self._made.get(kind)
        if executor is None:
            executor = self._made[kind] = self._make(kind)
        return executor.bind(job, on_start)

    def decodes(self, job: Job) -> bool:
        """Return whether the job's process decodes large bodies."""
        return kind_of(job, self._settings.executor) == "process"

    def under_way(self) -> int:
        """Return how many jobs are running outside the event loop's thread."""
        return sum(executor.under_way() for executor in self._made.values())

    def close(self) -> None:
        """Close every executor."""
        for executor in self._made.values():
            executor.close()

    def _make(self, kind: str) -> Executor:
        # Imported on demand: workers without such jobs do not load them.
        if kind in ("thread", ASYNCIO):
            sys.setswitchinterval(SWITCH_SECONDS)
        if kind == "thread":
            from qdo.worker.executors.thread import ThreadExecutor

            return ThreadExecutor(self._may_start)
        if kind == ASYNCIO:
            from qdo.worker.executors.aio import AsyncioExecutor

            return AsyncioExecutor(self._may_start)
        if kind == "process":
            from qdo.worker.executors.process.executor import ProcessExecutor

            return ProcessExecutor(self._settings, self._target or "", self._may_start)
        return GreenletExecutor()
