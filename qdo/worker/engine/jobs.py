"""Bind the jobs of an app for the engine, and check whether the broker meets their requirements.

The broker must meet the requirements of the jobs of its queues. A worker that finds an incompatible
queue at its start does not run. A later incompatible queue must not stop a running fleet or the
replacement of a dead process. Workers do not process the incompatible queue, and log its name. The
checks of a queue raise UnreachableError if the broker cannot report the order of the queue.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from qdo.app import App
from qdo.brokers.base import Broker
from qdo.brokers.registry import kind_of
from qdo.callables import check_done
from qdo.coordination.protocol.claims import Claim
from qdo.errors import UnreachableError, UsageError
from qdo.jobs.job import Job
from qdo.jobs.middleware import unchecked
from qdo.jobs.options import Order
from qdo.jobs.retry import PolicyInForce
from qdo.message import Batch, Message
from qdo.outcomes import FailedAt
from qdo.requests.jobs import ENDED, reporting
from qdo.text import describe, join_some
from qdo.worker.engine.breakers import Breaker
from qdo.worker.engine.limits import Gate, Limits
from qdo.worker.engine.meters import JobMeter
from qdo.worker.engine.observers import Observers
from qdo.worker.engine.slot import ClaimReports, Slot
from qdo.worker.executors.base import Executor, JobCall, NotStarted, check_lease

if TYPE_CHECKING:
    from qdo.worker.pools.subscription import PoolSubscription

_log = logging.getLogger(__name__)

_STRICTNESS = {"none": 0, "key": 1, "queue": 2, "priority": 2}
NAMES_SHOWN = 5


def check_jobs(
    app: App,
    broker: Broker,
    takes: Callable[[str], bool],
    policy: Callable[[str], PolicyInForce],
    refuse: bool = True,
    concurrency: Sequence[int] = (),
) -> None:
    """Raise an error if jobs require more than the broker offers; log the broker's warnings.

    A broker whose queues have different orders must list all queues. The list also reveals missing
    permissions or a wrong address at the start.

    :param refuse: raise an error for queues whose jobs require a stricter order.
    :param concurrency: the concurrency of each process of this worker's parent.
    :raises UsageError: a job requires more than the broker offers. The text names the job, its
      queues and the remedy.
    :raises QdoError: the broker cannot list its queues, see `QueueCatalog.names`.
    """
    _check_features(app.jobs, broker)
    if not orders_differ(broker) and not broker.capabilities.checks_config:
        return
    unfit: dict[Job, list[str]] = {}
    taken = sorted(filter(takes, broker.catalog.names()))
    for queue in taken if refuse and orders_differ(broker) else ():
        job = app.job_for(queue)
        if job is not None and is_weaker(broker, queue, job):
            unfit.setdefault(job, []).append(queue)
    for job, queues in unfit.items():
        raise UsageError(reason=_reason(broker, job, queues))
    warnings = broker.catalog.config_warnings({queue: policy(queue) for queue in taken})
    for sentence in [*warnings, *broker.catalog.connection_warnings(concurrency)]:
        _log.warning("%s", sentence)


def _check_features(jobs: Iterable[Job], broker: Broker) -> None:
    hold = broker.capabilities.hold_seconds
    for job in jobs:
        if job.order == "priority" and not broker.positions.stable:
            raise UsageError(
                reason=f"job {job.name}: order='priority' requires stable positions, which SQS "
                "does not have; give urgent messages queues of their own, or use another broker"
            )
        if hold is not None and job.timeout_seconds is not None and job.timeout_seconds > hold:
            raise UsageError(
                reason=f"job {job.name}: timeout_seconds must be at most {hold:g}, got "
                f"{job.timeout_seconds:g}: this broker cannot hide a message for longer, and "
                "another worker would receive it while the job runs"
            )


def check_pools(jobs: Iterable[Job], broker: str) -> None:
    """Raise UsageError if the app has pools and its broker cannot store requests."""
    for job in jobs:
        if job.pool and not kind_of(broker).stores_requests:
            raise UsageError(
                reason=f"job {job.name}: pool=True requires a broker that stores requests, which "
                "SQS and Kinesis do not; give requests an app with a PostgreSQL or SQLite broker"
            )


def orders_differ(broker: Broker) -> bool:
    return broker.capabilities.mixed_order


def is_weaker(broker: Broker, queue: str, job: Job) -> bool:
    """Return whether the broker's order of a queue is weaker than its job requires."""
    return _STRICTNESS[broker.catalog.order(queue)] < _STRICTNESS[job.order]


