"""The pools of one worker process of a testing kit: the duty of every worker, without its loop."""

from __future__ import annotations

from typing import NamedTuple, cast

from qdo.app import App
from qdo.brokers.requests import RequestStore
from qdo.coordination.member import Member
from qdo.coordination.protocol.lease import Lease
from qdo.testing.clock import Clock
from qdo.worker.duties.duty import CurrentMember
from qdo.worker.engine.dispatcher import Dispatcher
from qdo.worker.engine.lane import LanePermits
from qdo.worker.engine.pauses import PauseGate
from qdo.worker.pools.duty import PoolDuty

JOIN_SECONDS = 10.0
"""How long greenlets may take to store ends of requests in memory."""
SLACK_SECONDS = 1e-6
"""Tolerance: a Unix time as a float has an error of less."""


class KitRegistration(NamedTuple):
    """A member, as far as pools need one."""

    name: str
    lease: Lease


class KitPools:
    """Takes requests, and gives back what earlier processes had."""

    def __init__(
        self,
        app: App,
        store: RequestStore,
        clock: Clock,
        registration: KitRegistration,
        parts: tuple[Dispatcher, PauseGate, LanePermits],
    ) -> None:
        self._store = store
        self._clock = clock
        self._current = CurrentMember(cast(Member, registration))
        self._duty = PoolDuty(
            app, store, *parts, lambda pool: True, self._current, lambda: clock.now
        )
        for owner in store.owners():  # as the leader does for workers that are gone
            store.give_back(owner)
        self._woken, self._heard_at = True, 0.0
        self.unlisten = store.listen(self._wake)

    def _wake(self) -> None:
        self._woken = True

    def hear(self) -> None:
        """Claim new pools, and wake those whose requests may be taken, or were marked."""
        now = self._clock.now + SLACK_SECONDS
        if self._woken or self._duty.due(self._heard_at) <= now:
            self._woken, self._heard_at = False, now
            self._duty.step(at_once=True)  # the time may stand still

    def due(self) -> float:
        """Return the time on the clock when a request becomes due; `inf` for never."""
        return self._clock.passed_at(self._duty.due(self._heard_at))

    def is_paused(self, request: str) -> bool:
        """Return whether a request waits for another job to resume or cancel it."""
        found = self._store.find(request, whole=False)
        return found is not None and found.asks

    def store_ends(self) -> None:
        """Let the greenlets run that store how requests ended."""
        self._duty.join(JOIN_SECONDS)

    def lose(self) -> None:
        """Drop the claims: the session has ended."""
        self._current.member = None
        self._duty.step()

    def drain(self) -> None:
        """Put back what was not started."""
        self._duty.drain()
        self.store_ends()
