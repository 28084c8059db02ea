"""Sessions of an embedded coordinator: requests, heartbeats, expiry, and read-only sessions.

Every transaction first checks, under the same lock or snapshot, that the session still exists and
still belongs to this connection. So no request takes effect after its session has ended or was
resumed by another connection. A transaction that only checks versions takes the write lock too. So
either a process that wants to expire the session sees its new heartbeat, or the check sees that the
session is gone. A confirmed check therefore stays true for the session timeout.

Heartbeats keep sessions alive, and silent sessions expire. A heartbeat is the time in a slot of a
file beside the database. It is one small write to memory that needs no lock and no disk, so even a
process that waits for the database keeps its session. These times only suggest which session to
expire. Only the session's row in the database, read in a transaction, decides.
"""

from __future__ import annotations

import logging
import os
import random
import secrets
import struct
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from kazoo.exceptions import ConnectionDropped, SessionExpiredError
from kazoo.security import Id

from qdo.backoff import Backoff
from qdo.coordination.embedded.store import BusyError, SessionRow, Store, StoredState
from qdo.coordination.embedded.tree import CHANGING, Event, Tree, TreeResult
from qdo.errors import DatabaseError, DatabaseFullError
from qdo.system.clock import clock
from qdo.system.files import Rights, open_file
from qdo.system.sqlite import translated
from qdo.system.wakeup_pipes import WakeupPipe, notify_all

_SLOT = struct.Struct("<q")
_BLOCK = 4096


