"""The self-descriptions of an app's processes, and the app's format levels.

No process writes a value that a live, older process would misread. Each version of qdo has a format
level. The component node of a process shows its level. The node of the app has the level that all
workers support. A feature that older versions would misread requires a level through
`require_format_level`.

The leader raises the level of the app in two steps, one period apart. The leader announces the next
level, and then lists the workers again. After its registration, a worker reads the node of the app,
and stops if its own level is below the announced level. Therefore the leader need not know every
new worker.

Functions raise NodeRefusedError if the account may not read a node, and CoordinatorUnreachableError
after a timeout.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from qdo._version import FORMAT_LEVEL, __version__
from qdo.coordination.bulk_reads import NodeValue, names_below, read_children, read_nodes
from qdo.coordination.client import Client
from qdo.coordination.protocol.machine import CheckOp, Committed, NodeRead, SetOp
from qdo.coordination.transactions import commit, read
from qdo.coordination.znodes.layout import Layout
from qdo.coordination.znodes.values import encode_with_others, load, typed
from qdo.errors import RejectedError
from qdo.fleet.settings_machine import SettingsReport

# The types of the values of a component node.
_KINDS: Mapping[str, type[Any]] = MappingProxyType(
    {
        **dict.fromkeys(("host", "version", "python", "zone", "state", "settings"), str),
        **dict.fromkeys(("pid", "parent", "level", "busy", "queues"), int),
        "started": float,
    }
)
_log = logging.getLogger(__name__)
# The highest format level that a node may name.
MOST = 10_000


@dataclass(frozen=True, slots=True)
class ProcessDescription:
    """The description of a process in its component node. Missing values are None.

    Fields without an explanation are those of `WorkerReport`.
    """

    name: str
    # "worker", or the name of another folder of components.
    kind: str
    host: str | None = None
    pid: int | None = None
    parent: int | None = None
    version: str | None = None
    python: str | None = None
    level: int | None = None
    zone: str | None = None
    state: str | None = None
    busy: int | None = None
    queues: int | None = None
    settings: str | None = None
    # Number of the version of the live settings that the process uses; 0 without live settings.
    live: int | None = None
    started: float | None = None
    # Unix time of the node's last write, by the coordinator's clock.
    reported: float | None = None
    # The reason why the node does not describe a process, or None.
    fault: str | None = None

    @classmethod
    def parse(cls, node: NodeValue) -> ProcessDescription:
        """Return a process from its node. Values of wrong types count as missing."""
        folder, _, name = node.path.rpartition("/")
        kind = folder.rpartition("/")[2]
        value, fault = load(node.data)
        report = SettingsReport.parse(value.get("live"))
        known: dict[str, Any] = {each: typed(value.get(each), _KINDS[each]) for each in _KINDS}
        return cls(
            name,
            kind,
            live=None if report is None else report.uses,
            reported=node.written,
            fault=node.refused or fault or (None if node.session else "its node has no session"),
            **known,
        )


def read_components(client: Client, layout: Layout) -> list[ProcessDescription]:
    """Return the processes of an app, by kind and node name."""
    kinds = names_below(client, layout.components)
    folders = [f"{layout.components}/{kind}" for kind in kinds]
    found = read_children(client, folders)
    paths = [f"{folder}/{name}" for folder in folders for name in sorted(found.get(folder, []))]
    return [ProcessDescription.parse(node) for node in read_nodes(client, paths)]


def skew(processes: list[ProcessDescription]) -> str:
    """Return the versions of qdo if they differ, or "". Ignore unreadable nodes."""
    counts = Counter(
        f"{each.version} (level {'unknown' if each.level is None else each.level})"
        for each in processes
        if each.version is not None
    )
    if len(counts) < 2:
        return ""
    total = sum(counts.values())
    return ", ".join(
        f"{name} in {number} of {total} processes" for name, number in sorted(counts.items())
    )


@dataclass(frozen=True, slots=True)
class AppLevel:
    """The levels in the node of an app. `next_level` is the announced level, or 0."""

    format_level: int = 0
    next_level: int = 0
    # Keys of other programs, which qdo keeps.
    other: dict[str, Any] | None = None

    @classmethod
    def parse(cls, data: bytes) -> AppLevel:
        """Return the levels in a node. An unreadable node has no levels."""
        value, _ = load(data)
        format_level = _level(value.pop("level", 0))
        next_level = _level(value.pop("next_level", 0))
        return cls(format_level, next_level, value)

    def encode(self) -> bytes:
        own = {"level": self.format_level}
        if self.next_level:
            own["next_level"] = self.next_level
        return encode_with_others(own, self.other or {})


def _level(value: Any) -> int:
    return value if type(value) is int and 0 < value <= MOST else 0


def check_format_level(client: Client, layout: Layout) -> None:
    """Raise RejectedError if this version may misread the nodes of the app."""
    node = read(client, layout.root)
    found = AppLevel.parse(node.data) if isinstance(node, NodeRead) else AppLevel()
    needed = max(found.format_level, found.next_level)
    if needed > FORMAT_LEVEL:
        raise RejectedError(
            reason=f"this version of qdo must have the format level {needed} of the app, got "
            f"{FORMAT_LEVEL} (qdo {__version__}): it would misread what newer workers have "
            "written; install their version, which `qdo workers --all` lists",
            needed=needed,
        )


def require_format_level(client: Client, layout: Layout, format_level: int, what: str) -> None:
    """Raise RejectedError, which names the feature `what`, unless all workers have this level."""
    for process in _workers(client, layout):
        if (process.level or 0) < format_level:
            version = process.version or "an older version"
            raise RejectedError(
                reason=f"every worker must have format level {format_level} for {what}, but "
                f"{process.name} has {version}, which would ignore it; update that worker, and "
                "repeat the command",
                name=process.name,
            )


class LevelChore:
    """Raises the level of the app to the level of its oldest worker, one step per run."""

    def __call__(self, client: Client, layout: Layout, fence: CheckOp) -> int:
        node = read(client, layout.root)
        if not isinstance(node, NodeRead):
            return 0
        before = AppLevel.parse(node.data)
        least = min((each.level or 0 for each in _workers(client, layout)), default=0)
        after = next_step(before, least)
        if after == before:
            return 0
        answer = commit(client, [fence, SetOp(layout.root, after.encode(), node.version)])
        if isinstance(answer, Committed) and after.format_level > before.format_level:
            raised = after.format_level
            _log.info("format level of the app is %d: older versions no longer start", raised)
        return 0


def next_step(found: AppLevel, least: int) -> AppLevel:
    """Return the levels of an app whose oldest worker has the level `least`."""
    if found.next_level and least >= found.next_level:
        return AppLevel(found.next_level, 0, found.other)
    announced = least if least > found.format_level else 0
    return AppLevel(found.format_level, announced, found.other)


def _workers(client: Client, layout: Layout) -> list[ProcessDescription]:
    found = read_components(client, layout)
    return [each for each in found if each.kind == "worker" and each.fault is None]
