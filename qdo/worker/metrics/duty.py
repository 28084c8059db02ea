"""The duty "metrics": publishes what a worker process counts."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping

import gevent

from qdo.brokers.base import Broker
from qdo.coordination.protocol.checkpoints import CheckpointTotals
from qdo.system.clock import clock
from qdo.system.histogram import Histogram
from qdo.worker.duties.member_api import CurrentMember
from qdo.worker.duties.runner import Duty
from qdo.worker.engine.dispatcher import Dispatcher
from qdo.worker.engine.pipeline import Pipeline
from qdo.worker.metrics import catalog
from qdo.worker.metrics.catalog import Metric
from qdo.worker.metrics.page import MetricsPage
from qdo.worker.metrics.survey import QueueSurvey, age

PUBLISH_SECONDS = 1.0
SURVEY_SECONDS = 2.0
SURVEY_SHARE = 0.02
"""The share of the time that looking at all owned queues may take, with pauses up to
`MOST_SURVEY_SECONDS`: on a busy worker others run in between."""
MOST_SURVEY_SECONDS = 30.0

_log = logging.getLogger(__name__)

Rows = list[tuple[tuple[str, ...], list[float]]]


class MetricsDuty(Duty):
    """Publishes the metrics of this process for its parent, until its last message has ended.

    :param state: returns the state of the worker.
    :param page: where they are published.
    """

    name = "metrics"
    ends_at_drain = False

    def __init__(
        self,
        broker: Broker,
        dispatcher: Dispatcher,
        pipeline: Pipeline,
        current: CurrentMember,
        checkpoints: CheckpointTotals,
        page: MetricsPage,
        state: Callable[[], str],
    ) -> None:
        self._broker = broker
        self._dispatcher = dispatcher
        self._pipeline = pipeline
        self._current = current
        self._checkpoints = checkpoints
        self._page = page
        self._state = state
        self._survey = QueueSurvey()
        self._delays = Histogram(catalog.LOOP_BOUNDS)
        self._failed = False

    def run(self) -> None:
        surveys = gevent.spawn(self._survey_forever)
        try:
            while True:
                self.publish()
                planned = clock() + PUBLISH_SECONDS
                gevent.sleep(PUBLISH_SECONDS)
                self._delays.observe(max(0.0, clock() - planned))
        finally:
            surveys.kill(block=False)
            self.publish()

    def publish(self) -> None:
        """Publish the metrics now; an error is only logged, once."""
        try:
            metrics = {metric.name: rows for metric, rows in self._values().items()}
            self._page.write({"state": self._state(), "metrics": metrics})
        except Exception:  # noqa: BLE001 - messages do not depend on it
            if not self._failed:
                _log.exception("cannot publish metrics; /metrics shows the last ones")
            self._failed = True

    def _survey_forever(self) -> None:
        while True:
            began = clock()
            survey = QueueSurvey()
            try:
                survey.take(list(self._dispatcher.slots.values()), time.time(), _breathe)
                survey.ask(self._broker)
                self._survey = survey
            except Exception:  # noqa: BLE001 - messages do not depend on it
                _log.exception("cannot survey the owned queues for /metrics; trying again")
            pause = max(SURVEY_SECONDS, (clock() - began) / SURVEY_SHARE)
            gevent.sleep(min(pause, MOST_SURVEY_SECONDS))

    def _values(self) -> Mapping[Metric, Rows]:
        counters, member = self._pipeline.counters, self._current.member
        changes = {name: getattr(counters, name) for name in ("claimed", "released", "lost")}
        lease = 0.0 if member is None else max(0.0, member.lease.until - clock())
        checkpoints = self._checkpoints
        return {
            **self._job_values(),
            catalog.QUEUES: _rows(self._survey.states),
            catalog.OLDEST: _one(age(self._survey.oldest, time.time())),
            catalog.JOBS_RUNNING: _one(self._survey.jobs),
            catalog.CONCURRENCY: _one(self._dispatcher.concurrency),
            catalog.OWNERSHIP: _rows(changes),
            catalog.SESSIONS_LOST: _one(counters.sessions_lost),
            catalog.LEASES_EXPIRED: _one(self._dispatcher.timers.expirations),
            catalog.LEASE: _one(lease),
            catalog.REGISTERED: _one(member is not None),
            catalog.CHECKPOINTS: _rows(checkpoints.results),
            catalog.CHECKPOINT_QUEUES: _one(checkpoints.queues),
            catalog.CHECKPOINT_DURATION: [((), checkpoints.latency.dump())],
            catalog.BROKER_REQUESTS: _rows(self._broker.request_counts()),
            catalog.LOOP_DELAY: [((), self._delays.dump())],
        }

    def _job_values(self) -> dict[Metric, Rows]:
        meters = {} if self._pipeline.meters is None else self._pipeline.meters.by_glob
        attempts: Rows = []
        for glob, meter in meters.items():
            counts = {"done": meter.done, **meter.outcomes}
            attempts += [((glob, outcome), [float(n)]) for outcome, n in counts.items()]
        return {
            catalog.ATTEMPTS: attempts,
            catalog.JOB_DURATION: [
                ((glob,), meter.durations.dump()) for glob, meter in meters.items()
            ],
            catalog.DWELL: [((glob,), meter.dwell.dump()) for glob, meter in meters.items()],
        }


def _one(value: float) -> Rows:
    return [((), [float(value)])]


def _rows(values: Mapping[str, float]) -> Rows:
    return [((label,), [float(value)]) for label, value in values.items()]


def _breathe() -> None:
    gevent.sleep(0)
