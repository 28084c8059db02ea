"""Limit the starts of messages by the permits and rates of their jobs.

A job with limits gets a `Gate` when the worker binds the job. Jobs without limits cost nothing.
Before a queue starts a message, it takes permits of all limits or of none. A queue without permits
gives up its place among the running queues. Waiting queues get permits in order of arrival. If this
process has no share of a limit, queues that wait for that limit do not hold up other queues.

A job with limits needs permits for each row. Asking for permits before each message would cost more
than a short job. So a turn takes its rows in a streak, directly from the fetched rows, while
nothing can change between two messages. All messages of a streak use one grant. Three events
interrupt streaks: a queue begins to wait, an operator lowers a cap, or the process checks a rate.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from itertools import chain, count, islice
from operator import length_hint
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from qdo.coordination.member import Member
from qdo.coordination.znodes.layout import Layout
from qdo.fleet.limit_node import MISSING, DeclaredLimit
from qdo.fleet.shares import LimitShare
from qdo.jobs.job import Job
from qdo.worker.engine.slot import LaneGroup, Row, Rows, Slot, TurnResult

if TYPE_CHECKING:
    from qdo.fleet.permit_counts import PermitCount, StartCount


# Maximum number of messages that ask for permits one by one after an interruption.
MOST_SINGLES = 63

_log = logging.getLogger(__name__)


class PermitShare(Protocol):
    """A share of a limit; see `qdo.fleet.shares.LimitShare`."""

    fault: str | None
    starts: StartCount
    counts: tuple[PermitCount, ...]

    @property
    def has_share(self) -> bool: ...

    @property
    def why(self) -> str | None: ...

    def has_free(self) -> bool: ...

    def take(self) -> None: ...

    def give_back(self) -> bool: ...

    def wait(self, count: int) -> bool: ...

    def awaits_token(self) -> bool: ...


class GatedRows:
    """Yields rows with permits, and ends early when no permits are free."""

    __slots__ = ("_fence", "_gate", "_rows", "_slot")

    def __init__(self, gate: Gate, slot: Slot, rows: Any, fence: int) -> None:
        self._gate = gate
        self._slot = slot
        self._rows = rows
        self._fence = fence

    def __iter__(self) -> Iterator[Row]:
        return self

    def __next__(self) -> Row:
        # Take permits before the row, because a row from the lane counts as started.
        if not self._renew():
            raise StopIteration
        row: Row = next(self._rows)
        self._slot.grant.started = True
        self._gate.note_start(self._slot.queue, self._fence)
        return row

    def __length_hint__(self) -> int:
        return length_hint(self._rows)

    def _renew(self) -> bool:
        """Take permits for the next message; return whether the slot's grant has them."""
        slot = self._slot
        gate = self._gate
        grant = slot.grant
        if grant is None:
            return False
        # The first row uses the permits that the queue took in `Gate.enter`.
        if grant.started and (
            gate.due(slot.queue, self._fence) > gate.limits.clock() or not grant.renew()
        ):
            grant.release()
            slot.grant = None
            return False
        return True


class StreakRows(GatedRows):
    """Yields the fetched rows of a queue, in streaks where possible."""

    __slots__ = ("_most", "_shares")

    def __init__(self, gate: Gate, slot: Slot, rows: Rows, fence: int) -> None:
        super().__init__(gate, slot, rows, fence)
        self._shares: tuple[PermitShare, ...] = ()
        self._most = 0

    def __iter__(self) -> Iterator[Row]:
        return chain.from_iterable(self._parts())

    def _parts(self) -> Iterator[Rows]:
        """Yield the rows in parts; each part is a streak or a single row."""
        slot = self._slot
        gate = self._gate
        streaks: Streaks = gate.limits.streaks
        while True:
            # The loop returns here after a streak, and counts the starts of the streak.
            streaks.end(self)
            if not length_hint(self._rows) or not self._renew():
                return
            grant = slot.grant
            grant.started = True
            gate.note_start(slot.queue, self._fence)
            if streaks.may_begin and gate.allows_streak and grant.allows(length_hint(self._rows)):
                streaks.begin(self)
                grant.streak = self
                self._shares = grant.shares
                self._most = length_hint(self._rows)
                yield self._rows
            else:
                yield islice(self._rows, 1)

    def settle(self) -> None:
        """Count the starts of the streak, except the first, which `_parts` has counted."""
        count = self._most - length_hint(self._rows) - 1
        now = self._gate.limits.clock()
        for share in self._shares:
            share.starts.take_more(count, now)
        self._shares = ()

    def interrupt(self) -> None:
        """End the streak between two messages, so that the turn's loop finds no further row."""
        self.settle()
        # The list exhausts the iterator of the turn's loop. The cost is proportional to the number
        # of remaining rows.
        remaining = iter(list(self._rows))
        if self._slot.rows is self._rows:
            self._slot.rows = remaining
        self._rows = remaining


