"""The facts that a worker process reports to operators: the value of its component node.

A fact is declared once, as a field of `WorkerReport`. The worker sets it in
`worker.duties.status_report`, or the leader in `LeaderQueues.facts`. Its type says how the node
is checked. ``qdo workers -o json`` and the dashboard's JSON show each fact, and `qdo worker show`
shows those with a label.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from typing import Any, get_args, get_origin, get_type_hints

from qdo.coordination.znodes.values import load
from qdo.text import one_line

MAX_EXACT = 2**53
"""Larger whole numbers have no exact float."""


@dataclass(frozen=True, slots=True)
class LostWorker:
    """A worker that went without releasing its queues.

    :ivar process: its host and parent process, "" if the leader does not know them.
    :ivar queues: how many queues were assigned to it.
    :ivar at: when the leader noticed: a time of its clock, and for all others Unix time.
    """

    name: str
    process: str
    queues: int
    at: float


@dataclass(frozen=True, slots=True)
class WorkerReport:
    """A worker process as it describes itself; None or empty for a fact that it does not report.

    :ivar worker: name of its worker node.
    :ivar parent: process id of its parent process.
    :ivar level: the format level of what it writes to the coordinator.
    :ivar settings: digest of its settings: processes with equal settings have the same.
    :ivar started: Unix time.
    :ivar concurrency: how many jobs it runs at once.
    :ivar busy: number of its queues with a job that runs.
    :ivar processed: for the counts from here to `undone` see `engine.slot.Counters`.
    :ivar behind: age of the first unprocessed message in seconds, by queue.
    :ivar waits: by queue, the limits for whose permits it waits.
    :ivar long_runs: queue, id, attempt, seconds and usual seconds of messages in flight.
    :ivar live: its answer to the live settings.
    :ivar lost_workers: the workers that went without releasing their queues; only of the leader.
    """

    worker: str | None = None
    host: str | None = None
    pid: int | None = None
    parent: int | None = None
    version: str | None = None
    python: str | None = None
    level: int | None = None
    zone: str | None = field(default=None, metadata={"label": "zone"})
    settings: str | None = None
    started: float | None = None
    state: str | None = None
    concurrency: int | None = None
    queues: int | None = None
    busy: int | None = None
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
    behind: dict[str, float] = field(default_factory=dict)
    faults: dict[str, str] = field(default_factory=dict)
    waits: dict[str, tuple[str, ...]] = field(default_factory=dict)
    long_runs: tuple[tuple[str, str, int, float, float | None], ...] = ()
    live: dict[str, Any] = field(default_factory=dict)
    lost_workers: tuple[LostWorker, ...] | None = None

    def dump(self) -> dict[str, Any]:
        """Return its JSON, without the facts that it lacks."""
        return {name: each for name, each in asdict(self).items() if each is not None}

    @classmethod
    def parse(cls, data: bytes | None) -> WorkerReport:
        """Return the report in a node. Values of wrong types count as missing."""
        value, _ = load(data)
        types = _types(cls)
        return cls(
            **dict(_fitting(types, ((name, value[name]) for name in types if name in value)))
        )

    def labelled(self) -> list[tuple[str, str | None]]:
        """Return label and text of each fact that has a label."""
        found = [(each.metadata.get("label"), getattr(self, each.name)) for each in fields(self)]
        return [(label, None if value is None else str(value)) for label, value in found if label]


_known: dict[Any, dict[str, Any]] = {}


def _types(kind: Any) -> dict[str, Any]:
    if kind not in _known:
        _known[kind] = get_type_hints(kind)
    return _known[kind]


def _fitting(types: Any, pairs: Iterable[tuple[Any, Any]]) -> Iterator[tuple[Any, Any]]:
    """Yield the pairs whose values have the right type; other programs wrote the rest.

    :param types: the type of all values, or the type of each by name.
    """
    for name, value in pairs:
        try:
            yield name, _fit(types[name] if isinstance(types, dict) else types, value)
        except (TypeError, ValueError):
            continue


def _fit(kind: Any, value: Any) -> Any:
    """Return a JSON value as a value of this type.

    :raises ValueError: it has another type.
    """
    arguments = get_args(kind)
    if kind is Any or (value is None and type(None) in arguments):
        return value
    if type(None) in arguments:
        return _fit(arguments[0], value)
    if get_origin(kind) is dict:
        return dict(_fitting(arguments[1], _exactly(dict, value).items()))
    if get_origin(kind) is tuple:
        items = _exactly(list, value)
        if arguments[-1] is Ellipsis:
            return tuple(each for _, each in _fitting(arguments[0], enumerate(items)))
        return tuple(_fit(*pair) for pair in zip(arguments, items, strict=True))
    if is_dataclass(kind):
        types = _types(kind)
        if _exactly(dict, value).keys() != types.keys():
            raise ValueError("other facts")
        made: Any = kind
        return made(**{name: _fit(each, value[name]) for name, each in types.items()})
    if kind is str:
        return one_line(_exactly(str, value))
    if kind is float and type(value) is int and abs(value) < MAX_EXACT:
        return float(value)
    return _exactly(kind, value)


def _exactly(kind: Any, value: Any) -> Any:
    if type(value) is not kind:
        raise ValueError("another type")
    return value
