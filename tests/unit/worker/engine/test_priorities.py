"""``order="priority"``: the engine against a sorted list, and with each of its rules left out."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

import qdo
from qdo.message import Message
from qdo.outcomes import Event
from qdo.testing import TestKit
from qdo.worker.engine import lanes as engine
from qdo.worker.engine import priorities
from qdo.worker.engine.lane import Lane
from qdo.worker.engine.priorities import Priorities

LEVELS = (qdo.URGENT, qdo.HIGH, qdo.NORMAL, qdo.LOW)


class PriorityHistory:
    """An app whose jobs send and fail by chance, and what may start at each start.

    :ivar starts: priority and position of each start, in order, and `expected` the sorted list's.
    """

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.app = qdo.App("test")
        self.app.job("q", order="priority", policy=qdo.Policy(attempts=3))(self.job)
        self.app.observer(self.ended)
        self.starts: list[tuple[int, int]] = []
        self.expected: list[tuple[int, int]] = []
        self.over: set[int] = set()
        self.waiting: dict[int, float] = {}

    def job(self, message: Message, context: Any) -> None:
        self.starts.append((message.priority, message.position))
        self.expected.append(min(self.startable(), default=(0, 0)))
        for _ in range(self.chance.choice((0, 0, 0, 1, 2))):
            if len(self.starts) < 100:
                self.send(1)
        if self.chance.random() < 0.2:
            pause = self.chance.choice((0.5, 1.5))
            self.waiting[message.position] = self.kit.clock.passed() + pause
            raise qdo.Retry(after=pause)

    def startable(self) -> list[tuple[int, int]]:
        """Return the first message of each priority, unless it waits."""
        first: dict[int, int] = {}
        for position, _, _, headers in self.kit.broker.reader("q", 0).fetch(10_000):
            if position not in self.over:
                first.setdefault(priorities.priority_of_row((0, b"", None, headers)), position)
        now = self.kit.clock.passed()
        return [each for each in first.items() if self.waiting.get(each[1], 0.0) <= now + 1e-6]

    def ended(self, event: Event) -> None:
        if event.outcome != "retry":
            self.over.add(event.position)

    def send(self, count: int) -> None:
        chosen = self.chance.choices(LEVELS, k=count)
        self.app.send_many([qdo.NewMessage("q", 0, priority=each) for each in chosen])

    def play(self) -> None:
        with TestKit(self.app) as self.kit:
            for _ in range(4):
                self.send(self.chance.randrange(12))
                self.kit.advance(self.chance.choice((0.0, 0.4, 1.0)))
                self.kit.hand_over()
            self.kit.run_until_settled()
            attempts = self.kit.attempts("q")
        assert self.starts == self.expected
        assert len(self.starts) == len(attempts) > len(self.over)


def play_histories(monkeypatch: pytest.MonkeyPatch) -> None:
    """P1 and P2, and of P3 that handovers at other times repeat nothing."""
    for seed in range(20):
        PriorityHistory(seed).play()


def starve(monkeypatch: pytest.MonkeyPatch) -> None:
    """P4: while each urgent message sends the next one, the others start, too."""
    monkeypatch.setattr(priorities, "STARTS", 50)
    app, starts = qdo.App("test"), []

    @app.job("q", order="priority")
    def job(message: Message, context: Any) -> None:
        starts.append(message.priority)
        if message.priority == qdo.URGENT and len(starts) < 200:
            app.send("q", 0, priority=qdo.URGENT)

    with TestKit(app) as kit:
        app.send_many([qdo.NewMessage("q", 0, priority=each) for each in (qdo.LOW, 9, qdo.URGENT)])
        kit.run_until_idle()
    assert starts[:102] == [qdo.URGENT] * 50 + [qdo.LOW] + [qdo.URGENT] * 50 + [9]


def hand_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """P3: more ranges than a node records would repeat."""
    app, starts = qdo.App("test"), []

    @app.job("q", order="priority")
    def job(message: Message, context: Any) -> None:
        starts.append(message.body)
        if len(starts) == 620:
            raise qdo.Stop("the worker leaves")

    with TestKit(app) as kit:
        app.send_many([qdo.NewMessage("q", n, priority=5 * (n % 2)) for n in range(1_300)])
        for _ in range(2):
            kit.run_until_idle()
    again = {body for body in starts if starts.count(body) > 1}
    assert again == {starts[619]}  # its attempt ended with the worker
    assert sorted(set(starts)) == list(range(1_300))


def block(monkeypatch: pytest.MonkeyPatch) -> None:
    """P1 behind a blocked message, which no bound can let run; it blocks its priority only."""
    monkeypatch.setattr(priorities, "RANGES", 5)
    app, starts = qdo.App("test"), []

    @app.job("q", order="priority", policy=qdo.Policy(attempts=1, then="block"))
    def job(message: Message, context: Any) -> None:
        starts.append((message.priority, message.body))
        if message.priority == 9:
            raise ValueError("no")

    sent = [(9, -1), (9, -2), *((n % 3, n) for n in range(60))]
    with TestKit(app) as kit:
        app.send("q", -1, priority=9)
        kit.run_until_idle()
        app.send_many([qdo.NewMessage("q", body, priority=each) for each, body in sent[1:]])
        kit.run_until_idle()
    assert starts == [(9, -1), *sorted(sent[2:])]


CHECKS = (play_histories, starve, hand_over, block)


@pytest.mark.parametrize("check", CHECKS)
def test_the_most_urgent_runs_first(
    check: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    check(monkeypatch)


def reads_no_further(self: Any, lane: Lane) -> bool:
    return self._priorities.admit(lane, self._ready)


def ignores_blocks(self: Any, ready: Any) -> Lane:
    bound = self._passed >= priorities.STARTS or self._progress.ranges >= priorities.RANGES
    key = priorities._position if bound else priorities._priority
    return min(ready, key=key)


MUTANTS: dict[str, tuple[Callable[..., None], Any, str, Any]] = {
    "P1: the first lane is next": (
        play_histories,
        Priorities,
        "first_of",
        lambda self, r: next(iter(r)),
    ),
    "P1: arrivals are not read": (play_histories, engine.Lanes, "admits", reads_no_further),
    "P1: a lane runs to its end": (play_histories, engine.Lanes, "admits", lambda self, lane: True),
    "P1: a blocked message is waited for": (block, Priorities, "first_of", ignores_blocks),
    "P2: no message waits for another": (
        play_histories,
        engine,
        "_LANE_OF",
        {"priority": lambda row: (priorities.priority_of_row(row), row[0])},
    ),
    "P3: no bound of ranges": (hand_over, priorities, "RANGES", 10**9),
    "P4: starts are not counted": (
        starve,
        Priorities,
        "admit",
        lambda self, lane, others: self.first_of((lane, *others)) is lane,
    ),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_rule_left_out_is_found(mutant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check, place, name, replacement = MUTANTS[mutant]
    monkeypatch.setattr(place, name, replacement)
    with pytest.raises((AssertionError, qdo.QdoError)):
        check(monkeypatch)


def test_another_order_keeps_its_order() -> None:
    """P5: its jobs see the priority."""
    app, seen = qdo.App("test"), []
    app.job("q")(lambda message, context: seen.append(message.priority))
    with TestKit(app) as kit:
        app.send_many([qdo.NewMessage("q", 0, priority=each) for each in (7, 5, 0, 3)])
        kit.send("q", 0, headers={"qdo-priority": "1"})
        kit.run_until_idle()
    assert seen == [7, 5, 0, 3, 5]