def _reason(broker: Broker, job: Job, queues: list[str]) -> str:
    order = broker.catalog.order(queues[0])
    names = ("queue " if len(queues) == 1 else "queues ") + join_some(queues, NAMES_SHOWN)
    what = "no order" if order == "none" else f"only order={order!r}"
    return (
        f"the broker keeps {what} in {names}, but job {job.name} has order={job.order!r}: "
        f'write @app.job(order="{order}") for such queues, or exclude them with --exclude'
    )


class Compatibility:
    """Checks whether the broker's order of each queue meets the requirement of its job."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._differ = orders_differ(broker)
        self._named: set[str] = set()

    def fits(self, queue: str, job: Job) -> bool:
        """Return whether a job may process a queue; log each incompatible queue once."""
        if not self._differ or job.order == "none" or not self._is_weaker(queue, job):
            return True
        if queue not in self._named:
            self._named.add(queue)
            reason = _reason(self._broker, job, [queue])
            _log.error("queue %s is not processed; its messages wait: %s", queue, reason)
        return False

    def _is_weaker(self, queue: str, job: Job) -> bool:
        try:
            return is_weaker(self._broker, queue, job)
        except Exception as error:
            raise UnreachableError(
                what=f"the broker's order of queue {queue}", reason=describe(error)
            ) from error


@dataclass(frozen=True, slots=True)
class BoundJob:
    """A job bound to its executor, for the pipeline."""

    name: str
    call: JobCall
    # Whether to record progress after every message, before the next message of the queue starts.
    every_message: bool
    order: Order
    # Maximum number of messages of a queue in flight at once, with the order "key" or "none".
    lanes: int
    # Maximum number of messages of one call; 0 if the job takes single messages.
    batch: int = 0
    batch_wait_seconds: float = 0.0
    timeout_seconds: float | None = None
    executor: str = "greenlet"
    # Gives each message its permits; None if messages need no permits.
    gate: Gate | None = None
    # Counts the job's turns for the metrics. None without metrics, and for batch jobs, whose call
    # counts the batches.
    meter: JobMeter | None = None
    # Pauses the job when all attempts fail; None only for `NO_JOB`.
    breaker: Breaker | None = None


def _never_started(message: Message, context: Any) -> None:
    raise NotStarted


# The job of queues whose messages must wait.
NO_JOB = BoundJob("", _never_started, every_message=False, order="queue", lanes=1)


class JobTable:
    """Finds the job of a queue, and binds the job to its executor."""

    def __init__(
        self,
        app: App,
        executor: Executor,
        observers: Observers,
        compatibility: Compatibility,
        limits: Limits,
        breaker: Callable[[str], Breaker],
    ) -> None:
        self._app = app
        self._executor = executor
        self._observers = observers
        self._compatibility = compatibility
        self._limits = limits
        self._breaker = breaker
        self._bound: dict[Job, BoundJob] = {}
        self._jobless: set[str] = set()

    def find(self, queue: str) -> BoundJob:
        """Return the job of a queue; `NO_JOB` if its messages must wait."""
        job = self._app.job_for(queue)
        if job is None:
            if queue not in self._jobless:
                self._jobless.add(queue)
                _log.error(
                    "queue %s: the app has no job for it; its messages wait; deploy a job for it, "
                    "or delete the queue",
                    queue,
                )
            return NO_JOB
        if not self._compatibility.fits(queue, job):
            return NO_JOB
        bound = self._bound.get(job)
        if bound is None:
            call = self._executor.bind(self._app.hooks.composed(job, check_lease))
            # The call of a batch job counts its batches, see `_call_of`. A meter would count them
            # twice.
            meters = self._observers.meters if job.batch is None else None
            bound = self._bound[job] = BoundJob(
                job.name,
                self._call_of(job, call),
                job.checkpoint == "message",
                job.order,
                job.lanes,
                job.batch or 0,
                job.batch_wait_seconds,
                job.timeout_seconds,
                self._executor.kind(job),
                self._limits.gate(job),
                None if meters is None else meters.of(job.queues),
                self._breaker(job.name),
            )
        return bound

    def paused_globs(self) -> dict[str, str]:
        """Return the globs of paused jobs, each with the error; see `breakers`."""
        return {
            job.queues: bound.breaker.why
            for job, bound in self._bound.items()
            if bound.breaker and bound.breaker.paused
        }

    def _call_of(self, job: Job, call: JobCall) -> JobCall:
        """Wrap the executor's call for turns."""
        if job.batch is not None:
            return self._observers.bind_batch(call, job.queues)
        observed = self._observers.bind(call)
        if job.pool:
            return reporting(observed)
        # Omitting the check, which `RowRunner` repeats, gains 7 % of the rate.
        return unchecked(call) if observed is call else observed


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


