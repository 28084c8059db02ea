"""The vocabulary of the protocol's state machines: requests out, answers in, no I/O.

A machine appends what it wants from the coordinator to its outbox, each request with the
function that takes the answer. A driver (`member.py` on a real client, a simulation in the
tests) performs requests in the order of the outbox within one session and calls that function
with the answer, one at a time, never from inside the machine. Answers come in the order of the
requests. When it has passed on every event at hand the driver calls `flush`, where machines
send what they have collected, and then empties the outboxes. When the connection is lost all
requests without an answer are answered `Unanswered`, then `suspended` is called; what is asked
while it is lost is answered so before `connected` is called. No answer ever crosses that line.

=============  ====================================================================
request        answers
=============  ====================================================================
`Get`          `Node`, or `NoNode`
`Stat`         `Node` without its data, or `NoNode`
`Children`     `Listing`, or `NoNode`
`Create`       `Created`, or `Refused` (index 0)
`Commit`       `Committed`, or `Refused` with the index of the first bad operation
any            `Unanswered`: the connection was lost first; it may have taken effect
=============  ====================================================================

A request with ``watch=True`` also arms a one-shot watch, whether or not the node exists; when
it fires the driver calls `Machine.changed(path)` of the machine that armed it, and never before
it has passed on the answer of that request. A lost connection drops all watches without a call:
machines read and arm again in `connected`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias

ANY_VERSION = -1


@dataclass(frozen=True, slots=True)
class Get:
    """Read data and version of a node in one read."""

    path: str
    watch: bool = False


@dataclass(frozen=True, slots=True)
class Stat:
    """Look whether a node exists, and at which version; cheaper than `Get` where most do not."""

    path: str
    watch: bool = False


@dataclass(frozen=True, slots=True)
class Children:
    """List the names below a node."""

    path: str
    watch: bool = False


@dataclass(frozen=True, slots=True)
class Create:
    """Create an ephemeral sequential node; `path` is the prefix that gets the number."""

    path: str
    data: bytes


@dataclass(frozen=True, slots=True)
class CheckOp:
    """Require that a node has this version (`ANY_VERSION`: that it exists)."""

    path: str
    version: int = ANY_VERSION


@dataclass(frozen=True, slots=True)
class SetOp:
    """Write a node's data at a version."""

    path: str
    data: bytes
    version: int


@dataclass(frozen=True, slots=True)
class CreateOp:
    """Create a persistent node."""

    path: str
    data: bytes


@dataclass(frozen=True, slots=True)
class DeleteOp:
    """Delete a node at a version."""

    path: str
    version: int = ANY_VERSION


Op: TypeAlias = CheckOp | SetOp | CreateOp | DeleteOp


@dataclass(frozen=True, slots=True)
class Commit:
    """One transaction: all operations or none."""

    ops: tuple[Op, ...]


Request: TypeAlias = Get | Stat | Children | Create | Commit


class Fault(Enum):
    """Why an operation was refused."""

    BAD_VERSION = "the node has another version"
    NO_NODE = "the node does not exist"
    NODE_EXISTS = "the node exists already"
    OTHER = "refused for another reason"


@dataclass(frozen=True, slots=True)
class Node:
    """A node as read.

    :ivar mzxid: place in the coordinator's total order of the write that left this data.
    :ivar ephemeral_owner: session that an ephemeral node lives with, 0 for others.
    """

    data: bytes
    version: int
    mzxid: int = 0
    ephemeral_owner: int = 0


@dataclass(frozen=True, slots=True)
class NoNode:
    """The node did not exist."""


@dataclass(frozen=True, slots=True)
class Listing:
    """The names below a node, in no order."""

    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Created:
    """The full path of the created node."""

    path: str


@dataclass(frozen=True, slots=True)
class Committed:
    """A transaction took effect.

    :ivar zxid: its place in the coordinator's total order; 0 when it changed no node.
    :ivar versions: for every operation the version it left behind; -1 for a check or delete.
    """

    zxid: int
    versions: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Refused:
    """Nothing took effect: operation `index` could not be done."""

    index: int
    fault: Fault


@dataclass(frozen=True, slots=True)
class Unanswered:
    """The connection was lost before the answer: it may or may not have taken effect."""


Answer: TypeAlias = Node | NoNode | Listing | Created | Committed | Refused | Unanswered
Then: TypeAlias = Callable[[Answer], None]


class Machine:
    """A state machine without I/O; see the module's docstring."""

    def __init__(self) -> None:
        self.outbox: deque[tuple[Request, Then]] = deque()

    def ask(self, request: Request, then: Then) -> None:
        """Put a request into the outbox."""
        self.outbox.append((request, then))

    def connected(self) -> None:
        """Take note that the session is connected, first or again; all watches are gone."""

    def suspended(self) -> None:
        """Take note that the connection is lost; the session may live on."""

    def changed(self, path: str) -> None:
        """Take note that a watch on `path` fired; it is no longer armed."""

    def tick(self) -> None:
        """Do what is due by the clock."""

    def flush(self) -> None:
        """Send what the events so far have added up to."""

    def due(self) -> float:
        """Return the clock time of the next `tick` wanted, `inf` for none."""
        return float("inf")
