"""The real member and its machines on a modeled link, with a modeled engine."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, cast

from kazoo.protocol.states import KazooState

from qdo.coordination.client import Client
from qdo.coordination.kazoo_driver import KazooDriver
from qdo.coordination.member import Member
from qdo.coordination.protocol.lease import Lease
from qdo.coordination.protocol.machine import Machine
from qdo.coordination.protocol.ownership import MemberOptions
from tests.simulation.client import LinkClient, LinkPerformer
from tests.simulation.engine import SimulatedEngine
from tests.simulation.limits import SimulatedJobs
from tests.simulation.network import Link

if TYPE_CHECKING:
    from tests.simulation.process import SimulatedProcess


class SimulatedMember(Member):
    """The real member on a modeled link; it registers without waiting."""

    def __init__(self, process: SimulatedProcess) -> None:
        self.schedule = process.schedule
        self.engine = SimulatedEngine(
            process.schedule,
            process.broker,
            process.checks,
            process.run,
            process.switches,
            lambda: process.member.lease if process.member.is_running else self.lease,
            process.sign,
        )
        self.engine.on_expired = process.renew
        self.wake = process.wake
        self.process = process
        self.client = LinkClient(process.wake)
        super().__init__(
            cast(Client, self.client),
            process.layout,
            self.engine,
            component={},
            make_machines=self._further_machines,
            options=MemberOptions(
                checkpoint_seconds=process.checkpoint_seconds, filter=process.takes
            ),
        )
        self.link = Link(
            process.coordinator,
            process.name,
            process.timeout,
            process.receive,
            on_connected=self._on_connected,
            on_suspended=partial(self._state_changed, KazooState.SUSPENDED),
            on_expired=partial(self._state_changed, KazooState.LOST),
        )
        self.client.lose = self.link.lose
        self._loop.driver = cast(KazooDriver, LinkPerformer(self.link, self._loop.put))
        self.link.connect()

    def _on_connected(self, session: int, new: bool, heard_at: float) -> None:
        self.client.client_id = (session, b"")
        self.client.negotiated_timeout_seconds = self.link.timeout
        self.client.heard_at = heard_at
        if new and not self._loop.machines and not self._ended.is_set():
            self._begin(session, heard_at)
        self._state_changed(KazooState.CONNECTED)

    def _begin(self, session: int, heard_at: float) -> None:
        self._loop.lease = Lease(self.link.timeout, heard_at)
        self._loop.machines = [self._registration(session)]
        self._loop.running = True

    def _worker_registered(self, path: str) -> None:
        self.engine.worker = path.rpartition("/")[2]
        self.engine.member = self
        super()._worker_registered(path)
        self.process.sign.begin_lease()
        self.lease.on_moved = self._lease_moved
        self._lease_moved(self.lease.until)

    def _lease_moved(self, until: float) -> None:
        if self.process.member is self:
            self.process.sign.move_lease(until)

    def _further_machines(self, member: Member) -> Sequence[Machine]:
        made: list[Machine] = []
        if self.process.limits is not None:
            made.append(SimulatedJobs(self, member.name, self.process.limits).share)
        if self.process.actions is not None:
            made.append(self.process.actions.join(self, member.name))
        return made

    def stop(self) -> None:
        """End the session."""
        self._leaving = True
        self._end()
        self.link.close()

    @property
    def is_running(self) -> bool:
        return self._loop.running

    @property
    def is_released(self) -> bool:
        return not self._loop.running or self._released.is_set()

    def drain(self) -> None:
        self.engine.draining = True
        super().drain()

    def step(self) -> None:
        """Run the loop once."""
        self._loop.step(0.0)

    def wanted_at(self) -> float:
        """Return when the loop wants to run again without any event."""
        wait = self._loop.wait_seconds() if self._loop.running else None
        return float("inf") if wait is None else self.schedule.now + wait
