"""The jobs of an app as the engine runs them."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

from qdo.app import App, Job
from qdo.message import Batch, Message
from qdo.ordering import Order
from qdo.outcomes import FailedAt
from qdo.worker.executors.base import Executor, JobCall
from qdo.worker.observing import Observing
from qdo.worker.suitability import Suitability

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Work:
    """A job as the pipeline runs it."""

    name: str
    call: JobCall
    every_message: bool
    """Record progress after every message, before the next one of the queue."""
    order: Order
    lanes: int
    """How many messages of a queue may be in hand at once, where they need not all wait."""
    batch: int = 0
    """How many messages a call takes at most, 0 where it takes one that is in no batch."""
    batch_wait_seconds: float = 0.0


class Works:
    """Which job a queue has, and how it is run.

    :param suitability: says whether a queue can be processed as its job wants it.
    """

    def __init__(
        self, app: App, executor: Executor, observing: Observing, suitability: Suitability
    ) -> None:
        self._app = app
        self._executor = executor
        self._observing = observing
        self._suitability = suitability
        self._works: dict[Job, Work] = {}
        self._jobless: set[str] = set()

    def of(self, queue: str) -> Work | None:
        """Return how the messages of a queue are run; None where they have to wait.

        :raises UnreachableError: it cannot be found out whether the queue suits its job.
        """
        job = self._app.job_for(queue)
        if job is None:
            if queue not in self._jobless:
                self._jobless.add(queue)
                _log.error("queue %s: the app has no job for it; its messages wait", queue)
            return None
        if not self._suitability.fits(queue, job):
            return None
        work = self._works.get(job)
        if work is None:
            call = self._executor.bind(self._app.composed(job))
            work = self._works[job] = Work(
                job.name,
                self._observing.bind(call) if job.batch is None else call,
                job.checkpoint == "message",
                job.order,
                job.lanes,
                job.batch or 0,
                job.batch_wait_seconds,
            )
        return work


def in_batches(call: JobCall) -> JobCall:
    """Return a call that gives a job a single message as a batch."""

    def alone(message: Message, context: Any) -> None:
        try:
            call(Batch((message,)), context)  # type: ignore[arg-type]
        except FailedAt as error:
            if error.index == 0 and error.__cause__ is not None:
                raise error.__cause__ from None
            raise

    return alone
