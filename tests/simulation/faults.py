"""The faults of a fleet."""

from __future__ import annotations

from collections.abc import Callable

from qdo.coordination.protocol.machine import CreateOp, SetOp
from qdo.coordination.znodes.worker_node import encode_queues
from tests.simulation import operators
from tests.simulation.invariants import ROGUE
from tests.simulation.process import SimulatedProcess
from tests.simulation.world import TIMEOUT, World


def lose_connection(world: World) -> None:
    """Cut a connection; the client comes back by itworld."""
    process = world.one()
    if process is not None:
        process.link.lose()


def lose_often(world: World) -> None:
    """Cut one worker's connection again and again."""
    process = world.one()
    if process is not None:
        for _ in range(world.random.randint(2, 5)):
            world.schedule.after(world.random.random() * 0.6, world.befall, _loser(process))


def lose_answers(world: World) -> None:
    """Lose connections of some worker just after its writes took effect."""
    process = world.one()
    if process is not None:
        process.link.snipe(world.random.randint(1, 3))


def cut_server(world: World) -> None:
    """Cut the server of some worker from the leader, and after a while the connection."""
    process = world.one()
    if process is not None:
        _cut(world, process)


def _cut(world: World, process: SimulatedProcess) -> None:
    process.link.cut()
    world.schedule.after(TIMEOUT * world.random.uniform(0.1, 1.6), world.befall, _loser(process))


def stall(world: World) -> None:
    """Let nothing through for a worker for a while."""
    process = world.one()
    if process is not None:
        process.link.stall(TIMEOUT * world.random.uniform(0.1, 0.9))
        if world.random.random() < 0.3:
            world.schedule.after(
                TIMEOUT * world.random.uniform(0.3, 1.2), world.befall, _cutter(process)
            )


def stop(world: World) -> None:
    """Stop a process, and continue it some time later."""
    process = world.one()
    if process is None:
        return
    process.stop()
    duration = TIMEOUT * world.random.choice((0.3, 0.8, 1.2, 2.0)) * world.random.random()
    world.schedule.after(duration, process.resume)
    if world.switches.close_living:
        _close(world, process)
    if world.random.random() < 0.4:
        world.schedule.after(duration + 0.3 * world.random.random(), world.befall, _cutter(process))


def block(world: World) -> None:
    """Let a job block a process; its parent keeps the session, and kills it after a while."""
    process = world.one()
    if process is None or process.stopped:
        return
    process.block()
    limit = TIMEOUT * world.random.choice((1.0, 3.0))
    duration = TIMEOUT * world.random.uniform(0.3, 3.5)
    if duration < limit:
        world.schedule.after(duration, process.resume)
    else:
        world.schedule.after(limit, _kill_blocked, world, process)
    world.schedule.after(TIMEOUT / 2, _keep, world, process)


def _keep(world: World, process: SimulatedProcess) -> None:
    if process.dead or not process.blocked:
        return
    # The loop may run again before the parent has attached.
    if world.random.random() < 0.9:
        world.schedule.after(0.1 * world.random.random(), _take_over, process)
    world.schedule.after(TIMEOUT / 3, _keep, world, process)


def _take_over(process: SimulatedProcess) -> None:
    if not process.dead:
        process.link.take_over()


def _kill_blocked(world: World, process: SimulatedProcess) -> None:
    if process.blocked and not process.dead:
        process.kill()
        _close(world, process)
        world.schedule.after(world.random.random(), world.befall, World.join)


def kill(world: World) -> None:
    """Kill a process; its parent may or may not close its session; another may start."""
    process = world.one()
    if process is None:
        return
    process.kill()
    if world.random.random() < 0.7:
        _close(world, process)
    if world.random.random() < 0.8:
        world.schedule.after(world.random.random(), world.befall, World.join)


def _close(world: World, process: SimulatedProcess) -> None:
    session = process.link.session
    if session is not None:
        world.schedule.after(0.005 + 0.3 * world.random.random(), _close_session, world, session.id)


def _close_session(world: World, session: int) -> None:
    if not world.coordinator.down:
        world.coordinator.close_session(session)


def outage(world: World) -> None:
    """Take the coordinator away for a while."""
    if not world.coordinator.down:
        world.coordinator.go_down()
        duration = TIMEOUT * world.random.choice((0.1, 0.5, 1.5)) * world.random.random()
        world.schedule.after(duration, _end_outage, world)


def _end_outage(world: World) -> None:
    if world.coordinator.down:
        world.coordinator.come_up()


def deafen(world: World) -> None:
    """Delay the news of a process about an event that its client knows already."""
    process = world.one()
    if process is not None:
        process.deafness = world.random.choice((0.05, 0.3, 1.0))


def daze(world: World) -> None:
    """Stop a process for longer than its session lives; it learns of that late."""
    process = world.one()
    if process is not None:
        process.deafness = world.random.choice((0.3, 1.0))
        process.stop()
        world.schedule.after(TIMEOUT * world.random.uniform(1.0, 1.6), process.resume)


def slow_down(world: World) -> None:
    """Make a worker's network slow."""
    process = world.one()
    if process is not None:
        process.link.slowness = world.random.choice((3.0, 10.0, 30.0))


def write_garbage(world: World) -> None:
    """Let a rebalancer that is stale, doubled or mad write well-formed assignments."""
    world.rogue = True
    workers = world.coordinator.names(world.layout.workers) or ()
    if not workers:
        return
    worker = world.random.choice(workers)
    names = [*world.queues(), "ghost"]
    share = world.random.sample(names, world.random.randint(0, len(names)))
    path = world.layout.assignment(worker)
    data = encode_queues(share)
    exists = world.coordinator.node(path) is not None
    world.schedule.note("a rogue grants %s to %s", share, worker)
    world.coordinator.commit(ROGUE, (SetOp(path, data, -1) if exists else CreateOp(path, data),))
    if world.random.random() < 0.7:
        world.schedule.after(world.random.random(), world.befall, write_garbage)


def usurp(world: World) -> None:
    """Make an idle impostor the leader: it never rebalances."""
    path = world.layout.rebalancer
    world.schedule.note("a rogue takes office as rebalancer")
    world.coordinator.commit(ROGUE, (SetOp(path, b'{"worker":"rogue"}', -1),))


def _loser(process: SimulatedProcess) -> Callable[[World], None]:
    return lambda world: process.link.lose()


def _cutter(process: SimulatedProcess) -> Callable[[World], None]:
    return lambda world: _cut(world, process)


FAULTS: tuple[Callable[[World], None], ...] = (
    lose_connection,
    lose_connection,
    lose_often,
    lose_answers,
    lose_answers,
    cut_server,
    stall,
    stop,
    stop,
    block,
    block,
    kill,
    kill,
    outage,
    deafen,
    daze,
    slow_down,
    World.join,
    World.leave,
    World.new_queue,
    operators.seek,
    operators.seek,
    operators.seek_hastily,
    operators.mark_deleted,
    operators.delete,
    operators.spoil,
    write_garbage,
    usurp,
)