class Streaks:
    def __init__(self) -> None:
        self._running: list[StreakRows] = []
        self._pause = self._singles = 0

    @property
    def may_begin(self) -> bool:
        """Whether the next message may begin a streak; otherwise it must ask for permits alone."""
        # An interruption copies all remaining rows. After an interruption, single messages cost
        # less.
        if self._singles:
            self._singles -= 1
            return False
        return True

    def begin(self, rows: StreakRows) -> None:
        self._running.append(rows)

    def end(self, rows: StreakRows) -> None:
        if rows in self._running:
            self._running.remove(rows)
            rows.settle()
            # No interruption ended the streak, so only one single message follows the next
            # interruption.
            self._pause = 0

    def interrupt(self) -> None:
        """End all streaks between two messages."""
        if self._running:
            running = self._running
            self._running = []
            self._pause = self._singles = min(2 * self._pause + 1, MOST_SINGLES)
            for rows in running:
                rows.interrupt()


# A queue, or the lanes of a queue, that can wait for permits.
PermitWaiter: TypeAlias = Slot | LaneGroup


class Grant:
    """One permit and one start from each limit of a job.

    :ivar shares: the shares that gave the permits.
    :ivar started: whether a message was started with this grant.
    :ivar streak: the last streak of messages that this grant began.
    """

    __slots__ = ("_gate", "shares", "started", "streak")

    def __init__(self, gate: Gate, shares: tuple[PermitShare, ...]) -> None:
        self._gate = gate
        self.shares = shares
        self.started = False
        self.streak: StreakRows | None = None

    def allows(self, messages: int) -> bool:
        """Return whether this grant allows a streak of this many messages, including the first."""
        return not self._gate.limits.waiting and all(
            share.starts.covers(messages - 1, self._gate.limits.clock()) for share in self.shares
        )

    def renew(self) -> bool:
        """Take the permits again for the next message, unless another queue waits."""
        self._return()
        limits = self._gate.limits
        if limits.waiting or not all(share.has_free() for share in self.shares):
            self.shares = ()
            limits.serve()
            return False
        # No greenlet has run after the check, so the permits are still free.
        for share in self.shares:
            share.take()
        self.started = False
        return True

    def release(self) -> None:
        """Return the permits and the unused starts; idempotent."""
        if self.shares:
            self._return()
            self.shares = ()
            self._gate.limits.serve()

    def _return(self) -> None:
        if self.streak is not None:
            self._gate.limits.streaks.end(self.streak)
            self.streak = None
        for share in self.shares:
            # The share counted the start at the time of the grant, so refund an unused start.
            if not self.started:
                share.starts.refund()
            if share.give_back():
                self._gate.limits.wake()


