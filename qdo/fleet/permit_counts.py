"""Counts the permits and starts in one process's share of a limit. Does no I/O.

Each count belongs to one registration. At most `cap` permits may be in use. The node of the limit
has a share of at least `held`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from itertools import repeat

from qdo.fleet.limit_node import MOST, ShareHolder

# Length of a window, slightly shorter because of rounding errors.
FULL = 1 - 1e-9


def targets(total: int, holders: Sequence[ShareHolder]) -> list[int]:
    """Return the max-min fair number of permits for each process.

    The result is the same as giving one permit after the other to each process in turn that wants
    more.
    """
    dealt = [0] * len(holders)
    open_ = [index for index, each in enumerate(holders) if each.wants > 0]
    while open_ and total >= len(open_):
        each = min(total // len(open_), min(holders[index].wants - dealt[index] for index in open_))
        for index in open_:
            dealt[index] += each
        total -= each * len(open_)
        open_ = [index for index in open_ if dealt[index] < holders[index].wants]
    for index in open_[:total]:
        dealt[index] += 1
    return dealt


class PermitCount:
    """The permits of one process.

    :ivar held: the share in the last acknowledged write.
    :ivar cap: maximum number of permits in use, which falls immediately but rises only with
        acknowledged writes.
    :ivar got_at: the time at which `held` became more than 0.
    :ivar used: whether a caller has taken a permit since `got_at`.
    :ivar peak: the highest demand since `peak_since`.
    :ivar interrupt: a function to call before `cap` falls, because an engine may start messages
        before it counts them.
    """

    def __init__(self) -> None:
        self.unlimited = False
        self.held = self.cap = self.in_use = self.waiting = self.peak = 0
        self.got_at = self.peak_since = float("-inf")
        self.used = False
        self.interrupt: Callable[[], None] = lambda: None

    def has_free(self, now: float) -> bool:
        return self.unlimited or self.in_use < self.cap

    def take(self) -> None:
        self.in_use += 1
        self.used = True
        self.peak = max(self.peak, self.in_use)

    def give_back(self) -> None:
        self.in_use -= 1

    def less_at(self, now: float) -> float:
        """Return the next time at which a permit becomes free without a caller, or `inf`."""
        return float("inf")

    @property
    def occupied(self) -> int:
        """The number of permits that the process cannot give up until callers return them."""
        return self.in_use

    def demand(self, now: float) -> int:
        """Return the number of permits that the process could use now."""
        return min(self.in_use + self.waiting, MOST)

    def wanted(self, now: float) -> int:
        """Return the highest demand since `peak_since`."""
        self.peak = max(self.peak, self.demand(now))
        return self.peak

    def measure_again(self, now: float) -> None:
        self.peak = self.demand(now)
        self.peak_since = now

    def limit(self, cap: int, now: float) -> None:
        if cap < self.cap:
            self.interrupt()
        self.cap = cap

    def acknowledge(self, held: int, cap: int, now: float) -> None:
        if held and not self.held:
            self.got_at = now
            self.used = False
        self.held = held
        self.limit(min(cap, held), now)


class StartCount(PermitCount):
    """The starts of one process, as a share of a rate.

    Each unit of the burst serves one start in a window of burst / rate seconds, as if a start held
    a permit for this time. So the fleet starts at most `burst` jobs in any window. After a unit
    moves to another process, the other process can use it immediately.

    :ivar unit_rate: starts per second of each unit. A window is the time between two starts.
    """

    def __init__(self) -> None:
        super().__init__()
        self.unit_rate = 0.0
        self._started: deque[float] = deque()
        self._at = 0.0

    def set_rate(self, unit_rate: float, now: float) -> None:
        if unit_rate != self.unit_rate:
            self.interrupt()
            self.unit_rate = unit_rate
            self._count(now)

    @property
    def window_seconds(self) -> float:
        return 1 / self.unit_rate if self.unit_rate else 0.0

    def _count(self, now: float) -> None:
        """Forget the starts before the window that ends now."""
        self.interrupt()  # the engine may have started messages without counting them yet
        self._at = now
        started = self._started
        since = now - self.window_seconds * FULL
        while started and started[0] <= since:
            started.popleft()
        self.in_use = len(started)

    def has_free(self, now: float) -> bool:
        if self.unlimited:
            return True
        self._count(now)
        return self.in_use < self.cap

    def take(self) -> None:
        if self.unlimited:
            self.used = True
        else:
            super().take()
            self._started.append(self._at)

    def covers(self, count: int, now: float) -> bool:
        if self.unlimited:
            return True
        self._count(now)
        return self.in_use + count <= self.cap

    def take_more(self, count: int, now: float) -> None:
        """Count starts that `covers` has allowed, even some time ago."""
        if not self.unlimited:
            self._started.extend(repeat(now, count))
            self._count(now)

    def give_back(self) -> None:
        """Do nothing, because a start cannot be undone."""

    def refund(self) -> None:
        """Forget a counted start whose message did not start."""
        if self._started:
            self._started.popleft()  # the oldest, so that no other job starts too early
            self.in_use = len(self._started)

    def next_at(self, now: float) -> float:
        self._count(now)
        excess = self.in_use - self.cap
        if excess < 0:
            return now
        # If the cap fell below the number in use, several starts must leave the window.
        return self._started[excess] + self.window_seconds if self.cap else float("inf")

    def less_at(self, now: float) -> float:
        self._count(now)
        return self._started[0] + self.window_seconds if self._started else float("inf")

    def demand(self, now: float) -> int:
        self._count(now)
        # Double a share that must grow. In steps of one, the share of a fast rate would take
        # seconds to grow.
        return min(self.in_use + (self.waiting + self.cap if self.waiting else 0), MOST)
