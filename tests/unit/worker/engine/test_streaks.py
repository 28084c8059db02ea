"""Messages that are started without asking for permits before each: what interrupts them."""

from __future__ import annotations

import random
from collections.abc import Iterator
from operator import length_hint
from pathlib import Path
from typing import Any

import pytest

from qdo.app import App
from qdo.coordination.protocol.lease import Lease
from qdo.coordination.znodes.layout import Layout
from qdo.worker.engine.limits import Gate, Limits
from qdo.worker.engine.slot import Slot
from tests.support.engine import EngineSetup, until

ROWS = 100


class StreakSetup:
    """The limit of a process without its coordinator, and queues with rows."""

    def __init__(self, permits: int = 10, tokens: int = 0, rate: float = 0.0) -> None:
        self.now = 1000.0
        self.lease = Lease(1e6, self.now)
        app = App("shop")
        app.job("*", limits=["crm"])(print)
        self.limits = Limits(lambda: self.now)
        (job,) = app.jobs
        gate = self.limits.gate(job)
        assert gate is not None
        self.gate: Gate = gate
        self.name = "worker-0000000001"
        member: Any = self
        (self.share,) = self.limits.join([job], {}, Layout.of("shop"), member)
        self.share.permits.acknowledge(permits, permits, self.now)
        if tokens:
            self.share.starts.set_rate(rate / tokens, self.now)
            self.share.starts.acknowledge(tokens, tokens, self.now)
            self.now += tokens / rate
        else:
            self.share.starts.unlimited = True

    def call(self, event: Any) -> None:
        """Be a member that writes nothing."""

    def queue(self, name: str = "a", count: int = ROWS) -> Slot:
        slot = Slot(name)
        slot.rows = iter([(number, b"", None, None) for number in range(1, count + 1)])
        return slot

    def rows(self, slot: Slot) -> Iterator[Any]:
        """Return the rows of a queue as its turn gets them."""
        assert self.gate.enter(slot, 1) is None
        assert slot.rows is not None
        return iter(self.gate.fetched(slot, slot.rows, 1))


def _left(slot: Slot) -> int:
    return length_hint(slot.rows)


def test_one_permit_serves_a_whole_turn() -> None:
    """It is handed from message to message, and is free after the turn."""
    setup = StreakSetup(permits=1)
    slot = setup.queue()
    seen = [(row[0], setup.share.permits.in_use) for row in setup.rows(slot)]
    assert seen == [(number, 1) for number in range(1, ROWS + 1)]
    setup.limits.leave(slot)
    assert setup.share.permits.in_use == 0


def test_a_lowered_cap_is_obeyed_between_two_messages() -> None:
    """The rows that were not started stay with the queue, in order."""
    setup = StreakSetup(permits=1)
    slot = setup.queue()
    rows = setup.rows(slot)
    assert [next(rows)[0], next(rows)[0]] == [1, 2]
    setup.share.permits.limit(0, setup.now)
    assert list(rows) == []
    assert setup.share.permits.in_use == 0
    setup.share.permits.limit(1, setup.now)
    assert [row[0] for row in setup.rows(slot)] == list(range(3, ROWS + 1))


def test_a_queue_that_waits_is_next() -> None:
    """With one permit two queues take turns message by message."""
    setup = StreakSetup(permits=1)
    first, second = setup.queue("a"), setup.queue("b")
    rows = setup.rows(first)
    next(rows)
    assert not setup.gate.admits(second)
    assert list(rows) == []
    assert second.grant is not None
    assert _left(first) == ROWS - 1


def test_a_limit_that_breaks_stops_the_streak() -> None:
    """Nothing more starts once the node cannot be used, or the registration is another one."""
    setup = StreakSetup()
    slot = setup.queue()
    rows = setup.rows(slot)
    next(rows)
    setup.share.fault = "it does not exist"
    setup.limits.changed()
    assert list(rows) == []
    setup = StreakSetup()
    slot = setup.queue()
    rows = setup.rows(slot)
    next(rows)
    member: Any = setup
    setup.limits.join([], {}, Layout.of("shop"), member)
    setup.lease.end()
    assert list(rows) == []
    assert _left(slot) == ROWS - 1