class Gate:
    """Gives permits to the queues of one job before they start messages.

    :ivar limits: all limits of the process.
    :ivar glob: the job's queues.
    :ivar names: names of the job's limits, sorted.
    :ivar waiting: arrival number of each waiter, in order of arrival.
    :ivar allows_streak: whether the job has no rate per queue.
    """

    def __init__(self, limits: Limits, job: Job) -> None:
        self.limits = limits
        self.glob = job.queues
        self.names = tuple(sorted(job.limits))
        self.waiting: dict[PermitWaiter, int] = {}
        self.allows_streak = not job.queue_seconds
        self._queue_seconds = job.queue_seconds
        self._last: dict[str, tuple[int, float]] = {}

    def due(self, queue: str, fence: int) -> float:
        """Return the clock time at which the queue's own rate allows the next message."""
        if not self._queue_seconds:
            return 0.0
        since, at = self._last.get(queue, (None, 0.0))
        # A new claim also waits, because the former owner may have just started a message.
        if since != fence:
            self._last[queue] = fence, (at := self.limits.clock())
        return at + self._queue_seconds

    def note_start(self, queue: str, fence: int) -> None:
        if self._queue_seconds:
            self._last[queue] = fence, self.limits.clock()

    def forget(self, queue: str) -> None:
        self._last.pop(queue, None)

    def admits(self, waiter: PermitWaiter) -> bool:
        """Set the waiter's `grant`; return False if the waiter must wait for permits."""
        # While other queues wait, only `serve` gives permits, in order of arrival.
        if waiter.grant is None and not self.limits.waiting:
            waiter.grant = self.limits.take(self)
        if waiter.grant is None and not self.names:
            waiter.grant = Grant(self, ())
        elif waiter.grant is None:
            self.limits.enqueue(self, waiter)
            # This queue may get its permits at once if the other waiting queues need other limits.
            self.limits.serve()
        return waiter.grant is not None

    def enter(self, slot: Slot, fence: int) -> TurnResult | None:
        """Take permits for a queue and return None, or return the result of its turn."""
        due = self.due(slot.queue, fence)
        if due > self.limits.clock():
            slot.not_before = due
            return TurnResult.WAIT
        return None if self.admits(slot) else TurnResult.LIMITED

    def enter_lane(self, lanes: LaneGroup, fence: int) -> bool:
        """Take permits for one lane; return False if it must wait for permits or the rate."""
        lanes.admitted_at = self.due(lanes.queue, fence)
        if lanes.admitted_at > self.limits.clock() or not self.admits(lanes):
            return False
        # Count now, because the next lane asks before this lane starts its message.
        self.note_start(lanes.queue, fence)
        return True

    def start(self, slot: Slot, fence: int) -> None:
        """Use the permits of a queue that has entered for one call."""
        if slot.grant is not None:
            slot.grant.started = True
        self.note_start(slot.queue, fence)

    def rows(self, slot: Slot, rows: Any, fence: int) -> GatedRows:
        """Return the rows of a lane that has entered, as long as permits are free."""
        return GatedRows(self, slot, rows, fence)

    def fetched(self, slot: Slot, rows: Rows, fence: int) -> StreakRows:
        """Return the fetched rows of a queue that has entered, as long as permits are free."""
        return StreakRows(self, slot, rows, fence)


