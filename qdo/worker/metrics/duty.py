"""The duty "metrics" publishes the counts of a worker process and the states of its queues."""

from __future__ import annotations

import copy
import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from heapq import nsmallest
from typing import TYPE_CHECKING, get_args

import gevent

from qdo.app import App
from qdo.brokers.base import Broker
from qdo.coordination.protocol.checkpoints import CheckpointTotals
from qdo.errors import QdoError
from qdo.outcomes import OutcomeName
from qdo.positions import time_of_position
from qdo.system import logs
from qdo.system.clock import Histogram, clock
from qdo.worker.duties.duty import CurrentMember, Duty
from qdo.worker.engine.dispatcher import Dispatcher
from qdo.worker.engine.meters import MOST_GLOBS
from qdo.worker.engine.pipeline import Pipeline
from qdo.worker.engine.slot import Slot, SlotState
from qdo.worker.metrics import catalog
from qdo.worker.metrics.catalog import Metric
from qdo.worker.metrics.facts import AppFacts, Rows, one, rows
from qdo.worker.metrics.monitor import MetricsPage

if TYPE_CHECKING:
    from qdo.coordination.protocol.claims import Claim


_log = logging.getLogger(__name__)

PUBLISH_SECONDS = 1.0
# Minimum pause between surveys of the owned queues, maximum share of the time for surveys, and
# maximum pause. On a busy worker, the duration of a survey includes the time of other greenlets.
SURVEY_SECONDS = 2.0
SURVEY_SHARE = 0.02
MOST_SURVEY_SECONDS = 30.0
# Maximum number of queues to look up at the broker, beginning with the lowest positions.
ASKED = 3
# Number of queues to survey, in 4 ms, before other greenlets run. On a busy worker, the other
# greenlets may take a second.
CHUNK = 5000
STATES = (
    *("idle", "ready", "running", "waiting", "limited", "failing", "unreadable"),
    *("blocked", "paused", "lease-expired"),
)
_STATES = {
    SlotState.READY: "ready",
    SlotState.RUNNING: "running",
    SlotState.WAITING: "waiting",
    SlotState.LIMITED: "limited",
    SlotState.PAUSED: "lease-expired",
    SlotState.STILL: "paused",
    SlotState.HELD: "waiting",
}


class QueueSurvey:
    """The queues of one worker process at one time.

    :ivar jobs: number of messages in flight.
    :ivar oldest: Unix time of the oldest known waiting message; None without a waiting message.
    """

    def __init__(self) -> None:
        self.states: Counter[str] = Counter(dict.fromkeys(STATES, 0))
        self.jobs = 0
        self.oldest: float | None = None
        self._unknown: list[Slot] = []

    def take(self, slots: Sequence[Slot], now: float, breathe: Callable[[], None]) -> None:
        """Survey queues; call `breathe` at times to let other greenlets run."""
        for number, slot in enumerate(slots, start=1):
            state = state_of(slot)
            self.states[state] += 1
            if slot.state is SlotState.RUNNING:
                self.jobs += 1 if slot.lanes is None else len(slot.lanes.in_flight())
            if state not in ("idle", "blocked", "paused"):
                self._note_age(slot, now)
            if number % CHUNK == 0:
                breathe()

    def ask(self, broker: Broker) -> None:
        """Ask the broker for the oldest messages of queues without a known oldest message."""
        if broker.capabilities.subscriptions:
            return  # each subscription knows its oldest message
        claimed = [(slot, slot.claim) for slot in self._unknown if slot.claim is not None]
        for slot, claim in nsmallest(ASKED, claimed, key=lambda each: each[1].done):
            try:
                oldest = broker.catalog.backlog(slot.queue, claim.done).oldest
            except QdoError:
                return  # the turn of the queue reports the error
            if oldest is not None:
                self._note(time_of_position(broker.positions.to_time(oldest)))

    def age(self, now: float) -> float:
        """Return the age of the oldest waiting message in seconds; 0 without a waiting message."""
        return 0.0 if self.oldest is None else max(0.0, now - self.oldest)

    def _note_age(self, slot: Slot, now: float) -> None:
        if slot.subscription is not None:
            behind = slot.subscription.behind_seconds()
            if behind is not None and behind > 0:
                self._note(now - behind)
            return
        sent = _next_sent(slot)
        if sent is None:
            self._unknown.append(slot)
        else:
            self._note(sent)

    def _note(self, sent: float) -> None:
        self.oldest = sent if self.oldest is None else min(self.oldest, sent)


def state_of(slot: Slot) -> str:
    """Return the state of a queue, which is one of `STATES`."""
    claim = slot.claim
    if claim is None:
        return "running"  # the worker lost the queue, but its message in flight still runs
    if claim.paused:
        return "paused"
    if slot.state is SlotState.PAUSED:
        return "lease-expired"
    failure = claim.failure
    if failure is not None and failure.position > claim.done and not failure.only_begun:
        return "blocked" if failure.blocked else "failing"
    if slot.broker_failures:
        return "unreadable"
    return _STATES.get(slot.state, "idle")


