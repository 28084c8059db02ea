"""Twelve processes of unequal demand share a few permits: none waits for long.

Everything runs in virtual time, with requests that take milliseconds and compete at one node.
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Callable
from functools import partial
from itertools import count
from typing import Any

import pytest

from qdo.coordination.protocol.lease import Lease
from qdo.coordination.protocol.machine import (
    Callback,
    CheckOp,
    Children,
    ChildrenRead,
    Commit,
    CommitError,
    Committed,
    CoordinatorRequest,
    Get,
    NodeRead,
    Rejected,
    Response,
    SetOp,
)
from qdo.coordination.znodes.layout import Layout
from qdo.fleet.limit_node import LimitNode
from qdo.fleet.shares import TURN_SECONDS, LimitShare, Planner

LAYOUT = Layout.of("test")
PATH = LAYOUT.fleet.limit("crm")
PROCESSES = 12
JOB_SECONDS = 0.05
"""The longest job."""
REQUEST_SECONDS = 0.004
"""The longest request, with its answer."""
SECONDS = 10.0


class FairnessWorld:
    """A node in memory, its processes, and virtual time.

    :param late: how many seconds answers and events take at least.
    :ivar served: when each process last got a permit, or last wanted none.
    :ivar waited: the longest time for which each process wanted a permit and got none.
    :ivar starts: when each message started.
    """

    def __init__(
        self,
        most: int,
        seed: int,
        node: LimitNode | None = None,
        processes: int = PROCESSES,
        late: float = 0.0,
    ) -> None:
        self.late = late
        self.random = random.Random(seed)
        self.now = 100.0
        self.node, self.version = node or LimitNode(max=most), 0
        self.most = most
        self.starts: list[float] = []
        self.in_use = 0
        self.watching: set[LimitedProcess] = set()
        self._events: list[tuple[float, int, Callable[[], object]]] = []
        self._order, self._numbers = count(), count()
        self.processes = [LimitedProcess(self, next(self._numbers)) for _ in range(processes)]

    def at(self, seconds: float, event: Callable[[], object]) -> None:
        """Call a function after some seconds."""
        heapq.heappush(self._events, (self.now + seconds, next(self._order), event))

    def run(self, seconds: float) -> None:
        end = self.now + seconds
        while self._events and self._events[0][0] <= end:
            self.now, _, event = heapq.heappop(self._events)
            event()
        self.now = end

    def replace(self, process: LimitedProcess) -> None:
        """Let a process die, and start another."""
        self.processes.remove(process)
        process.alive = False
        self.processes.append(LimitedProcess(self, next(self._numbers)))
        for each in self.processes:
            each.told(LAYOUT.workers)

    def reply(self, process: LimitedProcess, request: CoordinatorRequest) -> Response:
        if isinstance(request, Children):
            return ChildrenRead(tuple(each.name for each in self.processes))
        if isinstance(request, Get):
            self.watching.add(process)
            return NodeRead(self.node.encode(), self.version)
        assert isinstance(request, Commit)
        check, write = request.ops
        assert isinstance(check, CheckOp)
        assert isinstance(write, SetOp)
        if write.version != self.version:
            return Rejected(1, CommitError.BAD_VERSION)
        self.node, self.version = LimitNode.parse(write.data), self.version + 1
        assert sum(each.held for each in self.node.permits) <= self.most
        told, self.watching = self.watching, set()
        for each in told:
            self.at(self.late + self.half(), each.told)
        return Committed(1, (-1, self.version))

    def half(self) -> float:
        """Return how long a request or an answer takes."""
        return self.random.uniform(0.1, 0.5) * REQUEST_SECONDS


class LimitedProcess:
    """A process with as many callers as it wants permits; each uses one, and waits again."""

    def __init__(self, world: FairnessWorld, number: int) -> None:
        self.name = f"worker-{number:010d}"
        self.callers = world.random.choice((1, 2, 3, 10, 30))
        self.longest = 0.0
        self.served = 0
        self.alive = True
        self._world = world
        self._waiting = 0
        self._since = 0.0
        self._serving = False
        self._tick_at = float("inf")
        self.share = LimitShare(
            LAYOUT,
            "crm",
            self.name,
            Lease(1e9, world.now),
            clock=lambda: world.now,
            on_change=self._serve,
            chance=world.random.random,
        )
        world.at(0.0, self.share.connected)
        for _ in range(self.callers):
            world.at(world.random.uniform(0.0, 1.0), self._want)

    def told(self, path: str = PATH) -> None:
        """Take the event of a watch."""
        self.share.changed(path)
        self._step()

    def _want(self) -> None:
        if not self._waiting:
            self._since = self._world.now
        self._waiting += 1
        self._serve()
        self._step()

    def _serve(self) -> None:
        if self._serving or not self.alive:
            return
        self._serving = True
        world = self._world
        while self._waiting and self.share.has_free():
            self.share.take()
            self._waiting -= 1
            self.longest = max(self.longest, world.now - self._since)
            self._since = world.now
            self.served += 1
            world.starts.append(world.now)
            world.in_use += 1
            assert world.in_use <= world.most
            world.at(world.random.uniform(0.001, JOB_SECONDS), self._done)
        self.share.wait(self._waiting)
        self._serving = False

    def _done(self) -> None:
        self._world.in_use -= 1
        self.share.give_back()
        # The caller waits again, behind the others of its process.
        self._waiting += 1
        self._serve()
        self._step()

    def _step(self) -> None:
        """Do what a loop does after each event: send requests, and come back when it is time."""
        world = self._world
        if not self.alive:
            return
        if self.share.due() <= world.now:
            self.share.tick()
        self.share.flush()
        while self.share.outbox:
            request, then = self.share.outbox.popleft()
            world.at(world.half(), partial(self._perform, request, then))
        due = self.share.due()
        if world.now < due < self._tick_at or (due < float("inf") and self._tick_at <= world.now):
            self._tick_at = due
            world.at(max(0.0, due - world.now), self._step)

    def _perform(self, request: CoordinatorRequest, then: Callback) -> None:
        answer = self._world.reply(self, request)

        def receive() -> None:
            then(answer)
            self._step()

        self._world.at(self._world.late + self._world.half(), receive)

    def waited(self) -> float:
        """Return the longest time without a permit, until now."""
        return max(self.longest, self._world.now - self._since if self._waiting else 0.0)


def longest_wait(most: int, seed: int) -> float:
    """Return for how long the unluckiest process waited for a permit."""
    world = FairnessWorld(most, seed)
    world.run(SECONDS)
    return max(each.waited() for each in world.processes)


def bound(most: int) -> float:
    """Return the promised longest wait, with the requests of each handover."""
    return math.ceil(PROCESSES / most) * (TURN_SECONDS + JOB_SECONDS + 2 * REQUEST_SECONDS)


FURTHER = pytest.mark.long("further histories")


@pytest.mark.parametrize("seed", [0, *(pytest.param(each, marks=FURTHER) for each in range(1, 6))])
@pytest.mark.parametrize("most", [1, 2, 5])
@pytest.mark.slow
def test_every_process_gets_a_permit_in_time(most: int, seed: int) -> None:
    assert longest_wait(most, seed) <= bound(most)


@pytest.mark.slow
def test_permits_are_in_use_most_of_the_time() -> None:
    """Handing on costs a few requests for each turn."""
    for most in (1, 2, 5):
        world = FairnessWorld(most, 1)
        world.run(SECONDS)
        busy = sum(each.served for each in world.processes) * JOB_SECONDS / 2
        assert busy > 0.75 * most * SECONDS


@pytest.mark.parametrize(("rate", "burst"), [(40.0, 40), (40.0, 4), (5.0, 1)])
def test_no_window_has_more_starts_than_the_burst(rate: float, burst: int) -> None:
    """However shares move and processes come and go; and the rate is used."""
    world = FairnessWorld(10**6, 1, LimitNode(rate=rate, burst=burst))
    world.run(SECONDS)
    assert len(world.starts) > 0.75 * rate * SECONDS
    for _ in range(10):
        world.run(SECONDS / 10)
        world.replace(world.random.choice(world.processes))
    window = burst / rate - 1e-6
    assert all(
        later - at > window for at, later in zip(world.starts, world.starts[burst:], strict=False)
    )


def test_permits_are_in_use_although_answers_are_late() -> None:
    """Seven processes, and answers of a third of a second: it was 5 %, with waits of a minute."""
    world = FairnessWorld(5, 1, processes=7, late=0.3)
    world.run(6 * SECONDS)
    busy = sum(each.served for each in world.processes) * JOB_SECONDS / 2
    assert busy > 0.75 * 5 * 6 * SECONDS
    assert max(each.waited() for each in world.processes) < 15.0


# --- mutants -----------------------------------------------------------------------------


def test_without_turns_some_starve(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Planner, "_turn_is_over", lambda *arguments: False)
    assert longest_wait(2, 1) > 5 * bound(2)


@pytest.mark.slow
def test_if_those_who_wait_move_too_some_starve(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process near the front loses its place each time."""
    rule: Any = Planner._turn_is_over

    def moves(planner: Any, count: Any, rest: Any, total: int) -> bool:
        own = next(each for each in rest if each.worker == planner._worker)
        return bool(not own.held or rule(planner, count, rest, total))

    monkeypatch.setattr(Planner, "_turn_is_over", moves)
    assert longest_wait(2, seed=2) > bound(2)
