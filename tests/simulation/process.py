"""A worker process: it can be stopped, killed, and slow to react."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from qdo.coordination.znodes.layout import Layout
from qdo.queues import EVERYTHING, QueueFilter
from qdo.system.processes import StopFlag
from tests.simulation.broker import SimulatedBroker
from tests.simulation.coordinator import Coordinator
from tests.simulation.fleet.actions import ActionBook
from tests.simulation.invariants import Checks, Violation
from tests.simulation.limits import LimitBook
from tests.simulation.network import Link
from tests.simulation.registration import SimulatedMember
from tests.simulation.schedule import Schedule
from tests.simulation.switches import Switches

SPINS = 20
"""Turns of the loop in a row after which something is due at once."""


class SimulatedProcess:
    """One operating system process; it can be stopped, killed, and slow to react.

    :ivar deafness: how many seconds its coordination loop may be late.
    :ivar blocked: a job blocks its loop; its job threads still start what they were given.
    """

    def __init__(
        self,
        schedule: Schedule,
        coordinator: Coordinator,
        layout: Layout,
        broker: SimulatedBroker,
        checks: Checks,
        name: str,
        *,
        timeout: float,
        checkpoint_seconds: float,
        switches: Switches,
        takes: QueueFilter = EVERYTHING,
        limits: LimitBook | None = None,
        actions: ActionBook | None = None,
    ) -> None:
        self.schedule = schedule
        self.coordinator = coordinator
        self.layout = layout
        self.broker = broker
        self.checks = checks
        self.name = name
        self.timeout = timeout
        self.checkpoint_seconds = checkpoint_seconds
        self.switches = switches
        self.takes = takes
        self.limits = limits
        self.actions = actions
        self.dead = False
        self.stopped = False
        self.blocked = False
        self.draining = False
        self.deafness = 0.0
        self.sign = StopFlag()
        self._held: deque[tuple[Callable[..., None], tuple[Any, ...]]] = deque()
        self._inbox: deque[tuple[Callable[..., None], tuple[Any, ...]]] = deque()
        self._wake_at = float("inf")
        self._spins = 0
        self.members: list[SimulatedMember] = []
        self.member = self._new_member()

    def _new_member(self) -> SimulatedMember:
        member = SimulatedMember(self)
        self.members.append(member)
        return member

    @property
    def alive(self) -> bool:
        return not self.dead

    @property
    def link(self) -> Link:
        return self.member.link

    # --- running ------------------------------------------------------------------------

    def run(self, function: Callable[..., None], *arguments: Any) -> None:
        """Run a function of the process; a stopped process runs it after it resumes."""
        starts = self.blocked and getattr(function, "__name__", "") in ("_start", "_begin")
        if self.stopped and not (starts and self.schedule.chance() < 0.5):
            self._held.append((function, arguments))
        elif not self.dead:
            function(*arguments)

    def receive(self, function: Callable[..., None], *arguments: Any) -> None:
        """Queue a call of the client; calls are handled in this order."""
        if self.stopped or self._inbox:
            self._inbox.append((function, arguments))
        elif not self.dead:
            function(*arguments)

    def _hear(self) -> None:
        if self.stopped or self.dead or not self._inbox:
            return
        function, arguments = self._inbox.popleft()
        function(*arguments)
        self.schedule.after(0.002 * self.schedule.chance(), self._hear)

    def wake(self) -> None:
        """Let the coordination loop run soon."""
        delay = 0.001
        if self.deafness:
            delay += self.deafness * self.schedule.chance()
        self._wake(self.schedule.now + delay)

    def _wake(self, when: float) -> None:
        if when < self._wake_at:
            self._wake_at = when
            self.schedule.at(when, self._step, when)

    def _step(self, when: float) -> None:
        """Run the coordination loop once, unless an earlier wake-up has done it."""
        if when != self._wake_at or self.dead:
            return
        self._wake_at = float("inf")
        if self.stopped:
            self._held.append((self.wake, ()))
            return
        self.member.step()
        wanted = self.member.wanted_at()
        self._spins = self._spins + 1 if wanted <= self.schedule.now else 0
        if self._spins > SPINS:
            raise Violation("spin", f"the loop of {self.member.name} does not come to rest")
        if wanted != float("inf"):
            self._wake(max(wanted, self.schedule.now + 0.005))

    def renew(self) -> None:
        """Make another registration with a new client: the old one is over."""
        if self.dead:
            return
        self.schedule.note("%s registers again", self.name)
        old = self.member
        self.member = self._new_member()
        self.schedule.after(0.05 * self.schedule.chance(), self.run, old.stop)
        if self.draining:
            self.member.drain()

    # --- faults -------------------------------------------------------------------------

    def kill(self) -> None:
        """kill -9: its code no longer runs; its sent requests may arrive."""
        self.schedule.note("%s is killed", self.name)
        self._die()
        for member in self.members:
            member.link.die()

    def _die(self) -> None:
        self.dead = True
        for member in self.members:
            for work in member.engine.work.values():
                if work.position is not None:
                    self.checks.dropped(work.claim)

    def stop(self) -> None:
        """SIGSTOP."""
        if self.alive and not self.stopped:
            self.schedule.note("%s is stopped", self.name)
            self.stopped = True
            for member in self.members:
                member.link.pause()

    def block(self) -> None:
        """Let a job block the event loop, until `resume`."""
        if self.alive and not self.stopped:
            self.schedule.note("%s is blocked by a job", self.name)
            self.stop()
            self.blocked = True

    def resume(self) -> None:
        """SIGCONT: it resumes with its old knowledge, in no certain order."""
        if self.dead or not self.stopped:
            return
        self.schedule.note("%s resumes", self.name)
        self.stopped = self.blocked = False
        held, self._held = self._held, deque()
        for member in self.members:
            member.link.resume()
        gap = 0.0
        for function, arguments in held:
            gap += 0.002 * self.schedule.chance()
            self.schedule.after(gap, self.run, function, *arguments)
        self.schedule.after((0.01 + self.deafness) * self.schedule.chance(), self._hear)
        self.wake()

    def drain(self) -> None:
        """Drain, then leave."""
        if self.alive and not self.draining:
            self.schedule.note("%s drains", self.name)
            self.draining = True
            self.run(self.member.drain)
            self._leave()

    def _leave(self) -> None:
        if self.dead:
            return
        if self.stopped or not self.member.is_released:
            self.schedule.after(0.2, self._leave)
            return
        self.schedule.note("%s leaves", self.name)
        self._die()
        for member in self.members:
            member.link.close()
