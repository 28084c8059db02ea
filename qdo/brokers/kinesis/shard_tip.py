"""How far the last responses of a shard were from its tip, its newest record."""

from __future__ import annotations

from qdo.brokers.kinesis.clock_skew import ClockSkew
from qdo.brokers.kinesis.positions import time_in
from qdo.brokers.kinesis.requests import Records, RetentionPeriod
from qdo.positions import time_of_position

FRESH_SECONDS = 30.0
"""How long a response describes the present backlog."""


class ShardTip:
    """The distance from the tip of a shard. Times are Unix times by the local clock.

    :ivar reached: the last response contained everything up to the tip.
    :ivar reached_at: time of the newest response that did, None before the first.
    """

    def __init__(self) -> None:
        self.reached = False
        self.reached_at: float | None = None
        self._behind: tuple[float, float] | None = None

    def records_received(self, response: Records, limit: int, now: float) -> None:
        """Update the distance from a response to a request for at most `limit` records."""
        self._behind = response.behind_seconds, now
        complete = response.records < limit and not response.cut
        self.reached = response.behind_seconds <= 0 and complete
        if self.reached:
            self.reached_at = now

    def complete_until(self, start_time: float | None) -> float | None:
        """Return the time at AWS up to which everything was read; None before the tip.

        :param start_time: time at which reading began, None if it did not begin at a time.
        """
        if self.reached_at is None:
            return None
        return max(ClockSkew.complete_until(self.reached_at), start_time or 0.0)

    def is_fresh(self, now: float) -> bool:
        """Return whether the last response is recent and the clock was not set back since."""
        return self._behind is not None and 0 <= now - self._behind[1] < FRESH_SECONDS

    def behind_seconds(self, now: float) -> float | None:
        """Return the distance from the tip; None before the first response.

        The distance in a response is as old as the response, and grows while a job runs.
        """
        if self._behind is None:
            return None
        seconds, received_at = self._behind
        return seconds + max(0.0, now - received_at)


def proves_complete(
    after: int, complete_until: float | None, now: float, retention: RetentionPeriod
) -> bool:
    """Return whether no message was missed although the record at `after` is gone.

    Everything that arrived up to a known time was read. If the stream still keeps all records
    that are younger, the record at `after` is only too old: the shard received nothing for days.
    A stream that was created after the known time is another stream of the same name.
    """
    known = max(time_of_position(time_in(after)), complete_until or 0.0)
    return retention.since <= known and now < known + retention.seconds
