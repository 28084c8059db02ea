"""Detect a coordinator that accepts requests and does not answer.

A server that is stopped, or whose host has lost power, closes no connection. kazoo looks for a
missing answer to its ping only while nothing is sent, but a worker renews its lease all the time.
So the driver asks this detector when to give the connection up. Another server answers within the
lease, and no message has to wait.
"""

from __future__ import annotations

# Share of the session timeout after which an unanswered request means a silent server.
SILENCE = 1 / 3
# Share of the session timeout for which the driver runs before it believes in the silence. After a
# job has blocked the process, the answers are there but not yet read.
GRACE = 0.02


class SilenceDetector:
    """Says when a connection has been silent for too long. Times are in seconds."""

    def __init__(self, timeout_seconds: float) -> None:
        self.timeout_seconds = timeout_seconds
        self._waiting_since: float | None = None
        self._suspected_at: float | None = None

    def sent(self, now: float) -> None:
        """Record a request; an earlier one that is unanswered counts from its own time."""
        if self._waiting_since is None:
            self._waiting_since = now

    def answered(self, now: float, unanswered: int) -> None:
        self._waiting_since = now if unanswered else None
        self._suspected_at = None

    def reset(self) -> None:
        """Forget all requests, because their connection is gone."""
        self._waiting_since = self._suspected_at = None

    def due(self) -> float:
        """Return when to call `is_silent` next, infinity for never."""
        if self._suspected_at is not None:
            return self._suspected_at + GRACE * self.timeout_seconds
        if self._waiting_since is not None:
            return self._waiting_since + SILENCE * self.timeout_seconds
        return float("inf")

    def is_silent(self, now: float) -> bool:
        """Return whether the connection should be given up."""
        if now < self.due():
            return False
        if self._suspected_at is None:
            self._suspected_at = now
            return False
        return True
