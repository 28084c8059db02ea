"""The real member and its machines on a modelled link, with a modelled engine."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, cast

from kazoo.protocol.states import KazooState

from qdo.coordination.client import Client
from qdo.coordination.layout import WORKER_STEM, WorkerNode
from qdo.coordination.lease import Lease
from qdo.coordination.member import Member
from qdo.coordination.membership import Registration
from qdo.coordination.performer import Performer
from tests.simulation.client import LinkClient, LinkPerformer
from tests.simulation.engine import Engine
from tests.simulation.link import Link

if TYPE_CHECKING:
    from tests.simulation.process import Process


class SimulatedMember(Member):
    """The real member on a link; it registers without waiting."""

    def __init__(self, process: Process) -> None:
        self.schedule = process.schedule
        self.engine = Engine(
            process.schedule,
            process.broker,
            process.checks,
            process.run,
            process.switches,
            lambda: process.member.lease if process.member.is_running else self.lease,
        )
        self.engine.on_expired = process.renew
        self.wake = process.wake
        self.client = LinkClient(process.wake)
        super().__init__(
            cast(Client, self.client),
            process.layout,
            self.engine,
            component={},
            checkpoint_seconds=process.checkpoint_seconds,
            takes=process.takes,
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
        self._performer = cast(Performer, LinkPerformer(self.link, self._put))
        self.link.connect()

    def _on_connected(self, session: int, new: bool, heard_at: float) -> None:
        self.client.client_id = (session, b"")
        self.client.negotiated_timeout_seconds = self.link.timeout
        self.client.heard_at = heard_at
        if new and not self._machines and not self._ended.is_set():
            self._begin(session, heard_at)
        self._state_changed(KazooState.CONNECTED)

    def _begin(self, session: int, heard_at: float) -> None:
        self._lease = Lease(self.link.timeout, heard_at)
        registration = Registration(
            self._layout.workers,
            WORKER_STEM,
            WorkerNode(takes=self._takes).encode(),
            session,
            self._worker_registered,
        )
        self._machines = [registration]
        self._running = True

    def _worker_registered(self, path: str) -> None:
        self.engine.worker = path.rpartition("/")[2]
        self.engine.member = self
        super()._worker_registered(path)

    def stop(self) -> None:
        """End the session."""
        self._leaving = True
        self._end()
        self.link.close()

    @property
    def is_running(self) -> bool:
        return self._running

    @property
    def is_released(self) -> bool:
        return not self._running or self._released.is_set()

    def drain(self) -> None:
        self.engine.draining = True
        super().drain()

    def wanted_at(self) -> float:
        """Return when the loop wants to run again without any event."""
        wait = self._wait_seconds() if self._running else None
        return float("inf") if wait is None else self.schedule.now + wait
