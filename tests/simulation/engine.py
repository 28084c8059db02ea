"""A modelled worker engine: one message in flight per queue, jobs that take virtual time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol
from unittest.mock import patch

from qdo.coordination.protocol.claims import Claim
from qdo.coordination.protocol.lease import Lease
from qdo.coordination.znodes.queue_node import FailureRecord
from qdo.message import Message
from qdo.system.processes import StopFlag
from qdo.worker.executors.base import NotStarted, check_lease
from tests.simulation.broker import SimulatedBroker
from tests.simulation.invariants import Checks, marks_behind
from tests.simulation.schedule import Schedule
from tests.simulation.switches import Switches


class MemberReports(Protocol):
    """The engine's reports to the member that made a claim."""

    def progress(self, claim: Claim) -> object: ...

    def finished(self, claim: Claim) -> object: ...


class _Work:
    """The engine's data about one claim.

    :ivar position: the message in flight, None between messages.
    :ivar going: a start is scheduled.
    :ivar next: target of an operator's seek, effective once the message in flight has ended.
    """

    __slots__ = ("claim", "going", "lost", "next", "position", "releasing")

    def __init__(self, claim: Claim) -> None:
        self.claim = claim
        self.position: int | None = None
        self.going = False
        self.next: Claim | None = None
        self.releasing = False
        self.lost = False


class SimulatedEngine:
    """Implements the listener of one registration; see `qdo.coordination.protocol.claims.Listener`.

    :param run: runs ``(function, *arguments)`` in the process, now or when it runs again.
    :param lease: the lease to look at instead of the claim's own, for a mutant.
    :param sign: shows the lease to a job that waits.
    """

    def __init__(
        self,
        schedule: Schedule,
        broker: SimulatedBroker,
        checks: Checks,
        run: Callable[..., None],
        switches: Switches,
        lease: Callable[[], Lease],
        sign: StopFlag,
    ) -> None:
        self.schedule = schedule
        self.broker = broker
        self.checks = checks
        self.run = run
        self.switches = switches
        self.lease = lease
        self.sign = sign
        self.member: MemberReports | None = None
        self.worker = ""
        self.draining = False
        self.on_expired: Callable[[], None] | None = None
        self.work: dict[str, _Work] = {}

    # --- calls of the member -------------------------------------------------------------

    def claimed(self, claim: Claim) -> None:
        self.schedule.note("%s has claimed %r", self.worker, claim)
        self.checks.claimed(self.worker, claim)
        work = self.work[claim.queue] = _Work(claim)
        self._go(work, 0.002)

    def releasing(self, claim: Claim) -> None:
        self.schedule.note("%s is to release %r", self.worker, claim)
        if not self.draining:
            self.checks.check_release_wanted(self.worker, claim)
        work = self._find(claim)
        if work is None:
            return
        work.releasing = True
        if work.position is None:
            self.schedule.after(self._moment(), self.run, self._let_go, work)

    def released(self, claim: Claim) -> None:
        self.schedule.note("%s has released %r", self.worker, claim)

    def undone(self, claim: Claim) -> None:
        """Do nothing: a release follows."""

    def lost(self, claim: Claim) -> None:
        self.schedule.note("%s has lost %r", self.worker, claim)
        self.checks.lost(self.worker, claim)
        work = self._find(claim)
        if work is not None:
            if not self.switches.ignore_lost:
                work.lost = True
            self.work.pop(claim.queue, None)
            if work.position is not None:
                self.checks.dropped(work.claim)

    def decided(self, claim: Claim, decisions: Mapping[int, FailureRecord | None]) -> bool:
        """Leave decisions to `repositioned`: the model has one message in flight per queue."""
        return False

    def repositioned(self, old: Claim, new: Claim) -> None:
        self.schedule.note("%s is moved from %r to %r", self.worker, old, new)
        self.checks.repositioned(old, new)
        work = self._find(old)
        if work is None:
            return
        work.next = new
        if work.position is None:
            self._turn(work)

    def expired(self) -> None:
        if self.on_expired is not None:
            self.on_expired()

    def _find(self, claim: Claim) -> _Work | None:
        work = self.work.get(claim.queue)
        return work if work is not None and claim in (work.claim, work.next) else None

    # --- the messages -------------------------------------------------------------------

    def wake(self, queue: str) -> None:
        """Called when there are new messages in a queue."""
        work = self.work.get(queue)
        if work is not None:
            self._go(work, self._moment())

    def _moment(self) -> float:
        return 0.001 + 0.02 * self.schedule.chance()

    def _go(self, work: _Work, delay: float) -> None:
        if not work.going and work.position is None and not work.lost:
            work.going = True
            self.schedule.after(delay, self.run, self._start, work)

    def _start(self, work: _Work) -> None:
        work.going = False
        if work.lost or work.position is not None:
            return
        if work.releasing and not self.switches.keep_starting:
            return
        claim = work.claim
        lease = self.lease() if self.switches.current_lease else claim.lease
        careless = self.switches.keep_starting or self.switches.ignore_lost
        valid = self.schedule.now < lease.until or self.switches.careless_threads
        if not ((claim.open or careless) and valid):
            self._go(work, 0.4)
            return
        position = self.broker.next(claim.queue, claim.done)
        if position is None:
            return
        work.position = position
        if self.switches.waits and self.schedule.chance() > 0.8:
            message = Message(claim.queue, position, None)
            self._may_begin(message)
            wait = min(8.0, 20 * self.broker.tempo) * self.schedule.chance()
            self.schedule.after(wait, self.run, self._begin, work, message)
        else:
            self._run_job(work, position)

    def _begin(self, work: _Work, message: Message) -> None:
        """Start a job after the wait of its middleware."""
        if self._may_begin(message):
            self._run_job(work, message.position)
        elif not work.lost:
            work.position = None
            self._continue(work, 0.4)

    def _may_begin(self, message: Message) -> bool:
        with patch("qdo.message.SIGN", self.sign):
            try:
                check_lease(message)
            except NotStarted:
                return False
        return True

    def _run_job(self, work: _Work, position: int) -> None:
        self.schedule.note("%s starts %d of %r", self.worker, position, work.claim)
        self.checks.started(work.claim, position)
        chance = self.schedule.chance()
        duration = self.broker.tempo * chance * (12 if chance > 0.97 else 1)
        self.schedule.after(duration, self.run, self._end, work)

    def _end(self, work: _Work) -> None:
        if work.lost or work.position is None:
            return
        claim, position, work.position = work.claim, work.position, None
        self.schedule.note("%s ends %d of %r", self.worker, position, claim)
        self.checks.ended(claim, position)
        claim.done = position
        claim.failure = marks_behind(position, self.worker)
        if self.member is not None:
            self.member.progress(claim)
        self._continue(work, 0.0005)

    def _continue(self, work: _Work, delay: float) -> None:
        if work.next is not None:
            self._turn(work)
        elif work.releasing:
            self._let_go(work)
        else:
            self._go(work, delay)

    def _turn(self, work: _Work) -> None:
        """Continue at the position to which an operator moved the queue."""
        if work.next is None:
            return
        work.claim, work.next = work.next, None
        self.checks.resumed(work.claim)
        if work.releasing:
            self._let_go(work)
        else:
            self._go(work, 0.001)

    def _let_go(self, work: _Work) -> None:
        if work.lost or work.position is not None or self.work.get(work.claim.queue) is not work:
            return
        self.work.pop(work.claim.queue, None)
        if self.member is not None:
            self.member.finished(work.claim)
        if self.switches.keep_starting:
            self._go(work, 0.0005)
