"""The facts that a worker process reports to operators: the value of its component node.

A fact is declared once, as a field of `WorkerReport`. The worker sets it in
`worker.duties.status_report`, or the leader in `LeaderQueues.facts`. Its type says how the node
is checked. ``qdo workers -o json`` and the dashboard's JSON show each fact, and `qdo workers NAME`
shows those with a label.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from functools import partial
from typing import Any, TypeAlias, get_args, get_origin, get_type_hints

from qdo.coordination.znodes.values import load, typed
from qdo.text import one_line

Reader: TypeAlias = Callable[[Any], Any]
# At most this many messages in flight are listed, about 8 KiB: first those that run for much longer
# than usual, then those that have run for longest.
MOST_RUNS = 100
# A report says for how much of this time the worker has lacked a processor.
STARVED_SECONDS = 30.0
MINUTES = 60
# Stands for a value of a wrong type: another program wrote it.
_UNFIT = object()


@dataclass(frozen=True, slots=True)
class LostWorker:
    """A worker that went without releasing its queues."""

    name: str
    process: str  # host, process and parent process, "" if the leader does not know them
    queues: int
    at: float  # when the leader noticed: a time of its clock, and for all others Unix time


@dataclass(frozen=True, slots=True)
class LastHour:
    """Counts of the last `MINUTES`, the newest first, without the zeros at the end."""

    # A worker without messages adds 60 bytes to its report; with one message a minute, 180; with
    # 100 a second, 360, or 660 if one in a hundred fails; with 100,000 a second, 540 or 1,200.

    # The newest one: Unix time of the worker's clock, in minutes.
    minute: int
    # Attempts that returned.
    done: tuple[int, ...] = ()
    failed: tuple[int, ...] = ()
    dead_lettered: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class WorkerReport:
    """A worker process as it describes itself; None or empty for a fact that it does not report."""

    worker: str | None = None
    host: str | None = None
    pid: int | None = None
    # Process id of its parent process.
    parent: int | None = None
    version: str | None = None
    python: str | None = None
    # The format level of what it writes to the coordinator.
    level: int | None = None
    zone: str | None = field(default=None, metadata={"label": "zone"})
    # Digest of its settings: processes with equal settings have the same.
    settings: str | None = None
    # Unix time.
    started: float | None = None
    state: str | None = None
    concurrency: int | None = None
    queues: int | None = None
    # Number of its queues with a job that runs.
    busy: int | None = None
    # The message and the job that block its event loop; written by its parent.
    blocked_by: str | None = None
    # Unix time.
    blocked_since: float | None = None
    # For the counts from here to `undone` see `engine.slot.Counters`.
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
    # Age of the first unprocessed message in seconds, by queue.
    behind: dict[str, float] = field(default_factory=dict)
    # Of the queues that have more messages and are farthest behind: how many messages a second it
    # has processed lately, and how many seconds one took.
    paces: dict[str, tuple[float, float]] = field(default_factory=dict)
    # Why it does not process a queue.
    faults: dict[str, str] = field(default_factory=dict)
    # The globs of its jobs.
    jobs: tuple[str, ...] = ()
    # Number of its queues that wait for a free place.
    ready: int | None = None
    # By glob of a job, the limits for whose permits queues of this job wait.
    waits: dict[str, tuple[str, ...]] = field(default_factory=dict)
    # By limit, why it permits nothing.
    unusable: dict[str, str] = field(default_factory=dict)
    # By glob of a job, the most seconds between two messages of one of its queues.
    rests: dict[str, float] = field(default_factory=dict)
    # By glob, the error for which a job is paused, see `engine.breakers`.
    paused_jobs: dict[str, str] = field(default_factory=dict)
    # Queue, id, attempt, seconds and usual seconds of messages in flight.
    long_runs: tuple[tuple[str, str, int, float, float | None], ...] = ()
    live: dict[str, Any] = field(default_factory=dict)
    # The share of the last `STARVED_SECONDS` in which its event loop could have run but had no
    # processor; only of a worker that hardly runs.
    starved: float | None = None
    # The processes that its parent had to replace by this one: process id, Unix time and how each
    # ended, the oldest first.
    deaths: tuple[tuple[int, float, str], ...] = ()
    # The workers that went without releasing their queues; only of the leader.
    lost_workers: tuple[LostWorker, ...] | None = None
    # How many rows of an outbox the broker refused, by table; only of the leader.
    refused_rows: dict[str, int] | None = None

    def dump(self) -> dict[str, Any]:
        """Return its JSON, without the facts that it lacks."""
        found = {name: each for name in _READERS if (each := getattr(self, name)) is not None}
        if self.last_hour is not None:
            found["last_hour"] = asdict(self.last_hour)
        if self.lost_workers is not None:
            found["lost_workers"] = [asdict(each) for each in self.lost_workers]
        return found

    @classmethod
    def parse(cls, data: bytes | None) -> WorkerReport:
        """Return the report in a node. Values of wrong types count as missing."""
        value, _ = load(data)
        return cls(
            **{
                name: found
                for name, read in _READERS.items()
                if name in value and (found := _read(read, value[name])) is not _UNFIT
            }
        )

    def labelled(self) -> list[tuple[str, str | None]]:
        """Return label and text of each fact that has a label."""
        found = [(each.metadata.get("label"), getattr(self, each.name)) for each in fields(self)]
        return [(label, None if value is None else str(value)) for label, value in found if label]


def _read(read: Reader, value: Any) -> Any:
    try:
        return read(value)
    except ValueError:
        return _UNFIT


def _reader(kind: Any) -> Reader:
    """Return a function that reads a JSON value of a type; it raises ValueError for others."""
    # Items of lists and objects that have a wrong type are left out. The functions are made once:
    # with 20 long runs, a report takes 0.15 ms instead of 0.5 ms.
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
