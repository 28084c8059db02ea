"""Callers that wait until the progress of a claim is recorded."""

from __future__ import annotations

from typing import Any

from qdo.coordination.protocol.claims import Claim
from qdo.coordination.protocol.ownership import Ownership


class Recordings:
    """The callers of `Member.record`, each with the event that it waits for."""

    def __init__(self) -> None:
        self._waiting: list[tuple[Claim, Any]] = []

    def add(self, claim: Claim, done: Any) -> None:
        """Set an event once the progress of a claim is recorded."""
        self._waiting.append((claim, done))

    def wake(self, ownership: Ownership) -> None:
        """Wake the callers whose progress is recorded."""
        if self._waiting:
            for item in [each for each in self._waiting if ownership.recorded(each[0])]:
                self._waiting.remove(item)
                item[1].set()

    def wake_all(self) -> None:
        """Wake all callers: the registration is over."""
        for _, done in self._waiting:
            done.set()
        self._waiting.clear()
