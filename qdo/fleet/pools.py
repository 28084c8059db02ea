"""The part of a limit that one process may use: permits, and starts at a rate. Counts, without I/O.

A pool belongs to one registration. At most `cap` may be in use; the node has at least `held`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from qdo.fleet.limit_node import MOST, ShareHolder

FULL = 1 - 1e-9
"""A token, but for rounding."""


def targets(total: int, holders: Sequence[ShareHolder]) -> list[int]:
    """Return how many permits each process should hold: max-min fair.

    As if permits were dealt one at a time, in this order, to the processes that want more.
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


class Pool:
    """The permits of one process.

    :ivar unlimited: the limit does not limit this.
    :ivar held: the share of the last acknowledged write.
    :ivar cap: most in use; lowered at once, raised by acknowledged writes only.
    :ivar got_at: when `held` became more than 0.
    :ivar used: whether one was taken since then.
    :ivar peak: the highest demand since `peak_since`.
    :ivar interrupt: called before less may be used: an engine may start messages without asking
        for each, and counts them afterwards.
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

    def next_at(self, now: float) -> float:
        """Return the time of the next new one, `inf` for never."""
        return float("inf")

    def use_seconds(self) -> float:
        """Return how long a new one may take until it can be used."""
        return 0.0

    @property
    def occupied(self) -> int:
        """The number that cannot be given up before callers return it."""
        return self.in_use

    def demand(self, now: float) -> int:
        """Return the number that could be used at once."""
        return min(self.in_use + self.waiting, MOST)

    def wanted(self, now: float) -> int:
        """Return the highest demand since `peak_since`."""
        self.peak = max(self.peak, self.demand(now))
        return self.peak

    def measure_again(self, now: float) -> None:
        self.peak, self.peak_since = self.demand(now), now

    def limit(self, cap: int, now: float) -> None:
        if cap < self.cap:
            self.interrupt()
        self.cap = cap

    def acknowledge(self, held: int, cap: int, now: float) -> None:
        if held and not self.held:
            self.got_at, self.used = now, False
        self.held = held
        self.limit(min(cap, held), now)


class StartPool(Pool):
    """Tokens for starts: a share of a rate.

    Each unit is one token of the burst, with its part of the rate. A new unit has no token, and a
    unit that is given up loses it. So the tokens of all processes are never more than the burst,
    and the fleet starts at most rate * t + burst in any t seconds.

    :ivar unit_rate: tokens a second of each unit.
    """

    def __init__(self) -> None:
        super().__init__()
        self.unit_rate = 0.0
        self._tokens = 0.0
        self._at = 0.0

    def set_rate(self, unit_rate: float, now: float) -> None:
        if unit_rate != self.unit_rate:
            self._refill(now)
            self.unit_rate = unit_rate

    def _refill(self, now: float) -> None:
        more = max(0.0, now - self._at) * self.unit_rate * self.cap
        self._tokens = min(float(self.cap), self._tokens + more)
        self._at = now
        # Interrupt afterwards: a message started since then left no room for further tokens.
        self.interrupt()

    def has_free(self, now: float) -> bool:
        if self.unlimited:
            return True
        self._refill(now)
        return self._tokens >= FULL

    def take(self) -> None:
        self.used = True
        if not self.unlimited:
            self._tokens = max(0.0, self._tokens - 1)

    def covers(self, count: int, now: float) -> bool:
        if self.unlimited:
            return True
        self._refill(now)
        return self._tokens >= count

    def take_more(self, count: int, now: float) -> None:
        if not self.unlimited:
            self._refill(now)
            self._tokens = max(0.0, self._tokens - count)

    def give_back(self) -> None:
        """Do nothing: a start cannot be undone."""

    def refund(self, count: int = 1) -> None:
        """Return the tokens of messages that did not start."""
        self._tokens = min(float(self.cap), self._tokens + count)

    def next_at(self, now: float) -> float:
        self._refill(now)
        speed = self.unit_rate * self.cap
        return now + max(0.0, 1 - self._tokens) / speed if speed else float("inf")

    def use_seconds(self) -> float:
        return 1 / self.unit_rate if self.unit_rate else 0.0

    @property
    def occupied(self) -> int:
        return 0

    def demand(self, now: float) -> int:
        self._refill(now)
        spent = self.cap - int(self._tokens + 1e-9)
        # A share grows by doubling: one by one, the share of a fast rate would take seconds.
        return min(spent + (self.waiting + self.cap if self.waiting else 0), MOST)

    def limit(self, cap: int, now: float) -> None:
        self._refill(now)
        self.cap = cap
        self._tokens = min(self._tokens, float(cap))
