"""Locks and sections within one process."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from qdo.fleet.holds import new_hold
from qdo.fleet.limiting.permits import PermitService
from qdo.fleet.locks import HeldLock, Section
from qdo.fleet_errors import LockTimeoutError


class MemoryLocks:
    """Locks within one process: nobody waits, since nobody could release.

    No job runs during a section unless the test itself runs it, so sections hold nothing.
    """

    def __init__(self, permits: PermitService) -> None:
        self.permits = permits
        self._lock = threading.Lock()
        self._holders: dict[str, list[bool]] = {}
        self._fence = 0

    def register(self, over: Any, timeout_seconds: float) -> None:
        """Do nothing: nobody lists the processes of a test."""

    def acquire(
        self, name: str, shared: bool, why: str, timeout_seconds: float | None
    ) -> tuple[HeldLock, Callable[[], None]]:
        """Return a lock; raise LockTimeoutError if it is held."""
        with self._lock:
            holders = self._holders.setdefault(name, [])
            if holders and not (shared and all(holders)):
                raise LockTimeoutError(name=name, seconds=timeout_seconds or 0, holder="")
            holders.append(shared)
            self._fence += 1
            held = [True]

        def release() -> None:
            held.clear()
            holders.remove(shared)

        return HeldLock(name, self._fence, lambda: bool(held)), release

    def hold(
        self, globs: tuple[str, ...], why: str, timeout_seconds: float
    ) -> tuple[Section, Callable[[], None]]:
        """Return a section that is in force at once."""
        queues = new_hold(globs, why).queues
        held = [True]
        self._fence += 1
        return Section(" ".join(queues), self._fence, lambda: bool(held)), held.clear