def _next_sent(slot: Slot) -> float | None:
    """Return the Unix time of the next message of a queue; None if this worker does not know it."""
    if slot.message is not None:
        return slot.message.due or slot.message.time
    claim = slot.claim
    if claim is None:
        return None
    if claim.failure is not None and claim.failure.position > claim.done:
        return _time(claim, claim.failure.position)
    if slot.gathered:
        return _time(claim, slot.gathered[0][0])
    if slot.rows is not None:
        row = next(copy.copy(slot.rows), None)
        return None if row is None else _time(claim, row[0])
    return None


def _time(claim: Claim, position: int) -> float:
    return time_of_position(claim.positions.to_time(position))


class MetricsDuty(Duty):
    """Publishes the metrics of this process for its parent until the last message has ended."""

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
        app: App,
    ) -> None:
        self._broker = broker
        self._dispatcher = dispatcher
        self._pipeline = pipeline
        self._current = current
        self._checkpoints = checkpoints
        self._page = page
        self._app = app
        self._survey = QueueSurvey()
        self._facts = AppFacts(app, broker, current)
        self._delays = Histogram(catalog.LOOP_BOUNDS)
        self._failed = False

    def run(self) -> None:
        looks = [gevent.spawn(self._survey_forever), gevent.spawn(self._facts.run)]
        try:
            while True:
                self.publish()
                planned = clock() + PUBLISH_SECONDS
                gevent.sleep(PUBLISH_SECONDS)
                self._delays.observe(max(0.0, clock() - planned))
        finally:
            gevent.killall(looks, block=False)
            self.publish()

    def publish(self) -> None:
        """Publish the metrics now; log only the first error."""
        try:
            metrics = {metric.name: each for metric, each in self._values().items()}
            facts = {"leads_until": self._facts.holds_until(), "metrics": metrics}
            self._page.write({"state": self._current.state, **facts})
        except Exception:  # noqa: BLE001 - messages do not depend on it
            if not self._failed:
                _log.exception("cannot publish metrics; /metrics shows the last ones")
            self._failed = True

    def _survey_forever(self) -> None:
        while True:
            began = clock()
            survey = QueueSurvey()
            try:
                survey.take(list(self._dispatcher.slots.values()), time.time(), gevent.sleep)
                survey.ask(self._broker)
                self._survey = survey
            except Exception:  # noqa: BLE001 - messages do not depend on it
                _log.exception("cannot survey the owned queues for /metrics; trying again")
            pause = max(SURVEY_SECONDS, (clock() - began) / SURVEY_SHARE)
            gevent.sleep(min(pause, MOST_SURVEY_SECONDS))

    def _paused_jobs(self) -> Mapping[str, int]:
        globs = [job.queues for job in self._app.jobs][:MOST_GLOBS]
        return {glob: glob in self._pipeline.paused_globs() for glob in globs}

    def _values(self) -> Mapping[Metric, Rows]:
        counters = self._pipeline.counters
        member = self._current.member
        changes = {name: getattr(counters, name) for name in ("claimed", "released", "lost")}
        lease = 0.0 if member is None else max(0.0, member.lease.until - clock())
        checkpoints = self._checkpoints
        return {
            **self._job_values(),
            catalog.QUEUES: rows(self._survey.states),
            catalog.OLDEST: one(self._survey.age(time.time())),
            catalog.JOBS_RUNNING: one(self._survey.jobs),
            catalog.JOBS_PAUSED: rows(self._paused_jobs()),
            catalog.CONCURRENCY: one(self._dispatcher.concurrency),
            catalog.OWNERSHIP: rows(changes),
            catalog.SESSIONS_LOST: one(counters.sessions_lost),
            catalog.LEASES_EXPIRED: one(self._dispatcher.alarms.expirations),
            catalog.LEASE: one(lease),
            catalog.REGISTERED: one(member is not None),
            catalog.CHECKPOINTS: rows(checkpoints.results),
            catalog.CHECKPOINT_QUEUES: one(checkpoints.queues),
            catalog.CHECKPOINT_DURATION: [((), checkpoints.latency.dump())],
            catalog.BROKER_REQUESTS: rows(self._broker.call_counts()),
            catalog.LOOP_DELAY: [((), self._delays.dump())],
            catalog.BROKER_ERRORS: one(counters.broker_errors + self._facts.broker_errors),
            catalog.LOG_DROPPED: one(logs.lines_missing()),
            **self._facts.values(),
        }

    def _job_values(self) -> dict[Metric, Rows]:
        meters = {} if self._pipeline.meters is None else self._pipeline.meters.by_glob
        attempts: Rows = []
        for glob, meter in meters.items():
            # Publish zeros, because Prometheus sees no increase in a series that begins with the
            # first event.
            counts = {**dict.fromkeys(get_args(OutcomeName), 0), **meter.outcomes}
            counts["done"] = meter.done
            attempts += [((glob, outcome), [float(n)]) for outcome, n in counts.items()]
        return {
            catalog.ATTEMPTS: attempts,
            catalog.JOB_DURATION: [
                ((glob,), meter.durations.dump()) for glob, meter in meters.items()
            ],
            catalog.DWELL: [((glob,), meter.dwell.dump()) for glob, meter in meters.items()],
        }
