"""The jobs of an app as the engine runs them."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

from qdo.app import App
from qdo.jobs.job import Job
from qdo.jobs.options import Order
from qdo.message import Batch, Message
from qdo.outcomes import FailedAt
from qdo.worker.engine.compatibility import Compatibility
from qdo.worker.engine.gates.limits import Gate, Limits
from qdo.worker.engine.observers import Observers
from qdo.worker.executors.base import Executor, JobCall, NotStarted
from qdo.worker.metrics.meters import JobMeter

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class BoundJob:
    """A job as the pipeline runs it."""

    name: str
    call: JobCall
    every_message: bool
    """Record progress after every message, before the next one of the queue."""
    order: Order
    lanes: int
    """How many messages of a queue may be in flight at once, with an order of key or none."""
    batch: int = 0
    """Maximum messages of one call; 0 if the job takes single messages."""
    batch_wait_seconds: float = 0.0
    timeout_seconds: float | None = None
    decodes: bool = False
    """Its process decodes large bodies."""
    gate: Gate | None = None
    """What it needs before a message is started, None for nothing."""
    meter: JobMeter | None = None
    """Counts its turns for the metrics; None without them, and for batches, whose call counts."""


def _never_started(message: Message, context: Any) -> None:
    raise NotStarted


NO_JOB = BoundJob("", _never_started, every_message=False, order="queue", lanes=1)
"""Stands for the job of a queue whose messages must wait."""


class JobTable:
    """Finds the job of a queue, bound to its executor."""

    def __init__(
        self,
        app: App,
        executor: Executor,
        observers: Observers,
        compatibility: Compatibility,
        limits: Limits,
    ) -> None:
        self._app = app
        self._executor = executor
        self._observers = observers
        self._compatibility = compatibility
        self._limits = limits
        self._bound: dict[Job, BoundJob] = {}
        self._jobless: set[str] = set()

    def find(self, queue: str) -> BoundJob:
        """Return the job of a queue; `NO_JOB` if its messages must wait.

        :raises UnreachableError: the broker cannot report whether the queue suits its job.
        """
        job = self._app.job_for(queue)
        if job is None:
            if queue not in self._jobless:
                self._jobless.add(queue)
                _log.error("queue %s: the app has no job for it; its messages wait", queue)
            return NO_JOB
        if not self._compatibility.fits(queue, job):
            return NO_JOB
        bound = self._bound.get(job)
        if bound is None:
            call = self._executor.bind(self._app.hooks.composed(job))
            meters = self._observers.meters if job.batch is None else None
            bound = self._bound[job] = BoundJob(
                job.name,
                self._observers.bind(call)
                if job.batch is None
                else self._observers.bind_batch(call, job.queues),
                job.checkpoint == "message",
                job.order,
                job.lanes,
                job.batch or 0,
                job.batch_wait_seconds,
                job.timeout_seconds,
                self._executor.decodes(job),
                self._limits.gate(job),
                None if meters is None else meters.of(job.queues),
            )
        return bound


def in_batches(call: JobCall) -> JobCall:
    """Return a call that passes a single message to a job as a batch."""

    def call_with_one(message: Message, context: Any) -> None:
        try:
            call(Batch((message,)), context)  # type: ignore[arg-type]
        except FailedAt as error:
            if error.index == 0 and error.__cause__ is not None:
                raise error.__cause__ from None
            raise

    return call_with_one
