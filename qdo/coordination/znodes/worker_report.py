"""The facts that a worker process reports to operators, in its component node.

Each fact is one field of `WorkerReport`. The worker sets the facts in
`worker.duties.status_report`; the leader sets its own facts in `LeaderQueues.facts`. The type of
the field determines the check of the node's value. ``qdo workers -o json`` and the dashboard's JSON
show each fact, and `qdo workers NAME` shows the facts with a label.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from functools import partial
from typing import Any, TypeAlias, get_args, get_origin, get_type_hints

from qdo.coordination.znodes.values import load, typed
from qdo.text import one_line

Reader: TypeAlias = Callable[[Any], Any]
# The maximum number of messages in flight in a report, about 8 KiB. Messages that run for much
# longer than usual come first, then the messages with the longest running times.
MOST_RUNS = 100
# The time for which a report shows the share in which the worker lacked a processor.
STARVED_SECONDS = 30.0
MINUTES = 60
# Marks a value of a wrong type, which another program wrote.
_UNFIT = object()


@dataclass(frozen=True, slots=True)
class LostWorker:
    """A worker that is gone without releasing its queues."""

    name: str
    process: str  # host, process and parent process; "" if the leader does not know them
    queues: int
    at: float  # when the leader noticed, by its clock; in a report, Unix time


@dataclass(frozen=True, slots=True)
class LastHour:
    """The counts for each of the last `MINUTES`, newest first, without zeros at the end."""

    # The counts add 60 bytes to a report without messages, and 180 bytes with one message a minute.
    # The counts of 100 messages a second take 360 bytes, or 660 bytes if one in a hundred fails.
    # The counts of 100,000 messages a second take 540 or 1,200 bytes.

    # The newest minute, as Unix time in minutes by the worker's clock.
    minute: int
    # The numbers of successful attempts.
    done: tuple[int, ...] = ()
    failed: tuple[int, ...] = ()
    dead_lettered: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class WorkerReport:
    """The description of a worker process; missing facts are None or empty."""

    worker: str | None = None
    host: str | None = None
    pid: int | None = None
    # The process id of the parent process.
    parent: int | None = None
    version: str | None = None
    python: str | None = None
    # The format level of the values that the worker writes to the coordinator.
    level: int | None = None
    zone: str | None = field(default=None, metadata={"label": "zone"})
    # A digest of the worker's settings. Processes with equal settings have equal digests.
    settings: str | None = None
    # Unix time.
    started: float | None = None
    state: str | None = None
    concurrency: int | None = None
    queues: int | None = None
    # The number of the worker's queues with a running job.
    busy: int | None = None
    # The message and the job that block the worker's event loop. The parent process writes this.
    blocked_by: str | None = None
    # Unix time.
    blocked_since: float | None = None
    # For `processed`, `failed` and the following counts up to `undone`, see `engine.slot.Counters`.
    processed: int | None = None
    failed: int | None = None
    retried: int | None = None
    dead_lettered: int | None = None
    skipped: int | None = None
    blocked: int | None = None
    stopped: int | None = None
    expired: int | None = None
    claimed: int | None = None
    released: int | None = None
    lost: int | None = None
    undone: int | None = None
    # The counts of messages and requests by minute.
    last_hour: LastHour | None = None
    # The age in seconds of the first unprocessed message, by queue.
    behind: dict[str, float] = field(default_factory=dict)
    # The recent pace of the queues that are farthest behind and have more messages: processed
    # messages per second, and seconds per message.
    paces: dict[str, tuple[float, float]] = field(default_factory=dict)
    # The reasons why the worker does not process queues, by queue.
    faults: dict[str, str] = field(default_factory=dict)
    # The globs of the worker's jobs.
    jobs: tuple[str, ...] = ()
    # The number of the worker's queues that wait for a free slot.
    ready: int | None = None
    # The limits for which the queues of a job await permits, by glob of the job.
    waits: dict[str, tuple[str, ...]] = field(default_factory=dict)
    # The reasons why limits grant no permits, by limit.
    unusable: dict[str, str] = field(default_factory=dict)
    # The longest time in seconds between two messages of a job's queue, by glob of the job.
    rests: dict[str, float] = field(default_factory=dict)
    # The error that paused a job, by glob of the job; see `engine.breakers`.
    paused_jobs: dict[str, str] = field(default_factory=dict)
    # The queue, id, attempt, running time and usual running time of messages in flight; in seconds.
    long_runs: tuple[tuple[str, str, int, float, float | None], ...] = ()
    live: dict[str, Any] = field(default_factory=dict)
    # The share of the last `STARVED_SECONDS` in which the worker's event loop was ready to run but
    # had no processor. None if the worker is not starved.
    starved: float | None = None
    # The earlier processes that the parent replaced, oldest first: the process id, and the Unix
    # time and cause of the end.
    deaths: tuple[tuple[int, float, str], ...] = ()
    # The workers that are gone without releasing their queues; only in the leader's report.
    lost_workers: tuple[LostWorker, ...] | None = None
    # The number of outbox rows that the broker refused, by table; only in the leader's report.
    refused_rows: dict[str, int] | None = None

    def dump(self) -> dict[str, Any]:
        """Return the report as JSON without missing facts."""
        found = {name: each for name in _READERS if (each := getattr(self, name)) is not None}
        if self.last_hour is not None:
            found["last_hour"] = asdict(self.last_hour)
        if self.lost_workers is not None:
            found["lost_workers"] = [asdict(each) for each in self.lost_workers]
        return found

    @classmethod
    def parse(cls, data: bytes | None) -> WorkerReport:
        """Parse the report in a node; values of wrong types count as missing."""
        value, _ = load(data)
        return cls(
            **{
                name: found
                for name, read in _READERS.items()
                if name in value and (found := _read(read, value[name])) is not _UNFIT
            }
        )

    def labelled(self) -> list[tuple[str, str | None]]:
        """Return the label and the text of each fact with a label."""
        found = [(each.metadata.get("label"), getattr(self, each.name)) for each in fields(self)]
        return [(label, None if value is None else str(value)) for label, value in found if label]


def _read(read: Reader, value: Any) -> Any:
    try:
        return read(value)
    except ValueError:
        return _UNFIT


def _reader(kind: Any) -> Reader:
    """Return a function that reads a JSON value of a type, or raises ValueError."""
    # The functions omit items of a wrong type from lists and objects. Making the functions only
    # once reduces the time to parse a report with 20 long runs from 0.5 ms to 0.15 ms.
    arguments = get_args(kind)
    if kind is Any:
        return lambda value: value
    if type(None) in arguments:
        some = _reader(arguments[0])
        return lambda value: None if value is None else some(value)
    if get_origin(kind) is dict:
        item = _reader(arguments[1])
        return lambda value: {
            name: found
            for name, each in _exactly(dict, value).items()
            if (found := _read(item, each)) is not _UNFIT
        }
    if get_origin(kind) is tuple and arguments[-1] is Ellipsis:
        item = _reader(arguments[0])
        return lambda value: tuple(
            found for each in _exactly(list, value) if (found := _read(item, each)) is not _UNFIT
        )
    if get_origin(kind) is tuple:
        items = [_reader(each) for each in arguments]
        return lambda value: tuple(
            read(each) for read, each in zip(items, _exactly(list, value), strict=True)
        )
    if is_dataclass(kind):
        return partial(_object, kind, _readers(kind))
    if kind is str:
        return lambda value: one_line(_exactly(str, value))
    return partial(_number, kind)


def _readers(kind: Any) -> dict[str, Reader]:
    return {name: _reader(each) for name, each in get_type_hints(kind).items()}


def _object(kind: Any, readers: dict[str, Reader], value: Any) -> Any:
    if _exactly(dict, value).keys() != readers.keys():
        raise ValueError("other facts")
    return kind(**{name: read(value[name]) for name, read in readers.items()})


def _number(kind: type, value: Any) -> Any:
    number = typed(value, kind)
    if number is None:
        raise ValueError("another type")
    return number


def _exactly(kind: type, value: Any) -> Any:
    if type(value) is not kind:
        raise ValueError("another type")
    return value


_READERS = _readers(WorkerReport)
