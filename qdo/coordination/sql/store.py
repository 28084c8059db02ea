"""The interface of a database for sessions: znodes, sessions, recent changes, and wakeups."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from qdo.broker_errors import PostgresqlFullError, PostgresqlRefusedError
from qdo.coordination.sql.tree import Event, TreeNode
from qdo.errors import DatabaseFullError

Operations = Collection[Any]
# The errors if the database's disk is full, or the database refuses a value. Such an error undoes
# the transaction, but other transactions may succeed.
UNDONE = (DatabaseFullError, PostgresqlFullError, PostgresqlRefusedError)
MIN_TIMEOUT_SECONDS = 0.2
MAX_TIMEOUT_SECONDS = 600.0


class BusyError(Exception):
    """Another process is writing; try again in a moment."""


@dataclass(frozen=True, slots=True)
class StoredState:
    """The state at the start of a transaction."""

    # The zxid of the newest change.
    zxid: int
    # The events since the requested zxid, or None if the store no longer has them.
    missed: list[Event] | None
    # The number of beginnings and ends of sessions; 0 if the store does not count them.
    sessions: int
    # The generation of the own session; None if the session has ended.
    generation: int | None
    # The Unix time in milliseconds by the clock of the store. This time dates changes, so all node
    # times come from one clock, and reveal processes with a wrong clock.
    now: int


@dataclass(frozen=True, slots=True)
class SessionRow:
    """A session that has not ended."""

    id: int
    password: bytes
    timeout_milliseconds: int
    # A number that increases whenever another connection resumes the session.
    generation: int
    # The slot of the session's heartbeats, in a store with slots.
    beat_slot: int
    # The `Store.age` in which the session began. No client can resume the session in another age.
    age: str


class Store(Protocol):
    """A connection to the database, for one thread at a time."""

    # The name of the database in errors.
    name: str
    # The name of the period in which sessions can last: a boot of the machine, or a timeline of the
    # server.
    age: str
    # A file or descriptor that becomes readable when the tree may have changed; see `drain`.
    bell: Any
    # Whether the answer to a statement has reported a change of the tree.
    woken: bool
    # Whether calls wait for the network, and so need a native thread.
    waits_for_network: bool
    # The time in seconds between looks for changes without a wakeup.
    look_seconds: float
    # The pause in seconds between two looks.
    rest_seconds: float
    # Whether the user may only read the database.
    read_only: bool

    def close(self) -> None: ...

    def drain(self) -> bool:
        """Read all wakeups; return whether another connection may have changed the tree."""

    # --- transactions -----------------------------------------------------------------

    def begin(
        self, session: SessionRow | None, *, write: bool, since: int, operations: Operations = ...
    ) -> StoredState:
        """Begin a transaction.

        A write transaction excludes all other transactions, and is a heartbeat of its session.

        :param since: the zxid after which to return events; -1: return no events.
        :param operations: a hint: the operations that the caller will perform.
        :raises BusyError: another process has the lock; no transaction has begun.
        """

    def commit(self) -> None:
        """Make the transaction visible; without a call of `save` it need not be durable."""

    def rollback(self) -> None:
        """Undo the transaction; do nothing if no transaction is open, such as after `commit`."""

    def announce(self) -> None:
        """Wake other connections after a commit; return when the commit is durable."""

    # --- znodes -----------------------------------------------------------------------

    def node(self, path: str) -> TreeNode | None: ...

    def names(self, path: str) -> Iterable[str]: ...

    def ephemerals(self, session: int) -> list[str]: ...

    def save(
        self, changes: Mapping[str, TreeNode | None], zxid: int, events: Iterable[Event]
    ) -> None:
        """Write changed nodes, the new zxid, and the events for other processes' watches."""

    # --- sessions ---------------------------------------------------------------------

    def sessions(self) -> list[tuple[SessionRow, float]]:
        """Return all sessions, each with the time of its last heartbeat on `clock`, or later.

        The time is -inf if the process of the session has certainly ended.
        """

    def outlast(self) -> tuple[float, list[int]]:
        """Return the seconds until a session may begin, and the sessions that will have ended.

        Callers must be in a write transaction, and commit it.
        """

    def put_session(self, row: SessionRow) -> SessionRow:
        """Add a session, or store its next generation; return the session with a `beat_slot`."""

    def delete_session(self, session: int) -> None:
        """End a session; the caller deletes the session's nodes."""

    def beat(self, row: SessionRow) -> None:
        """Record a heartbeat of a session."""


def key_of(path: str) -> tuple[str, str]:
    """Return the key of a node's row: the parent's path and the node's name."""
    parent, _, name = path.rpartition("/")
    return (parent, name) if name or parent else ("/", "")


def folder_of(path: str) -> str:
    """Return the path of a node as the keys of its children contain it."""
    return "" if path == "/" else path
