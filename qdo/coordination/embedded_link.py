"""One connection of one session to the file of an embedded coordinator.

Every transaction first finds out, under the same lock or snapshot, whether the session still
lives and still belongs to this connection: no request takes effect after its session has ended
or was taken up by another connection. A transaction that only checks versions takes the write
lock too. So either whoever wants to expire the session sees its new sign of life, or the check
sees that the session is gone; what was confirmed to a client stays true for its time-out.
"""

from __future__ import annotations

import logging
import random
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kazoo.exceptions import ConnectionDropped, SessionExpiredError
from kazoo.security import Id

from qdo.coordination.embedded_sessions import Beats, Watchdog, boot, clock
from qdo.coordination.embedded_store import BusyError, SessionRow, State, Store
from qdo.coordination.embedded_tree import CHANGING, Event, Outcome, Tree
from qdo.doorbell import Doorbell, ring
from qdo.errors import DatabaseError, DatabaseFullError
from qdo.storage import translated

log = logging.getLogger(__name__)

MIN_TIMEOUT_SECONDS = 0.2
MAX_TIMEOUT_SECONDS = 600.0
_BEATS_PER_TIMEOUT = 4
_PAUSE_SECONDS = (0.0002, 0.01)


@dataclass(frozen=True, slots=True)
class Performed:
    """What became of a batch of requests.

    :ivar foreign: what others changed before it, and the client has not been told yet.
    :ivar outcomes: one for each request.
    """

    foreign: list[Event]
    outcomes: list[Outcome]


class Link:
    """The session's end of a connection: call `enter` first, `tick` when `due`, `close` at last.

    :ivar seen: zxid up to which the client was told of changes.
    :ivar due: when to call `tick`, on `embedded_sessions.clock`.
    """

    def __init__(
        self,
        path: str,
        *,
        pause: Callable[[float], None],
        offload: Callable[[Callable[[], Any], Callable[[], None]], Any],
    ) -> None:
        """Open the file.

        :param pause: sleeps, in the way of the client's handler.
        :param offload: runs a call that waits for the disk, its first argument; calls the
            second from time to time meanwhile.
        """
        self._pause = pause
        self._offload = offload
        self._row: SessionRow | None = None
        self._beating: SessionRow | None = None
        self._next_beat = 0.0
        self._store: Store = offload(lambda: Store(path), self.beat_if_due)
        try:
            with translated(path):
                self.bell = Doorbell(self._store.bells)
                self._beats = Beats(f"{path}.beats")
        except DatabaseError:
            self._store.close()
            raise
        self._watchdog = Watchdog()
        self._state = State(0, 0, 0, 0, None)
        self._sessions = -1
        self.seen = 0
        self.due = 0.0

    def close(self) -> None:
        """Release the file; the session lives on for its time-out."""
        self._offload(self._store.close, self.beat_if_due)
        self.bell.close()
        self._beats.close()

    # --- the session ------------------------------------------------------------------

    @property
    def row(self) -> SessionRow:
        """The session as entered."""
        if self._row is None:
            raise ConnectionDropped("no session was entered")
        return self._row

    def enter(
        self, session: int, password: bytes, timeout_seconds: float, former: SessionRow | None
    ) -> SessionRow:
        """Resume a session, or begin one if `session` is 0.

        :param former: the session as last entered by this client; kept alive while a lock that
            is taken keeps it from being resumed.
        :raises SessionExpiredError: there is no such session any more, or not with that password.
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
        return SessionRow(
            row.id,
            row.password,
            row.timeout_milliseconds,
            row.generation + 1,
            row.slot,
            row.boot,
        )

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
        """End the session: its ephemeral nodes go with it."""
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
    ) -> Performed:
        """Do requests in order, each atomic on its own, all in one transaction.

        What they change is durable on return.

        :param watching: whether the client has watches, and wants to be told of changes.
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
        return Performed(foreign, outcomes)

    def look(self, *, watching: bool) -> list[Event]:
        """Return what others changed since `seen`; notice if the session was ended or moved."""
        state = self._begin(write=False)
        try:
            foreign = self._missed(state, watching)
        finally:
            self._store.rollback()
        self.seen = state.zxid
        return foreign

    def tick(self, *, watching: bool) -> list[Event]:
        """Show a sign of life, expire sessions that showed none, and `look`."""
        self._beat()
        if self._silent():
            self._expire()
        foreign = self.look(watching=watching)
        # Spread, so that not all processes wake at once to expire the same session.
        silence = self._watchdog.due() + random.uniform(0.005, 0.02)
        self.due = min(self._next_beat, silence)
        self._watchdog.expect(self.due)
        return foreign

    def _expire(self) -> None:
        self._begin(write=True)
        try:
            # Judged once more under the lock: they may have come back, or be expired already.
            self._end_sessions(self._judge())
        except DatabaseFullError as error:
            log.warning("sessions that ended cannot be removed yet: %s", error)
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

    def _missed(self, state: State, watching: bool) -> list[Event]:
        if not watching or state.zxid == self.seen:
            return []
        if self.seen < state.trimmed:
            raise ConnectionDropped("changes came faster than this connection could follow")
        return self._store.events(self.seen)

    # --- transactions -----------------------------------------------------------------

    def _begin(self, *, write: bool, patience_seconds: float = 0.0) -> State:
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

    def _locked(self, session: int, write: bool, patience_seconds: float) -> State:
        limit = clock() + patience_seconds
        pause, longest = _PAUSE_SECONDS
        while True:
            try:
                return self._store.begin(session, write=write)
            except BusyError:
                if clock() > limit:
                    raise ConnectionDropped(
                        f"the database has been locked for {patience_seconds:.1f} s"
                    ) from None
            self.beat_if_due()
            self._pause(pause * random.uniform(0.5, 1.0))
            pause = min(2 * pause, longest)

    def beat_if_due(self) -> None:
        """Show a sign of life if the last one is getting old."""
        if clock() >= self._next_beat:
            self._beat()

    def _beat(self) -> None:
        row = self._beating
        if row is not None:
            self._beats.beat(row.slot)
            self._next_beat = clock() + row.timeout_milliseconds / 1000 / _BEATS_PER_TIMEOUT

    def _announce(self) -> None:
        """Wake whom a commit may concern, and make it durable."""
        self._ring()
        self._offload(self._store.sync, self.beat_if_due)

    def _ring(self) -> None:
        with translated(self._store.path):
            ring(self._store.bells, skip=self.bell)


def _now_milliseconds() -> int:
    return int(time.time() * 1000)
