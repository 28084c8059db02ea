"""Keep the coordinator session of a blocked process, and close the sessions of a dead process.

`SessionCloser` ends the session of a dead process. About 10 ms later its worker node is gone and
its queues are free, instead of after a session timeout. The close is safe only if the process and
its whole group are dead. Closing the session of a live worker would give its queues two owners.

`SessionKeeper` keeps the session of a process alive while its blocked event loop cannot send
heartbeats.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from qdo.coordination.access import ANYBODY, Access
from qdo.coordination.client import Client, connect
from qdo.coordination.interrupted_attempts import InFlight, count_interrupted
from qdo.coordination.side import note_in_component
from qdo.coordination.znodes.layout import Layout
from qdo.errors import NodeRefusedError, QdoError, SettingsError
from qdo.positions import TIME_POSITIONS, Positions
from qdo.system.clock import clock
from qdo.text import describe, pluralize

RETRY_SECONDS = 0.2

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Session:
    """The data for closing a worker's coordinator session."""

    # Address of the coordinator.
    url: str
    id: int
    password: bytes
    # Znode of the app; "" if unknown.
    root: str = ""
    # The timeout that the coordinator granted, in seconds; 0 if unknown.
    timeout_seconds: float = 0.0
    # The credentials for connections to the coordinator.
    access: Access = field(default=ANYBODY, compare=False)

    def __repr__(self) -> str:
        return f"<Session {self.id:#x}>"


class SessionCloser(threading.Thread):
    """Closes the sessions of one dead process on a separate thread.

    The thread retries until the session would have timed out anyway.

    :ivar finished: whether the thread has no work left. The thread then calls `ended`.
    :param in_flight: messages whose attempts died with the process, for the given `reason`.
    :param after: another thread that may attach to the sessions. The closer waits for its end.
    """

    def __init__(
        self,
        process: str,
        sessions: Sequence[Session],
        session_timeout_seconds: float,
        ended: Callable[[], None],
        in_flight: Sequence[InFlight] = (),
        reason: str = "",
        positions: Positions = TIME_POSITIONS,
        *,
        after: threading.Thread | None = None,
    ) -> None:
        super().__init__(name=f"closer-{process}", daemon=True)
        self._process = process
        self._sessions = tuple(sessions)
        self._timeout = session_timeout_seconds
        self._ended = ended
        self._in_flight = tuple(in_flight)
        self._reason = reason
        self._positions = positions
        self._after = after
        self.finished = False

    def run(self) -> None:
        try:
            deadline = time.monotonic() + self._timeout
            if self._after is not None:
                self._after.join(self._timeout)
            # Close the newest session first, because earlier sessions have probably expired.
            for session in reversed(self._sessions):
                self._close(session, deadline)
        finally:
            self.finished = True
            self._ended()

    def _close(self, session: Session, deadline: float) -> None:
        began = time.monotonic()
        while (left := deadline - time.monotonic()) > 0:
            try:
                close_session(session, self._timeout, left, before=self._count)
            except Exception as error:  # noqa: BLE001 - a job may have forged the report
                if isinstance(error, SettingsError) or not isinstance(error, QdoError):
                    break
                _log.debug(
                    "%s: cannot close session %#x yet, retrying: %s",
                    self._process,
                    session.id,
                    error,
                )
                time.sleep(min(RETRY_SECONDS, left))
                continue
            _log.info(
                "%s: closed its session %#x in %.0f ms; its queues are free",
                self._process,
                session.id,
                (time.monotonic() - began) * 1000,
            )
            return
        _log.warning(
            "%s: cannot close its session %#x; its queues are free when the session times out",
            self._process,
            session.id,
        )

    def _count(self, session: Session, client: Client) -> None:
        """Record the attempts that died with the process. A failure does not stop the closing."""
        # Count before the close, because the queues have other owners after the close.
        if not self._in_flight or not session.root:
            return
        try:
            counted = count_interrupted(
                client, Layout(session.root), self._in_flight, self._reason, self._positions
            )
        except Exception as error:  # noqa: BLE001 - a job may have written to the shared memory
            _log.warning(
                "%s: cannot count its interrupted attempts; these messages may get one more: %s",
                self._process,
                describe(error),
            )
            return
        # Count each attempt only once, even if the thread retries or closes another session.
        self._in_flight = tuple(each for each in self._in_flight if each not in counted)
        if counted:
            _log.warning(
                "%s: it died with %s in flight; one attempt is counted for each",
                self._process,
                pluralize(len(counted), "message"),
            )


def prepare_closing(url: str) -> None:
    """Import the client for a coordinator early, because an import would delay a close."""
    connect(url)


def close_session(
    session: Session,
    session_timeout_seconds: float,
    patience_seconds: float,
    before: Callable[[Session, Client], None] = lambda session, client: None,
) -> None:
    """Close a dead process's session, which deletes its ephemeral nodes.

    :param before: called before the close. If the session has already ended, the client has a new
      session.
    :raises UnreachableError: the coordinator does not respond within `patience_seconds`.
    """
    client = _attached(session, session_timeout_seconds, patience_seconds)
    try:
        before(session, client)
        client.stop()
    finally:
        client.close()


def _attached(session: Session, timeout_seconds: float, patience_seconds: float) -> Client:
    client = connect(
        session.url,
        access=session.access,
        session_timeout_seconds=timeout_seconds,
        client_id=(session.id, session.password),
    )
    client.open(patience_seconds)
    return client


class SessionKeeper(threading.Thread):
    """Keeps one session alive on a separate thread while a loop is blocked.

    :ivar kept_at: clock time at which the keeper last attached to the session.
    """

    def __init__(
        self,
        process: str,
        session: Session,
        note: Mapping[str, Any],
        is_blocked: Callable[[], bool],
    ) -> None:
        super().__init__(name=f"keeper-{process}", daemon=True)
        self._process = process
        self._session = session
        self._note = note
        self._is_blocked = is_blocked
        self._stopping = threading.Event()
        self.kept_at = 0.0

    def stop(self) -> None:
        """Ask the thread to end. Until its end, the thread may still attach to the session."""
        self._stopping.set()

    def run(self) -> None:
        seconds = self._session.timeout_seconds / 3
        while not self._stopping.is_set() and self._is_blocked():
            pause = seconds
            now = clock()
            try:
                if keep_session(self._session, self._note):
                    self.kept_at = now
                else:
                    _log.warning(
                        "%s: its session %#x is over; other workers take its queues",
                        self._process,
                        self._session.id,
                    )
                    return
            except QdoError as error:
                _log.warning(
                    "%s: cannot keep its session %#x, retrying: %s",
                    self._process,
                    self._session.id,
                    error,
                )
                pause = RETRY_SECONDS
            self._stopping.wait(pause)


# Each call restores the session's full timeout. The call disconnects the client of the process, and
# the client reconnects once its loop runs. The call does not renew a lease, because only the
# process itself renews its lease when the coordinator responds.
def keep_session(session: Session, note: Mapping[str, Any]) -> bool:
    """Attach to a session and detach; return whether the session still exists.

    :param note: keys to add to the component node of the worker.
    """
    client = _attached(session, session.timeout_seconds, session.timeout_seconds / 3)
    if client.client_id is None or client.client_id[0] != session.id:
        client.stop()  # end the new session that the client got instead
        client.close()
        return False
    try:
        if session.root:
            # Without the right to write the note, omit the note, and still keep the session.
            with contextlib.suppress(NodeRefusedError):
                note_in_component(client, Layout(session.root), note)
    finally:
        client.detach()
    return True
