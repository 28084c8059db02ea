"""The SQLite file behind an embedded coordinator: znodes, sessions, and recent changes.

Transactions are kept short, because only one process can write at a time. A commit appends to the
write-ahead log without waiting for the disk. `Store.sync` then makes all commits so far durable,
while other processes already continue. A process that waits for its own `sync` before answering
loses nothing by that: earlier changes precede its own in the log, and become durable with it.
"""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3
from collections.abc import Iterable, Iterator
from dataclasses import astuple, dataclass

from qdo.coordination.embedded.tree import ROOT, Event, TreeNode
from qdo.system.files import Rights, open_file
from qdo.system.fork_guard import ForkGuard, unforked
from qdo.system.sqlite import Format, ReplacedFileCheck, open_database, translated

_FORMAT = Format(
    name="coordination",
    application_id=0x71646F63,
    version=1,
    schema="""
        CREATE TABLE node (
            parent TEXT NOT NULL, name TEXT NOT NULL,
            data BLOB, acl TEXT,
            czxid INTEGER NOT NULL, mzxid INTEGER NOT NULL, pzxid INTEGER NOT NULL,
            ctime INTEGER NOT NULL, mtime INTEGER NOT NULL,
            version INTEGER NOT NULL, creates INTEGER NOT NULL, aversion INTEGER NOT NULL,
            owner INTEGER NOT NULL, children INTEGER NOT NULL,
            PRIMARY KEY (parent, name)
        ) WITHOUT ROWID;
        CREATE INDEX node_owner ON node (owner) WHERE owner != 0;
        CREATE TABLE session (
            id INTEGER PRIMARY KEY, password BLOB NOT NULL, timeout INTEGER NOT NULL,
            generation INTEGER NOT NULL, slot INTEGER NOT NULL UNIQUE, boot TEXT NOT NULL
        );
        CREATE TABLE change (zxid INTEGER PRIMARY KEY, events TEXT NOT NULL);
        CREATE TABLE state (
            zxid INTEGER NOT NULL, trimmed INTEGER NOT NULL, sessions INTEGER NOT NULL,
            unmerged INTEGER NOT NULL
        );
        INSERT INTO state VALUES (0, 0, 0, 0);
        INSERT INTO node VALUES ('/', '', X'', NULL, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0)
    """,
)
_KEPT_CHANGES = 2000
_TRIM_EVERY = 64
_MERGE_PAGES = 1000

_SAVE = """
    INSERT INTO node (parent, name, data, acl, czxid, mzxid, pzxid, ctime, mtime,
                      version, creates, aversion, owner, children)
    VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)
    ON CONFLICT (parent, name) DO UPDATE SET
        data = excluded.data, acl = excluded.acl, czxid = excluded.czxid,
        mzxid = excluded.mzxid, pzxid = excluded.pzxid, ctime = excluded.ctime,
        mtime = excluded.mtime, version = excluded.version, creates = excluded.creates,
        aversion = excluded.aversion, owner = excluded.owner, children = excluded.children
"""
_LOAD = """
    SELECT data, acl, czxid, mzxid, pzxid, ctime, mtime, version, creates, aversion, owner, children
    FROM node WHERE parent = ? AND name = ?
"""
_SESSIONS = "SELECT id, password, timeout, generation, slot, boot FROM session"


class BusyError(Exception):
    """Another process is writing; try again in a moment."""


@dataclass(frozen=True, slots=True)
class StoredState:
    """The state at the start of a transaction.

    :ivar zxid: zxid of the newest change.
    :ivar trimmed: changes up to this zxid are no longer stored.
    :ivar sessions: grows whenever a session begins or ends.
    :ivar unmerged: approximate number of log pages that are not merged into the database.
    :ivar generation: generation of the own session's connection, None if the session has ended.
    """

    zxid: int
    trimmed: int
    sessions: int
    unmerged: int
    generation: int | None


@dataclass(frozen=True, slots=True)
class SessionRow:
    """A session that has not ended; `slot` is the place of its heartbeats."""

    id: int
    password: bytes
    timeout_milliseconds: int
    generation: int
    slot: int
    boot: str


