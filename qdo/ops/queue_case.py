"""The facts about one queue that verdicts are based on, from samples of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from qdo.ops.status import QueueStatus


@dataclass(frozen=True, slots=True)
class VerdictRules:
    """The times from which a queue is worth a look.

    :ivar late_seconds: age of its next message.
    :ivar stuck_seconds: how long one message may run.
    :ivar unusual_seconds: how long it may run if that is much longer than usual.
    :ivar expiring_share: age of its next message, as a share of the broker's retention.
    :ivar still_seconds: how long nothing may happen: no owner, nothing recorded, no report.
    """

    late_seconds: float = 60.0
    stuck_seconds: float = 300.0
    unusual_seconds: float = 60.0
    still_seconds: float = 30.0
    expiring_share: float = 0.5


RULES = VerdictRules()


@dataclass(frozen=True, slots=True)
class QueueSample:
    """A queue at one time.

    :ivar at: Unix time of the reader's clock.
    :ivar workers: number of registered workers, None if it is unknown.
    """

    at: float
    status: QueueStatus
    workers: int | None


class QueueCase:
    """The facts about a queue, from its samples."""

    def __init__(self, samples: Sequence[QueueSample], rules: VerdictRules) -> None:
        self.rules = rules
        self.sample = samples[-1]
        # Before it was deleted and created again, it was another queue.
        same = (each for each in samples if each.status.created == self.sample.status.created)
        self.first = next(same)
        self.now = self.sample.at
        self.status = self.sample.status
        self.queue = self.status.queue

    @property
    def waiting(self) -> bool | None:
        """Whether messages wait; None if it is unknown."""
        if self.status.missing:
            return False
        backlog, age = self.status.backlog, self.status.behind_seconds
        if backlog is None and age is None:
            return None
        return bool(backlog) or bool(age)

    @property
    def age(self) -> float | None:
        """Age of the next message in seconds."""
        return self.status.behind_seconds

    @property
    def owned(self) -> bool:
        return self.status.owner is not None and not self.status.owner_gone

    @property
    def seconds(self) -> float:
        """Time between the first and the last sample."""
        return self.sample.at - self.first.at

    @property
    def still_seconds(self) -> float | None:
        """How long nothing was recorded; None if that is unknown."""
        written = self.status.written
        return max(0.0, self.now - written) if written else None