def test_a_new_max_stops_the_streak() -> None:
    """A process that had no share, since there was no limit, starts no more without one."""
    setup = StreakSetup(permits=0)
    setup.share.permits.unlimited = True
    slot = setup.queue()
    rows = setup.rows(slot)
    next(rows)
    planner = setup.share._planner
    planner.plan(setup.share.permits, (), 5, frozenset())
    assert list(rows) == []


def test_starts_of_a_streak_are_counted() -> None:
    """Each message has used one token when the bucket is looked at."""
    setup = StreakSetup(tokens=1000, rate=1000.0)
    slot = setup.queue()
    rows = setup.rows(slot)
    for _ in range(40):
        next(rows)
    assert setup.share.starts.demand(setup.now) == 40
    assert len(list(rows)) == ROWS - 40
    setup.limits.leave(slot)
    assert setup.share.starts.demand(setup.now) == ROWS


def test_an_unused_start_is_returned() -> None:
    """A turn that ends before its first message costs no token."""
    setup = StreakSetup(tokens=1000, rate=1000.0)
    slot = setup.queue(count=0)
    assert list(setup.rows(slot)) == []
    setup.limits.leave(slot)
    assert setup.share.starts.demand(setup.now) == 0


@pytest.mark.parametrize("seed", range(20))
def test_a_rate_holds_in_every_stretch_of_time(seed: int) -> None:
    """Two queues, long and short jobs, and looks at the bucket at any time."""
    chance = random.Random(seed)
    burst, rate = chance.choice([(150, 100.0), (300, 30.0), (105, 1000.0)])
    setup = StreakSetup(tokens=burst, rate=rate)
    starts: list[float] = []
    turns: list[tuple[Slot, Iterator[Any]]] = []
    streaks = 0
    for number in range(3000):
        if len(turns) < 2:
            slot = setup.queue(str(number))
            if setup.share.has_free():
                turns.append((slot, setup.rows(slot)))
        if turns:
            slot, rows = chance.choice(turns)
            if next(rows, None) is not None:
                starts.append(setup.now)
                streaks += slot.grant.streak is not None
            else:
                setup.limits.leave(slot)
                turns.remove((slot, rows))
        setup.now += chance.choice([0.0, 0.0, 0.0, 0.001, 0.01, 1.0])
        if not chance.randrange(10):
            setup.share.starts.demand(setup.now)
    assert streaks > 20
    for first in range(0, len(starts), 7):
        for last in range(first, len(starts), 7):
            most = rate * (starts[last] - starts[first]) + burst
            assert last - first + 1 <= most + 1e-6


@pytest.fixture
def setup(tmp_path: Path) -> Iterator[EngineSetup]:
    setup = EngineSetup(tmp_path)
    yield setup
    setup.close()


@pytest.mark.parametrize("checkpoint", ["message", "interval"])
def test_a_worker_outlives_a_failure_without_a_permit(setup: EngineSetup, checkpoint: Any) -> None:
    """After a failure messages run one by one, and the next one may have to wait."""
    seen: list[tuple[int, int]] = []

    @setup.app.job("own-*", per_queue_rate="50/s", checkpoint=checkpoint)
    def job(message: Any, context: Any) -> None:
        seen.append((message.body, message.attempt))
        if message.body == 1 and message.attempt == 1:
            raise ValueError("it fails once")

    setup.send("own-1", *range(5))
    setup.start("own-1")
    until(lambda: len(seen) == 6, "all messages ran")
    assert seen == [(0, 1), (1, 1), (1, 2), (2, 1), (3, 1), (4, 1)]
    assert not setup.ended()