class Store:
    """One connection to the file. Not safe for use by several threads at once."""

    def __init__(self, path: str) -> None:
        """Open or create the file; raise DatabaseError if it cannot be used."""
        self.path = path
        self.wakeups = f"{path}.wakeups"
        self._log_file = -1
        self._in_transaction = False
        with unforked:
            # `sync` syncs commits instead of SQLite, outside of the write lock.
            self._db = open_database(path, _FORMAT, durable=False)
            self._fork_guard = ForkGuard(path, lambda: None)
            try:
                self._prepare()
            except BaseException:
                self.close()
                raise
        self._unmerged = 0
        self._saves = 0
        self._merge = False

    def _prepare(self) -> None:
        with translated(self.path):
            self._db.execute("PRAGMA busy_timeout = 0")
            # Merging the log syncs twice: `sync` does it, where waiting does no harm.
            self._db.execute("PRAGMA wal_autocheckpoint = 0")
            self._db.execute("SELECT count(*) FROM sqlite_master").fetchone()
            if os.access(self.path, os.W_OK):  # an onlooker syncs nothing
                self._log_file = open_file(f"{self.path}-wal", os.O_RDONLY, Rights.of(self.path))
            self._watch = ReplacedFileCheck(self.path)

    def close(self) -> None:
        with self._fork_guard:
            self._db.close()
            self._fork_guard.close()
        if self._log_file >= 0:
            os.close(self._log_file)
            self._log_file = -1

    # --- transactions -----------------------------------------------------------------

    def begin(self, session: int, *, write: bool) -> StoredState:
        """Begin a transaction, and return the state of the file.

        :raises BusyError: the lock is taken; no transaction began.
        :raises DatabaseError: the file is unusable, or no longer under its name.
        """
        self._fork_guard.__enter__()  # until `commit` or `rollback`
        self._in_transaction = True
        with self._guarded():
            self._watch.check()
            self._db.execute("BEGIN IMMEDIATE" if write else "BEGIN")
            found = self._db.execute(
                "SELECT zxid, trimmed, sessions, unmerged,"
                " (SELECT generation FROM session WHERE id = ?) FROM state",
                (session,),
            ).fetchone()
            state = StoredState(*found)
            self._unmerged = state.unmerged
            return state

    def commit(self) -> None:
        """Make the transaction visible to all processes; it is not durable yet."""
        with self._guarded():
            self._db.execute("COMMIT")
        self.rollback()

    def rollback(self) -> None:
        """Undo the transaction; does nothing without one, such as after `commit`."""
        if self._db.in_transaction:
            with contextlib.suppress(sqlite3.Error):
                self._db.execute("ROLLBACK")
        if self._in_transaction:
            self._in_transaction = False
            self._fork_guard.__exit__()

    @contextlib.contextmanager
    def _guarded(self) -> Iterator[None]:
        """Roll back on any error; raise BusyError if the lock is taken."""
        try:
            with translated(self.path):
                yield
        except BaseException as error:
            self.rollback()
            if isinstance(error.__cause__, sqlite3.OperationalError) and _busy(error.__cause__):
                raise BusyError from error
            raise

    def sync(self) -> None:
        """Make all commits so far durable; waits for the disk."""
        with translated(self.path):
            os.fdatasync(self._log_file)
            # Only now it is certain that the commits are in the files that other processes open.
            self._watch.check()
            if self._merge:
                with self._fork_guard:
                    self._merge = not self._merged()

    def _merged(self) -> bool:
        """Merge the log; return whether the next commit can start it from the beginning.

        If other processes read old pages or write meanwhile, the next `sync` must try again:
        otherwise the log grew to 66 MiB in half a minute.
        """
        for mode in ("PASSIVE", "RESTART"):  # the first waits for the disk without the write lock
            busy, pages, merged = self._db.execute(f"PRAGMA wal_checkpoint({mode})").fetchone()
            if busy or merged < pages:
                return False
        return True

    # --- znodes -----------------------------------------------------------------------

    def node(self, path: str) -> TreeNode | None:
        with self._guarded():
            row = self._db.execute(_LOAD, _key(path)).fetchone()
        return None if row is None else TreeNode(*row)

    def names(self, path: str) -> Iterable[str]:
        with self._guarded():
            rows = self._db.execute(
                "SELECT name FROM node WHERE parent = ?", ("" if path == ROOT else path,)
            ).fetchall()
        return [name for (name,) in rows]

    def ephemerals(self, session: int) -> list[str]:
        with self._guarded():
            rows = self._db.execute(
                "SELECT parent, name FROM node WHERE owner = ? AND owner != 0", (session,)
            ).fetchall()
        return [f"{parent}/{name}" for parent, name in rows]

    def save(self, changes: dict[str, TreeNode | None], zxid: int, events: Iterable[Event]) -> None:
        """Write changed nodes, the new zxid, and the events for other processes' watches."""
        deleted = [_key(path) for path, node in changes.items() if node is None]
        written = [(*_key(path), *node.row()) for path, node in changes.items() if node is not None]
        with self._guarded():
            if deleted:
                self._db.executemany("DELETE FROM node WHERE parent = ? AND name = ?", deleted)
            self._db.executemany(_SAVE, written)
            unmerged = self._unmerged + len(changes) + 2
            # The process that reaches the limit merges for all processes.
            if unmerged >= _MERGE_PAGES:
                self._merge, unmerged = True, 0
            self._db.execute("UPDATE state SET zxid = ?, unmerged = ?", (zxid, unmerged))
            self._db.execute(
                "INSERT INTO change VALUES (?, ?)", (zxid, json.dumps(list(dict.fromkeys(events))))
            )
            self._saves += 1
            if self._saves % _TRIM_EVERY == 0:
                self._trim()

    def _trim(self) -> None:
        row = self._db.execute(
            "SELECT zxid FROM change ORDER BY zxid DESC LIMIT 1 OFFSET ?", (_KEPT_CHANGES,)
        ).fetchone()
        if row is not None:
            self._db.execute("DELETE FROM change WHERE zxid <= ?", row)
            self._db.execute("UPDATE state SET trimmed = ?", row)

    def events(self, since: int) -> list[Event]:
        with self._guarded():
            rows = self._db.execute(
                "SELECT events FROM change WHERE zxid > ? ORDER BY zxid", (since,)
            ).fetchall()
        return [(kind, path) for (text,) in rows for kind, path in json.loads(text)]

    # --- sessions ---------------------------------------------------------------------

    def sessions(self) -> list[SessionRow]:
        with self._guarded():
            rows = self._db.execute(_SESSIONS).fetchall()
        return [SessionRow(*row) for row in rows]

    def session(self, session: int) -> SessionRow | None:
        with self._guarded():
            row = self._db.execute(f"{_SESSIONS} WHERE id = ?", (session,)).fetchone()
        return None if row is None else SessionRow(*row)

    def free_slot(self) -> int:
        with self._guarded():
            (slot,) = self._db.execute(
                "SELECT min(free) FROM (SELECT 0 AS free UNION ALL SELECT slot + 1 FROM session)"
                " WHERE free NOT IN (SELECT slot FROM session)"
            ).fetchone()
        return int(slot)

    def put_session(self, row: SessionRow) -> None:
        """Add a session, or replace it by its next generation."""
        with self._guarded():
            self._db.execute(
                "INSERT OR REPLACE INTO session VALUES (?, ?, ?, ?, ?, ?)",
                astuple(row),
            )
            self._db.execute("UPDATE state SET sessions = sessions + 1")

    def delete_session(self, session: int) -> None:
        """End a session; the caller deletes its nodes."""
        with self._guarded():
            self._db.execute("DELETE FROM session WHERE id = ?", (session,))
            self._db.execute("UPDATE state SET sessions = sessions + 1")


def _key(path: str) -> tuple[str, str]:
    parent, _, name = path.rpartition("/")
    return (parent, name) if name or parent else (ROOT, "")


def _busy(error: sqlite3.OperationalError) -> bool:
    # SQLite's codes for busy, locked and protocol have these texts; Python 3.10 hides the codes.
    return "locked" in str(error) or "locking protocol" in str(error)
