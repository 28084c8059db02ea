"""Keeps the coordinator session of a process alive while its event loop is blocked.

The process cannot send heartbeats then. So its parent attaches to the session once in a while and
leaves it again. Each time, the session gets its full timeout again. The client of the process loses
its connection by that, and connects again once its loop runs. No lease becomes longer: only the
process itself renews its lease, when it has heard from the coordinator.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Mapping
from typing import Any

from qdo.coordination.client import connect
from qdo.coordination.component_notes import note_in_component
from qdo.coordination.znodes.layout import Layout
from qdo.errors import NodeRefusedError, QdoError
from qdo.system.clock import clock
from qdo.worker.supervisor.session_closer import RETRY_SECONDS, Session

_log = logging.getLogger(__name__)


class SessionKeeper(threading.Thread):
    """Keeps one session alive while a loop is blocked, in parallel to the parent's other work.

    :ivar kept_at: clock time at which it last attached to the session.
    :param process: name of the process, for the log.
    :param note: keys for the component node of the worker.
    :param is_blocked: returns whether the loop still has not run; called on this thread.
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
        """Let the thread end; it may attach to the session until it has ended."""
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


def keep_session(session: Session, note: Mapping[str, Any]) -> bool:
    """Attach to a session and leave it again; return whether it still exists.

    :param note: keys for the component node of the worker.
    :raises UnreachableError: the coordinator did not respond in time.
    """
    timeout = session.timeout_seconds
    client = connect(
        session.url,
        access=session.access,
        session_timeout_seconds=timeout,
        client_id=(session.id, session.password),
    )
    client.open(timeout / 3)
    if client.client_id is None or client.client_id[0] != session.id:
        client.stop()  # ends the new session that it got instead
        client.close()
        return False
    try:
        if session.root:
            # Without a right the session lives all the same; operators lack the note.
            with contextlib.suppress(NodeRefusedError):
                note_in_component(client, Layout(session.root), note)
    finally:
        client.detach()
    return True
