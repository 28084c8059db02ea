"""Detect a coordinator that accepts requests but does not answer.

A stopped server, or a host without power, closes no connection. If the client sends other requests,
kazoo does not notice a missing answer to its ping. But a worker renews its lease all the time. So
the driver asks this detector when to give up the connection. Then another server can answer within
the lease, and no message has to wait.
"""

from __future__ import annotations

# The time after which an unanswered request means a silent server, as a share of the timeout.
SILENCE = 1 / 3
# The time, as a share of the session timeout, for which the driver must run before it trusts the
# silence. When a job has blocked the process, the driver may not have read the arrived answers yet.
GRACE = 0.02


class SilenceDetector:
    """Decides when a connection has been silent for too long. Times are in seconds."""

    def __init__(self, timeout_seconds: float) -> None:
        self.timeout_seconds = timeout_seconds
        self._waiting_since: float | None = None
        self._suspected_at: float | None = None

    def sent(self, now: float) -> None:
        """Record a request; keep the time of an earlier unanswered request."""
        if self._waiting_since is None:
            self._waiting_since = now

    def answered(self, now: float, unanswered: int) -> None:
        self._waiting_since = now if unanswered else None
        self._suspected_at = None

    def reset(self) -> None:
        """Forget all requests after the loss of their connection."""
        self._waiting_since = self._suspected_at = None

    def due(self) -> float:
        """Return the time of the next call of `is_silent`; infinity if none is needed."""
        if self._suspected_at is not None:
            return self._suspected_at + GRACE * self.timeout_seconds
        if self._waiting_since is not None:
            return self._waiting_since + SILENCE * self.timeout_seconds
        return float("inf")

    def is_silent(self, now: float) -> bool:
        """Return whether the driver should give up the connection."""
        if now < self.due():
            return False
        if self._suspected_at is None:
            self._suspected_at = now
            return False
        return True
