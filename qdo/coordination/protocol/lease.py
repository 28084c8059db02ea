"""The lease: the time for which a worker may start messages without contact to the coordinator.

A session keeps its queues while the coordinator counts the session as alive. When the coordinator
has ended the session, other workers may own the queues. So a worker starts a message only while its
session certainly exists. The session exists until at least 0.95 T after the latest proven contact,
where T is the negotiated session timeout. A proven contact is a moment after which the leader of
the servers certainly heard of the session.

An acknowledged transaction alone does not prove a contact. A follower forwards a transaction at
once, but reports its active sessions to the leader only with its pings, every half tick. Suppose
that the session was quiet before the transaction, and the follower is cut off right after it. Then
the leader counts from the previous contact. But a transaction proves that follower and leader were
connected at its commit, and their messages arrive in order. So at the commit, the follower had
reported every contact that was *acknowledged* half a tick before the transaction was *sent*:

    acknowledged(i) <= sent(j) - half a tick   =>   the leader heard of the session after sent(i)

This rule is true for any gaps between contacts. Half a tick is at most T/10 if T is at least 5
ticks. With contact every T/10, a lease lasts until about 0.75 T after the last transaction. A new
connection alone is a proof, because the leader confirms the session before the reply.

The clock keeps running while the machine sleeps (CLOCK_BOOTTIME). A resumed virtual machine
therefore finds its lease expired.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from qdo.coordination.protocol import machine as m

# The length of a lease after a proven contact, as a share of the session timeout.
SHARE = 0.95
# The maximum time between two contacts, as a share of the session timeout.
GAP = 0.1
# The time after which a follower has reported a contact, as a share of the session timeout.
REPORT = 0.1


class Lease:
    """A deadline that is extended only when the leader has certainly heard from the session.

    :param heard_at: a time in seconds after which the leader heard from the session.
    :ivar until: the end of the lease in seconds. Start a message only while ``clock() < until``.
    :ivar timeout_seconds: the negotiated session timeout.
    :ivar contact: the time in seconds at which the worker sent the last acknowledged transaction.
    :ivar on_moved: a function of `until`, called after each change by the same thread.
    """

    __slots__ = ("_unproven", "contact", "on_moved", "timeout_seconds", "until")

    def __init__(self, timeout_seconds: float, heard_at: float) -> None:
        self.timeout_seconds = timeout_seconds
        self.contact = heard_at
        self.until = heard_at + SHARE * timeout_seconds
        self.on_moved: Callable[[float], None] | None = None
        self._unproven: deque[tuple[float, float]] = deque()

    def heard(self, at: float) -> None:
        """Record that the leader heard of the session after a time."""
        if self.until != float("-inf"):
            self._move(max(self.until, at + SHARE * self.timeout_seconds))

    def renew(self, sent_at: float, acknowledged_at: float) -> None:
        """Record an acknowledged transaction; callers keep the order of sending."""
        unproven = self._unproven
        timeout = self.timeout_seconds
        self.contact = max(self.contact, sent_at)
        while unproven and unproven[0][1] <= sent_at - REPORT * timeout:
            self.heard(unproven.popleft()[0])
        # A precision of a fiftieth of the timeout is enough, and keeps the list short.
        if not unproven or sent_at - unproven[-1][0] >= 0.02 * timeout:
            unproven.append((sent_at, acknowledged_at))

    def end(self) -> None:
        self._move(float("-inf"))

    def _move(self, until: float) -> None:
        self.until = until
        if self.on_moved is not None:
            self.on_moved(until)


class Renewal(m.Machine):
    """Renews a lease with a transaction of one check, if the worker sends no other transaction."""

    # Two renewals may be in flight, so a slow answer causes no gap.

    def __init__(
        self, path: str, lease: Lease, *, clock: Callable[[], float], on_gone: Callable[[], None]
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
        # Renew a little early, to keep the real gap below `GAP`.
        return max(self._lease.contact, self._sent_at) + 0.9 * GAP * self._lease.timeout_seconds

    def tick(self) -> None:
        if self._connected and self._clock() >= self.due():
            self._send()

    def _send(self) -> None:
        self._sent_at = self._clock()
        self.ask(m.Commit((m.CheckOp(self._path),)), self._answered)

    def _answered(self, answer: m.Response) -> None:
        if isinstance(answer, m.Rejected) and answer.fault is not m.CommitError.BAD_VERSION:
            self._on_gone()  # treat an unreadable node as gone
