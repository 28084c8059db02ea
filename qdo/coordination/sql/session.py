"""Sessions of a coordinator in a database: operations, heartbeats and expiry.

Every transaction first checks, under the same lock or snapshot, that the session still exists and
still belongs to this connection. So no operation takes effect after the end of its session, or
after another connection has resumed the session. Even a transaction of version checks takes the
write lock. So either a process that is about to expire the session sees the new heartbeat, or the
check sees that the session is gone. A confirmed check therefore stays true for the session timeout.

Heartbeats keep sessions alive, and silent sessions expire. Other processes measure the silence by
their own `qdo.system.clock.clock`, from the moment at which they saw the last heartbeat. So no
session depends on a clock that an operator may set, such as a server's clock. A process first finds
silent sessions without the lock. Then the process reads the heartbeats of these sessions again
under the lock, and decides.
"""

from __future__ import annotations

import logging
import random
import secrets
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import Any

from kazoo.exceptions import ConnectionDropped, SessionExpiredError
from kazoo.security import Id

from qdo.backoff import Backoff
from qdo.coordination.sql.store import (
    MAX_TIMEOUT_SECONDS,
    MIN_TIMEOUT_SECONDS,
    UNDONE,
    BusyError,
    Operations,
    SessionRow,
    Store,
    StoredState,
)
from qdo.coordination.sql.tree import CHANGING, Event, Tree, TreeResult
from qdo.errors import OnlookerError
from qdo.system.clock import clock

log = logging.getLogger(__name__)
_BEATS_PER_TIMEOUT = 4
_LOCK_BACKOFF = Backoff(0.0002, 0.01)
_OUTLAST_SECONDS = 0.5


class ExpiryMonitor:
    """Finds sessions that have been silent for their whole timeout."""

    def __init__(self) -> None:
        self._awake_since = 0.0
        # The time of the next check, or of the next expiry of a silent session.
        self.due = float("inf")

    def silent(self, sessions: Collection[tuple[SessionRow, float]], now: float) -> list[int]:
        """Return the sessions to expire, and set `due`; `now` is a time before the read."""
        shortest = min((row.timeout_milliseconds for row, _ in sessions), default=0) / 1000
        # Count silence only while this monitor is awake. After a sleep, for example of the whole
        # machine, all sessions get their full timeout again, as in ZooKeeper after an election.
        if now - self.due > shortest / 4:
            self._awake_since = now
        ends = {row.id: self._end(row, heard) for row, heard in sessions}
        self.due = min((end for end in ends.values() if end > now), default=float("inf"))
        return [session for session, end in ends.items() if end <= now]

    def _end(self, row: SessionRow, heard: float) -> float:
        if heard == float("-inf"):
            return heard
        return max(heard, self._awake_since) + row.timeout_milliseconds / 1000


@dataclass(frozen=True, slots=True)
class CommandResult:
    """The results of operations; `foreign` has other clients' changes since the last report."""

    foreign: list[Event]
    outcomes: list[TreeResult]


