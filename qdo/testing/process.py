"""One worker process of a testing kit, which runs the engine of a worker step by step.

The process uses the dispatcher, pipeline, outcomes and policies of a worker. A list of calls
replaces the greenlets, and memory replaces the broker and the coordinator. Fault points are between
the steps, not in the engine.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, NoReturn, cast

from qdo.app import App
from qdo.brokers.request_store import RequestStore
from qdo.coordination.member import Member
from qdo.coordination.protocol.claims import Claim, QueueState
from qdo.coordination.protocol.claims import OwnedQueue as Owned
from qdo.coordination.protocol.lease import Lease
from qdo.coordination.znodes.queue_node import CancelOutcome, QueueNode
from qdo.errors import NotSettledError, UsageError
from qdo.jobs.job import check_policies
from qdo.message import Message
from qdo.outcomes import Event
from qdo.settings.live import SettingsInForce
from qdo.testing.clock import Clock
from qdo.testing.faults import Crashed, FaultyBroker, InstrumentedApp, Point
from qdo.testing.inline_executor import InlineExecutor
from qdo.testing.state import State
from qdo.worker import shared_memory as hands
from qdo.worker.duties.duty import CurrentMember
from qdo.worker.duties.streams import ShardOpener
from qdo.worker.engine.context import Engine
from qdo.worker.engine.dispatcher import Dispatcher, Loop
from qdo.worker.engine.lane import LanePermits
from qdo.worker.engine.pauses import PauseGate
from qdo.worker.engine.pipeline import Pipeline
from qdo.worker.pools.duty import PoolDuty

# Duration of a lease, which ends only when the test ends it.
LEASE_SECONDS = 1e9
# Maximum time for greenlets to store the ends of requests in memory.
JOIN_SECONDS = 10.0
# Tolerance, which exceeds the error of a Unix time as a float.
SLACK_SECONDS = 1e-6
NEVER_RESUMED = (
    "waits in `pause`, and no job resumes it; in a TestKit, a job must do so, for instance that of"
    " its queue `then`, with events=True"
)
GIVE_UP = (
    "check for a job that always sends another message or retries immediately, or allow more with "
    "most_attempts="
)


class KitRegistration(NamedTuple):
    """The part of a coordinator member that pools need."""

    name: str
    lease: Lease


class KitPools:
    """Takes requests, and releases the requests of earlier processes."""

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
        for owner in store.owners():  # the leader does this for lost workers
            store.give_back(owner)
        self._woken = True
        self._heard_at = 0.0
        self.unlisten = store.listen(self._wake)

    def _wake(self) -> None:
        self._woken = True

    def hear(self) -> None:
        """Claim new pools, and wake pools that have available or marked requests."""
        now = self._clock.now + SLACK_SECONDS
        if self._woken or self._duty.due(self._heard_at) <= now:
            self._woken = False
            self._heard_at = now
            self._duty.step(at_once=True)  # the clock may not move

    def due(self) -> float:
        return self._clock.passed_at(self._duty.due(self._heard_at))

    def is_paused(self, request: str) -> bool:
        found = self._store.find(request, whole=False)
        return found is not None and found.asks

    def store_ends(self) -> None:
        """Wait for the greenlets that store the ends of requests."""
        self._duty.join(JOIN_SECONDS)

    def lose(self) -> None:
        """Drop the claims, because the session has ended."""
        self._current.member = None
        self._duty.step()

    def drain(self) -> None:
        """Return the requests that were not started."""
        self._duty.drain()
        self.store_ends()


class Process:
    """A worker process. In place of a coordinator member, it receives the engine's reports.

    :ivar alive: False after the test has killed the process. Actions of a dead process have no
        effect.
    :ivar stopping: reason why the process releases its queues, or None.
    :ivar running: whether the process is on the stack, so that a job may be running.
    """

    is_pool = False

    def __init__(self, world: State) -> None:
        settings = world.settings
        self.clock = world.clock
        self.name = f"worker-{next(world.numbers):010d}"
        self.alive = True
        self.running = False
        self.stopping: str | None = None
        self._world = world
        self._lease = Lease(LEASE_SECONDS, self.clock.passed())
        self._owned: dict[str, Owned] = {}
        self._fences: dict[str, int] = {}
        self._began: dict[tuple[str, int], tuple[float, Any]] = {}
        self._dirty: dict[str, Claim] = {}
        self._news: set[str] = set()
        self._spawned: deque[Callable[[], None]] = deque()
        self._fault: Exception | None = None
        check_policies(world.app.jobs, settings.policies, settings.default_policy)
        self._executor = InlineExecutor(self.clock, self._starting, self.reach, settings.executor)
        world.app.hooks.wait = self._executor.wait
        self._manager = world.app.hooks.job_context()
        context = self._manager.__enter__()
        self._memory = hands.make_memory()
        self._broker = FaultyBroker(world.store, world.app.name, self.reach)
        engine = Engine.build(
            cast(App, InstrumentedApp(world.app, self.reach, self._ended)),
            self._broker,
            self._executor,
            SettingsInForce(settings),
            in_flight=hands.InFlightTable(2 * settings.concurrency, self._memory),
            on_stop=self._stop,
            clock=self.clock.passed,
            jitter=world.chance,
            context=context,
        )
        self._pipeline = Pipeline(engine)
        self._limits = world.limits.shares(world.app.jobs)
        engine.limits.use(self._limits)
        self._dispatcher = Dispatcher(
            self._pipeline,
            concurrency=1,
            loop=Loop(self._spawned.append, self._between_turns, clock=self.clock.passed),
        )
        self.gate = PauseGate(self._dispatcher)
        self.gate.apply(world.pauses.pauses)
        parts = self._dispatcher, self.gate, self._pipeline.permits
        member = KitRegistration(self.name, self._lease)
        self._pools = KitPools(world.app, self._broker.requests, self.clock, member, parts)
        self._opener = ShardOpener(self._broker.streams)
        self._stop_listening = self._broker.listen(self._woken)
        self._woken(self._broker.catalog.names())

    def run(self) -> None:
        """Run turns until no queue is ready or this process ends (see `TestKit.run_until_idle`)."""
        self.running = True
        self._pipeline.limits.changed()
        try:
            while self.alive and self.stopping is None and self._step():
                pass
        except Crashed:
            self._spawned.clear()
        finally:
            self.running = False
        if self._fault is not None:
            raise self._fault

    def _step(self) -> bool:
        """Make the next call of the list, or open shards; return False without work."""
        self._hear()
        self._dispatcher.tick()
        if self._spawned:
            self._spawned.popleft()()
            return True
        opened = self._opener.step(self._world.record.read_queues)
        self._woken(opened)
        return bool(opened)

    def paused(self, request: str) -> None:
        """Run other jobs until one of them resumes or cancels a paused request."""
        while self._pools.is_paused(request):
            if not self._step():
                self.fail(UsageError(reason=f"request {request!r} {NEVER_RESUMED}"))

    def due(self) -> float:
        """Return the time on the clock at which a waiting queue resumes, or `inf`."""
        slots = self._dispatcher.slots.values()
        starts = min([self._pools.due(), *(share.due() for share in self._limits.values())])
        if not any(slot.waits_for_key for slot in slots):
            return min(starts, self._dispatcher.due())
        # Ignore queues that wait for a key, because waiting does not add the key.
        return min([starts, *(slot.alarm for slot in slots if not slot.waits_for_key)])

    def spend(self, seconds: float) -> None:
        """Let time pass within the running job, and record the progress of turns."""
        self._executor.spend(seconds)
        if seconds >= self._world.settings.checkpoint_seconds:
            self._dispatcher.note_progress()
            self._checkpoint()

    def fail(self, fault: Exception) -> NoReturn:
        """End the run with an error for the test, not for the job."""
        self._fault = fault
        self.alive = False
        raise Crashed

    def reach(self, point: Point, queue: str) -> None:
        """Pass a fault point, or raise `Crashed` if this process is dead."""
        if self.alive:
            self._world.faults.reach(point, queue)
        if not self.alive:
            raise Crashed

    def _starting(self, message: Message) -> None:
        world = self._world
        self._began[message.queue, message.position] = self.clock.passed(), message.body
        if not world.left:
            self.fail(
                NotSettledError(
                    goal=f"become idle within {world.most} attempts",
                    waiting=world.busiest(),
                    remedy=GIVE_UP,
                )
            )
        world.left -= 1

    def _ended(self, event: Event) -> None:
        now = self.clock.passed()
        began, body = self._began.pop((event.queue, event.position), (now, None))
        self._world.note(event, self._fences.get(event.queue, 0), now - began, body)
        slot = self._dispatcher.slots.get(event.queue)
        if event.queue in self._news and slot is not None and slot.lanes is not None:
            slot.lanes.wake()  # the next message may be more urgent

    def _woken(self, queues: Iterable[str]) -> None:
        self._news.update(queues)

    def _unlisten(self) -> None:
        self._stop_listening()
        self._pools.unlisten()

    def _hear(self) -> None:
        """Claim new queues, and wake queues with new messages."""
        hidden = {each.queue for each in self._broker.streams.resharded() if each.hidden}
        news = sorted(self._news - hidden)
        self._news.clear()
        for queue in news:
            if queue not in self._owned and not self._world.is_pool(queue):
                self._claim(queue)
        self._dispatcher.wake(news)
        self._pools.hear()

    def _between_turns(self) -> None:
        """Do the work of a worker's other greenlets: checkpoints, wakeups and shutdown."""
        if not self.alive:
            raise Crashed
        self._pools.store_ends()
        self._checkpoint()
        if self.stopping is not None:
            self._release()
        else:
            self._hear()

    def _checkpoint(self) -> None:
        dirty = [*self._dirty.values()]
        self._dirty.clear()
        for claim in dirty:
            self.record(claim)

    def _stop(self, reason: str) -> None:
        self.stopping = reason
        self._world.stops.append(reason)

    def progress(self, claim: Claim) -> None:
        self._dirty[claim.queue] = claim  # the process writes the node after the turn

    def record(self, claim: Claim, timeout_seconds: float | None = None) -> bool:
        owned = self._owned.get(claim.queue)
        if owned is None or owned.claim is not claim:
            return False
        node = owned.progressed()
        if node is owned.node:
            return True
        self.reach("before-checkpoint", claim.queue)
        written = self._write(owned, node)
        self.reach("after-checkpoint", claim.queue)
        return written

    def finished(self, claim: Claim) -> None:
        owned = self._owned.get(claim.queue)
        if owned is None or owned.claim is not claim or not self.alive:
            return
        self.reach("before-release", claim.queue)
        if self._write(owned, owned.final()):
            del self._owned[claim.queue]
        self.reach("after-release", claim.queue)

    def _write(self, owned: Owned, node: QueueNode) -> bool:
        """Write a queue node, unless the process lost its lease at the last fault point."""
        if not self._world.record.write(owned.queue, node, self.name):
            return False
        owned.node = node
        return True

    def _claim(self, queue: str) -> None:
        fence, node = self._world.record.claim(queue, self.name)
        owned = self._owned[queue] = Owned(queue)
        owned.state = QueueState.OWNED
        owned.node = node
        claim = self._give(owned, fence)
        self._fences[queue] = fence
        self.reach("after-claim", queue)
        if not claim.over:
            self._dispatcher.claimed(self, claim)

    def _give(self, owned: Owned, fence: int) -> Claim:
        node = owned.node
        owned.claim = claim = Claim(
            owned.queue, fence, node.last, self._lease, node.failure, node.out_of_order
        )
        self.gate.admit(claim)
        return claim

    def cancel(self, queue: str, positions: Iterable[int]) -> dict[int, CancelOutcome]:
        """Cancel messages of a queue. Claim new queues first."""
        self._hear()
        return self._pipeline.cancellations(self._dispatcher.slots).cancel(queue, positions)

    def moved(self, queue: str, node: QueueNode) -> None:
        """Continue with the queue node that an operator changed."""
        owned = self._owned.get(queue)
        if owned is None or owned.claim is None:
            return
        old = owned.claim
        owned.node = node
        old.close()
        self._dispatcher.repositioned(self, old, self._give(owned, old.fence))

    def lose(self) -> None:
        """Lose the session. From now on, another worker may own every queue."""
        self._lease.end()
        self._unlisten()
        self._pools.lose()
        for owned in self._owned.values():
            if (claim := owned.claim) is not None:
                owned.claim = None
                claim.close()
                self._dispatcher.lost(claim)
        self._owned.clear()
        self._world.record.free(self.name)

    def drain(self) -> None:
        """Release all queues cleanly. A fault may kill the process before the end."""
        try:
            self._release()
        except Crashed:
            self._spawned.clear()

    def _release(self) -> None:
        self._unlisten()
        claims = [owned.claim for owned in self._owned.values() if owned.claim is not None]
        for claim in claims:
            claim.close()
        for claim in claims:
            self._dispatcher.releasing(self, claim)
        self._pools.drain()

    def die(self, reason: str) -> None:
        """Die as after kill -9. With a reason, count an attempt of each message in flight."""
        self.alive = False
        self._unlisten()
        if reason:
            self._world.record.count_crash(hands.read_in_flight(self._memory), reason)
        self._world.record.free(self.name)

    def close(self) -> None:
        self._unlisten()
        os.close(self._memory)
        self._manager.__exit__(None, None, None)
        self._executor.close()