class Limits:
    """The limits of a worker process. `waiting` is the number of waiting queues."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.waiting = 0
        self.clock = clock
        self.streaks = Streaks()
        self._resume: Callable[[PermitWaiter], None] = lambda waiter: None
        self.wake: Callable[[], None] = lambda: None
        self._gates: list[Gate] = []
        self._shares: Mapping[str, PermitShare] = {}
        self._faults: dict[str, str] = {}
        self._arrivals = count()

    def report_to(self, resume: Callable[[PermitWaiter], None]) -> None:
        """Set the function that `serve` calls with each waiter that got its permits."""
        self._resume = resume

    def gate(self, job: Job) -> Gate | None:
        """Return the gate of a job; None if the job has neither limits nor a rate."""
        if not job.limits and not job.queue_seconds:
            return None
        gate = Gate(self, job)
        self._gates.append(gate)
        return gate

    def join(
        self,
        jobs: Iterable[Job],
        declared: Mapping[str, DeclaredLimit],
        layout: Layout,
        member: Member,
    ) -> list[LimitShare]:
        """Return the shares of a new registration, which replace the earlier shares."""
        names = {name for job in jobs for name in job.limits} | declared.keys()
        self.wake = partial(member.call, lambda: None)
        shares = {
            name: LimitShare(
                layout,
                name,
                member.name,
                member.lease,
                clock=self.clock,
                on_change=self.changed,
                chance=random.random,
                declared=declared.get(name),
            )
            for name in sorted(names)
        }
        self.use(shares)
        return list(shares.values())

    def use(self, shares: Mapping[str, PermitShare]) -> None:
        """Set the shares that give permits."""
        # Interrupt first, because a running streak would start messages with permits of the old
        # shares.
        self.streaks.interrupt()
        self._shares = shares
        for share in shares.values():
            for part in share.counts:
                part.interrupt = self.streaks.interrupt
        self._count()

    def take(self, gate: Gate) -> Grant | None:
        """Return permits of all limits of a gate, or None."""
        # Take all permits or none, because two queues with one permit each would wait for each
        # other.
        shares = tuple(share for name in gate.names if (share := self._shares.get(name)))
        if len(shares) < len(gate.names) or not all(share.has_free() for share in shares):
            return None
        for share in shares:
            share.take()
        return Grant(gate, shares)

    def enqueue(self, gate: Gate, waiter: PermitWaiter) -> None:
        """Add a queue to the end of the line, unless the queue already waits."""
        if waiter not in gate.waiting:
            gate.waiting[waiter] = next(self._arrivals)
            waiter.awaits_permit = True
            self._count()

    def leave(self, waiter: PermitWaiter) -> None:
        """Remove a queue from the line, and return its permits."""
        if waiter.awaits_permit:
            waiter.awaits_permit = False
            for gate in self._gates:
                gate.waiting.pop(waiter, None)
            self._count()
        grant = waiter.grant
        waiter.grant = None
        if grant is not None:
            grant.release()

    def forget(self, queue: str) -> None:
        for gate in self._gates:
            gate.forget(queue)

    def changed(self) -> None:
        """Serve the waiting queues after a share has changed."""
        self.streaks.interrupt()
        for name, share in self._shares.items():
            if share.fault == self._faults.get(name):
                continue
            if share.fault is None:
                _log.info("limit %s: it can be used again", name)
                del self._faults[name]
            else:
                self._faults[name] = share.fault
                _log.warning("%s; the queues of its jobs wait", _reason(name, share.fault))
        self.serve()

    def serve(self) -> None:
        """Give permits to the queues that have waited longest."""
        if not self.waiting:
            return
        reserved: set[str] = set()
        candidates = [gate for gate in self._gates if gate.waiting]
        served = False
        while candidates:
            # The first waiter of each gate has waited longest.
            gate = min(candidates, key=lambda gate: next(iter(gate.waiting.values())))
            grant = None if reserved & {*gate.names} else self.take(gate)
            if grant is None:
                # Reserve the free permits of this waiter until it can get permits of all its
                # limits.
                candidates.remove(gate)
                reserved |= self._coming(gate)
                continue
            served = True
            waiter = next(iter(gate.waiting))
            del gate.waiting[waiter]
            waiter.awaits_permit = False
            waiter.grant = grant
            self._resume(waiter)
            if not gate.waiting:
                candidates.remove(gate)
        if served:
            self._count()
        # Wake the loop of the shares, which must schedule a check at the time of the next token.
        if self.waiting and any(share.awaits_token() for share in self._shares.values()):
            self.wake()

    def _coming(self, gate: Gate) -> set[str]:
        """Return the limits to reserve for the first waiter of a gate."""
        # Reserve nothing if this process lacks a share of any limit, because the wait may be long.
        shares = [self._shares.get(name) for name in gate.names]
        has_all = all(share is not None and share.has_share for share in shares)
        return {*gate.names} if has_all else set()

    def _count(self) -> None:
        """Report the number of waiting queues to the shares."""
        counts = dict.fromkeys(self._shares, 0)
        self.waiting = 0
        for gate in self._gates:
            self.waiting += len(gate.waiting)
            for name in gate.names if gate.waiting else ():
                if name in counts:
                    counts[name] += len(gate.waiting)
        news = [self._shares[name].wait(number) for name, number in counts.items()]
        if self.waiting:
            self.streaks.interrupt()
        if any(news):
            self.wake()

    def faults(self) -> dict[str, str]:
        """Return the reason for each unusable limit."""
        return {name: _reason(name, share.why) for name, share in self._shares.items() if share.why}

    def waits(self) -> dict[str, tuple[str, ...]]:
        """Return the limits that queues wait for, by the glob of the queues' job."""
        return {gate.glob: gate.names for gate in self._gates if gate.waiting}


def _reason(name: str, why: str) -> str:
    remedy = f"; run `qdo limits set {name}` with --max or --rate" if why == MISSING else ""
    return f"limit {name}: {why}{remedy}"
