"""Totals of a worker process, counted where counting costs nothing."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Counters:
    """Counts since the start of the process.

    :ivar attempts: runs of a job that were started and have ended.
    :ivar unsuccessful: attempts that did not return: retried, dead-lettered, skipped, blocked, or
        of a queue that was lost before they ended.
    :ivar blocked: how often a failing message blocked its queue.
    :ivar expired: messages that the broker took back while they were in flight or about to start.
    :ivar undone: how often the coordinator lost acknowledged writes of an owned queue.
    :ivar sessions_lost: coordinator sessions that ended before this worker left.
    :ivar stopped: how often a job asked to stop the worker; such attempts do not count.
    """

    attempts: int = 0
    unsuccessful: int = 0
    retried: int = 0
    dead_lettered: int = 0
    skipped: int = 0
    blocked: int = 0
    stopped: int = 0
    expired: int = 0
    claimed: int = 0
    released: int = 0
    lost: int = 0
    undone: int = 0
    sessions_lost: int = 0

    @property
    def processed(self) -> int:
        """Attempts that returned: messages that are done."""
        return self.attempts - self.unsuccessful

    def dump(self) -> dict[str, int]:
        """Return the counts as the component node shows them."""
        return {
            "processed": self.processed,
            "failed": self.unsuccessful - self.skipped,
            "retried": self.retried,
            "dead_lettered": self.dead_lettered,
            "skipped": self.skipped,
            "blocked": self.blocked,
            "stopped": self.stopped,
            "expired": self.expired,
            "claimed": self.claimed,
            "released": self.released,
            "lost": self.lost,
            "undone": self.undone,
        }
