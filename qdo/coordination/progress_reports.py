"""Pass the worker engine's progress to the checkpoints of one member."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from qdo.coordination.protocol.claims import Claim
from qdo.coordination.protocol.ownership import Ownership


class ProgressReports:
    """Collects the progress of claims until the machines' loop takes it.

    The engine calls `progress` and `record`; the loop calls the other methods.
    """

    def __init__(
        self, put: Callable[[Callable[[], object] | None], None], make_event: Callable[[], Any]
    ) -> None:
        # The ownership of queues; None before the worker is registered.
        self.ownership: Ownership | None = None
        self._put = put
        self._make_event = make_event
        self._progressed: deque[Claim] = deque()
        # The waiting callers of `record`, each as a claim and an event.
        self._recordings: list[tuple[Claim, Any]] = []

    def progress(self, claim: Claim) -> None:
        """Let the next checkpoint record ``claim.done``."""
        waiting = self._progressed
        waiting.append(claim)
        # The first report wakes the loop, which also takes all later reports.
        if len(waiting) == 1:
            self._put(None)

    def record(self, claim: Claim, timeout_seconds: float | None = None) -> bool:
        """Checkpoint at once; return True if ``claim.done`` is recorded or the claim has ended."""
        done = self._make_event()

        def begin() -> None:
            if self.ownership is not None:
                self.ownership.progress(claim)
                self.ownership.checkpoints.hurry()
            self._recordings.append((claim, done))

        self._put(begin)
        return bool(done.wait(timeout_seconds))

    def pass_on(self) -> None:
        if self.ownership is not None:
            while self._progressed:
                self.ownership.progress(self._progressed.popleft())

    def notify(self, ownership: Ownership) -> None:
        """Wake the callers of `record` whose progress has been recorded."""
        for recording in list(self._recordings):
            claim, done = recording
            if ownership.recorded(claim):
                self._recordings.remove(recording)
                done.set()

    def end(self) -> None:
        """Wake all callers of `record`, because their claims have ended."""
        for _, done in self._recordings:
            done.set()
        self._recordings.clear()
