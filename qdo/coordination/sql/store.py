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
    """The state at the start of a transaction.

    :ivar zxid: zxid of the newest change.
    :ivar missed: the events since the zxid that was asked for, None if they are no longer stored.
    :ivar sessions: grows whenever a session begins or ends; 0 if the store does not count them.
    :ivar generation: generation of the own session's connection, None if the session has ended.
    :ivar now: Unix time in milliseconds by the clock of the store. It dates changes, so that the
        times of all nodes are of one clock, which shows whose own clock is wrong.
    """

    zxid: int
    missed: list[Event] | None
    sessions: int
    generation: int | None
    now: int


@dataclass(frozen=True, slots=True)
class SessionRow:
    """A session that has not ended.

    :ivar generation: grows whenever another connection resumes the session.
    :ivar beat_slot: place of its heartbeats, in a store that has places.
    :ivar age: the `Store.age` in which it began; in another one it cannot be resumed.
    """

    id: int
    password: bytes
    timeout_milliseconds: int
    generation: int
    beat_slot: int
    age: str


class Store(Protocol):
    """One connection to the database. Not safe for use by several threads at once.

    :ivar name: the database in errors.
    :ivar age: names the time for which sessions can last: this boot of the machine, or this
        timeline of the server.
    :ivar bell: file or descriptor that can be read once the tree may have changed; see `drain`.
    :ivar woken: the answer to a statement said that the tree has changed.
    :ivar waits_for_network: calls belong on a native thread.
    :ivar look_seconds: how often to look without a wakeup.
    :ivar rest_seconds: pause between two looks.
    :ivar read_only: the user may read the database, but not write.
    """

    name: str
    age: str
    bell: Any
    woken: bool
    waits_for_network: bool
    look_seconds: float
    rest_seconds: float
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
