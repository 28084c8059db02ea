"""The machine that obeys pauses, against every order of writes, stale reads, events and answers.

Workers register, run messages and lose their sessions; two operators pause the queue and lift their
pauses. Reads may be stale, but never older than what the session has seen. While a pause is in
force, no message may be in flight. Mutants leave out one rule each, and must be found.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import pytest

from qdo.coordination.protocol.machine import (
    CoordinatorRequest,
    NodeMissing,
    NodeRead,
    Response,
    Stat,
)
from qdo.fleet.pause_machine import Pause, PauseNode, PauseWatch
from tests.support.fakes.one_node import OneNode, OneNodeSession

PAUSES = "/app/pauses"
STEPS = 300
MUTANTS = (
    "open before the first read",
    "acknowledge with one in flight",
    "list before writing",
    "acknowledge versions",
)


class PausesWorld(OneNode):
    """The node of the pauses, and its clients.

    :ivar registered: the workers with a session, and up to where each has acknowledged.
    """

    def __init__(self, seed: int, mutant: str = "") -> None:
        super().__init__(seed)
        self.mutant = mutant
        self.registered: dict[int, int] = {}
        self.makers: dict[str, bool] = {}
        self.workers: list[HeldWorker] = []
        self.operators = [Operator(self), Operator(self)]
        self.numbers = 0
        self.in_force = 0
        self.messages = 0

    def pauses(self) -> tuple[Pause, ...]:
        return PauseNode.parse(self.node.data).pauses if self.node else ()

    def mark(self, zxid: int) -> int:
        """Return what is acknowledged for a state of the node."""
        node = self.states[zxid]
        return node.version + 1 if node and self.mutant == "acknowledge versions" else zxid

    def spoil(self) -> None:
        """Let another program delete the node while nothing is paused: its versions begin again."""
        if not self.pauses():
            self.delete()

    def play(self) -> None:
        for _ in range(STEPS):
            choice = self.random.random()
            if choice < 0.06 and len(self.workers) < 3:
                self.workers.append(HeldWorker(self))
            elif choice < 0.3:
                self.random.choice(self.operators).step()
            elif choice < 0.31:
                self.spoil()
            elif self.workers:
                self.random.choice(self.workers).step()
            self.check()

    def check(self) -> None:
        for operator in self.operators:
            if operator.is_in_force():
                busy = [worker.number for worker in self.workers if worker.gate.busy]
                assert not busy, "a message is in flight while a pause is in force"


class Operator:
    """Writes a pause, lists the workers, waits for them, and lifts it."""

    def __init__(self, world: PausesWorld) -> None:
        self._world = world
        self._pause: Pause | None = None
        self._zxid = 0
        self._listed: set[int] | None = None
        self._reached = False

    def step(self) -> None:
        world = self._world
        if self._pause is None:
            if world.mutant == "list before writing" and self._listed is None:
                self._listed = set(world.registered)
            elif world.random.random() < 0.1:
                self._begin()
        elif self._listed is None:
            self._listed = set(world.registered)
        elif not self._reached:
            late = [n for n in self._listed if world.registered.get(n, self._zxid) < self._zxid]
            self._reached = not late and self._pause in world.pauses()
            world.in_force += self._reached
        elif world.random.random() < 0.3:
            self._end()

    def _begin(self) -> None:
        world = self._world
        world.numbers += 1
        maker = f"{PAUSES}/{world.numbers}" if world.random.random() < 0.5 else ""
        world.makers[maker] = True
        self._pause = Pause(f"{world.numbers:08x}", ("*",), by=maker)
        self._zxid = world.mark(world.write(PauseNode((*world.pauses(), self._pause)).encode()))

    def _end(self) -> None:
        """End the pause, or die: then a section ends, and another operator ends a pause."""
        world, pause = self._world, self._pause
        assert pause is not None
        if pause.by and world.random.random() < 0.5:
            world.makers[pause.by] = False
        else:
            world.write(PauseNode(tuple(each for each in world.pauses() if each != pause)).encode())
        self._pause = self._listed = None
        self._reached = False

    def is_in_force(self) -> bool:
        return self._reached


class PlainGate:
    """A gate of one queue."""

    def __init__(self, is_open: bool) -> None:
        self.open = is_open
        self.busy = False

    def apply(self, pauses: Sequence[Pause]) -> None:
        self.open = not pauses

    def in_flight(self) -> bool:
        return self.busy


class HeldSession(OneNodeSession):
    """A session that also watches the nodes of those that made pauses."""

    def __init__(self, world: PausesWorld, machine: PauseWatch) -> None:
        self._makers = world.makers
        self._watched: set[str] = set()
        super().__init__(world, PAUSES, machine)

    def perform(self, request: CoordinatorRequest) -> Response:
        if not isinstance(request, Stat):
            return super().perform(request)
        if not self._makers[request.path]:
            return NodeMissing()
        self._watched.add(request.path)
        return NodeRead(b"", 0)

    def notify(self) -> None:
        super().notify()
        for path in sorted(self._watched):
            if not self._makers[path]:
                self._watched.remove(path)
                self._machine.changed(path)
        self.send()

    def reconnect(self) -> None:
        self._watched.clear()
        super().reconnect()


class HeldWorker:
    """A worker: its session, its machine and its message."""

    def __init__(self, world: PausesWorld) -> None:
        self._world = world
        self.number = world.numbers = world.numbers + 1
        world.registered[self.number] = 0
        self.gate = PlainGate(world.mutant == "open before the first read")
        if world.mutant == "acknowledge with one in flight":
            self.gate.in_flight = lambda: False  # type: ignore[method-assign]
        self._clock = 0.0
        self._acknowledged: deque[int] = deque()
        self._machine = PauseWatch(
            PAUSES,
            self.gate,
            acknowledge=lambda zxid: self._acknowledged.append(world.mark(zxid)),
            is_leader=lambda: True,
            clock=lambda: self._clock,
            wall=lambda: 0.0,
        )
        self._session = HeldSession(world, self._machine)

    def step(self) -> None:
        actions: list[Callable[[], None]] = [self._message, self._message, self._tick]
        actions += [self._session.answer] * 3 + [self._session.notify, self._acknowledge]
        chance = self._world.random.random()
        if chance < 0.02:
            self._end()
        elif chance < 0.05:
            self._session.reconnect()
        else:
            self._world.random.choice(actions)()

    def _message(self) -> None:
        """Start a message, or end the one in flight."""
        self.gate.busy = not self.gate.busy and self.gate.open
        self._world.messages += self.gate.busy

    def _tick(self) -> None:
        self._clock += 0.6
        if self._machine.due() <= self._clock:
            self._machine.tick()
            self._session.send()

    def _acknowledge(self) -> None:
        if self._acknowledged:
            self._world.registered[self.number] = self._acknowledged.popleft()

    def _end(self) -> None:
        """The session ends, after the lease and so without a message in flight."""
        del self._world.registered[self.number]
        self._world.workers.remove(self)


def play_many(mutant: str = "") -> list[PausesWorld]:
    worlds = [PausesWorld(seed, mutant) for seed in range(1500)]
    for world in worlds:
        world.play()
    return worlds


@pytest.mark.slow
def test_nothing_is_in_flight_while_a_hold_is_in_force() -> None:
    worlds = play_many()
    assert sum(world.in_force for world in worlds) > 1000
    assert sum(world.messages for world in worlds) > 5_000


@pytest.mark.parametrize("mutant", MUTANTS)
def test_each_rule_is_needed(mutant: str) -> None:
    with pytest.raises(AssertionError, match="in flight"):
        play_many(mutant)
