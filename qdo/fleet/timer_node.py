"""The nodes ``timers/<name>``: the last occurrence of each timer that a leader has sent.

Nodes only remember; timers are declared in code.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from qdo.coordination.bulk_reads import NodeValue, names_below, read_nodes
from qdo.coordination.client import Client
from qdo.coordination.protocol.machine import CheckOp, Committed, CreateOp, DeleteOp, Op, SetOp
from qdo.coordination.transactions import commit_each, make_folder
from qdo.coordination.znodes.layout import Layout
from qdo.coordination.znodes.queue_node import QueueNode
from qdo.coordination.znodes.values import encode_with_others, load, shown, text_of
from qdo.text import iso_time

_FORM = "%Y-%m-%dT%H:%M:%SZ"
_MOST_LAST = 2**35
"""The year 3058: calendars end in 9999, and the next occurrence may be decades later."""


@dataclass(frozen=True, slots=True)
class TimerNode:
    """The progress of a timer; times are whole Unix seconds.

    :ivar last: the last occurrence that was sent, counted as missed, or skipped.
    :ivar next: the one after it, 0 if unknown.
    :ivar when: the schedule in the leader's code; "" if it has no such timer any more.
    :ivar by: the leader that wrote it.
    :ivar fault: why the node cannot be read, None if it can.
    :ivar version: None if it does not exist yet.
    :ivar written: Unix time of the coordinator's clock.
    """

    last: int
    next: int = 0
    when: str = ""
    queue: str = ""
    by: str = ""
    fault: str | None = None
    version: int | None = None
    written: float = 0.0
    extra: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def parse(cls, node: NodeValue) -> TimerNode:
        value, fault = load(node.data)
        found = value.pop("last", None)
        last, next_ = _time_of(found), _time_of(value.pop("next", None))
        when, queue, by = (text_of(value.pop(key, "")) for key in ("when", "queue", "by"))
        fault = node.refused or fault
        if not last and fault is None:
            fault = f"last must be a time such as 2026-11-26T01:30:00Z, got {shown(found)}"
        return cls(last, next_, when, queue, by, fault, node.version, node.written, value)

    def encode(self) -> bytes:
        times = {"last": iso_time(self.last), "next": iso_time(self.next)}
        texts = {"when": self.when, "queue": self.queue, "by": self.by}
        return encode_with_others({**times, **texts}, self.extra)


def _time_of(text: Any) -> int:
    """Return the Unix time of `iso_time`, 0 for anything else, and for a far future."""
    try:
        found = int(datetime.datetime.strptime(f"{text}+0000", f"{_FORM}%z").timestamp())
    except ValueError:
        return 0
    return found if 0 < found < _MOST_LAST else 0


def list_timers(client: Client, layout: Layout) -> dict[str, TimerNode]:
    """Return the nodes of timers by name; raise as `read_nodes` and `names_below`."""
    paths = [f"{layout.fleet.timers}/{name}" for name in names_below(client, layout.fleet.timers)]
    return {
        each.path.rpartition("/")[2]: TimerNode.parse(each) for each in read_nodes(client, paths)
    }


class TimerLedger:
    """Reads and writes nodes of timers for a leader.

    :param fence: the leader's fence, the first operation of each transaction.
    """

    def __init__(self, client: Client, layout: Layout, fence: CheckOp) -> None:
        self._client = client
        self._layout = layout
        self._folder = layout.fleet.timers
        self._fence = fence

    def read(self) -> dict[str, TimerNode]:
        return list_timers(self._client, self._layout)

    def write(self, nodes: Mapping[str, TimerNode]) -> dict[str, int]:
        """Write each node at the version that was read; return the new versions.

        A node whose write was rejected, or got no answer, is not among them.
        """
        if any(node.version is None for node in nodes.values()):
            make_folder(self._client, self._folder)
        ops: list[Op] = []
        for name, node in nodes.items():
            path = f"{self._folder}/{name}"
            if node.version is None:
                ops.append(CreateOp(path, node.encode()))
            else:
                ops.append(SetOp(path, node.encode(), node.version))
        answers = commit_each(self._client, [(self._fence, op) for op in ops])
        return {
            name: 0 if node.version is None else node.version + 1
            for (name, node), answer in zip(nodes.items(), answers, strict=True)
            if isinstance(answer, Committed)
        }

    def delete(self, names: Iterable[str]) -> None:
        ops = [DeleteOp(f"{self._folder}/{name}") for name in names]
        commit_each(self._client, [(self._fence, op) for op in ops])

    def recorded(self, queue: str) -> int:
        """Return the recorded `last` of a queue, 0 without a node."""
        found = read_nodes(self._client, [self._layout.queue(queue)])
        return QueueNode.parse(found[0].data, found[0].refused).last if found else 0
