"""One worker process of a testing kit: the engine of a worker, turned by hand.

Dispatcher, pipeline, outcomes and policies are those of every worker. What stands around them is
replaced: greenlets by a list of what is to be run, the broker by one in memory, the
coordinator by `record`. Between the steps stand fault points, none of them in the engine.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable
from typing import cast

from qdo.app import App
from qdo.coordination.layout import QueueNode
from qdo.coordination.lease import Lease
from qdo.coordination.slots import Claim, State
from qdo.coordination.slots import Slot as Owned
from qdo.errors import UsageError
from qdo.events import Event
from qdo.message import Message
from qdo.policies import check_policies
from qdo.policy import Policy
from qdo.testing.faults import Crashed, Point
from qdo.testing.pointed import PointedBroker, Watched
from qdo.testing.running import InlineExecutor
from qdo.testing.world import World
from qdo.worker import hands
from qdo.worker.dispatcher import Dispatcher
from qdo.worker.pipeline import Pipeline

LEASE_SECONDS = 1e9
"""The kit keeps the session alive: a lease only ends when the test says so."""
GIVE_UP = (
    "{most} attempts did not bring the queues to rest: is there a job that always sends another"
    " message, or asks for another attempt at once? Else allow more with most_attempts="
)


class Process:
    """One worker process, which is its own registration.

    :ivar name: of its worker node.
    :ivar alive: False once it was killed; nothing it does counts any more.
    :ivar stopping: why it gives its queues back, None while it does not.
    :ivar running: it is on the stack: a job may be in hand.
    """

    def __init__(self, world: World) -> None:
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
        self._began: dict[tuple[str, int], float] = {}
        self._dirty: dict[str, Claim] = {}
        self._news: set[str] = set()
        self._spawned: deque[Callable[[], None]] = deque()
        self._fault: Exception | None = None
        policy = Policy(settings.attempts, settings.backoff_seconds, settings.backoff_max_seconds)
        check_policies(world.app.jobs, settings.policies, policy)
        self._manager = world.app.job_context()
        context = self._manager.__enter__()
        self._memory = hands.make_memory()
        self._executor = InlineExecutor(self, settings.executor)
        self._broker = PointedBroker(world.store, world.app.name, self.reach)
        self._pipeline = Pipeline(
            cast(App, Watched(world.app, self)),
            self._broker,
            self._executor,
            policy=policy,
            policies=settings.policies,
            on_stop=self._stop,
            hands=hands.Hands(2 * settings.concurrency, self._memory),
            fetch=settings.fetch,
            turn_seconds=settings.turn_seconds,
            clock=self.clock.passed,
            chance=world.chance,
        )
        self._dispatcher = Dispatcher(
            self._pipeline,
            concurrency=1,
            spawn=self._spawned.append,
            breathe=self._between_turns,
            clock=self.clock.passed,
        )
        self._pipeline.context = context
        self._unlisten = self._broker.listen(self._woken)
        self._woken(self._broker.queues())

    # --- running ----------------------------------------------------------------------

    def run(self) -> None:
        """Run turns until no queue is ready, or this process has come to its end.

        :raises UsageError: the kit was used in a wrong way meanwhile.
        """
        self.running = True
        try:
            while self.alive and self.stopping is None:
                self._hear()
                self._dispatcher.tick()
                if not self._spawned:
                    break
                self._spawned.popleft()()
        except Crashed:
            self._spawned.clear()
        finally:
            self.running = False
        if self._fault is not None:
            raise self._fault

    def due(self) -> float:
        """Return when a queue that waits goes on, by the clock; `inf` for never."""
        return self._dispatcher.due()

    def spend(self, seconds: float) -> None:
        """Let time pass within the job in hand; others record what turns have done so far."""
        self._executor.spend(seconds)
        if seconds >= self._world.settings.checkpoint_seconds:
            self._dispatcher.note_progress()
            self._checkpoint()

    def fail(self, fault: Exception) -> None:
        """End the run, and have it raise an error: one of the test, not of the job."""
        self._fault = fault
        self.alive = False
        raise Crashed

    def reach(self, point: Point, queue: str) -> None:
        """Pass a fault point.

        :raises Crashed: this process is dead.
        """
        if self.alive:
            self._world.faults.reach(point, queue)
        if not self.alive:
            raise Crashed

    def starting(self, message: Message) -> None:
        """Take note that a job is about to run."""
        world = self._world
        self._began[message.queue, message.position] = self.clock.passed()
        if not world.left:
            self.fail(UsageError(reason=f"{GIVE_UP.format(most=world.most)}"))
        world.left -= 1

    def ended(self, event: Event) -> None:
        """Keep what is told of an attempt."""
        now = self.clock.passed()
        began = self._began.pop((event.queue, event.position), now)
        self._world.note(event, self._fences.get(event.queue, 0), now - began)

    def _woken(self, queues: Iterable[str]) -> None:
        self._news.update(queues)

    def _hear(self) -> None:
        """Claim queues that are new, and look at those with new messages."""
        news, self._news = sorted(self._news), set()
        for queue in news:
            if queue not in self._owned:
                self._claim(queue)
        self._dispatcher.wake(news)

    def _between_turns(self) -> None:
        """Do what the other greenlets of a worker do: checkpoints, wake-ups, the way down."""
        if not self.alive:
            raise Crashed
        self._checkpoint()
        if self.stopping is not None:
            self._release()
        else:
            self._hear()

    def _checkpoint(self) -> None:
        dirty, self._dirty = self._dirty, {}
        for claim in dirty.values():
            self.record(claim)

    def _stop(self, reason: str) -> None:
        self.stopping = reason
        self._world.stops.append(reason)

    # --- what the engine says ----------------------------------------------------------

    def progress(self, claim: Claim) -> None:
        """Have a checkpoint written after the turn."""
        self._dirty[claim.queue] = claim

    def record(self, claim: Claim) -> bool:
        """Write a checkpoint."""
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
        """Give a queue back."""
        owned = self._owned.get(claim.queue)
        if owned is None or owned.claim is not claim or not self.alive:
            return
        self.reach("before-release", claim.queue)
        if self._write(owned, owned.final()):
            del self._owned[claim.queue]
        self.reach("after-release", claim.queue)

    def _write(self, owned: Owned, node: QueueNode) -> bool:
        """Write a queue node, unless the lease was lost at the last point."""
        if not self._world.record.write(owned.queue, node, self.name):
            return False
        owned.node = node
        return True

    # --- what the coordinator would say ----------------------------------------------------

    def _claim(self, queue: str) -> None:
        fence, node = self._world.record.claim(queue, self.name)
        owned = self._owned[queue] = Owned(queue)
        owned.state = State.OWNED
        owned.node = node
        owned.claim = claim = Claim(queue, fence, node.last, self._lease, node.marks, node.above)
        self._fences[queue] = fence
        self.reach("after-claim", queue)
        if claim.open:
            self._dispatcher.claimed(self, claim)

    def moved(self, queue: str, node: QueueNode) -> None:
        """Go on with a queue node that an operator changed."""
        owned = self._owned.get(queue)
        if owned is None or owned.claim is None:
            return
        old, owned.node = owned.claim, node
        old.open = False
        owned.claim = Claim(queue, old.fence, node.last, self._lease, node.marks, node.above)
        self._dispatcher.moved(self, old, owned.claim)

    def lose(self) -> None:
        """Lose the session: another worker may own every queue from now on."""
        self._lease.end()
        self._unlisten()
        for owned in self._owned.values():
            claim, owned.claim = owned.claim, None
            if claim is not None:
                claim.open = False
                self._dispatcher.lost(claim)
        self._owned.clear()
        self._world.record.free(self.name)

    # --- the end ------------------------------------------------------------------------

    def drain(self) -> None:
        """Give every queue back, in good order; it may die on the way."""
        try:
            self._release()
        except Crashed:
            self._spawned.clear()

    def _release(self) -> None:
        self._unlisten()
        claims = [owned.claim for owned in self._owned.values() if owned.claim is not None]
        for claim in claims:
            claim.open = False
        for claim in claims:
            self._dispatcher.releasing(self, claim)

    def die(self, reason: str) -> None:
        """Be dead from now on, as after kill -9.

        :param reason: how, for the attempts of the messages in hand; "" counts none.
        """
        self.alive = False
        self._unlisten()
        if reason:
            self._world.record.count_crash(hands.read(self._memory), reason)
        self._world.record.free(self.name)

    def close(self) -> None:
        """Tear down the job context, and let go of what is left."""
        self._executor.close()
        self._unlisten()
        os.close(self._memory)
        self._manager.__exit__(None, None, None)
