"""One history, from its seed to a good end or a violation."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import ModuleType

from qdo.coordination import machine_loop, member
from qdo.coordination.protocol import checkpoints, ownership
from qdo.fleet import action_machine
from qdo.system import processes
from tests.simulation import operators
from tests.simulation.faults import FAULTS, lose_answers, write_garbage
from tests.simulation.invariants import Violation
from tests.simulation.switches import Switches
from tests.simulation.world import TIMEOUT, World


def play(
    seed: int, *, tracing: bool = False, switches: Switches | None = None
) -> tuple[Violation | None, World]:
    """Play one history; return the violated invariant, if any."""
    world = World(seed, tracing=tracing, switches=switches)
    try:
        _play(world)
    except Violation as violation:
        return violation, world
    return None, world


def _play(world: World) -> None:
    batch = world.random.choice((1, 2, checkpoints.BATCH))
    with ExitStack() as patches:
        # The clock is the only thing that the member and its jobs do not get from their client.
        for module in (machine_loop, member, processes):
            patches.enter_context(_patched(module, "clock", lambda: world.schedule.now))
        # Small batches: full batches must be played too.
        patches.enter_context(_patched(checkpoints, "BATCH", batch))
        patches.enter_context(_patched(ownership, "BATCH", batch))
        if world.actions is not None:
            patches.enter_context(
                _patched(action_machine, "AT_ONCE", world.random.choice((1, 2, 20)))
            )
        try:
            tell(world)
        except Violation:
            raise
        except Exception as error:
            raise Violation("crash", f"{type(error).__name__}: {error}") from error


@contextmanager
def _patched(module: ModuleType, name: str, value: object) -> Iterator[None]:
    names = vars(module)
    real, names[name] = names[name], value
    try:
        yield
    finally:
        names[name] = real


def describe(world: World) -> str:
    """Return the state of the coordinator as text, for reports."""
    lines = []
    for parent in (world.layout.workers, world.layout.assignments, world.layout.queues):
        for name in world.coordinator.names(parent) or ():
            node = world.coordinator.node(f"{parent}/{name}")
            if node is not None:
                folder = parent.rpartition("/")[2]
                lines.append(f"{folder}/{name}@{node.version} {node.data.decode()}")
    return "\n".join(lines)


def tell(world: World) -> None:
    """Play the history; raise `Violation` when an invariant fails."""
    random = world.random
    world.broker.tempo = random.choice((0.05, 0.2, 0.5))
    for _ in range(random.randint(1, 5)):
        world.new_queue()
    for _ in range(random.choice((1, 2, 2, 3))):
        world.schedule.after(random.random() * 0.5, world.join)
    duration = TIMEOUT * random.uniform(0.7, 3.0)
    for _ in range(random.randint(2, 8)):
        world.schedule.at(random.random() * duration, world.befall, random.choice(FAULTS))
    for _ in range(random.randint(1, 4)):
        world.schedule.at(random.random() * duration, world.send)
    if world.switches.moves:
        for _ in range(random.randint(1, 6)):
            world.schedule.at(random.random() * duration, world.befall, operators.move)
    if world.limits is not None:
        for _ in range(random.randint(0, 4)):
            world.schedule.at(random.random() * duration, world.change_max)
    if world.actions is not None:
        for _ in range(random.randint(1, 12)):
            world.schedule.at(random.random() * duration, world.actions.ask)
    world.coordinator.sluggish = random.random() < 0.4
    if random.random() < 0.2:
        _storm(world, random.random() * duration)
    world.schedule.run(duration)
    world.heal()
    if random.random() < 0.25:
        world.rebalance_in_peace()


def _storm(world: World, start: float) -> None:
    """Let assignments change all the time while answers to claims get lost."""
    for _ in range(world.random.randint(5, 15)):
        when = start + TIMEOUT * world.random.random()
        world.schedule.at(when, world.befall, write_garbage)
        world.schedule.at(when + 0.1, world.befall, lose_answers)
