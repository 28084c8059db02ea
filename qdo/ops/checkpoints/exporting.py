"""Reads the recorded positions of queues."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

from qdo.coordination.bulk_reads import read_children, read_nodes
from qdo.coordination.client import Client
from qdo.coordination.queue_admin import is_deleted
from qdo.coordination.znodes.layout import Layout
from qdo.coordination.znodes.queue_node import QueueNode
from qdo.ops.checkpoints.lines import Checkpoint

READ_AT_ONCE = 1000
"""Nodes in memory besides the checkpoints."""


@dataclass(frozen=True, slots=True)
class Export:
    """The recorded positions of queues.

    :ivar faults: by queue, why its position cannot be read.
    """

    checkpoints: list[Checkpoint]
    faults: Mapping[str, str]


def read_checkpoints(client: Client, layout: Layout, glob: str = "*") -> Export:
    """Return the positions of the matching queues, by name. Reads only.

    Queues that no longer exist at the broker are left out; finished shards are not.

    :raises NodeRefusedError: this account may not list the queues.
    :raises CoordinatorUnreachableError: the connection is lost.
    """
    listed = read_children(client, [layout.queues]).get(layout.queues, [])
    names = [name for name in listed if fnmatchcase(name, glob)]
    found: list[Checkpoint] = []
    faults: dict[str, str] = {}
    for start in range(0, len(names), READ_AT_ONCE):
        paths = [layout.queue(name) for name in names[start : start + READ_AT_ONCE]]
        for read in read_nodes(client, paths):
            name = read.path.rpartition("/")[2]
            node = QueueNode.parse(read.data, read.refused)
            if node.fault is not None:
                faults[name] = node.fault
            elif not is_deleted(node):
                failing = len(node.failures)
                found.append(Checkpoint(name, node.last, node.position, node.seek, failing))
    return Export(found, faults)
