"""The metrics that qdo serves, with their names, labels, meanings, sums and text form.

The page docs/metrics.rst also lists the metrics.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from qdo.coordination.protocol.checkpoints import LATENCY_BOUNDS
from qdo.errors import SettingsError
from qdo.text import how_to_install
from qdo.worker.engine.meters import DWELL_BOUNDS, JOB_BOUNDS

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

# Upper bounds of the buckets for the event loop's delay, in seconds.
LOOP_BOUNDS = (0.005, 0.025, 0.1, 0.5, 2.5, 10.0)

# The values of a metric by label values: one number, or the counts and the sum of a histogram.
Series = dict[tuple[str, ...], list[float]]


class MetricKind(enum.Enum):
    """The kind of a metric, which determines how to combine the values of several processes.

    Counters and histograms include the counts of ended processes.
    """

    COUNTER = "counter"
    HISTOGRAM = "histogram"
    SUM = "sum"
    MAX = "max"
    MIN = "min"


@dataclass(frozen=True, slots=True)
class Metric:
    """A metric's name, kind, help text, labels and buckets."""

    # The name without the suffixes that Prometheus adds to counters and histograms.
    name: str
    kind: MetricKind
    help: str
    labels: tuple[str, ...] = ()
    # Upper bounds of a histogram's buckets.
    bounds: Sequence[float] = ()

    @property
    def adds_up(self) -> bool:
        """Whether the values of ended processes still count."""
        return self.kind in (MetricKind.COUNTER, MetricKind.HISTOGRAM)


_COUNTER = MetricKind.COUNTER
_HISTOGRAM = MetricKind.HISTOGRAM
_SUM = MetricKind.SUM
_MAX = MetricKind.MAX
_MIN = MetricKind.MIN
_MERGE: dict[MetricKind, Callable[[float, float], float]] = {_MAX: max, _MIN: min}

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
JOBS_PAUSED = Metric(
    "qdo_jobs_paused",
    _SUM,
    "Processes in which a job is paused because all its attempts fail, by the glob of the job.",
    ("queues",),
)
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
REQUESTS = Metric(
    "qdo_requests",
    _SUM,
    "Requests that are not over, by the glob of their job; the leader counts those of the app.",
    ("pool", "state"),
)
OUTBOX_REFUSED = Metric(
    "qdo_outbox_refused",
    _SUM,
    "Messages of an outbox that the broker refused; the leader counts those of the app.",
    ("table",),
)
OUTBOX_WAITING = Metric(
    "qdo_outbox_waiting",
    _SUM,
    "Messages of an outbox that are due and were not sent for 10 seconds; as the leader counts.",
    ("table",),
)
BACKLOG = Metric(
    "qdo_backlog_messages",
    _SUM,
    "Messages that wait in all queues of the app, as the leader counts them.",
)
BACKLOG_AGE = Metric(
    "qdo_backlog_age_seconds",
    _MAX,
    "Age of the oldest waiting message of the app, also of paused, blocked and untaken queues.",
)
DELAYED = Metric(
    "qdo_delayed_messages",
    _SUM,
    "Messages of the app that are not due yet, as the leader counts them.",
)
UNTAKEN = Metric(
    "qdo_queues_untaken",
    _SUM,
    "Queues of the app with messages that no worker processes, by the reason.",
    ("reason",),
)
DEAD_LETTERS = Metric(
    "qdo_dead_letters",
    _SUM,
    "Dead letters that the app keeps, as the leader counts them.",
    ("kind",),
)
TIMER_LATE = Metric(
    "qdo_timer_late_seconds",
    _MAX,
    "How late the timer of the app is that is overdue for longest; 0: none is.",
)
TIMERS_REFUSED = Metric(
    "qdo_timers_refused",
    _SUM,
    "Timers of the app that send nothing: the broker refuses them, or their nodes are damaged.",
)
BROKER_ERRORS = Metric(
    "qdo_broker_errors", _COUNTER, "How often the broker failed a worker, or did not answer it."
)
LOG_DROPPED = Metric(
    "qdo_log_lines_dropped",
    _COUNTER,
    "Log lines that are lost: the reader did not read, or the disk was full.",
)
# The metrics of the whole app, which only the leader publishes; see `facts`.
FROM_LEADER = (
    *(REQUESTS, OUTBOX_REFUSED, OUTBOX_WAITING, BACKLOG, BACKLOG_AGE, DELAYED, UNTAKEN),
    *(DEAD_LETTERS, TIMER_LATE, TIMERS_REFUSED),
)
# The metrics that worker processes publish.
FROM_WORKERS = (
    *(ATTEMPTS, JOB_DURATION, DWELL, QUEUES, OLDEST, JOBS_RUNNING, JOBS_PAUSED, CONCURRENCY),
    OWNERSHIP,
    *(SESSIONS_LOST, LEASES_EXPIRED, LEASE, REGISTERED, CHECKPOINTS, CHECKPOINT_QUEUES),
    *(CHECKPOINT_DURATION, BROKER_REQUESTS, BROKER_ERRORS, LOOP_DELAY, LOG_DROPPED),
    *FROM_LEADER,
)

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
# The metrics of the parent process itself.
FROM_PARENT = (BUILD, PROCESSES, RESTARTS, LOOP_BLOCKED, HEALTHY, READY)


