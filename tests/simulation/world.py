"""The processes of one history and their shared objects; how the world heals."""

from __future__ import annotations

from collections.abc import Callable

from qdo.coordination.protocol.machine import CreateOp
from qdo.coordination.znodes.layout import Layout
from qdo.coordination.znodes.queue_node import QueueNode
from qdo.queues import EVERYTHING, QueueFilter
from tests.simulation.broker import SimulatedBroker
from tests.simulation.coordinator import Coordinator
from tests.simulation.fleet.actions import ActionBook
from tests.simulation.invariants import OPERATOR, Checks, Violation
from tests.simulation.limits import LimitBook
from tests.simulation.process import SimulatedProcess
from tests.simulation.schedule import Schedule
from tests.simulation.switches import Switches

FILTERS = (
    EVERYTHING,
    QueueFilter(jobs=("q0", "q1")),
    QueueFilter(("q[1-9]*",)),
    QueueFilter(exclude=("q0",)),
)
"""The filters of workers if `filters` is on; the last two take the same queues."""
TIMEOUT = 4.0
"""Session timeout in virtual seconds; a tick is a fifth of it."""


class World:
    """Everything of one history.

    :param seed: decides all that happens.
    :param tracing: keep a line for each thing that happens.
    """

    def __init__(
        self, seed: int, *, tracing: bool = False, switches: Switches | None = None
    ) -> None:
        self.switches = switches or Switches()
        self.schedule = schedule = Schedule(seed, tracing=tracing)
        self.random = schedule.random
        self.layout = Layout("/q")
        self.broker = SimulatedBroker()
        self.coordinator = Coordinator(
            schedule,
            tick=TIMEOUT / 5,
            reuse_numbers=self.switches.reuse_numbers,
            late_requests=self.switches.late_requests,
        )
        self.coordinator.ensure(self.layout.persistent)
        self.checks = Checks(self.coordinator, self.layout, self.broker)
        self.limits = LimitBook(self.coordinator, self.layout) if self.switches.limits else None
        self.actions = ActionBook(self.coordinator, self.layout) if self.switches.actions else None
        self.processes: list[SimulatedProcess] = []
        self.healing = False
        self.rogue = False
        self._started = 0
        self._created = 0

    # --- the course of events -----------------------------------------------------------

    def befall(self, fault: Callable[[World], None]) -> None:
        """Let something go wrong, unless that is over."""
        if not self.healing:
            fault(self)

    def heal(self) -> None:
        """End all faults and wait until everything is owned, balanced and processed."""
        self.schedule.note("--- healing ---")
        self.healing = True
        self.broker.tempo = 0.02
        self.coordinator.sluggish = False
        if self.coordinator.down:
            self.coordinator.come_up()
        for process in self.living():
            link = process.link
            process.deafness = 0.0
            link.slowness = 1.0
            link.steady = True
            link.sniped = 0
            process.resume()
            if self.rogue or link.impaired:
                link.lose()
        if self.limits is not None:
            self.limits.heal()
        if self.actions is not None:
            self.actions.healed = True
        if not [process for process in self.living() if not process.draining]:
            self.join()
        self._settle(5 * TIMEOUT)

    def _settle(self, limit_seconds: float) -> None:
        """Wait until everything is as it should be."""
        limit = self.schedule.now + limit_seconds
        while True:
            self.schedule.run(self.schedule.now + TIMEOUT / 8)
            try:
                self.checks.check_healed()
                self._check_settled()
            except Violation:
                if self.schedule.now >= limit:
                    raise
            else:
                return

    def _check_settled(self) -> None:
        for process in self.living():
            if not (process.draining or process.member.settled()):
                raise Violation("liveness", f"{process.member.name} does not settle")
        if self.limits is not None:
            self.limits.check_served()
        if self.actions is not None:
            self.actions.check_ended()

    def rebalance_in_peace(self) -> None:
        """Let a worker join and another leave while nothing fails, and count the moves."""
        living = self.living()
        registered = set(self.coordinator.names(self.layout.workers) or ())
        if (
            self.switches.filters
            or self.switches.moves
            or any(self.checks.is_deleted(queue) for queue in self.queues())
            or any(process.draining for process in living)
            or registered != {process.member.name for process in living}
        ):
            return
        self.schedule.note("--- a worker joins ---")
        self.checks.peaceful = True
        self.broker.tempo = 0.2
        for queue in self.queues():
            self.send(queue)
        self._expect_moves(self.join, len(self.queues()) // (len(living) + 1))
        self.schedule.note("--- a worker leaves ---")
        leaver = self.random.choice(self.living())
        for queue in self.queues():
            self.send(queue)
        self._expect_moves(leaver.drain, len(self.checks.owned_by(leaver.member.name)))

    def _expect_moves(self, change: Callable[[], None], fewest: int) -> None:
        before = self.checks.claims
        change()
        self.schedule.run(self.schedule.now + 2.0)
        self._settle(5 * TIMEOUT)
        moved = self.checks.claims - before
        if moved != fewest:
            raise Violation("6", f"{moved} queues moved, {fewest} would have been enough")

    # --- who is there -------------------------------------------------------------------

    def living(self) -> list[SimulatedProcess]:
        return [process for process in self.processes if process.alive]

    def one(self) -> SimulatedProcess | None:
        """Return some living process."""
        living = self.living()
        return self.random.choice(living) if living else None

    def join(self) -> None:
        """Start a worker process."""
        self._started += 1
        self.processes.append(
            SimulatedProcess(
                self.schedule,
                self.coordinator,
                self.layout,
                self.broker,
                self.checks,
                f"process-{self._started}",
                timeout=TIMEOUT,
                checkpoint_seconds=0.2,
                switches=self.switches,
                takes=self.random.choice(FILTERS) if self.switches.filters else EVERYTHING,
                limits=self.limits,
                actions=self.actions,
            )
        )

    def change_max(self) -> None:
        """Let an operator change the limit."""
        if self.limits is not None:
            self.limits.change_max()

    def leave(self) -> None:
        """Let a worker drain and go."""
        process = self.one()
        if process is not None:
            process.drain()

    def queues(self) -> tuple[str, ...]:
        return self.coordinator.names(self.layout.queues) or ()

    def new_queue(self) -> None:
        """Create a queue that has some messages."""
        name = f"q{self._created}"
        self._created += 1
        self.broker.send(name, self.random.randint(1, 5))
        data = QueueNode().encode() if self.random.random() < 0.5 else b""
        self.coordinator.commit(OPERATOR, (CreateOp(self.layout.queue(name), data),))

    def send(self, queue: str = "") -> None:
        """Send messages to a queue."""
        queue = queue or self.random.choice(self.queues())
        self.broker.send(queue, self.random.randint(1, 4))
        for process in self.living():
            for registration in process.members:
                registration.engine.wake(queue)
