"""The lease: until when a worker may start messages without hearing from the coordinator.

A session that the coordinator counts as alive keeps its queues. A session that it has ended may
have lost them to other workers a moment later. So a worker starts a message only while it is
certain that its session cannot have ended. That is for 0.95 T after a moment since which the
leader of the servers has certainly heard of the session. T is the negotiated session timeout.

An acknowledged transaction alone does not prove such a moment. A follower forwards it at once, but
reports its active sessions to the leader only with its own pings, every half tick. If the session
was quiet before the transaction and the follower is cut off right after it, the leader counts from
the contact before. But a transaction proves that follower and leader were connected when it was
committed, and their messages arrive in order. So every contact that was *acknowledged* half a tick
before the transaction was *sent* has been reported by then:

    acknowledged(i) <= sent(j) - half a tick   =>   the leader heard of the session after sent(i)

This holds for any gaps between contacts. Half a tick is at most T/10 if T is at least 5 ticks. With
contact every T/10 a lease then lasts about 0.75 T after the last transaction. Connecting is a proof
by itself: the leader confirms the session before the reply.

The clock keeps running while the machine sleeps (CLOCK_BOOTTIME). A resumed virtual machine
therefore finds its lease expired.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from qdo.coordination.protocol import machine as m

# Share of the session timeout that a lease lasts after the leader heard of the session.
SHARE = 0.95
# Share of the session timeout within which the worker makes contact.
GAP = 0.1
# Share of the session timeout after which a follower has reported a contact.
REPORT = 0.1


class Lease:
    """A deadline that moves only when the leader has certainly heard of the session.

    :param heard_at: a time since which the leader has heard of the session; seconds.
    :ivar until: start a message only while ``clock() < until``; seconds.
    :ivar timeout_seconds: negotiated session timeout.
    :ivar contact: the time at which the last acknowledged transaction was sent; seconds.
    :ivar on_moved: called with `until` when it changes, on the thread that changes it.
    """

    __slots__ = ("_unproven", "contact", "on_moved", "timeout_seconds", "until")

    def __init__(self, timeout_seconds: float, heard_at: float) -> None:
        self.timeout_seconds = timeout_seconds
        self.contact = heard_at
        self.until = heard_at + SHARE * timeout_seconds
        self.on_moved: Callable[[float], None] | None = None
        self._unproven: deque[tuple[float, float]] = deque()

    def heard(self, at: float) -> None:
        """Record that the leader has heard of the session since this time."""
        if self.until != float("-inf"):
            self._move(max(self.until, at + SHARE * self.timeout_seconds))

    def renew(self, sent_at: float, acknowledged_at: float) -> None:
        """Record an acknowledged transaction; call it in the order of sending."""
        unproven = self._unproven
        timeout = self.timeout_seconds
        self.contact = max(self.contact, sent_at)
        while unproven and unproven[0][1] <= sent_at - REPORT * timeout:
            self.heard(unproven.popleft()[0])
        # A fiftieth of the timeout is precise enough, and keeps the list short.
        if not unproven or sent_at - unproven[-1][0] >= 0.02 * timeout:
            unproven.append((sent_at, acknowledged_at))

    def end(self) -> None:
        self._move(float("-inf"))

    def _move(self, until: float) -> None:
        self.until = until
        if self.on_moved is not None:
            self.on_moved(until)


class Renewal(m.Machine):
    """Keeps a lease valid while no other transaction is sent, by a transaction of one check."""

    # Two of them may be in flight, so one slow answer does not open a gap.

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
        # Renew a little early, so the real gap stays below `GAP`.
        return max(self._lease.contact, self._sent_at) + 0.9 * GAP * self._lease.timeout_seconds

    def tick(self) -> None:
        if self._connected and self._clock() >= self.due():
            self._send()

    def _send(self) -> None:
        self._sent_at = self._clock()
        self.ask(m.Commit((m.CheckOp(self._path),)), self._answered)

    def _answered(self, answer: m.Response) -> None:
        if isinstance(answer, m.Rejected) and answer.fault is not m.CommitError.BAD_VERSION:
            self._on_gone()  # a protected node is as good as gone
