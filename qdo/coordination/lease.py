"""The lease: until when a worker may start messages without hearing from the coordinator.

A session that the coordinator counts as alive keeps its queues; one that it has ended may
have lost them to others a moment later. So a worker starts a message only while it is certain
that its session cannot have ended: for 0.95 T after a moment since which the leader is known
to have heard of the session, where T is the negotiated session time-out.

Which moments are known? An acknowledged transaction alone proves nothing: a follower forwards
it at once, yet reports the sessions it heard of to the leader only with its own pings, every
half tick. If the session was quiet before the transaction and the follower is cut off right
after it, the leader counts from the contact before. But a transaction proves that follower and
leader were connected when it was committed, and their messages arrive in order; so everything
that was *acknowledged* half a tick before it was *sent* has been reported by then:

    acknowledged(i) <= sent(j) - half a tick   =>   the leader heard of the session after sent(i)

This holds whatever the gaps between contacts are. With half a tick of at most T/10, that is T
of at least 5 ticks, and contact every T/10 a lease runs about 0.75 T after the last
transaction. Connecting is proof by itself: the leader confirms the session before the reply.

The clock goes on while the machine sleeps (CLOCK_BOOTTIME), so that a resumed virtual machine
finds its lease over.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from functools import partial

from qdo.coordination.machine import Answer, CheckOp, Commit, Fault, Machine, Refused

SHARE = 0.95
"""Share of the session time-out that a lease runs after the leader heard of the session."""
GAP = 0.1
"""Share of the session time-out within which contact is made."""
REPORT = 0.1
"""Share of the session time-out after which a follower has reported a contact."""

# partial, not def: the test before every message costs one C call (65 ns).
clock: Callable[[], float] = partial(
    time.clock_gettime, getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
)
"""Seconds since boot, counting suspends; the same for all processes of a machine."""


class Lease:
    """A deadline that only proofs of the leader's knowledge move.

    :param heard_at: a time since which the leader has heard of the session; seconds.
    :ivar until: start a message only while ``clock() < until``; seconds.
    :ivar timeout_seconds: negotiated session time-out.
    :ivar contact: when the last acknowledged transaction was sent; seconds.
    """

    __slots__ = ("_unproven", "contact", "timeout_seconds", "until")

    def __init__(self, timeout_seconds: float, heard_at: float) -> None:
        self.timeout_seconds = timeout_seconds
        self.contact = heard_at
        self.until = heard_at + SHARE * timeout_seconds
        self._unproven: deque[tuple[float, float]] = deque()

    def heard(self, at: float) -> None:
        """Take note that the leader has heard of the session since this time."""
        if self.until != float("-inf"):
            self.until = max(self.until, at + SHARE * self.timeout_seconds)

    def renew(self, sent_at: float, acknowledged_at: float) -> None:
        """Take note of an acknowledged transaction, in the order of sending."""
        unproven, timeout = self._unproven, self.timeout_seconds
        self.contact = max(self.contact, sent_at)
        while unproven and unproven[0][1] <= sent_at - REPORT * timeout:
            self.heard(unproven.popleft()[0])
        # A fiftieth of the time-out is fine enough, and keeps the list short.
        if not unproven or sent_at - unproven[-1][0] >= 0.02 * timeout:
            unproven.append((sent_at, acknowledged_at))

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