@cache
def boot() -> str:
    """Return the id of this boot of the machine: `clock` starts again with each boot."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


class Heartbeats:
    """The file of slots."""

    def __init__(self, path: str, rights: Rights) -> None:
        self._fd = open_file(path, os.O_RDWR, rights)

    def reserve(self, slot: int) -> None:
        """Allocate a slot, or raise OSError: later heartbeats need no disk space."""
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


class ExpiryMonitor:
    """Finds sessions that were silent for their whole timeout.

    Silence counts only while the monitor itself was awake. After a sleep, for instance of the whole
    machine, all sessions get their full timeout again, as from a newly elected leader.

    :ivar due: when the next check will be, or when the next silent session would expire.
    """

    def __init__(self) -> None:
        self._awake_since = 0.0
        self.due = float("inf")

    def silent(self, rows: Iterable[SessionRow], beats: list[float], now: float) -> list[int]:
        """Return the sessions to expire, and compute when to check again."""
        rows = list(rows)
        shortest = min((row.timeout_milliseconds for row in rows), default=0) / 1000
        if now - self.due > shortest / 4:
            self._awake_since = now
        ends = {row.id: self._end(row, beats) for row in rows}
        self.due = min((end for end in ends.values() if end > now), default=float("inf"))
        return [session for session, end in ends.items() if end <= now]

    def _end(self, row: SessionRow, beats: list[float]) -> float:
        if row.boot != boot():
            return 0.0
        last = beats[row.slot] if row.slot < len(beats) else 0.0
        return max(last, self._awake_since) + row.timeout_milliseconds / 1000


log = logging.getLogger(__name__)

MIN_TIMEOUT_SECONDS = 0.2
MAX_TIMEOUT_SECONDS = 600.0
_BEATS_PER_TIMEOUT = 4
_LOCK_BACKOFF = Backoff(0.0002, 0.01)


@dataclass(frozen=True, slots=True)
class CommandResult:
    """The result of requests; `foreign` are the changes of other clients since the last report."""

    foreign: list[Event]
    outcomes: list[TreeResult]


class EmbeddedSession:
    """A session on the file: call `enter` first, `tick` when `due`, and finally `close`.

    :ivar seen: zxid up to which changes were reported to the client.
    :ivar due: when to call `tick`, on `qdo.system.clock.clock`.
    """

    def __init__(
        self,
        path: str,
        *,
        pause: Callable[[float], None],
        offload: Callable[[Callable[[], Any], Callable[[], None]], Any],
    ) -> None:
        """Open the file.

        :param pause: sleeps, as the client's handler requires.
        :param offload: runs its first argument, a call that waits for the disk; meanwhile it calls
            the second from time to time.
        """
        self._pause = pause
        self._offload = offload
        self._row: SessionRow | None = None
        self._beating: SessionRow | None = None
        self._next_beat = 0.0
        self._store: Store = offload(lambda: Store(path), self.beat_if_due)
        try:
            with translated(path):
                self._join(path)
        except DatabaseError:
            self._store.close()
            raise
        self._watchdog = ExpiryMonitor()
        self._state = StoredState(0, 0, 0, 0, None)
        self._sessions = -1
        self.seen = 0
        self.due = 0.0

    def _join(self, path: str) -> None:
        """Open the files that other processes see."""
        rights = Rights.of(path)
        self.bell: Any = WakeupPipe(self._store.wakeups, rights)
        self._beats = Heartbeats(f"{path}.beats", rights)

    def close(self) -> None:
        """Release the file; the session stays alive for its timeout."""
        self._offload(self._store.close, self.beat_if_due)
        self.bell.close()
        self._beats.close()

    # --- the session ------------------------------------------------------------------

    @property
    def row(self) -> SessionRow:
        if self._row is None:
            raise ConnectionDropped("no session was entered")
        return self._row

    def enter(
        self, session: int, password: bytes, timeout_seconds: float, former: SessionRow | None
    ) -> SessionRow:
        """Resume a session, or begin one if `session` is 0.

        :param former: the session that this client entered last; it gets heartbeats while this call
            waits for the lock.
        :raises SessionExpiredError: the session is gone, or the password is wrong.
        """
        if former is not None and former.id == session:
            self._beating = former
            self._beat()
        state = self._begin(write=True, patience_seconds=timeout_seconds)
        try:
            row = self._resumed(session, password) if session else self._begun(timeout_seconds)
            self._store.put_session(row)
            self._beats.reserve(row.slot)
            self._beats.beat(row.slot)
            self._store.commit()
        except OSError as error:
            raise DatabaseError(path=self._store.path, reason=str(error)) from error
        finally:
            self._store.rollback()
        self._row = self._beating = row
        self.seen = state.zxid
        self._ring()
        return row

    def _resumed(self, session: int, password: bytes) -> SessionRow:
        row = self._store.session(session)
        if row is None or row.boot != boot() or not secrets.compare_digest(row.password, password):
            raise SessionExpiredError("Session has expired")
        return replace(row, generation=row.generation + 1)

    def _begun(self, timeout_seconds: float) -> SessionRow:
        granted = min(max(timeout_seconds, MIN_TIMEOUT_SECONDS), MAX_TIMEOUT_SECONDS)
        return SessionRow(
            id=secrets.randbits(62) + 1,
            password=secrets.token_bytes(16),
            timeout_milliseconds=int(granted * 1000),
            generation=1,
            slot=self._store.free_slot(),
            boot=boot(),
        )

    def end(self) -> None:
        self._begin(write=True)
        try:
            self._end_sessions([self.row.id])
        finally:
            self._store.rollback()
        self._announce()

    def _end_sessions(self, sessions: list[int]) -> None:
        state = self._state
        tree = Tree(self._store, state.zxid, _now_milliseconds())
        events: list[Event] = []
        for session in sessions:
            events += tree.end_session(self._store.ephemerals(session))
            self._store.delete_session(session)
        changes = tree.changes()
        if changes:
            self._store.save(changes, tree.zxid, events)
        self._store.commit()

    # --- requests ---------------------------------------------------------------------

    def perform(
        self, requests: list[Any], identities: tuple[Id, ...], *, watching: bool
    ) -> CommandResult:
        """Perform requests in order, each atomic on its own, all in one durable transaction.

        :param watching: whether the client has watches, so changes must be reported.
        """
        state = self._begin(write=any(type(request) in CHANGING for request in requests))
        try:
            foreign = self._missed(state, watching)
            tree = Tree(self._store, state.zxid, _now_milliseconds())
            outcomes = [tree.perform(each, self.row.id, identities) for each in requests]
            changes = tree.changes()
            if changes:
                events = [event for outcome in outcomes for event in outcome.events]
                self._store.save(changes, tree.zxid, events)
                self._store.commit()
        finally:
            self._store.rollback()
        self.seen = tree.zxid
        if changes:
            self._announce()
        return CommandResult(foreign, outcomes)

    def look(self, *, watching: bool) -> list[Event]:
        """Return other clients' changes since `seen`; check that the session still lives here."""
        state = self._begin(write=False)
        try:
            foreign = self._missed(state, watching)
        finally:
            self._store.rollback()
        self.seen = state.zxid
        return foreign

    def tick(self, *, watching: bool) -> list[Event]:
        """Write a heartbeat, expire silent sessions, and `look`."""
        self._beat()
        if self._silent():
            self._expire()
        foreign = self.look(watching=watching)
        # Without jitter, every process would wake to expire the same session.
        silence = self._watchdog.due + random.uniform(0.005, 0.02)  # nosec B311 # spreads pauses
        self.due = min(self._next_beat, silence)
        self._watchdog.due = min(self._watchdog.due, self.due)
        return foreign

    def _expire(self) -> None:
        self._begin(write=True)
        try:
            # Read them again under the lock: they may be back, or expired already.
            self._end_sessions(self._judge())
        except DatabaseFullError as error:
            log.warning(
                "cannot remove ended sessions yet, so their queues stay owned: %s; trying again",
                error,
            )
            return
        finally:
            self._store.rollback()
        self._announce()

    def _silent(self) -> list[int]:
        self._begin(write=False)
        try:
            return self._judge()
        finally:
            self._store.rollback()

    def _judge(self) -> list[int]:
        others = [row for row in self._store.sessions() if row.id != self.row.id]
        return self._watchdog.silent(others, self._beats.read(), clock())

    def _missed(self, state: StoredState, watching: bool) -> list[Event]:
        if not watching or state.zxid == self.seen:
            return []
        if self.seen < state.trimmed:
            raise ConnectionDropped("changes came faster than this connection could follow")
        return self._store.events(self.seen)

    # --- transactions -----------------------------------------------------------------

    def _begin(self, *, write: bool, patience_seconds: float = 0.0) -> StoredState:
        """Begin a transaction of a live session; wait for a lock that is taken."""
        row = self._row
        patience = patience_seconds or self.row.timeout_milliseconds / 1000 * 2 / 3
        state = self._locked(0 if row is None else row.id, write, patience)
        if row is not None:
            if state.generation != row.generation:
                self._store.rollback()
                raise ConnectionDropped("the session was ended, or moved to another connection")
            if write:
                self._beat()
        if state.sessions != self._sessions:
            self._sessions = state.sessions
            self.due = 0.0
        self._state = state
        return state

    def _locked(self, session: int, write: bool, patience_seconds: float) -> StoredState:
        limit = clock() + patience_seconds
        attempt = 0
        while True:
            try:
                return self._store.begin(session, write=write)
            except BusyError:
                if clock() > limit:
                    raise ConnectionDropped(
                        f"the database has been locked for {patience_seconds:.1f} s"
                    ) from None
            self.beat_if_due()
            attempt += 1
            self._pause(_LOCK_BACKOFF.delay(attempt, random.random()))  # nosec B311 # spreads pauses

    def beat_if_due(self) -> None:
        """Write a heartbeat if the last one is getting old."""
        if clock() >= self._next_beat:
            self._beat()

    def _beat(self) -> None:
        row = self._beating
        if row is not None:
            self._beats.beat(row.slot)
            self._next_beat = clock() + row.timeout_milliseconds / 1000 / _BEATS_PER_TIMEOUT

    def _announce(self) -> None:
        """Wake the other processes after a commit, and make it durable."""
        self._ring()
        self._offload(self._store.sync, self.beat_if_due)

    def _ring(self) -> None:
        with translated(self._store.path):
            notify_all(self._store.wakeups, skip=self.bell)


