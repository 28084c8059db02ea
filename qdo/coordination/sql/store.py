"""The interface of a database for sessions: znodes, sessions, recent changes, and wakeups."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from qdo.broker_errors import PostgresqlFullError, PostgresqlRefusedError
from qdo.coordination.sql.tree import Event, TreeNode
from qdo.errors import DatabaseFullError

Operations = Collection[Any]
# The disk of the database is full, or the database refuses a value. The transaction is undone, but
# other transactions may succeed.
UNDONE = (DatabaseFullError, PostgresqlFullError, PostgresqlRefusedError)
MIN_TIMEOUT_SECONDS = 0.2
MAX_TIMEOUT_SECONDS = 600.0


class BusyError(Exception):
    """Another process is writing; try again in a moment."""


@dataclass(frozen=True, slots=True)
class StoredState:
    """The state at the start of a transaction."""

    # Zxid of the newest change.
    zxid: int
    # The events since the requested zxid, or None if the store no longer has them.
    missed: list[Event] | None
    # Grows whenever a session begins or ends; 0 if the store does not count them.
    sessions: int
    # Generation of the own session's connection, None if the session has ended.
    generation: int | None
    # Unix time in milliseconds by the clock of the store. It dates changes, so all node times come
    # from one clock. This reveals processes whose own clock is wrong.
    now: int


@dataclass(frozen=True, slots=True)
class SessionRow:
    """A session that has not ended."""

    id: int
    password: bytes
    timeout_milliseconds: int
    # Number that grows whenever another connection resumes the session.
    generation: int
    # Slot of the session's heartbeats, in a store with slots.
    beat_slot: int
    # The `Store.age` in which the session began. It cannot be resumed in another age.
    age: str


class Store(Protocol):
    """A connection to the database, for one thread at a time."""

    # Name of the database in errors.
    name: str
    # Name of the period in which sessions can last: a boot of the machine, or a timeline of the
    # server.
    age: str
    # File or descriptor that becomes readable when the tree may have changed; see `drain`.
    bell: Any
    # Whether the answer to a statement reported a change of the tree.
    woken: bool
    # Whether calls wait for the network, and so belong on a native thread.
    waits_for_network: bool
    # Time between looks for changes without a wakeup.
    look_seconds: float
    # Pause between two looks.
    rest_seconds: float
    # Whether the user may read the database, but not write it.
    read_only: bool

    def close(self) -> None: ...

    def drain(self) -> bool:
        """Empty the bell; return whether another connection may have changed the tree."""

    # --- transactions -----------------------------------------------------------------

    def begin(
        self, session: SessionRow | None, *, write: bool, since: int, operations: Operations = ...
    ) -> StoredState:
        """Begin a transaction.

        A write transaction excludes all others, and is a heartbeat of its session.

        :param since: an earlier zxid, for the events since then; -1 for none.
        :param operations: the operations that the caller will perform, as a hint.
        :raises BusyError: the lock is taken; no transaction began.
        """

    def commit(self) -> None:
        """Make the transaction visible; without `save` it need not be durable."""

    def rollback(self) -> None:
        """Undo the transaction; do nothing without a transaction, such as after `commit`."""

    def announce(self) -> None:
        """Wake other connections after a commit, and return once it is durable."""

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
        """Return all sessions, each with the time on `clock` of its last heartbeat, or a later one.

        It is -inf for a session whose process has certainly ended.
        """

    def outlast(self) -> tuple[float, list[int]]:
        """Return the seconds until a session may begin, and the sessions that are over by then.

        Call it in a write transaction, and commit.
        """

    def put_session(self, row: SessionRow) -> SessionRow:
        """Add a session, or store its next generation; return the session with its `beat_slot`."""

    def delete_session(self, session: int) -> None:
        """End a session; the caller deletes its nodes."""

    def beat(self, row: SessionRow) -> None:
        """Record that the session's process lives."""


def key_of(path: str) -> tuple[str, str]:
    """Return the parent's path and the node's name, which are the key of the node's row."""
    parent, _, name = path.rpartition("/")
    return (parent, name) if name or parent else ("/", "")


def folder_of(path: str) -> str:
    """Return the parent path in the keys of a node's children."""
    return "" if path == "/" else path
