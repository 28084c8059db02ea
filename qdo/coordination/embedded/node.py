"""One znode of an embedded coordinator."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol

from kazoo.protocol.states import ZnodeStat

ROOT = "/"


@dataclass(slots=True, eq=False)
class TreeNode:
    """One znode; not changed in place once it is part of a tree."""

    data: bytes | None
    acl: str | None
    czxid: int
    mzxid: int
    pzxid: int
    ctime: int
    mtime: int
    version: int
    creates: int
    aversion: int
    owner: int
    children: int

    def row(self) -> tuple[Any, ...]:
        """Return the fields in the order of the constructor."""
        return (
            self.data,
            self.acl,
            self.czxid,
            self.mzxid,
            self.pzxid,
            self.ctime,
            self.mtime,
            self.version,
            self.creates,
            self.aversion,
            self.owner,
            self.children,
        )

    def copy(self) -> TreeNode:
        return TreeNode(*self.row())

    def stat(self) -> ZnodeStat:
        # Sequence numbers count creations only; the version clients see counts deletions too.
        return ZnodeStat(
            self.czxid,
            self.mzxid,
            self.ctime,
            self.mtime,
            self.version,
            2 * self.creates - self.children,
            self.aversion,
            self.owner,
            len(self.data) if self.data else 0,
            self.children,
            self.pzxid,
        )


class NodeSource(Protocol):
    """The source of the nodes that no request of a tree has changed."""

    def node(self, path: str) -> TreeNode | None:
        """Return a node."""

    def names(self, path: str) -> Iterable[str]:
        """Return the names of a node's children."""


def parent_of(path: str) -> str:
    """Return the path of the parent of a node other than the root."""
    return path[: path.rindex("/")] or ROOT
