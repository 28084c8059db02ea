"""The SQLite file behind an embedded coordinator: znodes, sessions, and recent changes.

Transactions are short, because only one process can write at a time. A commit appends to the
write-ahead log without waiting for the disk. `announce` then makes all earlier commits durable,
while other processes already continue. A process waits for its own `announce` before it answers.
This wait is enough, because all earlier changes precede the process's change in the log, and become
durable with it.
"""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3
import struct
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import astuple, replace
from functools import cache
from pathlib import Path
from typing import Any

from qdo.coordination.sql.store import (
    MAX_TIMEOUT_SECONDS,
    MIN_TIMEOUT_SECONDS,
    BusyError,
    Operations,
    SessionRow,
    StoredState,
    folder_of,
    key_of,
)
from qdo.coordination.sql.tree import Event, TreeNode
from qdo.errors import DatabaseError
from qdo.system.clock import clock
from qdo.system.files import Rights, open_file
from qdo.system.fork_guard import ForkGuard, unforked
from qdo.system.sqlite import Format, ReplacedFileCheck, error_code, open_database, translated
from qdo.system.wakeup_pipes import WakeupPipe, notify_all

_BUSY_CODES = {sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_PROTOCOL}
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
_SESSIONS = f"""
    SELECT id, password, min(max(timeout, {MIN_TIMEOUT_SECONDS * 1000:.0f}),
        {MAX_TIMEOUT_SECONDS * 1000:.0f}), generation, slot, boot FROM session
"""
_SLOT = struct.Struct("<q")
_BLOCK = 4096
# The time between looks of a process that may only read, because no other process wakes it.
ONLOOKER_SECONDS = 1.0


