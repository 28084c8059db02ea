"""The nodes ``timers/<name>``, which record the last sent occurrence of each timer.

The nodes only record progress. The code of the app declares the timers.
"""

from __future__ import annotations

import calendar
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from qdo.coordination.bulk_reads import NodeValue, names_below, read_nodes
from qdo.coordination.client import Client
from qdo.coordination.protocol.machine import CheckOp, Committed, CreateOp, Op, SetOp
from qdo.coordination.transactions import commit_each, make_folder
from qdo.coordination.znodes.layout import Layout
from qdo.coordination.znodes.values import encode_with_others, load, shown, text_of
from qdo.text import iso_time

# Maximum time, in the year 3058. Calendars end in the year 9999, and the next occurrence may be
# decades later.
_MOST_LAST = 2**35


@dataclass(frozen=True, slots=True)
class TimerNode:
    """The progress of a timer. Times are whole Unix seconds."""

    # The last occurrence that a leader has sent, skipped or counted as missed.
    last: int
    # The occurrence after `last`; 0 if unknown.
    next: int = 0
    # The schedule in the leader's code; "" if the code no longer has this timer.
    when: str = ""
    queue: str = ""
    # The name of the leader that wrote the node.
    by: str = ""
    # The reason why the occurrence after `last` cannot be sent, or "".
    refused: str = ""
    fault: str | None = None
    # The version of the node; -1 if the node does not exist yet.
    version: int = -1
    # Unix time of the last write, by the coordinator's clock.
    written: float = 0.0
    extra: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def parse(cls, node: NodeValue) -> TimerNode:
        value, fault = load(node.data)
        text = value.pop("last", None)
        last = _time_of(text)
        fault = node.refused or fault
        if not last and fault is None:
            fault = f"last must be a time such as 2026-11-26T01:30:00Z, got {shown(text)}"
        return cls(
            last,
            _time_of(value.pop("next", None)),
            when=text_of(value.pop("when", "")),
            queue=text_of(value.pop("queue", "")),
            by=text_of(value.pop("by", "")),
            refused=text_of(value.pop("refused", "")),
            fault=fault,
            version=node.version,
            written=node.written,
            extra=value,
        )

    def encode(self) -> bytes:
        times = {"last": iso_time(self.last), "next": iso_time(self.next)}
        texts = {"when": self.when, "queue": self.queue, "by": self.by}
        reason = {"refused": self.refused} if self.refused else {}
        return encode_with_others({**times, **texts, **reason}, self.extra)


def _time_of(text: Any) -> int:
    """Return the Unix time of a text from `iso_time`; 0 for other values and very late times."""
    try:
        found = calendar.timegm(time.strptime(str(text), "%Y-%m-%dT%H:%M:%SZ"))
    except ValueError:
        return 0
    return found if 0 < found < _MOST_LAST else 0


def read_timers(
    client: Client, layout: Layout, names: Iterable[str] | None = None
) -> dict[str, TimerNode]:
    """Return the nodes of timers; raise the errors of `read_nodes` and `names_below`."""
    folder = layout.fleet.timers
    names = names_below(client, folder) if names is None else names
    nodes = read_nodes(client, [f"{folder}/{name}" for name in names])
    return {each.path.rpartition("/")[2]: TimerNode.parse(each) for each in nodes}


def write_timers(
    client: Client, layout: Layout, fence: CheckOp, nodes: Mapping[str, TimerNode]
) -> list[str]:
    """Write each node at the version read; return the timers whose write may have failed."""
    folder = layout.fleet.timers
    ops: list[Op] = []
    if any(node.version < 0 for node in nodes.values()):
        make_folder(client, folder)
    for name, node in nodes.items():
        path = f"{folder}/{name}"
        data = node.encode()
        ops.append(CreateOp(path, data) if node.version < 0 else SetOp(path, data, node.version))
    # Use separate transactions. A node that another leader has changed must not stop the other
    # writes.
    answers = commit_each(client, [(fence, op) for op in ops])
    pairs = zip(nodes, answers, strict=True)
    return [name for name, answer in pairs if not isinstance(answer, Committed)]
