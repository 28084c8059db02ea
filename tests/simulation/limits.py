"""Jobs of a registration that need permits of one limit, and the checks of what they use."""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from typing import TYPE_CHECKING

from qdo.coordination.protocol.machine import Created, CreateOp, SetOp
from qdo.coordination.znodes.layout import clients_of
from qdo.fleet.limit_node import LimitNode
from qdo.fleet.shares import LimitShare
from tests.simulation.coordinator import Coordinator, LogEntry
from tests.simulation.invariants import OPERATOR, Violation

if TYPE_CHECKING:
    from qdo.coordination.znodes.layout import Layout
    from tests.simulation.registration import SimulatedMember

LIMIT = "crm"
RETIRES, RETIRED_SECONDS = 0.05, 20.0
"""How often a caller stays away for so long that others need what it wanted."""


class SimulatedJobs:
    """Callers of one registration: each waits for a permit, uses it, and comes again."""

    def __init__(self, member: SimulatedMember, worker: str, book: LimitBook) -> None:
        schedule = member.schedule
        self.member = member
        self.worker = book.holder(member, worker)
        self.lease = member.lease
        self.served_at: dict[int, float] = {}
        self._book = book
        self._run = member.process.run
        self._schedule = schedule
        self._waiting: deque[int] = deque()
        self._eager = schedule.chance() < 0.5
        self.share = LimitShare(
            book.layout,
            LIMIT,
            self.worker,
            self.lease,
            clock=lambda: schedule.now,
            on_change=self.serve,
            chance=schedule.chance,
        )
        book.jobs.append(self)
        for caller in range(schedule.random.choice((1, 1, 2, 4))):
            self.served_at[caller] = schedule.now
            schedule.after(schedule.chance(), self._run, self._wait, caller)

    @property
    def in_force(self) -> bool:
        """Whether permits in use count: the process lives and the lease is valid."""
        return self.member.process.alive and self._schedule.now < self.lease.until

    def _wait(self, caller: int) -> None:
        self.served_at[caller] = min(self.served_at[caller], self._schedule.now)
        self._waiting.append(caller)
        self.serve()

    def serve(self) -> None:
        """Serve those who wait, first come, first served."""
        while self._waiting and self.share.has_free():
            caller = self._waiting.popleft()
            self.share.take()
            self.served_at[caller] = self._schedule.now
            if self._schedule.now >= self.lease.until:
                raise Violation("L3", f"{self.worker} takes a permit without a lease")
            self._book.check_use(self)
            self._schedule.after(
                0.02 + 0.4 * self._schedule.chance() ** 3, self._run, self._end, caller
            )
        if self.share.wait(len(self._waiting)):
            self.member.call(lambda: None)

    def _end(self, caller: int) -> None:
        if self.share.give_back():
            self.member.call(lambda: None)
        pauses = not self._eager and self._schedule.chance() < 0.3
        pause = 3.0 * self._schedule.chance() if pauses else 0.0
        if self._book.retiring and self._schedule.chance() < RETIRES:
            pause = RETIRED_SECONDS
            self.served_at[caller] = float("inf")
        self._schedule.after(pause + 0.001, self._run, self._wait, caller)
        self.serve()


class LimitBook:
    """The limit of a world: its node, its users, and what must hold of them.

    :ivar retiring: callers stay away for long.
    """

    def __init__(self, coordinator: Coordinator, layout: Layout) -> None:
        self.layout = layout
        self.jobs: list[SimulatedJobs] = []
        self.healed_at = float("inf")
        self.retiring = coordinator.schedule.chance() < 0.5
        self._coordinator = coordinator
        self._random = coordinator.schedule.random
        self._path = layout.fleet.limit(LIMIT)
        coordinator.ensure([layout.fleet.limits, layout.components, clients_of(layout.root)])
        most = self._random.choice((1, 1, 2, 3, 5))
        coordinator.commit(OPERATOR, (CreateOp(self._path, LimitNode(max=most).encode()),))
        coordinator.observers.append(self._committed)

    def holder(self, member: SimulatedMember, worker: str) -> str:
        """Return the holder's name for a registration: half of them hold permits as clients."""
        session = member.link.session
        if session is None or session.closed_time is not None or self._random.random() < 0.5:
            return worker
        prefix = f"{clients_of(self.layout.root)}/host-"
        created = self._coordinator.create_sequential(session.id, prefix, b"")
        assert isinstance(created, Created)
        return created.path.removeprefix(f"{self.layout.components}/")

    def node(self) -> LimitNode:
        """Return the limit as it is."""
        node = self._coordinator.node(self._path)
        return LimitNode.parse(b"" if node is None else node.data)

    def change_max(self, least: int = 0) -> None:
        """Let an operator set another `max`, at the version of now."""
        node = self._coordinator.node(self._path)
        assert node is not None
        after = replace(LimitNode.parse(node.data), max=self._random.randint(least, 5))
        self._coordinator.commit(OPERATOR, (SetOp(self._path, after.encode(), node.version),))

    def heal(self) -> None:
        """Expect from now on that every process is served."""
        self.change_max(least=1)
        self.healed_at = self._coordinator.schedule.now

    def _committed(self, entry: LogEntry) -> None:
        for path, before, after in entry.changes:
            if path == self._path and before is not None and after is not None:
                self._check_shares(LimitNode.parse(before.data), LimitNode.parse(after.data))
                for jobs in self.jobs:
                    self.check_use(jobs)

    def _check_shares(self, before: LimitNode, after: LimitNode) -> None:
        was, held = (sum(each.held for each in node.permits) for node in (before, after))
        if held > (after.max or 0) and held > was:
            raise Violation("L1", f"shares of {held} with max {after.max}: {after.permits}")

    def check_use(self, jobs: SimulatedJobs) -> None:
        """Require that a registration whose lease is valid uses no more than its share."""
        if not jobs.in_force:
            return
        shares = (each.held for each in self.node().permits if each.worker == jobs.worker)
        share, in_use = next(shares, 0), jobs.share.permits.in_use
        if in_use > share:
            raise Violation("L2", f"{jobs.worker} uses {in_use} and holds {share}")

    def check_served(self) -> None:
        """Require that every process was served since the world healed."""
        for jobs in self.jobs:
            if jobs.in_force and jobs.member.is_running:
                for caller, at in jobs.served_at.items():
                    if at < self.healed_at:
                        raise Violation("L4", f"caller {caller} of {jobs.worker} waits since {at}")
