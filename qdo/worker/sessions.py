"""Closing the coordinator session of a dead worker process, and counting what it had in hand.

Its worker node is gone some 10 ms later, and its queues are free, instead of a session
time-out later. It is safe only when the process and its whole group are known to be dead:
closing the session of a live worker would make two owners.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from qdo.coordination.client import Client, connect
from qdo.coordination.crashes import InHand, count_crash
from qdo.coordination.layout import Layout
from qdo.describe import describe
from qdo.errors import UnreachableError
from qdo.positions import TIMES, Positions

RETRY_SECONDS = 0.2

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Session:
    """A coordinator session of a worker: what it takes to close it."""

    url: str
    """Its coordinator."""
    id: int
    password: bytes
    root: str = ""
    """Znode of its app, "" where it is not known."""

    def __repr__(self) -> str:
        return f"<Session {self.id:#x}>"


class Closer(threading.Thread):
    """Closes the sessions of one dead process, beside the parent's other work.

    It tries for as long as the session could live by itself: after that there is nothing
    left to close.

    :ivar finished: nothing is left to do; `ended` is called right after it is set.
    :param in_hand: messages of which an attempt ended with the process, `reason` says how. They
        are counted first: once the session is closed the queues have other owners.
    """

    def __init__(
        self,
        who: str,
        sessions: Sequence[Session],
        session_timeout_seconds: float,
        ended: Callable[[], None],
        in_hand: Sequence[InHand] = (),
        reason: str = "",
        positions: Positions = TIMES,
    ) -> None:
        super().__init__(name=f"closer-{who}", daemon=True)
        self._who = who
        self._sessions = tuple(sessions)
        self._timeout = session_timeout_seconds
        self._ended = ended
        self._in_hand = tuple(in_hand)
        self._reason = reason
        self._positions = positions
        self._given_up = threading.Event()
        self.finished = False

    def give_up(self) -> None:
        """Try no longer; the sessions end by their time-out."""
        self._given_up.set()

    def run(self) -> None:
        try:
            deadline = time.monotonic() + self._timeout
            # The newest first: earlier ones have most probably expired.
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
            except UnreachableError as error:
                _log.debug("%s: session %#x not closed yet: %s", self._who, session.id, error)
                if self._given_up.wait(min(RETRY_SECONDS, left)):
                    break
                continue
            took = (time.monotonic() - began) * 1000
            _log.info(
                "%s: closed its session %#x in %.0f ms, its queues are free",
                self._who,
                session.id,
                took,
            )
            return
        _log.warning(
            "%s: could not close its session %#x; its queues are free when the session times out",
            self._who,
            session.id,
        )

    def _count(self, session: Session, client: Client) -> None:
        """Count the attempts that ended with the process; never in the way of the closing."""
        if not self._in_hand or not session.root:
            return
        try:
            counted = count_crash(
                client, Layout(session.root), self._in_hand, self._reason, self._positions
            )
        except UnreachableError as error:
            _log.warning("%s: its attempts cannot be counted: %s", self._who, describe(error))
            return
        if counted:
            _log.warning(
                "%s: %d messages were in hand when it died, which counts as an attempt of each",
                self._who,
                counted,
            )


def prepare_closing(url: str) -> None:
    """Import now whatever closing a session at `url` takes: later every millisecond counts.

    :raises SettingsError: `url` is no address of a coordinator.
    """
    connect(url)


def close_session(
    session: Session,
    session_timeout_seconds: float,
    patience_seconds: float,
    before: Callable[[Session, Client], None] = lambda session, client: None,
) -> None:
    """Take over a session of a dead process and end it; its ephemeral nodes go at once.

    A session that has expired meanwhile is no error.

    :param before: called with session and client before the end, if the session still lives.

    :raises UnreachableError: when that took longer than `patience_seconds`.
    """
    client = connect(
        session.url,
        session_timeout_seconds=session_timeout_seconds,
        client_id=(session.id, session.password),
    )
    client.open(patience_seconds)
    try:
        if client.client_id is not None and client.client_id[0] == session.id:
            before(session, client)
        client.stop()
    finally:
        client.close()