class StoreSession:
    """A session in a store. Call `enter` first, `tick` when `due`, and `close` at the end.

    :ivar store: the open database.
    :ivar seen: the zxid up to which the client knows all changes.
    :ivar due: the time of the next `tick` on `qdo.system.clock.clock`.
    :ivar waits_until: the time on this clock until which `enter` waits for the end of sessions of
        an earlier age.
    """

    _is_stored = True

    def __init__(
        self,
        store: Store,
        pause: Callable[[float], None],
        is_stopped: Callable[[], bool] = lambda: False,
    ) -> None:
        """Take over an open store; begin no session when `is_stopped` returns True."""
        self._is_stopped = is_stopped
        self.store = store
        self._pause = pause
        self._row: SessionRow | None = None
        self._beating: SessionRow | None = None
        self._next_beat = 0.0
        self._watchdog = ExpiryMonitor()
        self._sessions = -1
        self.seen = -1
        self._looked = 0.0
        self.due = 0.0
        self.waits_until = 0.0

    def close(self) -> None:
        """Close the store; the session lives on until its timeout."""
        self.store.close()

    def woken(self) -> bool:
        """Empty the wakeup pipe; return whether to `look` now instead of at the next `tick`."""
        if not self.store.drain():
            return False
        rested = self._looked + self.store.rest_seconds
        self.due = min(self.due, rested)
        return clock() >= rested

    # --- the session ------------------------------------------------------------------

    @property
    def row(self) -> SessionRow:
        if self._row is None:
            raise ConnectionDropped("no session was entered")
        return self._row

    def enter(
        self, session: int, password: bytes, timeout_seconds: float, former: SessionRow | None
    ) -> SessionRow:
        """Resume a session, or begin a new session if `session` is 0.

        :param former: the session that this client entered last.
        :raises SessionExpiredError: the session is gone, or the password is wrong.
        """
        if former is not None and (former.id, former.age) == (session, self.store.age):
            self._beating = former  # beats while this call waits for the lock
            self._beat()
        if not session:
            self._outlast(timeout_seconds)
        state = self._begin(write=True, patience_seconds=timeout_seconds)
        try:
            row = self._resumed(session, password) if session else self._begun(timeout_seconds)
            row = self.store.put_session(row)
            self.store.commit()
        finally:
            self.store.rollback()
        self._row = self._beating = row
        self.seen = state.zxid
        self.store.announce()
        return row

    def _outlast(self, patience_seconds: float) -> None:
        """Wait until no client can still rely on a lost session of an earlier age."""
        while True:
            state = self._begin(write=True, patience_seconds=patience_seconds)
            try:
                left, over = self.store.outlast()
                if left <= 0:
                    self._end_sessions(state, over)
                    return
                self.store.commit()
            finally:
                self.store.rollback()
            if not self.waits_until:
                log.warning(
                    "no session begins at %s until %s: processes may still rely on sessions of the"
                    " earlier server; queues continue then",
                    self.store.name,
                    time.strftime("%H:%M:%S", time.localtime(time.time() + left)),
                )
            self.waits_until = clock() + left
            if self._is_stopped():
                raise ConnectionDropped("the client was stopped")
            self._pause(min(left, _OUTLAST_SECONDS))

    def _resumed(self, session: int, password: bytes) -> SessionRow:
        row = next((row for row, _ in self.store.sessions() if row.id == session), None)
        fits = row is not None and secrets.compare_digest(row.password, password)
        if row is None or not fits or row.age != self.store.age:
            raise SessionExpiredError("Session has expired")
        return replace(row, generation=row.generation + 1)

    def _begun(self, timeout_seconds: float) -> SessionRow:
        granted = min(max(timeout_seconds, MIN_TIMEOUT_SECONDS), MAX_TIMEOUT_SECONDS)
        return SessionRow(
            id=secrets.randbits(62) + 1,
            password=secrets.token_bytes(16),
            timeout_milliseconds=int(granted * 1000),
            generation=1,
            beat_slot=-1,
            age=self.store.age,
        )

    def end(self) -> None:
        state = self._begin(write=True)
        try:
            self._end_sessions(state, [self.row.id])
        finally:
            self.store.rollback()
        self.store.announce()

    def _end_sessions(self, state: StoredState, sessions: list[int]) -> None:
        tree = Tree(self.store, state.zxid, state.now)
        events: list[Event] = []
        for session in sessions:
            events += tree.end_session(self.store.ephemerals(session))
            self.store.delete_session(session)
        changes = tree.changes()
        if changes:
            self.store.save(changes, tree.zxid, events)
        self.store.commit()

    # --- operations -------------------------------------------------------------------

    def perform(
        self, operations: list[Any], identities: tuple[Id, ...], *, watching: bool
    ) -> CommandResult:
        """Perform atomic operations in their order, all in one durable transaction."""
        write = any(type(operation) in CHANGING for operation in operations)
        state = self._begin(write=write, watching=watching, operations=operations)
        try:
            foreign = _missed(state)
            tree = Tree(self.store, state.zxid, state.now)
            outcomes = [tree.perform(each, self.row.id, identities) for each in operations]
            changes = tree.changes()
            if changes:
                events = [event for outcome in outcomes for event in outcome.events]
                self.store.save(changes, tree.zxid, events)
            self.store.commit()
        finally:
            self.store.rollback()
        self.seen = tree.zxid
        if changes:
            self.store.announce()
        return CommandResult(foreign, outcomes)

    def look(self, *, watching: bool) -> list[Event]:
        """Return other clients' changes since `seen`; check that the session is still valid."""
        state = self._begin(write=False, watching=watching)
        try:
            foreign = _missed(state)
        finally:
            self.store.rollback()
        self.seen = state.zxid
        self._looked = clock()
        return foreign

    def tick(self, *, watching: bool) -> list[Event]:
        """If due, write a heartbeat and expire silent sessions; then `look`."""
        now = clock()
        if now >= min(self._next_beat, self._watchdog.due) or self.due == 0.0:
            self._beat()
            if self._silent():
                self._expire()
        foreign = self.look(watching=watching)
        # Add jitter, or every process would wake at the same time to expire the same session.
        silence = self._watchdog.due + random.uniform(0.005, 0.02)  # spreads pauses
        self._watchdog.due = min(silence, self._next_beat)
        look = now + self.store.look_seconds if watching else float("inf")
        self.due = min(self._watchdog.due, look)
        return foreign

    def _expire(self) -> None:
        state = self._begin(write=True)
        try:
            # Judge again under the lock, because sessions may have a new heartbeat or be expired.
            self._end_sessions(state, self._judge())
        except UNDONE as error:
            log.warning(
                "cannot remove ended sessions yet, so their queues stay owned: %s; trying again",
                error,
            )
            return
        finally:
            self.store.rollback()
        self.store.announce()

    def _silent(self) -> list[int]:
        self._begin(write=False)
        try:
            return self._judge()
        finally:
            self.store.rollback()

    def _judge(self) -> list[int]:
        now = clock()
        others = [each for each in self.store.sessions() if each[0].id != self.row.id]
        return self._watchdog.silent(others, now)

    # --- transactions -----------------------------------------------------------------

    def _begin(
        self,
        *,
        write: bool,
        watching: bool = False,
        patience_seconds: float = 0.0,
        operations: Operations = (),
    ) -> StoredState:
        """Begin a transaction of a live session; wait while another process has the lock."""
        row = self._row if self._is_stored else None
        patience = patience_seconds or self.row.timeout_milliseconds / 1000 * 2 / 3
        since = self.seen if watching else -1
        state = self._locked(row, write, since, patience, operations)
        if row is not None:
            if state.generation != row.generation:
                self.store.rollback()
                raise ConnectionDropped("the session was ended, or moved to another connection")
            if write:
                self._plan_beat(row)
        if state.sessions != self._sessions:
            self._sessions = state.sessions
            self.due = 0.0
        return state

    def _locked(
        self,
        row: SessionRow | None,
        write: bool,
        since: int,
        patience_seconds: float,
        operations: Operations,
    ) -> StoredState:
        limit = clock() + patience_seconds
        attempt = 0
        while True:
            try:
                return self.store.begin(row, write=write, since=since, operations=operations)
            except BusyError:
                if clock() > limit:
                    raise ConnectionDropped(
                        f"the database has been locked for {patience_seconds:.1f} s"
                    ) from None
            self.beat_if_due()
            attempt += 1
            self._pause(_LOCK_BACKOFF.delay(attempt, random.random()))  # spreads pauses

    def beat_if_due(self) -> None:
        """Write a heartbeat if the next heartbeat is due."""
        if clock() >= self._next_beat:
            self._beat()

    def _beat(self) -> None:
        row = self._beating
        if row is not None:
            self.store.beat(row)
            self._plan_beat(row)

    def _plan_beat(self, row: SessionRow) -> None:
        self._next_beat = clock() + row.timeout_milliseconds / 1000 / _BEATS_PER_TIMEOUT


