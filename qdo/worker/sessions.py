"""Closing the coordinator session of a dead worker process.

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

from qdo.coordination.client import connect
from qdo.errors import UnreachableError

RETRY_SECONDS = 0.2

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Session:
    """A coordinator session of a worker: what it takes to close it."""

    url: str
    """Its coordinator."""
    id: int
    password: bytes

    def __repr__(self) -> str:
        return f"<Session {self.id:#x}>"


class Closer(threading.Thread):
    """Closes the sessions of one dead process, beside the parent's other work.

    It tries for as long as the session could live by itself: after that there is nothing
    left to close.

    :ivar finished: nothing is left to do; `ended` is called right after it is set.
    """

    def __init__(
        self,
        who: str,
        sessions: Sequence[Session],
        session_timeout_seconds: float,
        ended: Callable[[], None],
    ) -> None:
        super().__init__(name=f"closer-{who}", daemon=True)
        self._who = who
        self._sessions = tuple(sessions)
        self._timeout = session_timeout_seconds
        self._ended = ended
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
                close_session(session, self._timeout, left)
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


def prepare_closing(url: str) -> None:
    """Import now whatever closing a session at `url` takes: later every millisecond counts.

    :raises SettingsError: `url` is no address of a coordinator.
    """
    connect(url)


def close_session(
    session: Session, session_timeout_seconds: float, patience_seconds: float
) -> None:
    """Take over a session of a dead process and end it; its ephemeral nodes go at once.

    A session that has expired meanwhile is no error.

    :raises UnreachableError: when that took longer than `patience_seconds`.
    """
    client = connect(
        session.url,
        session_timeout_seconds=session_timeout_seconds,
        client_id=(session.id, session.password),
    )
    client.open(patience_seconds)
    try:
        client.stop()
    finally:
        client.close()
