"""What sessions need of a database: znodes, sessions, recent changes, and wakeups."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from qdo.broker_errors import PostgresqlFullError, PostgresqlRefusedError
from qdo.coordination.sql.tree import Event, TreeNode
from qdo.errors import DatabaseFullError

Operations = Collection[Any]
# The disk of the database is full, or the database refuses a value: the transaction is undone, and
# others may succeed.
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
    # The events since the zxid that was asked for, None if they are no longer stored.
    missed: list[Event] | None
    # Grows whenever a session begins or ends; 0 if the store does not count them.
    sessions: int
    # Generation of the own session's connection, None if the session has ended.
    generation: int | None
    # Unix time in milliseconds by the clock of the store. It dates changes, so that the times of
    # all nodes are of one clock, which shows whose own clock is wrong.
    now: int


@dataclass(frozen=True, slots=True)
class SessionRow:
    """A session that has not ended."""

    id: int
    password: bytes
    timeout_milliseconds: int
    # Grows whenever another connection resumes the session.
    generation: int
    # Place of its heartbeats, in a store that has places.
    beat_slot: int
    # The `Store.age` in which it began; in another one it cannot be resumed.
    age: str


class Store(Protocol):
    """One connection to the database. Not safe for use by several threads at once."""

    # The database in errors.
    name: str
    # Names the time for which sessions can last: this boot of the machine, or this timeline of the
    # server.
    age: str
    # File or descriptor that can be read once the tree may have changed; see `drain`.
    bell: Any
    # The answer to a statement said that the tree has changed.
    woken: bool
    # Calls belong on a native thread.
    waits_for_network: bool
    # How often to look without a wakeup.
    look_seconds: float
    # Pause between two looks.
    rest_seconds: float
    # The user may read the database, but not write.
    read_only: bool

    def close(self) -> None: ...

    def drain(self) -> bool:
        """Empty the bell; return whether another connection may have changed the tree."""

    # --- transactions -----------------------------------------------------------------

    def begin(
        self, session: SessionRow | None, *, write: bool, since: int, operations: Operations = ...
    ) -> StoredState:
        """Begin a transaction.

        A transaction that writes excludes all others that write, and is a heartbeat of its session.

        :param since: an earlier zxid, for the events since then; -1 for none.
        :param operations: what the caller will perform, as a hint.
        :raises BusyError: the lock is taken; no transaction began.
        """

    def commit(self) -> None:
        """Make the transaction visible; without `save` it need not be durable."""

    def rollback(self) -> None:
        """Undo the transaction; does nothing without one, such as after `commit`."""

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
        """Return all sessions, and when each was last heard by `clock`, exact or later.

        It is -inf for a session whose process has certainly ended.
        """

    def outlast(self) -> tuple[float, list[int]]:
        """Return the seconds for which no session may begin, and sessions that are over by then.

        Call it in a transaction that writes, and commit.
        """

    def put_session(self, row: SessionRow) -> SessionRow:
        """Add a session, or replace it by its next generation; return it with its `beat_slot`."""

    def delete_session(self, session: int) -> None:
        """End a session; the caller deletes its nodes."""

    def beat(self, row: SessionRow) -> None:
        """Record that the session's process lives."""


def key_of(path: str) -> tuple[str, str]:
    """Return path of the parent and name of a node: the key of its row."""
    parent, _, name = path.rpartition("/")
    return (parent, name) if name or parent else ("/", "")


def folder_of(path: str) -> str:
    """Return the parent in the keys of a node's children."""
    return "" if path == "/" else path
