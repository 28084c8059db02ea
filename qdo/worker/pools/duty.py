"""The duty "pools" lets a registered worker take requests.

A registration claims every pool that has a job in this app. A claim of a pool writes no node, so
any number of workers may claim the same pool. Worker names are never reused, so a worker owns its
taken requests while its node exists; see `returner`.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Mapping
from functools import partial
from math import inf

import gevent
from gevent.event import Event

from qdo.app import App
from qdo.brokers.request_store import RequestStore
from qdo.coordination.member import Member
from qdo.coordination.protocol.claims import Claim
from qdo.errors import QdoError
from qdo.queues import is_glob
from qdo.system.clock import clock
from qdo.system.home_loop import LoopMailbox
from qdo.text import describe
from qdo.worker.duties.duty import CurrentMember, Duty
from qdo.worker.engine.dispatcher import Dispatcher
from qdo.worker.engine.lane import LanePermits
from qdo.worker.engine.pauses import PauseGate
from qdo.worker.pools.subscription import MARKS_SECONDS, PoolSubscription

_log = logging.getLogger(__name__)

# Maximum seconds between two looks. A sender may die before it wakes workers.
LOOK_SECONDS = 1.0
# Minimum seconds between two looks of an idle worker.
IDLE_SECONDS = 0.02
# Maximum seconds of a random pause before a look, so that woken workers do not compete for one
# lock.
SPREAD_SECONDS = 0.002
# Duration of a look, in seconds, above which the next look waits ten times this duration, at most a
# second.
SLOW_SECONDS = 0.05
# Seconds without requests after which a worker forgets a pool that it found by a glob.
FORGET_SECONDS = 60.0


class PoolDuty(Duty):
    """Claims pools, and wakes pools that have waiting requests.

    :param takes: returns whether the settings of this worker let it take a pool.
    """

    name = "pools"
    ends_at_drain = False

    def __init__(
        self,
        app: App,
        store: RequestStore,
        dispatcher: Dispatcher,
        gate: PauseGate,
        permits: LanePermits,
        takes: Callable[[str], bool],
        current: CurrentMember,
        now: Callable[[], float] = time.time,
    ) -> None:
        self.quiet = False
        self._app = app
        self._store = store
        self._dispatcher = dispatcher
        self._gate = gate
        self._permits = permits
        self._takes = takes
        self._current = current
        self._now = now
        globs = [job.queues for job in app.jobs if job.pool]
        self._named = {glob for glob in globs if not is_glob(glob)}
        self._has_globs = any(map(is_glob, globs))
        self._member: Member | None = None
        self._claims: dict[str, tuple[PoolSubscription, Claim]] = {}
        self._found: Mapping[str, float] = {}
        self._look_at = 0.0
        self._woken = Event()
        self._draining = False

    def run(self) -> None:
        mailbox = LoopMailbox()
        try:
            stop_listening = self._store.listen(lambda: mailbox.post(self._woken.set))
            try:
                while True:  # also in a drain, because senders may cancel running requests
                    taken = self._taken()
                    began = clock()
                    self._woken.wait(self._step_or_warn())
                    # Look again at once if a pool is busy. Looking at an idle pool after each wake
                    # would cost a statement for each request.
                    idle = 0.0 if self._taken() > taken else began + IDLE_SECONDS - clock()
                    gevent.sleep(max(0.0, idle) + random.uniform(0, SPREAD_SECONDS))
                    # Clear after the pause, because the next look answers all earlier wakes.
                    self._woken.clear()
            finally:
                stop_listening()
        finally:
            mailbox.close()

    def _taken(self) -> int:
        return sum(own.taken for own, _ in self._claims.values())

    def _step_or_warn(self) -> float:
        try:
            return self.step()
        except Exception as error:  # noqa: BLE001 - brokers raise what their libraries raise
            _warn("requests", error)
            return LOOK_SECONDS

    def step(self, at_once: bool = False) -> float:
        """Claim pools and take waiting requests; return the seconds until the next step.

        :param at_once: look for cancellation marks now, even directly after the last look.
        """
        member = self._current.member
        if member is not self._member:
            self._lose()
            self._member = member
        if member is None:
            return LOOK_SECONDS
        due = self._look(member, at_once)
        for pool in sorted(filter(self._is_mine, (self._named | due.keys()) - self._claims.keys())):
            self._claim(member, pool)
        # Use the result of the last look, because the next look has not begun.
        self.quiet = all(own.at_tip() for own, _ in self._claims.values())
        ready = []
        for pool, (own, _) in list(self._claims.items()):
            try:
                if own.look(due.get(pool), at_once):
                    ready.append(pool)
            except Exception as error:  # noqa: BLE001 - brokers raise anything; continue
                _warn(f"requests of pool {pool}", error)
        self._forget()
        self._dispatcher.wake(ready)
        busy = any(own.running for own, _ in self._claims.values())
        now = self._now()
        return min(MARKS_SECONDS if busy else LOOK_SECONDS, self.due(now) - now)

    def _look(self, member: Member, at_once: bool) -> Mapping[str, float]:
        """Return the due time of the next request of each pool, by one statement for all pools."""
        if not self._has_globs and len(self._named) == 1:
            return dict.fromkeys(self._named, 0.0)  # with one pool, a take reveals its due time
        began = clock()
        if at_once or began >= self._look_at:
            running = [id for own, _ in self._claims.values() for id in own.running]
            self._found = self._store.due(member.name, running)
            spent = clock() - began
            self._look_at = began + min(LOOK_SECONDS, 10 * spent if spent > SLOW_SECONDS else 0.0)
        return self._found

    def _forget(self) -> None:
        """Drop claims of globbed pools that have had no requests for `FORGET_SECONDS`."""
        for pool in self._claims.keys() - self._named:
            own, claim = self._claims[pool]
            if own.idle_seconds > FORGET_SECONDS:
                del self._claims[pool]
                claim.close()
                self._dispatcher.releasing(own, claim)

    def due(self, after: float) -> float:
        """Return the due time of the first request after a Unix time; `inf` without a request."""
        dues = [own.next_due for own, _ in self._claims.values()]
        return min((due for due in dues if due is not None and due > after), default=inf)

    def _is_mine(self, pool: str) -> bool:
        job = self._app.job_for(pool)
        return job is not None and job.pool and self._takes(pool) and not self._draining

    def _claim(self, member: Member, pool: str) -> None:
        job = self._app.job_for(pool)
        if job is None:
            return
        lanes = job.lanes
        one_by_one = bool(job.limits or job.per_queue_rate)

        def seats(seated: int) -> int:
            """Return the number of free seats; with limits, at most 1."""
            return min(lanes - seated, 1 if one_by_one else max(1, self._permits.free))

        number = int(member.name.rpartition("-")[2])
        own = PoolSubscription(
            self._app,
            self._store,
            pool,
            member.name,
            seats,
            wake=partial(self._dispatcher.wake, [pool]),
            now=self._now,
            turn=number,
        )
        claim = Claim(pool, number + 1, 0, member.lease)
        self._claims[pool] = own, claim
        self._gate.admit(claim)
        self._dispatcher.claimed(own, claim)

    def _lose(self) -> None:
        """Drop the claims of an ended registration."""
        # The leader puts back the requests of the old worker name, which is never reused.
        claims = list(self._claims.values())
        self._claims.clear()
        for _, claim in claims:
            self._dispatcher.lost(claim)

    def drain(self) -> None:
        """Take no more requests. Running requests finish."""
        self._draining = True
        for own, claim in list(self._claims.values()):
            claim.close()
            self._dispatcher.releasing(own, claim)

    def join(self, seconds: float) -> None:
        """Wait until the requests that have not started are back in their pools."""
        for own, _ in list(self._claims.values()):  # a session may end during the wait
            own.join(seconds)


def _warn(what: str, error: Exception) -> None:
    unknown = not isinstance(error, QdoError)
    text = "cannot look for %s, retrying in %g s: %s"
    _log.warning(text, what, LOOK_SECONDS, describe(error), exc_info=unknown)
