"""Checks that the broker can process queues in the way that their jobs require.

A worker that finds an incompatible queue at its start does not run. A queue that appears later
must not stop a running fleet, nor a process that replaces a dead one: it is not processed, and
the log names it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

from qdo.app import App
from qdo.brokers.base import Broker
from qdo.errors import UnreachableError, UsageError
from qdo.jobs.job import Job
from qdo.jobs.policy import Policy
from qdo.text import describe, join_some

_log = logging.getLogger(__name__)

_STRICTNESS = {"none": 0, "key": 1, "queue": 2}
NAMES_SHOWN = 5


def check_jobs(
    app: App,
    broker: Broker,
    takes: Callable[[str], bool],
    policy: Callable[[str], Policy],
    refuse: bool = True,
) -> None:
    """Raise an error if jobs require more than the broker offers; log the broker's warnings.

    A broker whose queues differ in their order must list them all. This also reveals missing
    permissions or a wrong address at the start.

    :param takes: returns whether this worker takes a queue.
    :param policy: returns the failure policy of a queue.
    :param refuse: raise an error for queues whose jobs require more.
    :raises UsageError: with the remedy, naming the first such job and its queues.
    :raises QdoError: the broker cannot list its queues, see `QueueCatalog.names`.
    """
    _check_time(app.jobs, broker)
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
    for sentence in broker.catalog.config_warnings({queue: policy(queue) for queue in taken}):
        _log.warning("%s", sentence)


def _check_time(jobs: Iterable[Job], broker: Broker) -> None:
    hold = broker.capabilities.hold_seconds
    for job in jobs:
        if hold is not None and job.timeout_seconds is not None and job.timeout_seconds > hold:
            raise UsageError(
                reason=f"job {job.name}: timeout_seconds must be at most {hold:g}, got "
                f"{job.timeout_seconds:g}: this broker cannot hide a message for longer, and "
                "another worker would receive it while the job runs"
            )


def orders_differ(broker: Broker) -> bool:
    """Return whether the broker's queues may differ in their order."""
    return broker.capabilities.mixed_order


def is_weaker(broker: Broker, queue: str, job: Job) -> bool:
    """Return whether the broker's order of a queue is weaker than its job requires.

    :raises: as `QueueCatalog.order`.
    """
    return _STRICTNESS[broker.catalog.order(queue)] < _STRICTNESS[job.order]


def _reason(broker: Broker, job: Job, queues: list[str]) -> str:
    order = broker.catalog.order(queues[0])
    shown = ("queue " if len(queues) == 1 else "queues ") + join_some(queues, NAMES_SHOWN)
    what = "no order" if order == "none" else f"only order={order!r}"
    return (
        f"the broker keeps {what} in {shown}, but job {job.name} has order={job.order!r}: "
        f'write @app.job(order="{order}") for such queues, or exclude them with --exclude'
    )


class Compatibility:
    """Checks each queue before it is processed."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._differ = orders_differ(broker)
        self._named: set[str] = set()

    def fits(self, queue: str, job: Job) -> bool:
        """Return whether a job may process a queue; log each queue once that it may not.

        :raises UnreachableError: the broker cannot report the queue's order.
        """
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
