"""The znodes below a path, with their values."""

from __future__ import annotations

from dataclasses import dataclass

from qdo.coordination.bulk_reads import read_nodes, read_permitted_children
from qdo.coordination.client import Client
from qdo.coordination.znodes.values import inflated


@dataclass(frozen=True, slots=True)
class Znode:
    """A node of the coordinator.

    :ivar value: its data as text; bytes that are not UTF-8 appear as ``\\xNN``. Of a node that
        cannot be read, the reason.
    :ivar ephemeral: it is deleted with the session that created it.
    """

    path: str
    value: str
    version: int
    ephemeral: bool

    @property
    def name(self) -> str:
        return self.path.rpartition("/")[2]


def subtree(client: Client, root: str) -> list[Znode]:
    """Return the node at `root` and all nodes below it, parents before children, by name.

    Empty if the node does not exist. Nodes that come or go during the read may be missing.

    :raises CoordinatorUnreachableError: the connection is lost.
    """
    paths = [root]
    level = paths
    while level:
        below = read_permitted_children(client, level)
        level = [
            f"{path.rstrip('/')}/{name}" for path, names in below.items() for name in names or ()
        ]
        paths += level
    nodes = [
        Znode(
            read.path,
            read.refused or inflated(read.data).decode(errors="backslashreplace"),
            read.version,
            read.session != 0,
        )
        for read in read_nodes(client, paths)
    ]
    return sorted(nodes, key=lambda node: node.path.split("/"))
