"""The states of queues, as words and in their order."""

from __future__ import annotations

import enum


class QueueHealth(enum.Enum):
    """The states of a queue, the worst first."""

    LOST = "lost"
    EXPIRING = "expiring"
    BLOCKED = "blocked"
    STUCK = "stuck"
    STOPPED = "stopped"
    NO_JOB = "no-job"
    NO_WORKER = "no-worker"
    UNOWNED = "unowned"
    REWOUND = "rewound"
    FAILING = "failing"
    LAGGING = "lagging"
    UNKNOWN = "unknown"
    CATCHING_UP = "catching-up"
    PAUSED = "paused"
    OK = "ok"
    IDLE = "idle"

    @property
    def rank(self) -> int:
        """0 for the worst."""
        return _RANKS[self]

    @property
    def is_critical(self) -> bool:
        """Whether messages wait, and will wait until somebody does something."""
        return self.rank <= QueueHealth.UNOWNED.rank

    @property
    def is_warning(self) -> bool:
        """Whether the queue is late, or may soon need somebody."""
        return QueueHealth.UNOWNED.rank < self.rank <= QueueHealth.UNKNOWN.rank

    @property
    def needs_attention(self) -> bool:
        """Whether it is critical or a warning."""
        return self.is_critical or self.is_warning


_RANKS = {state: rank for rank, state in enumerate(QueueHealth)}
