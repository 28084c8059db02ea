"""One history: processes, operators and faults, then healing; everything from one seed."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from qdo.coordination import member
from qdo.coordination.layout import Layout, QueueNode, WorkerNode, encode_queues
from qdo.coordination.machine import CreateOp, Op, Refused, SetOp
from tests.simulation.checks import Broker, Checks, Violation
from tests.simulation.model import Coordinator
from tests.simulation.process import Process
from tests.simulation.schedule import Schedule
from tests.simulation.switches import Switches

TIMEOUT = 4.0
"""Session time-out in virtual seconds; a tick is a fifth of it."""
OPERATOR = 1
ROGUE = 2


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
        self.broker = Broker()
        self.coordinator = Coordinator(
            schedule,
            tick=TIMEOUT / 5,
            reuse_numbers=self.switches.reuse_numbers,
            late_requests=self.switches.late_requests,
        )
        self.coordinator.ensure(self.layout.persistent)
        self.checks = Checks(self.coordinator, self.layout, self.broker)
        self.checks.operators.add(OPERATOR)
        self.checks.rogues.add(ROGUE)
        self.processes: list[Process] = []
        self.healing = False
        self.rogue = False
        self._started = 0

    # --- the plot -----------------------------------------------------------------------

    def run(self) -> None:
        """Play the history; raise `Violation` when something is not as it should be."""
        random = self.random
        self.broker.tempo = random.choice((0.05, 0.2, 0.5))
        for _ in range(random.randint(1, 5)):
            self.new_queue()
        for _ in range(random.choice((1, 2, 2, 3))):
            self.schedule.after(random.random() * 0.5, self.join)
        duration = TIMEOUT * random.uniform(0.7, 3.0)
        for _ in range(random.randint(2, 8)):
            self.schedule.at(random.random() * duration, self._befall, random.choice(FAULTS))
        for _ in range(random.randint(1, 4)):
            self.schedule.at(random.random() * duration, self.send)
        self.coordinator.sluggish = random.random() < 0.4
        if random.random() < 0.2:
            self._storm(random.random() * duration)
        self.schedule.run(duration)
        self.heal()
        if random.random() < 0.25:
            self.rebalance_in_peace()

    def _storm(self, start: float) -> None:
        """Let assignments change all the time while answers to claims get lost."""
        for _ in range(self.random.randint(5, 15)):
            when = start + TIMEOUT * self.random.random()
            self.schedule.at(when, self._befall, World.write_garbage)
            self.schedule.at(when + 0.1, self._befall, World.lose_answers)

    def _befall(self, fault: Callable[[World], None]) -> None:
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

    def rebalance_in_peace(self) -> None:
        """Let a worker join and another leave while nothing fails, and count the moves."""
        living = self.living()
        registered = set(self.coordinator.names(self.layout.workers) or ())
        if (
            any(self.checks.is_deleted(queue) for queue in self.queues())
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

    def living(self) -> list[Process]:
        return [process for process in self.processes if process.alive]

    def one(self) -> Process | None:
        """Return some living process."""
        living = self.living()
        return self.random.choice(living) if living else None

    def join(self) -> None:
        """Start a worker process."""
        self._started += 1
        self.processes.append(
            Process(
                self.schedule,
                self.coordinator,
                self.layout,
                self.broker,
                self.checks,
                f"process-{self._started}",
                timeout=TIMEOUT,
                checkpoint_seconds=0.2,
                switches=self.switches,
            )
        )

    def leave(self) -> None:
        """Let a worker drain and go."""
        process = self.one()
        if process is not None:
            process.drain()

    def queues(self) -> tuple[str, ...]:
        return self.coordinator.names(self.layout.queues) or ()

    def new_queue(self) -> None:
        """Create a queue that has some messages."""
        name = f"q{len(self.queues())}"
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

    # --- operators ----------------------------------------------------------------------

    def seek(self) -> None:
        """Move a queue's `last`, as rule 10 of the protocol says."""
        queue = self.random.choice(self.queues())
        end = self.broker.end(queue) // 10
        target = 10 * self.random.randint(0, end)
        self._operate(queue, lambda node: replace(node.moved_to(target), seek=node.seek + 1))

    def mark_deleted(self) -> None:
        """Mark a queue as deleted; some are created again later, in place."""
        queue = self.random.choice(self.queues())
        self._operate(queue, lambda node: replace(node, deleted=True))
        if self.random.random() < 0.6:
            self.schedule.after(
                self.random.random() * TIMEOUT,
                self._operate,
                queue,
                lambda node: replace(node.moved_to(0), seek=node.seek + 1, deleted=False),
            )

    def seek_hastily(self) -> None:
        """Move a queue's `last` without telling its owner, who will write and find out."""
        queue = self.random.choice(self.queues())
        target = 10 * self.random.randint(0, self.broker.end(queue) // 10)
        self._operate(
            queue,
            lambda node: replace(node.moved_to(target), seek=node.seek + 1),
            telling=False,
        )

    def _operate(
        self, queue: str, change: Callable[[QueueNode], QueueNode], *, telling: bool = True
    ) -> None:
        """Read a queue node and its owner's, perhaps stale; write both at those versions."""
        random, coordinator = self.random, self.coordinator
        head = coordinator.zxid
        view = head - random.randint(0, min(3, head - 1)) if random.random() < 0.3 else head
        node = coordinator.node(self.layout.queue(queue), view)
        if node is None:
            return
        before = QueueNode.parse(node.data)
        ops: list[Op] = [SetOp(self.layout.queue(queue), change(before).encode(), node.version)]
        path = self.layout.worker(before.owner)
        owner = coordinator.node(path, view) if before.owner else None
        if owner is not None and telling:
            value = WorkerNode.parse(owner.data)
            told = replace(value, reread=(*dict.fromkeys((*value.reread, queue)),))
            ops.append(SetOp(path, told.encode(), owner.version))
        delay = random.random() * 0.05
        self.schedule.after(delay, self._commit_operation, queue, change, ops, telling)

    def _commit_operation(
        self,
        queue: str,
        change: Callable[[QueueNode], QueueNode],
        ops: list[Op],
        telling: bool,
    ) -> None:
        if self.checks.peaceful:
            return
        again = partial(self._operate, queue, change, telling=telling)
        if self.coordinator.down:
            self.schedule.after(0.5, again)
            return
        answer = self.coordinator.commit(OPERATOR, tuple(ops))
        self.schedule.note("an operator changes %s: %s", queue, answer)
        if isinstance(answer, Refused):
            again()
        elif not telling:
            self.send(queue)

    # --- faults -------------------------------------------------------------------------

    def lose_connection(self) -> None:
        """Cut a connection; the client comes back by itself."""
        process = self.one()
        if process is not None:
            process.link.lose()

    def lose_often(self) -> None:
        """Cut one worker's connection again and again."""
        process = self.one()
        if process is not None:
            for _ in range(self.random.randint(2, 5)):
                self.schedule.after(self.random.random() * 0.6, self._befall, _loser(process))

    def lose_answers(self) -> None:
        """Lose connections of some worker just after its writes took effect."""
        process = self.one()
        if process is not None:
            process.link.snipe(self.random.randint(1, 3))

    def cut_server(self) -> None:
        """Cut the server of some worker from the leader, and after a while the connection."""
        process = self.one()
        if process is not None:
            self._cut(process)

    def _cut(self, process: Process) -> None:
        process.link.cut()
        self.schedule.after(TIMEOUT * self.random.uniform(0.1, 1.6), self._befall, _loser(process))

    def stall(self) -> None:
        """Let nothing through for a worker for a while."""
        process = self.one()
        if process is not None:
            process.link.stall(TIMEOUT * self.random.uniform(0.1, 0.9))
            if self.random.random() < 0.3:
                self.schedule.after(
                    TIMEOUT * self.random.uniform(0.3, 1.2), self._befall, _cutter(process)
                )

    def stop(self) -> None:
        """Stop a process, and let it go on some time later."""
        process = self.one()
        if process is None:
            return
        process.stop()
        duration = TIMEOUT * self.random.choice((0.3, 0.8, 1.2, 2.0)) * self.random.random()
        self.schedule.after(duration, process.resume)
        if self.switches.close_living:
            self._close(process)
        if self.random.random() < 0.4:
            self.schedule.after(
                duration + 0.3 * self.random.random(), self._befall, _cutter(process)
            )

    def kill(self) -> None:
        """Kill a process; its parent closes its session, or nobody does; another may start."""
        process = self.one()
        if process is None:
            return
        process.kill()
        if self.random.random() < 0.7:
            self._close(process)
        if self.random.random() < 0.8:
            self.schedule.after(self.random.random(), self._befall, World.join)

    def _close(self, process: Process) -> None:
        session = process.link.session
        if session is not None:
            self.schedule.after(0.005 + 0.3 * self.random.random(), self._close_session, session.id)

    def _close_session(self, session: int) -> None:
        if not self.coordinator.down:
            self.coordinator.close_session(session)

    def outage(self) -> None:
        """Take the coordinator away for a while."""
        if not self.coordinator.down:
            self.coordinator.go_down()
            duration = TIMEOUT * self.random.choice((0.1, 0.5, 1.5)) * self.random.random()
            self.schedule.after(duration, self._end_outage)

    def _end_outage(self) -> None:
        if self.coordinator.down:
            self.coordinator.come_up()

    def deafen(self) -> None:
        """Let a process hear late what its client knows already."""
        process = self.one()
        if process is not None:
            process.deafness = self.random.choice((0.05, 0.3, 1.0))

    def slow_down(self) -> None:
        """Make a worker's network slow."""
        process = self.one()
        if process is not None:
            process.link.slowness = self.random.choice((3.0, 10.0, 30.0))

    def write_garbage(self) -> None:
        """Let a rebalancer that is stale, doubled or mad write well-formed assignments."""
        self.rogue = True
        workers = self.coordinator.names(self.layout.workers) or ()
        if not workers:
            return
        worker = self.random.choice(workers)
        names = [*self.queues(), "ghost"]
        share = self.random.sample(names, self.random.randint(0, len(names)))
        path = self.layout.assignment(worker)
        data = encode_queues(share)
        exists = self.coordinator.node(path) is not None
        self.schedule.note("a rogue grants %s to %s", share, worker)
        self.coordinator.commit(ROGUE, (SetOp(path, data, -1) if exists else CreateOp(path, data),))
        if self.random.random() < 0.7:
            self.schedule.after(self.random.random(), self._befall, World.write_garbage)


def _loser(process: Process) -> Callable[[World], None]:
    return lambda world: process.link.lose()


def _cutter(process: Process) -> Callable[[World], None]:
    return lambda world: world._cut(process)


FAULTS: tuple[Callable[[World], None], ...] = (
    World.lose_connection,
    World.lose_connection,
    World.lose_often,
    World.lose_answers,
    World.lose_answers,
    World.cut_server,
    World.stall,
    World.stop,
    World.stop,
    World.kill,
    World.kill,
    World.outage,
    World.deafen,
    World.slow_down,
    World.join,
    World.leave,
    World.new_queue,
    World.seek,
    World.seek,
    World.seek_hastily,
    World.mark_deleted,
    World.write_garbage,
)


def play(
    seed: int, *, tracing: bool = False, switches: Switches | None = None
) -> tuple[Violation | None, World]:
    """Play one history; return what it violated, if anything."""
    world = World(seed, tracing=tracing, switches=switches)
    try:
        _play(world)
    except Violation as violation:
        return violation, world
    return None, world


def _play(world: World) -> None:
    real = vars(member)["clock"]
    # The clock is the one thing the member does not get from its client.
    vars(member)["clock"] = lambda: world.schedule.now
    try:
        world.run()
    except Violation:
        raise
    except Exception as error:
        raise Violation("crash", f"{type(error).__name__}: {error}") from error
    finally:
        vars(member)["clock"] = real


def describe(world: World) -> str:
    """Return the state of the coordinator in words, for reports."""
    lines = []
    for parent in (world.layout.workers, world.layout.assignments, world.layout.queues):
        for name in world.coordinator.names(parent) or ():
            node = world.coordinator.node(f"{parent}/{name}")
            if node is not None:
                folder = parent.rpartition("/")[2]
                lines.append(f"{folder}/{name}@{node.version} {node.data.decode()}")
    return "\n".join(lines) or json.dumps({})
