"""A coordinator with one node, as the sessions of several machines see it."""

from __future__ import annotations

import random
from collections import deque

from qdo.coordination.protocol.machine import (
    Callback,
    Commit,
    CommitError,
    Committed,
    CoordinatorRequest,
    Get,
    Machine,
    NodeMissing,
    NodeRead,
    NoResponse,
    Rejected,
    Response,
    SetOp,
)


class OneNode:
    """A node, all of whose states are kept.

    :ivar states: the node after each change; None while it is missing. The index is its zxid.
    """

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.states: list[NodeRead | None] = [None]

    @property
    def node(self) -> NodeRead | None:
        return self.states[-1]

    def write(self, data: bytes) -> int:
        """Set the node; return the zxid."""
        zxid = len(self.states)
        version = self.node.version + 1 if self.node else 0
        self.states.append(NodeRead(data, version, zxid))
        return zxid

    def delete(self) -> None:
        self.states.append(None)


class OneNodeSession:
    """A session with one machine. Reads may be stale, but not older than what it has seen."""

    def __init__(self, world: OneNode, path: str, machine: Machine) -> None:
        self._world = world
        self._path = path
        self._machine = machine
        self._seen = len(world.states) - 1
        self._armed: int | None = None
        self._asked: deque[tuple[CoordinatorRequest, Callback]] = deque()
        machine.connected()
        self.send()

    @property
    def settled(self) -> bool:
        """Whether the machine has read the newest state and knows it."""
        return not self._asked and self._armed == len(self._world.states) - 1

    def answer(self) -> None:
        """Answer the oldest request."""
        if self._asked:
            request, then = self._asked.popleft()
            then(self.perform(request))
            self.send()

    def perform(self, request: CoordinatorRequest) -> Response:
        """Read the node, or write it at a version."""
        world = self._world
        if isinstance(request, Get):
            self._seen = world.random.randint(self._seen, len(world.states) - 1)
            self._armed = self._seen
            return world.states[self._seen] or NodeMissing()
        assert isinstance(request, Commit)
        (op,) = request.ops
        assert isinstance(op, SetOp)
        if world.node is None or world.node.version != op.version:
            return Rejected(0, CommitError.BAD_VERSION)
        return Committed(world.write(op.data), (op.version + 1,))

    def notify(self) -> None:
        """Report a change behind the last read, if there is one."""
        if self._armed is not None and self._armed + 1 < len(self._world.states):
            self._seen = max(self._seen, self._armed + 1)
            self._armed = None
            self._machine.changed(self._path)
            self.send()

    def reconnect(self) -> None:
        """Lose the connection with all requests and watches, and connect again."""
        self._armed = None
        asked, self._asked = self._asked, deque()
        for _, then in asked:
            then(NoResponse())
        self._machine.suspended()
        self._machine.outbox.clear()
        self._machine.connected()
        self.send()

    def send(self) -> None:
        """Take the requests of the machine."""
        self._asked.extend(self._machine.outbox)
        self._machine.outbox.clear()