@dataclass(frozen=True, slots=True)
class Turn:
    """A queue's turn, or the run of one of its lanes."""

    # The slot of the queue or of the lane.
    slot: Slot
    # The registration that made the claim.
    member: ClaimReports
    # The claim of the queue or of the lane. After the loss of the queue, ``slot.claim`` is another
    # claim or None.
    claim: Claim
    # The queue's job; `NO_JOB` if the queue's messages must wait.
    job: BoundJob

    @property
    def pool(self) -> PoolSubscription:
        """Return the pool of a turn of requests. The pool is the member of this turn."""
        return cast("PoolSubscription", self.member)

    def returned(self, position: int, result: Any) -> None:
        """Handle a result other than None: a pool's report, or a job that did not do its work."""
        if result is ENDED:
            self.pool.reported(position)
        else:
            check_done(result, self.job.call, "job")

    @property
    def in_force(self) -> bool:
        """Whether the worker still owns the queue under this claim."""
        return self.slot.claim is self.claim

    def admit(self) -> float:
        """Return the seconds until an attempt may begin; more than 0 if the job is paused."""
        return 0.0 if self.job.breaker is None else self.job.breaker.admit()

    def note_successes(self, taken: int, slot: Slot | None = None) -> None:
        """Close the job's breaker if at least one of the `taken` messages succeeded.

        :param slot: the slot of the lane that took the messages; by default the queue's slot.
        """
        # Messages that failed or did not run must not close the breaker.
        counts = self.slot if slot is None else slot
        if taken > counts.unstarted + counts.unreturned and self.job.breaker is not None:
            self.job.breaker.succeeded()

    def must_record(self, before: int) -> bool:
        """Return whether to record `done` at once after it has moved from `before`."""
        failure = self.claim.failure
        # The worker recorded the start of the message. The next owner must not assume that the
        # message is still in flight.
        begun = failure is not None and failure.begun_by and failure.position > before
        moved = self.claim.done != before and self.in_force
        return moved and bool(self.job.every_message or begun)

    @property
    def has_failure(self) -> bool:
        """Whether a message after ``claim.done`` has a recorded failure."""
        claim = self.claim
        return claim.failure is not None and claim.failure.position > claim.done

    @property
    def is_blocked(self) -> bool:
        """Whether a message after ``claim.done`` waits for an operator."""
        failure = self.claim.failure
        return failure is not None and failure.position > self.claim.done and failure.held
