"""Permits and rates of jobs: which queue may start its next message, and which waits.

A job with limits gets a `Gate` when it is bound; other jobs cost nothing. Permits are taken before
a message is started, of all limits or of none. A queue without a permit waits without a place
among the running queues. Waiting queues are served in the order in which they began to wait. A
queue that waits for a limit that this process has no share of holds up no other limit.

Each row of a job with limits is started with permits. Asking for permits before each message would
cost more than a short job. While nothing can change between two messages, the rows of a turn come
in one streak, straight from the fetched rows: one grant is handed from message to message. Whatever
may change what this process may start interrupts the streak first: a queue that begins to wait, a
cap that is lowered, a look at a rate.
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


# Most messages that ask for permits one by one after streaks were interrupted.
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
    """Returns each row with permits; ends early where there are none."""

    __slots__ = ("_fence", "_gate", "_rows", "_slot")

    def __init__(self, gate: Gate, slot: Slot, rows: Any, fence: int) -> None:
        self._gate = gate
        self._slot = slot
        self._rows = rows
        self._fence = fence

    def __iter__(self) -> Iterator[Row]:
        return self

    def __next__(self) -> Row:
        # Permits before the row: a row that is taken from the lane counts as started.
        if not self._renew():
            raise StopIteration
        row: Row = next(self._rows)
        self._slot.grant.started = True
        self._gate.note_start(self._slot.queue, self._fence)
        return row

    def __length_hint__(self) -> int:
        return length_hint(self._rows)

    def _renew(self) -> bool:
        """Let the slot's grant have permits for a message; return whether it has."""
        slot = self._slot
        gate = self._gate
        grant = slot.grant
        if grant is None:
            return False
        # The first row uses the grant with which the queue has entered.
        if grant.started and (
            gate.due(slot.queue, self._fence) > gate.limits.clock() or not grant.renew()
        ):
            grant.release()
            slot.grant = None
            return False
        return True


class StreakRows(GatedRows):
    """The fetched rows of a queue, in streaks where that is possible."""

    __slots__ = ("_most", "_shares")

    def __init__(self, gate: Gate, slot: Slot, rows: Rows, fence: int) -> None:
        super().__init__(gate, slot, rows, fence)
        self._shares: tuple[PermitShare, ...] = ()
        self._most = 0

    def __iter__(self) -> Iterator[Row]:
        return chain.from_iterable(self._parts())

    def _parts(self) -> Iterator[Rows]:
        """Return the rows in parts; the first row of each may start as it is returned."""
        slot = self._slot
        gate = self._gate
        streaks: Streaks = gate.limits.streaks
        while True:
            # After a streak, the loop is back here for the next part: count its starts.
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
        """Count the starts of the streak, without the first one, which is counted already."""
        count = self._most - length_hint(self._rows) - 1
        now = self._gate.limits.clock()
        for share in self._shares:
            share.starts.take_more(count, now)
        self._shares = ()

    def interrupt(self) -> None:
        """End the streak between two messages: the loop that runs them finds no further row."""
        self.settle()
        # The list exhausts the iterator over which the loop runs; its length is the cost.
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
        """Whether the next message may begin a streak instead of asking for permits alone."""
        # An interruption copies each fetched row: after one, single messages cost less for a while.
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
            # Not interrupted: the next interruption is followed by one single message again.
            self._pause = 0

    def interrupt(self) -> None:
        """End all streaks between two messages."""
        if self._running:
            running = self._running
            self._running = []
            self._pause = self._singles = min(2 * self._pause + 1, MOST_SINGLES)
            for rows in running:
                rows.interrupt()


# A queue, or the lanes of one, that can wait for permits.
PermitWaiter: TypeAlias = Slot | LaneGroup


class Grant:
    """A permit and a start of each limit of a job.

    :ivar shares: where its permits come from.
    :ivar started: a message was started with it.
    :ivar streak: the last streak of messages that it began.
    """

    __slots__ = ("_gate", "shares", "started", "streak")

    def __init__(self, gate: Gate, shares: tuple[PermitShare, ...]) -> None:
        self._gate = gate
        self.shares = shares
        self.started = False
        self.streak: StreakRows | None = None

    def allows(self, messages: int) -> bool:
        """Return whether that many may start without asking again, the one in flight included."""
        return not self._gate.limits.waiting and all(
            share.starts.covers(messages - 1, self._gate.limits.clock()) for share in self.shares
        )

    def renew(self) -> bool:
        """Take the permits again for the next message, unless another queue waits for them."""
        self._return()
        limits = self._gate.limits
        if limits.waiting or not all(share.has_free() for share in self.shares):
            self.shares = ()
            limits.serve()
            return False
        # No greenlet has run since the question: the permits are still free.
        for share in self.shares:
            share.take()
        self.started = False
        return True

    def release(self) -> None:
        """Return the permits, and the starts that were not used; idempotent."""
        if self.shares:
            self._return()
            self.shares = ()
            self._gate.limits.serve()

    def _return(self) -> None:
        if self.streak is not None:
            self._gate.limits.streaks.end(self.streak)
            self.streak = None
        for share in self.shares:
            # A start counts from the grant on, not only when its message starts.
            if not self.started:
                share.starts.refund()
            if share.give_back():
                self._gate.limits.wake()


