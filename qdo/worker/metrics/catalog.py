"""The metrics that qdo serves: their names, labels and meanings. docs/metrics.rst has them, too."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

from qdo.coordination.protocol.checkpoints import LATENCY_BOUNDS
from qdo.worker.metrics.meters import DWELL_BOUNDS, JOB_BOUNDS

LOOP_BOUNDS = (0.005, 0.025, 0.1, 0.5, 2.5, 10.0)
"""Upper bounds of the classes of delays, in seconds."""


class MetricKind(enum.Enum):
    """How the values of several processes become one.

    Counters and histograms also keep the counts of processes that have ended.
    """

    COUNTER = "counter"
    HISTOGRAM = "histogram"
    SUM = "sum"
    MAX = "max"
    MIN = "min"


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric.

    :ivar name: without the suffixes that Prometheus adds to counters and histograms.
    :ivar bounds: of the classes of a histogram.
    """

    name: str
    kind: MetricKind
    help: str
    labels: tuple[str, ...] = ()
    bounds: Sequence[float] = ()

    @property
    def adds_up(self) -> bool:
        """Whether the values of processes that have ended still count."""
        return self.kind in (MetricKind.COUNTER, MetricKind.HISTOGRAM)


_COUNTER, _HISTOGRAM = MetricKind.COUNTER, MetricKind.HISTOGRAM
_SUM, _MAX, _MIN = MetricKind.SUM, MetricKind.MAX, MetricKind.MIN

ATTEMPTS = Metric(
    "qdo_attempts",
    _COUNTER,
    "Attempts to process messages that have ended, by the glob of the job and the outcome.",
    ("queues", "outcome"),
)
JOB_DURATION = Metric(
    "qdo_job_duration_seconds",
    _HISTOGRAM,
    "How long jobs ran. Messages of one turn, or of one batch, count with their mean.",
    ("queues",),
    JOB_BOUNDS,
)
DWELL = Metric(
    "qdo_dwell_seconds",
    _HISTOGRAM,
    "Time from sending a message, or from its due time, to its first start; one of each turn.",
    ("queues",),
    DWELL_BOUNDS,
)
QUEUES = Metric("qdo_queues", _SUM, "Owned queues by their state.", ("state",))
OLDEST = Metric(
    "qdo_oldest_message_age_seconds",
    _MAX,
    "Age of the oldest waiting message of the owned queues that are neither blocked nor paused.",
)
JOBS_RUNNING = Metric("qdo_jobs_running", _SUM, "Messages in flight.")
CONCURRENCY = Metric("qdo_concurrency", _SUM, "How many jobs may run at the same time.")
OWNERSHIP = Metric(
    "qdo_ownership_changes", _COUNTER, "Queues that were claimed, released and lost.", ("change",)
)
SESSIONS_LOST = Metric(
    "qdo_sessions_lost", _COUNTER, "Coordinator sessions that ended before their worker did."
)
LEASES_EXPIRED = Metric(
    "qdo_leases_expired",
    _COUNTER,
    "How often a worker with waiting messages stopped starting them: its lease had expired.",
)
LEASE = Metric(
    "qdo_lease_seconds",
    _MIN,
    "How long messages may still be started without an answer of the coordinator; 0: not at all.",
)
REGISTERED = Metric(
    "qdo_processes_registered", _SUM, "Worker processes that are registered at the coordinator."
)
CHECKPOINTS = Metric(
    "qdo_checkpoints", _COUNTER, "Transactions that record progress, by their result.", ("result",)
)
CHECKPOINT_QUEUES = Metric(
    "qdo_checkpoint_queues", _COUNTER, "How often the progress of a queue was recorded."
)
CHECKPOINT_DURATION = Metric(
    "qdo_checkpoint_duration_seconds",
    _HISTOGRAM,
    "Time from sending a checkpoint to the answer of the coordinator.",
    (),
    LATENCY_BOUNDS,
)
BROKER_REQUESTS = Metric(
    "qdo_broker_requests",
    _COUNTER,
    "Requests to the broker, where the broker counts them (SQS).",
    ("action",),
)
LOOP_DELAY = Metric(
    "qdo_event_loop_delay_seconds",
    _HISTOGRAM,
    "How much later than planned a timer of the event loop ran; measured once a second.",
    (),
    LOOP_BOUNDS,
)
FROM_WORKERS = (
    *(ATTEMPTS, JOB_DURATION, DWELL, QUEUES, OLDEST, JOBS_RUNNING, CONCURRENCY, OWNERSHIP),
    *(SESSIONS_LOST, LEASES_EXPIRED, LEASE, REGISTERED, CHECKPOINTS, CHECKPOINT_QUEUES),
    *(CHECKPOINT_DURATION, BROKER_REQUESTS, LOOP_DELAY),
)
"""What the worker processes publish."""

BUILD = Metric("qdo_build_info", _SUM, "1, with the versions.", ("version", "python"))
PROCESSES = Metric(
    "qdo_processes", _SUM, "Worker processes: running, restarting, or ended.", ("state",)
)
RESTARTS = Metric(
    "qdo_process_restarts", _COUNTER, "Worker processes that were started in place of another one."
)
LOOP_BLOCKED = Metric(
    "qdo_event_loop_blocked_seconds", _MAX, "For how long an event loop has not run, at the scrape."
)
HEALTHY = Metric("qdo_healthy", _SUM, "1 if /healthz answers with 200, 0 otherwise.")
READY = Metric("qdo_ready", _SUM, "1 if /readyz answers with 200, 0 otherwise.")
FROM_PARENT = (BUILD, PROCESSES, RESTARTS, LOOP_BLOCKED, HEALTHY, READY)
"""What the parent process knows itself."""
