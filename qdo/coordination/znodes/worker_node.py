"""The values of worker nodes, assignment nodes, the assignments folder, and the leader's node."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from qdo.coordination.znodes.layout import is_worker_name
from qdo.coordination.znodes.values import (
    encode_list,
    encode_with_others,
    load,
    load_list,
    string_tuple,
)
from qdo.queues import EVERYTHING, MAX_GLOBS_CHARACTERS, QueueFilter, is_path_part
from qdo.text import shorten

# The maximum number of moved queues, because the leader plans a worker with moved queues
# separately.
MAX_MOVES = 1000
MAX_PROCESS_CHARACTERS = 300
_TEXTS = ("process", "zone", "address")


@dataclass(frozen=True, slots=True)
class WorkerNode:
    """The value of a worker node: the worker's queues, and facts about the worker."""

    queues: tuple[str, ...] = ()
    # The queues that an operator has changed. The worker must read their nodes again.
    reread: tuple[str, ...] = ()
    # Whether the worker releases its queues and takes no new queues.
    draining: bool = False
    # The queues that the leader may assign to the worker; all queues if the node has no filter.
    filter: QueueFilter = EVERYTHING
    # The mzxid of the version of the node `holds` that the worker obeys; 0 before the first
    # version.
    holds: int = 0
    # The host, process and parent process, for operators; "" if unknown.
    process: str = ""
    # The worker's settings `zone` and `address`.
    zone: str = ""
    address: str = ""

    @classmethod
    def parse(cls, data: bytes | None) -> WorkerNode:
        """Parse a node; an unreadable node lists no queues."""
        value, _ = load_list(data)
        return cls(
            string_tuple(value.get("queues")),
            string_tuple(value.get("reread")),
            bool(value.get("draining", False)),
            parse_filter(value.get("filter")),
            _zxid(value.get("holds")),
            *(_text(value.get(each)) for each in _TEXTS),
        )

    def encode(self) -> bytes:
        value: dict[str, Any] = {"queues": list(self.queues)}
        if self.reread:
            value["reread"] = list(self.reread)
        if self.draining:
            value["draining"] = True
        if self.filter != EVERYTHING:
            value["filter"] = dump_filter(self.filter)
        if self.holds:
            value["holds"] = self.holds
        value |= {each: text for each in _TEXTS if (text := getattr(self, each))}
        return encode_list(value)


def dump_filter(takes: QueueFilter) -> dict[str, list[str]]:
    """Return a filter as JSON; like older nodes, omit `jobs` if they match every queue."""
    value = {"queues": list(takes.queues), "exclude": list(takes.exclude)}
    value |= {"pools": list(takes.pools)} if takes.pools else {}
    return value if "*" in takes.jobs else {**value, "jobs": list(takes.jobs)}


def parse_filter(value: Any) -> QueueFilter:
    """Parse the filter in a worker node; an unreadable or too long list matches everything."""
    if not isinstance(value, dict):
        return EVERYTHING
    return QueueFilter(
        _globs(value.get("queues")) or EVERYTHING.queues,
        _globs(value.get("exclude")),
        _globs(value.get("jobs")) or EVERYTHING.jobs,
        _globs(value.get("pools")),
    )


def _zxid(value: Any) -> int:
    return value if type(value) is int and 0 < value < 1 << 63 else 0


def _text(value: Any) -> str:
    return shorten(value, MAX_PROCESS_CHARACTERS) if isinstance(value, str) else ""


def _globs(value: Any) -> tuple[str, ...]:
    globs = string_tuple(value)
    return globs if sum(map(len, globs)) <= MAX_GLOBS_CHARACTERS else ()


def parse_assignment(data: bytes | None) -> frozenset[str] | None:
    """Return the queues in an assignment node; None if it is unreadable."""
    value, _ = load_list(data)
    if not isinstance(value.get("queues"), list):
        return None
    # Names become parts of paths, and an invalid path would break the connection.
    return frozenset(filter(is_path_part, string_tuple(value["queues"])))


def encode_queues(queues: Iterable[str]) -> bytes:
    return encode_list({"queues": sorted(queues)})


def parse_leader(data: bytes | None) -> tuple[str, str]:
    """Return the name and process of the last leader, each "" if the node lacks it."""
    value, _ = load(data)
    return _text(value.get("worker")), _text(value.get("process"))


def parse_moves(data: bytes | None) -> dict[str, str]:
    """Return the worker of each moved queue, from the value of the assignments folder."""
    value, _ = load(data)
    moves = value.get("moves")
    if not isinstance(moves, dict):
        return {}
    found = {
        queue: worker
        for queue, worker in moves.items()
        if isinstance(worker, str) and is_worker_name(worker) and is_path_part(queue)
    }
    return dict(sorted(found.items())[:MAX_MOVES])


def with_moves(data: bytes | None, moves: Mapping[str, str]) -> bytes:
    """Return the value of the assignments folder with new moves; keep all other keys."""
    value, _ = load(data)
    value.pop("moves", None)
    return encode_with_others({"moves": dict(moves)} if moves else {}, value)