@cache
def boot() -> str:
    """Return the id of this boot of the machine; `clock` restarts with each boot."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


class Heartbeats:
    """The heartbeat file, with the time of a heartbeat in each slot."""

    # A heartbeat is a small write to memory, without a lock or the disk. So even a process that
    # waits for the database keeps its session.

    def __init__(self, path: str, rights: Rights) -> None:
        self._fd = open_file(path, os.O_RDWR, rights)

    def reserve(self, slot: int) -> None:
        """Allocate a slot or raise OSError, so that later heartbeats need no disk space."""
        end = (slot * _SLOT.size // _BLOCK + 1) * _BLOCK
        os.posix_fallocate(self._fd, 0, end)

    def beat(self, slot: int) -> None:
        os.pwrite(self._fd, _SLOT.pack(int(clock() * 1e9)), slot * _SLOT.size)

    def read(self) -> list[float]:
        """Return the time of the last heartbeat of every slot."""
        size = os.fstat(self._fd).st_size
        return [beat / 1e9 for (beat,) in _SLOT.iter_unpack(os.pread(self._fd, size, 0))]

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class _SilentPipe:
    """Replaces the wakeup pipe of a process that may only read; no other process writes to it."""

    def __init__(self) -> None:
        self._ends = [*os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)]

    def fileno(self) -> int:
        return self._ends[0]

    def drain(self) -> None:
        """Do nothing, because no process writes to the pipe."""

    def close(self) -> None:
        while self._ends:
            os.close(self._ends.pop())


class SqliteStore:
    """A connection to the coordinator's SQLite file."""

    waits_for_network = False
    woken = False
    rest_seconds = 0.0

    def __init__(
        self, path: str, offload: Callable[[Callable[[], None]], None] = lambda call: call()
    ) -> None:
        """Open or create the file; `offload` runs calls that wait for the disk."""
        self.name = path
        self.age = boot()
        self._offload = offload
        self._log_file = -1
        self.bell: Any = None
        self._beats: Any = None
        self._in_transaction = False
        with unforked:
            # SQLite does not sync commits, because `_sync` does, without the write lock.
            self._db = open_database(path, _FORMAT, durable=False)
            self._fork_guard = ForkGuard(path, lambda: None)
            try:
                self._prepare()
                self._join()
            except BaseException:
                self.close()
                raise
        self._unmerged = 0
        self._saves = 0
        self._merge = False

    def _join(self) -> None:
        """Open the files for wakeups and heartbeats between processes."""
        if self.read_only:
            self.bell = _SilentPipe()
            return
        with translated(self.name):
            rights = Rights.of(self.name)
            self.bell = WakeupPipe(self._wakeups, rights)
            self._beats = Heartbeats(f"{self.name}.beats", rights)

    @property
    def _wakeups(self) -> str:
        return f"{self.name}.wakeups"

    def _prepare(self) -> None:
        with translated(self.name):
            self._db.execute("PRAGMA busy_timeout = 0")
            # A merge of the log syncs twice. `_sync` merges the log, because waiting does no harm
            # there.
            self._db.execute("PRAGMA wal_autocheckpoint = 0")
            self._db.execute("SELECT count(*) FROM sqlite_master").fetchone()
            self.read_only = not os.access(self.name, os.W_OK)
            self.look_seconds = ONLOOKER_SECONDS if self.read_only else float("inf")
            if not self.read_only:
                self._log_file = open_file(f"{self.name}-wal", os.O_RDONLY, Rights.of(self.name))
            self._watch = ReplacedFileCheck(self.name)

    def close(self) -> None:
        with self._fork_guard:
            self._db.close()
            self._fork_guard.close()
        if self._log_file >= 0:
            os.close(self._log_file)
            self._log_file = -1
        for each in (self.bell, self._beats):
            if each is not None:
                each.close()

    def drain(self) -> bool:
        self.bell.drain()
        return True

    # --- transactions -----------------------------------------------------------------

    def begin(
        self, session: SessionRow | None, *, write: bool, since: int, operations: Operations = ()
    ) -> StoredState:
        self._fork_guard.__enter__()  # until `commit` or `rollback`
        self._in_transaction = True
        with self._guarded():
            self._watch.check()
            self._db.execute("BEGIN IMMEDIATE" if write else "BEGIN")
            zxid, trimmed, sessions, self._unmerged, generation = self._db.execute(
                "SELECT zxid, trimmed, sessions, unmerged,"
                " (SELECT generation FROM session WHERE id = ?) FROM state",
                (0 if session is None else session.id,),
            ).fetchone()
            missed = self._events(since) if -1 < since < zxid else []
        if write and session is not None:
            self.beat(session)
        gone = -1 < since < trimmed
        now = int(time.time() * 1000)  # all processes share the machine's clock
        return StoredState(zxid, None if gone else missed, sessions, generation, now)

    def _events(self, since: int) -> list[Event]:
        rows = self._db.execute(
            "SELECT events FROM change WHERE zxid > ? ORDER BY zxid", (since,)
        ).fetchall()
        return [(kind, path) for (text,) in rows for kind, path in json.loads(text)]

    def commit(self) -> None:
        with self._guarded():
            self._db.execute("COMMIT")
        self.rollback()

    def rollback(self) -> None:
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
            with translated(self.name):
                yield
        except BaseException as error:
            self.rollback()
            if isinstance(error.__cause__, sqlite3.OperationalError) and _busy(error.__cause__):
                raise BusyError from error
            raise

    def announce(self) -> None:
        with translated(self.name):
            notify_all(self._wakeups, skip=self.bell)
        self._offload(self._sync)

    def _sync(self) -> None:
        with translated(self.name):
            os.fdatasync(self._log_file)
            # Only this check proves that the commits are in the files that other processes open.
            self._watch.check()
            if self._merge:
                with self._fork_guard:
                    self._merge = not self._merged()

    def _merged(self) -> bool:
        """Merge the log; return whether the next commit can write at the start of the log."""
        # If other processes read old pages or write meanwhile, the next `announce` must try again.
        # Without retries, the log grew to 66 MiB in half a minute.
        for mode in ("PASSIVE", "RESTART"):  # PASSIVE waits for the disk without the write lock
            busy, pages, merged = self._db.execute(f"PRAGMA wal_checkpoint({mode})").fetchone()
            if busy or merged < pages:
                return False
        return True

    # --- znodes -----------------------------------------------------------------------

    def node(self, path: str) -> TreeNode | None:
        with self._guarded():
            row = self._db.execute(_LOAD, key_of(path)).fetchone()
        return None if row is None else TreeNode(*row)

    def names(self, path: str) -> Iterable[str]:
        with self._guarded():
            rows = self._db.execute(
                "SELECT name FROM node WHERE parent = ?", (folder_of(path),)
            ).fetchall()
        return [name for (name,) in rows]

    def ephemerals(self, session: int) -> list[str]:
        with self._guarded():
            rows = self._db.execute(
                "SELECT parent, name FROM node WHERE owner = ? AND owner != 0", (session,)
            ).fetchall()
        return [f"{parent}/{name}" for parent, name in rows]

    def save(
        self, changes: Mapping[str, TreeNode | None], zxid: int, events: Iterable[Event]
    ) -> None:
        items = [(key_of(path), node) for path, node in changes.items()]
        deleted = [key for key, node in items if node is None]
        written = [(*key, *node.row()) for key, node in items if node is not None]
        with self._guarded():
            if deleted:
                self._db.executemany("DELETE FROM node WHERE parent = ? AND name = ?", deleted)
            self._db.executemany(_SAVE, written)
            unmerged = self._unmerged + len(changes) + 2
            # The process that reaches the limit merges for all processes.
            if unmerged >= _MERGE_PAGES:
                self._merge = True
                unmerged = 0
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

    # --- sessions ---------------------------------------------------------------------

    def sessions(self) -> list[tuple[SessionRow, float]]:
        with self._guarded():
            rows = [SessionRow(*row) for row in self._db.execute(_SESSIONS).fetchall()]
        beats = self._beats.read()
        return [(row, self._heard(row, beats)) for row in rows]

    def _heard(self, row: SessionRow, beats: list[float]) -> float:
        if row.age != self.age:
            return float("-inf")
        return beats[row.beat_slot] if row.beat_slot < len(beats) else 0.0

    def outlast(self) -> tuple[float, list[int]]:
        """Return a wait of 0, because all processes of an earlier boot have ended."""
        return 0.0, []

    def put_session(self, row: SessionRow) -> SessionRow:
        if row.beat_slot < 0:
            row = replace(row, beat_slot=self._free_slot())
        with self._guarded():
            self._db.execute(
                "INSERT OR REPLACE INTO session VALUES (?, ?, ?, ?, ?, ?)",
                astuple(row),
            )
            self._db.execute("UPDATE state SET sessions = sessions + 1")
        try:
            self._beats.reserve(row.beat_slot)
            self._beats.beat(row.beat_slot)
        except OSError as error:
            raise DatabaseError(path=self.name, reason=str(error)) from error
        return row

    def _free_slot(self) -> int:
        with self._guarded():
            (slot,) = self._db.execute(
                "SELECT min(free) FROM (SELECT 0 AS free UNION ALL SELECT slot + 1 FROM session)"
                " WHERE free NOT IN (SELECT slot FROM session)"
            ).fetchone()
        return int(slot)

    def beat(self, row: SessionRow) -> None:
        self._beats.beat(row.beat_slot)

    def delete_session(self, session: int) -> None:
        with self._guarded():
            self._db.execute("DELETE FROM session WHERE id = ?", (session,))
            self._db.execute("UPDATE state SET sessions = sessions + 1")


def _busy(error: sqlite3.OperationalError) -> bool:
    return error_code(error) in _BUSY_CODES