def parse(values: Any) -> dict[Metric, Series]:
    """Return the published metrics of a process; raise ValueError if they are invalid.

    :param values: the content of the process's page, which a job may have overwritten.
    """
    try:
        return {
            metric: _series(metric, values["metrics"].get(metric.name)) for metric in FROM_WORKERS
        }
    except (TypeError, LookupError, AttributeError, OverflowError, RecursionError) as error:
        raise ValueError("these are not metrics") from error


def _series(metric: Metric, rows: Any) -> Series:
    found: Series = {}
    size = len(metric.bounds) + 2 if metric.kind is MetricKind.HISTOGRAM else 1
    for labels, numbers in rows or ():
        key = tuple(map(str, labels))
        counted = [float(each) for each in numbers]
        if len(key) != len(metric.labels) or len(counted) != size:
            raise ValueError(f"{metric.name} has other labels or classes")
        if not all(map(math.isfinite, counted)):
            raise ValueError(f"{metric.name} is not a number")
        found[key] = counted
    return found


class MetricTotals:
    """The counters and histograms of ended processes."""

    def __init__(self) -> None:
        self._ended: dict[Metric, Series] = {metric: {} for metric in FROM_WORKERS}

    def end(self, values: dict[Metric, Series]) -> None:
        """Keep the counters and histograms of an ended process."""
        add({m: each for m, each in values.items() if m.adds_up}, self._ended)

    def copy(self) -> dict[Metric, Series]:
        """Return a copy of the counts; the caller may add other counts to the copy."""
        return {
            metric: {labels: list(numbers) for labels, numbers in series.items()}
            for metric, series in self._ended.items()
        }


def add(values: dict[Metric, Series], into: dict[Metric, Series]) -> None:
    for metric, series in values.items():
        merge = _MERGE.get(metric.kind, float.__add__)
        sums = into[metric]
        for labels, numbers in series.items():
            before = sums.get(labels)
            sums[labels] = list(numbers) if before is None else list(map(merge, before, numbers))


def check_library() -> None:
    """Raise SettingsError if the library for metrics is missing."""
    try:
        import prometheus_client  # noqa: F401
    except ImportError as error:
        raise SettingsError(
            name="http",
            reason=f"it needs prometheus-client ({error}); {how_to_install('metrics')}",
        ) from error


def exposition(values: Mapping[Metric, Series]) -> bytes:
    from prometheus_client import CollectorRegistry, generate_latest

    registry = CollectorRegistry()
    registry.register(_Collected(values))
    text: bytes = generate_latest(registry)
    return text


class _Collected:
    def __init__(self, values: Mapping[Metric, Series]) -> None:
        self._values = values

    def collect(self) -> Iterator[Any]:
        for metric, series in self._values.items():
            yield _family(metric, series)


def _family(metric: Metric, series: Series) -> Any:
    from prometheus_client import core

    if metric.kind is MetricKind.HISTOGRAM:
        family: Any = core.HistogramMetricFamily(metric.name, metric.help, labels=metric.labels)
        names = [*map(str, metric.bounds), "+Inf"]
        for labels, (*counts, seconds) in series.items():
            buckets = [*zip(names, accumulate(counts), strict=True)]
            family.add_metric(labels, buckets=buckets, sum_value=seconds)
        return family
    is_counter = metric.kind is MetricKind.COUNTER
    made: Any = core.CounterMetricFamily if is_counter else core.GaugeMetricFamily
    family = made(metric.name, metric.help, labels=metric.labels)
    for labels, (value,) in series.items():
        family.add_metric(labels, value)
    return family
