"""Whether jobs and a broker go together: what a job asks for that a broker cannot give.

At the start a worker that finds such a queue refuses to run. One that appears later must not
stop a fleet that runs, nor the process that takes the place of a dead one: it is not processed,
and named in the log.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

from qdo.app import App, Job
from qdo.brokers.base import Broker
from qdo.describe import describe, few
from qdo.errors import UnreachableError, UsageError
from qdo.policy import Policy

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
    """Refuse jobs that ask for more than the broker can give; pass on what it advises.

    A broker whose queues differ in their order is asked for them all, so that wrong rights or a
    wrong address come up at once, too.

    :param takes: whether this worker takes a queue.
    :param policy: gives the failure policy of a queue.
    :param refuse: queues whose jobs ask for more are a reason to refuse.
    :raises UsageError: with the remedy, naming the first such job and its queues.
    :raises QdoError: the broker cannot list its queues, see `Broker.queues`.
    """
    _check_time(app.jobs, broker)
    if not orders_differ(broker) and not _advises(broker):
        return
    unfit: dict[Job, list[str]] = {}
    taken = sorted(filter(takes, broker.queues()))
    for queue in taken if refuse and orders_differ(broker) else ():
        job = app.job_for(queue)
        if job is not None and is_weaker(broker, queue, job):
            unfit.setdefault(job, []).append(queue)
    for job, queues in unfit.items():
        raise UsageError(reason=_reason(broker, job, queues))
    for sentence in broker.advice({queue: policy(queue) for queue in taken}):
        _log.warning("%s", sentence)


def _check_time(jobs: Iterable[Job], broker: Broker) -> None:
    hold = broker.capabilities.hold_seconds
    for job in jobs:
        if hold is not None and job.timeout_seconds is not None and job.timeout_seconds > hold:
            raise UsageError(
                reason=f"job {job.name}: timeout_seconds={job.timeout_seconds:g} is longer than "
                f"this broker can hold a message, {hold:g} s, and another worker would get it "
                f"meanwhile: give at most {hold:g}"
            )


def orders_differ(broker: Broker) -> bool:
    """Return whether the broker has anything to say about the order of a queue."""
    return type(broker).order is not Broker.order


def _advises(broker: Broker) -> bool:
    return type(broker).advice is not Broker.advice


def is_weaker(broker: Broker, queue: str, job: Job) -> bool:
    """Return whether a queue cannot be processed in the order of its job.

    :raises: as `Broker.order`.
    """
    return _STRICTNESS[broker.order(queue)] < _STRICTNESS[job.order]


def _reason(broker: Broker, job: Job, queues: list[str]) -> str:
    given = broker.order(queues[0])
    shown = ("queue " if len(queues) == 1 else "queues ") + few(queues, NAMES_SHOWN)
    what = "no order" if given == "none" else f"order={given!r} only"
    return (
        f"the broker keeps {what} in {shown}, and job {job.name} has order={job.order!r}: "
        f'write @app.job(order="{given}") for such queues, or leave them out with --exclude'
    )


class Suitability:
    """Says of each queue that is about to be processed whether its job suits it."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._differ = orders_differ(broker)
        self._named: set[str] = set()

    def fits(self, queue: str, job: Job) -> bool:
        """Return whether a queue may be processed by its job; name once the one that may not.

        :raises UnreachableError: the broker cannot say it.
        """
        if not self._differ or job.order == "none" or not self._is_weaker(queue, job):
            return True
        if queue not in self._named:
            self._named.add(queue)
            reason = _reason(self._broker, job, [queue])
            _log.error("queue %s is not processed, its messages wait: %s", queue, reason)
        return False

    def _is_weaker(self, queue: str, job: Job) -> bool:
        try:
            return is_weaker(self._broker, queue, job)
        except Exception as error:
            raise UnreachableError(
                what=f"the broker's order of queue {queue}", reason=describe(error)
            ) from error
