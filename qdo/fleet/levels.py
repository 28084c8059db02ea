"""Format levels: no process writes what a live, older one would misread.

Each version of qdo has a level, which its component node shows. The node of the app has the level
that all workers have. A feature that older versions would misread asks for it with `require_level`.

The leader raises the level of the app in two steps, one period apart: it announces the next level,
and then lists the workers again. A worker reads the node after its registration, and stops if its
own level is below the announced one. So a worker that the leader did not list knows of it.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

from qdo._version import FORMAT_LEVEL, __version__
from qdo.coordination.client import Client
from qdo.coordination.protocol.machine import CheckOp, Committed, NodeRead, SetOp
from qdo.coordination.transactions import commit, read
from qdo.coordination.znodes.layout import Layout
from qdo.coordination.znodes.values import encode, load
from qdo.fleet.components import ProcessDescription, read_components
from qdo.fleet_errors import OldFleetError, OldProgramError

_log = logging.getLogger(__name__)

MOST = 10_000


@dataclass(frozen=True, slots=True)
class AppLevel:
    """The levels in the node of an app.

    :ivar level: every worker has at least this one.
    :ivar next: the announced one, 0 for none.
    :ivar other: what other programs wrote into the node.
    """

    level: int = 0
    next: int = 0
    other: dict[str, Any] | None = None

    @classmethod
    def parse(cls, data: bytes) -> AppLevel:
        """Return the levels; a node that cannot be read has none."""
        value, _ = load(data)
        level, next = (_level(value.pop(key, 0)) for key in ("level", "next_level"))
        return cls(level, next, value)

    def encode(self) -> bytes:
        value: dict[str, Any] = {**(self.other or {}), "level": self.level}
        return encode(value | ({"next_level": self.next} if self.next else {}))


def _level(value: Any) -> int:
    return value if type(value) is int and 0 < value <= MOST else 0


def check_level(client: Client, layout: Layout) -> None:
    """Raise OldProgramError if this version is too old for what the app may have written.

    :raises NodeRefusedError: this account may not read the node of the app.
    :raises CoordinatorUnreachableError: no answer in time.
    """
    node = read(client, layout.root)
    found = AppLevel.parse(node.data) if isinstance(node, NodeRead) else AppLevel()
    needed = max(found.level, found.next)
    if needed > FORMAT_LEVEL:
        raise OldProgramError(version=__version__, level=FORMAT_LEVEL, needed=needed)


def require_level(client: Client, layout: Layout, level: int, what: str) -> None:
    """Raise OldFleetError unless every worker that is registered has this level.

    :param what: the feature that needs it.
    """
    for process in _workers(client, layout):
        if (process.level or 0) < level:
            version = process.version or "an older version"
            raise OldFleetError(what=what, level=level, name=process.name, version=version)


class LevelChore:
    """Raises the level of the app to that of its oldest worker; a `Chore` of the leader."""

    def __call__(self, client: Client, layout: Layout, fence: CheckOp) -> int:
        """Take the next step; return 0, because it deletes nothing.

        :raises NodeRefusedError: this account may not read components.
        :raises CoordinatorUnreachableError: the connection is lost.
        """
        node = read(client, layout.root)
        if not isinstance(node, NodeRead):
            return 0
        before = AppLevel.parse(node.data)
        least = min((each.level or 0 for each in _workers(client, layout)), default=0)
        after = next_step(before, least)
        if after == before:
            return 0
        answer = commit(client, [fence, SetOp(layout.root, after.encode(), node.version)])
        if isinstance(answer, Committed) and after.level > before.level:
            _log.info("format level of the app is %d: older versions no longer start", after.level)
        return 0


def next_step(found: AppLevel, least: int) -> AppLevel:
    """Return the levels of an app whose oldest worker has the level `least`."""
    if found.next and least >= found.next:
        return AppLevel(found.next, 0, found.other)
    return AppLevel(found.level, least if least > found.level else 0, found.other)


def _workers(client: Client, layout: Layout) -> list[ProcessDescription]:
    found = read_components(client, layout)
    return [each for each in found if each.kind == "worker" and each.fault is None]
