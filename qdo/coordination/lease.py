"""The lease: until when a worker may start messages without hearing from the coordinator.

A session that the coordinator counts as alive keeps its queues; one that it has ended may
have lost them to others a moment later. So a worker starts a message only while it is certain
that its session cannot have ended: for 0.75 T after it sent its last transaction that was
acknowledged, where T is the negotiated session time-out.

A transaction alone does not prove that the leader saw the session at that moment: a follower
reports the sessions it heard of to the leader only with its own pings, every half tick. If the
session was quiet before the transaction and the follower is cut off right after it, the leader
counts from the contact before. Hence contact at least every T/10, and after a longer gap the
lease counts from the previous contact + T/10:

    0.75 T + T/10 (longest gap counted) + half a tick < T,  with T of at least 5 ticks

The clock goes on while the machine sleeps (CLOCK_BOOTTIME), so that a resumed virtual machine
finds its lease over.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

from qdo.coordination.machine import Answer, CheckOp, Commit, Fault, Machine, Refused

SHARE = 0.75
"""Share of the session time-out that a lease runs."""
GAP = 0.1
"""Share of the session time-out within which contact must be made."""

# partial, not def: the test before every message costs one C call (65 ns).
clock: Callable[[], float] = partial(
    time.clock_gettime, getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
)
"""Seconds since boot, counting suspends; the same for all processes of a machine."""


class Lease:
    """A deadline that only acknowledged transactions move.

    :ivar until: start a message only while ``clock() < until``; seconds.
    :ivar timeout_seconds: negotiated session time-out.
    :ivar contact: when the last acknowledged transaction was sent; seconds.
    """

    __slots__ = ("contact", "timeout_seconds", "until")

    def __init__(self, timeout_seconds: float, connected_at: float) -> None:
        self.timeout_seconds = timeout_seconds
        self.contact = connected_at
        self.until = connected_at + SHARE * timeout_seconds

    def renew(self, sent_at: float) -> None:
        """Take note that a transaction sent at this time was acknowledged."""
        if self.until == float("-inf") or sent_at <= self.contact:
            return
        counted = min(sent_at, self.contact + GAP * self.timeout_seconds)
        self.until = max(self.until, counted + SHARE * self.timeout_seconds)
        self.contact = sent_at

    def end(self) -> None:
        """End it for good: the session is gone."""
        self.until = float("-inf")


class Renewal(Machine):
    """Keeps a lease running while nothing else is sent: a transaction of one check.

    Two may be under way, so that one slow answer does not open a gap.
    """

    def __init__(
        self,
        path: str,
        lease: Lease,
        *,
        clock: Callable[[], float],
        on_gone: Callable[[], None],
    ) -> None:
        super().__init__()
        self._path = path
        self._lease = lease
        self._clock = clock
        self._on_gone = on_gone
        self._sent_at = float("-inf")
        self._connected = True

    def connected(self) -> None:
        self._connected = True
        self._send()

    def suspended(self) -> None:
        self._connected = False

    def due(self) -> float:
        if not self._connected:
            return float("inf")
        # A little early, so that the gap itself stays below the one that is counted.
        return max(self._lease.contact, self._sent_at) + 0.9 * GAP * self._lease.timeout_seconds

    def tick(self) -> None:
        if self._connected and self._clock() >= self.due():
            self._send()

    def _send(self) -> None:
        self._sent_at = self._clock()
        self.ask(Commit((CheckOp(self._path),)), self._answered)

    def _answered(self, answer: Answer) -> None:
        if isinstance(answer, Refused) and answer.fault is Fault.NO_NODE:
            self._on_gone()
