"""A session of a user who may read the file of an embedded coordinator, but not write to it."""

from __future__ import annotations

import os
import secrets
from typing import Any

from kazoo.security import Id

from qdo.coordination.embedded.heartbeats import boot
from qdo.coordination.embedded.session import CommandResult, EmbeddedSession
from qdo.coordination.embedded.store import SessionRow, StoredState
from qdo.coordination.embedded.tree import CHANGING, Event, TreeResult
from qdo.errors import DatabaseError
from qdo.system.clock import clock

LOOK_SECONDS = 1.0
"""Time between looks for changes: no process wakes an onlooker."""


class OnlookerSession(EmbeddedSession):
    """Answers requests that read; others fail with DatabaseError. The file does not know of it."""

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
    """Stands in for a wakeup pipe: no other process knows it."""

    def __init__(self) -> None:
        self._ends = [*os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)]

    def fileno(self) -> int:
        return self._ends[0]

    def drain(self) -> None:
        """Do nothing: nobody writes to it."""

    def close(self) -> None:
        """Close both ends; idempotent."""
        while self._ends:
            os.close(self._ends.pop())