def _now_milliseconds() -> int:
    return int(time.time() * 1000)


LOOK_SECONDS = 1.0
"""Time between looks for changes: no process wakes an onlooker."""


class OnlookerSession(EmbeddedSession):
    """Answers requests that read; others fail with DatabaseError. It is not in the file."""

    def _join(self, path: str) -> None:
        self.bell = _SilentPipe()

    def close(self) -> None:
        self._offload(self._store.close, self.beat_if_due)
        self.bell.close()

    def enter(
        self, session: int, password: bytes, timeout_seconds: float, former: SessionRow | None
    ) -> SessionRow:
        id = session or secrets.randbits(62) + 1
        self._row = SessionRow(id, b"", int(timeout_seconds * 1000), 1, 0, boot())
        self.look(watching=False)
        return self._row

    def end(self) -> None:
        """Do nothing: there is no session in the file."""

    def perform(
        self, requests: list[Any], identities: tuple[Id, ...], *, watching: bool
    ) -> CommandResult:
        reading = [each for each in requests if type(each) not in CHANGING]
        result = super().perform(reading, identities, watching=watching)
        answers = iter(result.outcomes)
        fault = DatabaseError(path=self._store.path, reason="this user may read it, but not write")
        outcomes = [
            TreeResult(error=fault) if type(each) in CHANGING else next(answers)
            for each in requests
        ]
        return CommandResult(result.foreign, outcomes)

    def tick(self, *, watching: bool) -> list[Event]:
        self.due = clock() + LOOK_SECONDS
        return self.look(watching=watching)

    def _begin(self, *, write: bool, patience_seconds: float = 0.0) -> StoredState:
        self._state = self._locked(0, False, patience_seconds or LOOK_SECONDS)
        return self._state


class _SilentPipe:
    """Replaces a wakeup pipe; no other process knows it."""

    def __init__(self) -> None:
        self._ends = [*os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)]

    def fileno(self) -> int:
        return self._ends[0]

    def drain(self) -> None:
        """Do nothing: no process writes to it."""

    def close(self) -> None:
        while self._ends:
            os.close(self._ends.pop())