def _missed(state: StoredState) -> list[Event]:
    if state.missed is None:
        raise ConnectionDropped("changes came faster than this connection could follow")
    return state.missed


class OnlookerSession(StoreSession):
    """Performs reads without a session in the store; other operations raise OnlookerError."""

    _is_stored = False

    def enter(
        self, session: int, password: bytes, timeout_seconds: float, former: SessionRow | None
    ) -> SessionRow:
        id = session or secrets.randbits(62) + 1
        self._row = SessionRow(id, b"", int(timeout_seconds * 1000), 1, 0, self.store.age)
        self.look(watching=False)
        return self._row

    def end(self) -> None:
        """Do nothing, because the store has no session to end."""

    def perform(
        self, operations: list[Any], identities: tuple[Id, ...], *, watching: bool
    ) -> CommandResult:
        reading = [each for each in operations if type(each) not in CHANGING]
        result = super().perform(reading, identities, watching=watching)
        answers = iter(result.outcomes)
        fault = OnlookerError(coordinator=self.store.name)
        outcomes = [
            TreeResult(error=fault) if type(each) in CHANGING else next(answers)
            for each in operations
        ]
        return CommandResult(result.foreign, outcomes)

    def tick(self, *, watching: bool) -> list[Event]:
        self.due = clock() + self.store.look_seconds
        return self.look(watching=watching)
