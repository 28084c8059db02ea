"""The processes of an app, as they describe themselves in the coordinator."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any, TypeVar

from qdo.coordination.bulk_reads import NodeValue, read_children, read_nodes
from qdo.coordination.client import Client
from qdo.coordination.znodes.layout import Layout
from qdo.coordination.znodes.values import load
from qdo.fleet.protocol.live_settings import SettingsReport

MAX_EXACT = 2**53
"""Larger whole numbers have no exact float."""
_Value = TypeVar("_Value", str, int, float)


@dataclass(frozen=True, slots=True)
class ProcessDescription:
    """A process as its component node describes it; None for a value that it does not have.

    :ivar name: the name of the node.
    :ivar kind: "worker", or the name of another folder of components.
    :ivar parent: process id of the parent process of a worker.
    :ivar version: its version of qdo.
    :ivar level: the format level of what it writes to the coordinator.
    :ivar busy: number of its queues with a job that runs.
    :ivar settings: digest of its settings: processes with equal settings have the same.
    :ivar live: number of the version of the live settings that it uses, 0 for none.
    :ivar reported: when the node was last written, Unix time of the coordinator's clock.
    :ivar fault: why the node is not that of a process, None if it is.
    """

    name: str
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
    live: int | None = None
    started: float | None = None
    reported: float | None = None
    fault: str | None = None

    @classmethod
    def parse(cls, node: NodeValue) -> ProcessDescription:
        """Return a process from its node. Values of wrong types count as missing."""
        folder, _, name = node.path.rpartition("/")
        kind = folder.rpartition("/")[2]
        value, fault = load(node.data)
        report = SettingsReport.parse(value.get("live"))
        fault = node.refused or fault or (None if node.session else "its node has no session")
        return cls(
            name,
            kind,
            host=_typed(value, "host", str),
            pid=_typed(value, "pid", int),
            parent=_typed(value, "parent", int),
            version=_typed(value, "version", str),
            python=_typed(value, "python", str),
            level=_typed(value, "level", int),
            zone=_typed(value, "zone", str),
            state=_typed(value, "state", str),
            busy=_typed(value, "busy", int),
            queues=_typed(value, "queues", int),
            settings=_typed(value, "settings", str),
            live=None if report is None else report.uses,
            started=_typed(value, "started", float),
            reported=node.written,
            fault=fault,
        )


def _typed(value: dict[str, Any], name: str, kind: type[_Value]) -> _Value | None:
    """Return a value if it has this type: JSON writes a whole number of seconds as an int."""
    found: Any = value.get(name)
    if kind is float and type(found) is int and abs(found) < MAX_EXACT:
        found = float(found)
    return found if type(found) is kind else None


def read_components(client: Client, layout: Layout) -> list[ProcessDescription]:
    """Return the processes of an app, by kind and node name.

    :raises NodeRefusedError: this account may not list the components.
    :raises CoordinatorUnreachableError: the connection is lost.
    """
    kinds = read_children(client, [layout.components]).get(layout.components, [])
    folders = [f"{layout.components}/{kind}" for kind in sorted(kinds)]
    found = read_children(client, folders)
    paths = [f"{folder}/{name}" for folder in folders for name in sorted(found.get(folder, []))]
    return [ProcessDescription.parse(node) for node in read_nodes(client, paths)]


def skew(processes: list[ProcessDescription]) -> str:
    """Return the versions of qdo if the processes have several, "" if they have one.

    A process without a version is not counted: its node cannot be read.
    """
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
