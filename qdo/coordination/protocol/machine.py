"""The requests and answers of the protocol's state machines, which do no I/O.

A machine appends each request to its outbox, with a function that takes the answer. A driver
(`machine_loop.py` on a real client, a simulation in the tests) performs the requests in the order
of the outbox within one session. The driver calls the functions with the answers, one at a time and
never from inside the machine. Answers come in the order of the requests.

After the driver has passed on all pending events, it calls `flush`, in which machines send their
collected requests. Then the driver empties the outboxes. When the connection is lost, the driver
answers all open requests with `NoResponse`, and then calls `suspended`. Before it calls
`connected`, the driver also answers requests from the time without a connection with `NoResponse`.
So a machine never gets an answer from an earlier connection.

=============  ======================================================================
request        answers
=============  ======================================================================
`Get`          `NodeRead`, or `NodeMissing`
`Stat`         `NodeRead` without its data, or `NodeMissing`
`Children`     `ChildrenRead`, or `NodeMissing`
`Create`       `Created`, or `Rejected` (index 0)
`Commit`       `Committed`, or `Rejected` with the index of the first bad operation
`WatchTree`    `Watching`
`Sync`         `Synced`
reads, Create  `Refused`: the coordinator does not do this with this node
any            `NoResponse`: the connection was lost first; it may have taken effect
=============  ======================================================================

A request with ``watch=True`` also arms a one-shot watch, whether or not the node exists. When the
watch fires, the driver calls `Machine.changed(path)` of the machine that armed the watch. The
driver always passes on the answer to the request first. A lost connection drops all watches without
a call. Machines read and arm watches again in `connected`.

`WatchTree` arms a permanent watch on a node and all nodes below it. The driver passes on its events
in the order of the changes. An event precedes the answer to any request that the coordinator
performed after the change.
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
    """Read the data and version of a node in one read."""

    path: str
    watch: bool = False


@dataclass(frozen=True, slots=True)
class Stat:
    """Get the version of a node, if it exists; if most nodes are missing, cheaper than `Get`."""

    path: str
    watch: bool = False


@dataclass(frozen=True, slots=True)
class Children:
    """List the names below a node."""

    path: str
    watch: bool = False


@dataclass(frozen=True, slots=True)
class Create:
    """Create an ephemeral sequential node; `path` is its path without the number."""

    path: str
    data: bytes


@dataclass(frozen=True, slots=True)
class CheckOp:
    """Require that a node has a version; `ANY_VERSION`: require only that it exists."""

    path: str
    version: int = ANY_VERSION


@dataclass(frozen=True, slots=True)
class SetOp:
    """Write a node's data, if the node has a version."""

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
    """Delete a node, if the node has a version."""

    path: str
    version: int = ANY_VERSION


@dataclass(frozen=True, slots=True)
class WatchTree:
    """Report every write, creation and deletion of a node and of all nodes below it."""

    path: str


@dataclass(frozen=True, slots=True)
class Sync:
    """Get a place in the coordinator's total order that follows all acknowledged changes."""

    path: str


Op: TypeAlias = CheckOp | SetOp | CreateOp | DeleteOp


@dataclass(frozen=True, slots=True)
class Commit:
    """Perform all operations in one transaction, or none of them."""

    ops: tuple[Op, ...]


CoordinatorRequest: TypeAlias = Get | Stat | Children | Create | Commit | WatchTree | Sync


class CommitError(Enum):
    """Why an operation was rejected."""

    BAD_VERSION = "the node has another version"
    NO_NODE = "the node does not exist"
    NODE_EXISTS = "the node exists already"
    OTHER = "rejected for another reason"


@dataclass(frozen=True, slots=True)
class NodeRead:
    """The data and state of a node."""

    data: bytes
    version: int
    # The place of the last write in the coordinator's total order.
    mzxid: int = 0
    # The session that owns an ephemeral node; 0 for other nodes.
    ephemeral_owner: int = 0


@dataclass(frozen=True, slots=True)
class NodeMissing:
    """The node did not exist."""


@dataclass(frozen=True, slots=True)
class ChildrenRead:
    """The names below a node, in no particular order."""

    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Created:
    """The full path of the created node."""

    path: str


@dataclass(frozen=True, slots=True)
class Committed:
    """A transaction took effect."""

    # The transaction's place in the coordinator's total order; 0 if it changed no node.
    zxid: int
    # The resulting version for each operation; -1 for a check or delete.
    versions: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Rejected:
    """No operation took effect, because operation `index` failed; `reason` explains `OTHER`."""

    index: int
    fault: CommitError
    reason: str = ""

    def refuses(self, index: int) -> bool:
        """Return whether an operation failed for a reason that a retry does not change."""
        return self.index == index and self.fault is CommitError.OTHER


@dataclass(frozen=True, slots=True)
class Refused:
    """The coordinator refuses the request for this node, for example because of its ACL."""

    reason: str


@dataclass(frozen=True, slots=True)
class Watching:
    """The watch is armed."""


@dataclass(frozen=True, slots=True)
class Synced:
    """A read after this answer shows the state at `zxid` or later.

    The driver has already passed on the events of all changes up to `zxid`.
    """

    zxid: int


@dataclass(frozen=True, slots=True)
class NoResponse:
    """The connection ended before the answer arrived; the request may have taken effect."""


Response: TypeAlias = (
    NodeRead
    | NodeMissing
    | ChildrenRead
    | Created
    | Committed
    | Rejected
    | Refused
    | Watching
    | Synced
    | NoResponse
)
Callback: TypeAlias = Callable[[Response], None]


class Machine:
    """A state machine without I/O; see the module's docstring."""

    def __init__(self) -> None:
        self.outbox: deque[tuple[CoordinatorRequest, Callback]] = deque()

    def ask(self, request: CoordinatorRequest, then: Callback) -> None:
        self.outbox.append((request, then))

    def connected(self) -> None:
        """Handle a new connection of the session, which has no watches."""

    def suspended(self) -> None:
        """Handle the loss of the connection; the session may still be alive."""

    def changed(self, path: str) -> None:
        """Handle the event of a watch on `path`; the watch is no longer armed."""

    def tick(self) -> None: ...

    def flush(self) -> None:
        """Send the requests that result from the events so far."""

    def due(self) -> float:
        """Return the clock time of the next `tick`; `inf` if no tick is needed."""
        return float("inf")
