"""A worker process: the real machines, a modelled engine, a client with a modelled far side."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from qdo.coordination.election import Election
from qdo.coordination.layout import Layout, WorkerNode
from qdo.coordination.lease import Lease, Renewal
from qdo.coordination.machine import (
    Answer,
    Commit,
    Committed,
    Machine,
    Refused,
    Then,
    Unanswered,
)
from qdo.coordination.membership import Registration
from qdo.coordination.ownership import Ownership
from qdo.coordination.rebalancer import Rebalancer
from qdo.coordination.slots import Claim

from .checks import Broker, Checks
from .engine import Engine
from .model import Coordinator, Link
from .schedule import Schedule

UNANSWERED = Unanswered()


class Crew:
    """The machines of one registration, from the start of a session to its end."""

    def __init__(self, process: Process, session: int) -> None:
        self.process = process
        self.session = session
        self.ended = False
        self.up = True
        self.machines: list[Machine] = []
        self.watchers: dict[int, Callable[[str], None]] = {}
        self.ownership: Ownership | None = None
        self.election: Election | None = None
        self.lease = Lease(process.timeout, process.schedule.now)
        self.engine = process.new_engine()
        self.registration = Registration(
            process.layout.workers, "worker-", WorkerNode().encode(), session, self._registered
        )
        self._add(self.registration)
        self.registration.connected()

    def _add(self, machine: Machine) -> None:
        self.machines.append(machine)

        def fired(path: str) -> None:
            if not self.ended and self.up:
                machine.changed(path)

        self.watchers[id(machine)] = fired

    def _registered(self, path: str) -> None:
        process = self.process
        name = path.rpartition("/")[2]
        clock = process.clock
        self.engine.worker = name
        self.ownership = Ownership(
            process.layout,
            name,
            self.lease,
            self.engine,
            clock=clock,
            checkpoint_seconds=process.checkpoint_seconds,
            on_gone=self._gone,
        )
        self.engine.member = self
        renewal = Renewal(path, self.lease, clock=clock, on_gone=self._gone)
        rebalancer = Rebalancer(process.layout, clock=clock, resign=self._resign)
        self.election = Election(
            process.layout,
            name,
            self.session,
            clock=clock,
            on_elected=rebalancer.elected,
            on_deposed=rebalancer.deposed,
        )
        for machine in (self.ownership, renewal, self.election, rebalancer):
            self._add(machine)
            machine.connected()
        if process.draining:
            self.drain()

    def _resign(self, reason: str) -> None:
        if self.election is not None:
            self.election.resign(reason)

    def _gone(self) -> None:
        self.process.schedule.note("%s: %s finds its node gone", self.process.name, self.engine.worker)

    # --- what the engine says -----------------------------------------------------------

    def progress(self, claim: Claim) -> None:
        if self.ownership is not None:
            self.ownership.progress(claim)

    def finished(self, claim: Claim) -> None:
        if self.ownership is not None:
            self.ownership.finished(claim)

    def drain(self) -> None:
        self.engine.draining = True
        if self.election is not None:
            self.election.resign("draining", for_good=True)
        if self.ownership is not None:
            self.ownership.drain()

    # --- the session --------------------------------------------------------------------

    def connected(self) -> None:
        self.up = True
        for machine in list(self.machines):
            machine.connected()

    def suspended(self) -> None:
        self.up = False
        for machine in self.machines:
            machine.suspended()

    def expire(self) -> None:
        self.ended = True
        self.up = False
        self.lease.end()
        if self.ownership is not None:
            self.ownership.expire()
        self.engine.expired()

    # --- requests -----------------------------------------------------------------------

    def pump(self) -> None:
        """Let the machines send what they have collected."""
        now = self.process.schedule.now
        for machine in self.machines:
            if machine.due() <= now:
                machine.tick()
        for machine in self.machines:
            machine.flush()
        refused: list[Then] = []
        for machine in self.machines:
            outbox = machine.outbox
            while outbox:
                request, then = outbox.popleft()
                if not self.up:
                    refused.append(then)
                    continue
                if isinstance(request, Commit):
                    then = self._renewing(then, now)
                self.process.link.submit(request, then, self.watchers[id(machine)])
        if refused:
            self.process.schedule.after(0.0, self.process.run, self._refuse, refused)

    def _renewing(self, then: Then, sent_at: float) -> Then:
        def answered(answer: Answer) -> None:
            if isinstance(answer, (Committed, Refused)):
                self.lease.renew(sent_at)
            then(answer)

        return answered

    @staticmethod
    def _refuse(refused: list[Then]) -> None:
        for then in refused:
            then(UNANSWERED)

    def due(self) -> float:
        return min((machine.due() for machine in self.machines), default=float("inf"))


class Process:
    """One operating system process; it can be stopped, killed, and be slow to hear."""

    def __init__(
        self,
        schedule: Schedule,
        coordinator: Coordinator,
        layout: Layout,
        broker: Broker,
        checks: Checks,
        name: str,
        *,
        timeout: float,
        checkpoint_seconds: float,
    ) -> None:
        self.schedule = schedule
        self.layout = layout
        self.broker = broker
        self.checks = checks
        self.name = name
        self.timeout = timeout
        self.checkpoint_seconds = checkpoint_seconds
        self.dead = False
        self.stopped = False
        self.draining = False
        self.deafness = 0.0
        self.crew: Crew | None = None
        self.crews: list[Crew] = []
        self._inbox: deque[tuple[Callable[..., None], tuple[Any, ...]]] = deque()
        self._held: deque[tuple[Callable[..., None], tuple[Any, ...]]] = deque()
        self._tick_at = float("inf")
        self.link = Link(
            coordinator,
            name,
            timeout,
            self._receive,
            on_connected=self._connected,
            on_suspended=self._suspended,
            on_expired=self._expired,
        )
        self.link.connect()

    @property
    def alive(self) -> bool:
        return not self.dead

    def clock(self) -> float:
        return self.schedule.now

    def new_engine(self) -> Engine:
        return Engine(self.schedule, self.broker, self.checks, self.run)

    # --- running ------------------------------------------------------------------------

    def run(self, function: Callable[..., None], *arguments: Any) -> None:
        """Run something of the process's own; when stopped, after it goes on."""
        if self.dead:
            return
        if self.stopped:
            self._held.append((function, arguments))
            return
        function(*arguments)
        self.pump()

    def _receive(self, function: Callable[..., None], *arguments: Any) -> None:
        """Take what the client hands over, in order."""
        if self.dead:
            return
        self._inbox.append((function, arguments))
        if self.deafness:
            self.schedule.after(self.deafness * self.schedule.chance(), self._hear)
        else:
            self._hear()

    def _hear(self) -> None:
        if self.stopped or self.dead:
            return
        while self._inbox:
            function, arguments = self._inbox.popleft()
            function(*arguments)
        self.pump()

    def pump(self) -> None:
        """Let every registration's machines send, also those that ended; wake up in time."""
        due = float("inf")
        for crew in self.crews:
            if crew.ended:
                continue
            crew.pump()
            due = min(due, crew.due())
        if due < self._tick_at and due != float("inf"):
            self._tick_at = max(due, self.schedule.now + 0.005)
            self.schedule.at(self._tick_at, self._tick)

    def _tick(self) -> None:
        if not self.stopped:
            self._tick_at = float("inf")
            self.run(lambda: None)

    # --- the session --------------------------------------------------------------------

    def _connected(self, session: int, new: bool) -> None:
        if new:
            self.crew = Crew(self, session)
            self.crews.append(self.crew)
        elif self.crew is not None:
            self.crew.connected()

    def _suspended(self) -> None:
        if self.crew is not None:
            self.crew.suspended()

    def _expired(self) -> None:
        if self.crew is not None:
            self.crew.expire()
            self.crew = None

    # --- what befalls it ----------------------------------------------------------------

    def kill(self) -> None:
        """kill -9: nothing of it runs any more, what it has sent may arrive."""
        self.schedule.note("%s is killed", self.name)
        self.dead = True
        for crew in self.crews:
            for work in crew.engine.work.values():
                if work.position is not None:
                    self.checks.dropped(work.claim)
        self.link.die()

    def stop(self) -> None:
        """SIGSTOP."""
        if self.alive and not self.stopped:
            self.schedule.note("%s is stopped", self.name)
            self.stopped = True
            self.link.pause()

    def resume(self) -> None:
        """SIGCONT: it goes on with what it knew; its own work may come before the news."""
        if self.dead or not self.stopped:
            return
        self.schedule.note("%s goes on", self.name)
        self.stopped = False
        self._tick_at = float("inf")
        self.link.resume()
        held, self._held = self._held, deque()
        own_first = self.schedule.chance() < 0.7
        if not own_first:
            self._hear()
        for function, arguments in held:
            self.run(function, *arguments)
        if own_first:
            self.schedule.after(0.05 * self.schedule.chance(), self._hear)
        self.pump()

    def drain(self) -> None:
        """Leave in good order."""
        if self.alive and not self.draining:
            self.schedule.note("%s drains", self.name)
            self.draining = True
            if self.crew is not None:
                self.run(self.crew.drain)
            self._leave()

    def _leave(self) -> None:
        if self.dead:
            return
        crew = self.crew
        empty = crew is None or crew.ownership is None or crew.ownership.empty()
        if self.stopped or not empty:
            self.schedule.after(0.2, self._leave)
            return
        self.schedule.note("%s leaves", self.name)
        self.dead = True
        self.link.close()