class Gate:
    """The permits that a job must have before it starts a message.

    :ivar limits: all limits of the process.
    :ivar glob: the job's queues.
    :ivar names: the job's limits, in the order in which their permits are taken.
    :ivar waiting: the waiters, with the number of their arrival.
    :ivar allows_streak: one queue may start messages as fast as it can.
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
        """Return when the queue may start a message according to its own rate."""
        if not self._queue_seconds:
            return 0.0
        since, at = self._last.get(queue, (None, 0.0))
        # A new claim waits, too: the former owner may have started one a moment before.
        if since != fence:
            self._last[queue] = fence, (at := self.limits.clock())
        return at + self._queue_seconds

    def note_start(self, queue: str, fence: int) -> None:
        if self._queue_seconds:
            self._last[queue] = fence, self.limits.clock()

    def forget(self, queue: str) -> None:
        self._last.pop(queue, None)

    def admits(self, waiter: PermitWaiter) -> bool:
        """Take permits for a waiter, into its `grant`; False: it waits for them from now on."""
        # While others wait, permits are given in the order of arrival only: by `serve`.
        if waiter.grant is None and not self.limits.waiting:
            waiter.grant = self.limits.take(self)
        if waiter.grant is None and not self.names:
            waiter.grant = Grant(self, ())
        elif waiter.grant is None:
            self.limits.enqueue(self, waiter)
            # Those that wait may need other limits: this one may get its permits at once.
            self.limits.serve()
        return waiter.grant is not None

    def enter(self, slot: Slot, fence: int) -> TurnResult | None:
        """Take permits for a queue; return how its turn ends if there are none."""
        due = self.due(slot.queue, fence)
        if due > self.limits.clock():
            slot.not_before = due
            return TurnResult.WAIT
        return None if self.admits(slot) else TurnResult.LIMITED

    def enter_lane(self, lanes: LaneGroup, fence: int) -> bool:
        """Take permits for one lane of a queue; False: it waits for them, or for its own rate."""
        lanes.admitted_at = self.due(lanes.queue, fence)
        if lanes.admitted_at > self.limits.clock() or not self.admits(lanes):
            return False
        # The next lane asks before this one starts its message.
        self.note_start(lanes.queue, fence)
        return True

    def start(self, slot: Slot, fence: int) -> None:
        """Use the permits of a queue that has entered for one call."""
        if slot.grant is not None:
            slot.grant.started = True
        self.note_start(slot.queue, fence)

    def rows(self, slot: Slot, rows: Any, fence: int) -> GatedRows:
        """Return the rows of a lane that has entered, as far as there are permits."""
        return GatedRows(self, slot, rows, fence)

    def fetched(self, slot: Slot, rows: Rows, fence: int) -> StreakRows:
        """Return the fetched rows of a queue that has entered, as far as there are permits."""
        return StreakRows(self, slot, rows, fence)


class Limits:
    """The limits of all registrations of a worker process; `waiting` counts the waiting queues."""

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
        """Call a function with each waiter that got its permits."""
        self._resume = resume

    def gate(self, job: Job) -> Gate | None:
        """Return the gate of a job; None if it has neither limits nor a rate."""
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
        """Return the shares of a new registration; those of earlier ones end with their lease."""
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
        """Take permits from these shares from now on."""
        # First: a streak that goes on would start messages with permits of the old shares.
        self.streaks.interrupt()
        self._shares = shares
        for share in shares.values():
            for part in share.counts:
                part.interrupt = self.streaks.interrupt
        self._count()

    def take(self, gate: Gate) -> Grant | None:
        """Take permits of all limits of a gate, or none."""
        # All or none: two queues that have one permit each would wait for each other.
        shares = tuple(share for name in gate.names if (share := self._shares.get(name)))
        if len(shares) < len(gate.names) or not all(share.has_free() for share in shares):
            return None
        for share in shares:
            share.take()
        return Grant(gate, shares)

    def enqueue(self, gate: Gate, waiter: PermitWaiter) -> None:
        """Add a queue to the end of the line; a queue that already waits keeps its place."""
        if waiter not in gate.waiting:
            gate.waiting[waiter] = next(self._arrivals)
            waiter.awaits_permit = True
            self._count()

    def leave(self, waiter: PermitWaiter) -> None:
        """Remove a queue from the line, and return the permits that it has."""
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
            # The first waiter of each gate has the lowest number of arrival there.
            gate = min(candidates, key=lambda gate: next(iter(gate.waiting.values())))
            grant = None if reserved & {*gate.names} else self.take(gate)
            if grant is None:
                # One of its limits may have permits: they stay free until it has all of them.
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
        # The loop of the shares must plan a look for the time of the next token.
        if self.waiting and any(share.awaits_token() for share in self._shares.values()):
            self.wake()

    def _coming(self, gate: Gate) -> set[str]:
        """Return the limits that later queues must not take before a waiting queue."""
        # None if this process has no share of one of them: that wait may be long.
        shares = [self._shares.get(name) for name in gate.names]
        has_all = all(share is not None and share.has_share for share in shares)
        return {*gate.names} if has_all else set()

    def _count(self) -> None:
        """Tell the shares how many queues wait."""
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
        """Return the limits that cannot be used, and why."""
        return {name: _reason(name, share.why) for name, share in self._shares.items() if share.why}

    def waits(self) -> dict[str, tuple[str, ...]]:
        """Return the jobs with queues that wait for permits: glob, and names of the limits."""
        return {gate.glob: gate.names for gate in self._gates if gate.waiting}


def _reason(name: str, why: str) -> str:
    remedy = f"; run `qdo limits set {name}` with --max or --rate" if why == MISSING else ""
    return f"limit {name}: {why}{remedy}"
