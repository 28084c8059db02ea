"""``order="priority"``: seeded histories against its rules, and with each of the rules left out."""

from __future__ import annotations

import random
from itertools import pairwise
from math import inf
from typing import Any

import pytest

import qdo
from qdo.message import Message
from qdo.outcomes import Event
from qdo.testing import TestKit
from qdo.worker.engine import lane, lanes, priorities
from qdo.worker.engine.lanes import Lanes
from qdo.worker.engine.priorities import Priorities

LEVELS = (qdo.URGENT, qdo.HIGH, qdo.NORMAL, qdo.LOW, 9)
STARTS, RANGES, RUNS = (each // 80 for each in (priorities.STARTS, priorities.RANGES, lane.RUNS))
"""The bounds of these histories, which are short."""


class PriorityHistory:
    """A job that sends, stops its worker, fails and blocks by chance; workers hand over.

    :ivar starts: positions in the order of their starts, each with the right one.
    :ivar passed: how many messages in a row were done before an older one that may start; the same
        of any older one. The next worker finds out late which ones wait: it counts one in between.
    """

    def __init__(self, seed: int) -> None:
        self.chance, self.troubled = random.Random(seed), seed % 2
        self.app = qdo.App("test")
        policy = qdo.Policy(attempts=2, then="block")
        self.app.job("q", order="priority", policy=policy)(self.job)
        self.app.observer(self.ended)
        self.starts: list[tuple[int, int]] = []
        self.over: list[int] = []
        self.waiting: dict[int, float] = {}
        self.passed = self.passed_then = [0, 0]

    def job(self, message: Message, context: Any) -> None:
        self.starts.append((message.position, self.next(message.position)))
        self.send(self.chance.choice((0, 0, 0, 1, 2)))
        self.kit.spend(self.chance.choice((0.0, 0.125)))
        if self.chance.random() < 0.02:
            self.passed = [0, 0]
            raise qdo.Stop("the worker leaves")
        if self.troubled and self.chance.random() < 0.2:
            pause = self.chance.choice((0.5, 1.5))
            self.waiting[message.position] = self.kit.clock.passed() + pause
            raise qdo.Retry(after=pause)

    def next(self, begun: int) -> int:
        """Return the position that is to start; `begun` if the bound of starts allows it, too."""
        sent = [(row[0], int(row[1])) for row in self.kit.broker.reader("q", 0).fetch(1000)]
        done, now = set(self.over), self.kit.clock.passed()
        first = {level: at for at, level in reversed(sent) if at not in done}
        may = [each for each in first.items() if self.waiting.get(each[1], 0.0) <= now]
        oldest, oldest_of_all = min((at for _, at in may), default=0), min(first.values())
        ranges = sum(b in done and a not in done for (a, _), (b, _) in pairwise(sent))
        bound = self.passed[0] >= STARTS or (self.passed[1] >= STARTS and begun == oldest)
        bound |= ranges >= RANGES and oldest == oldest_of_all
        older = begun > oldest, begun > oldest_of_all
        self.passed_then = [(n + 1) * each for n, each in zip(self.passed, older, strict=True)]
        return oldest if bound else min(may, default=(0, 0))[1]

    def ended(self, event: Event) -> None:
        if event.outcome == "block":
            self.waiting[event.position] = inf
        elif event.outcome == "done":
            self.over.append(event.position)
            self.passed = self.passed_then

    def send(self, count: int) -> None:
        chosen = self.chance.choices(LEVELS, k=count if len(self.starts) < 150 else 0)
        self.app.send_many([qdo.NewMessage("q", each, priority=each) for each in chosen])

    def play(self) -> None:
        with TestKit(self.app, most_attempts=1000) as self.kit:
            while len(self.starts) < 150 or self.kit.waiting("q"):
                self.send(self.chance.randrange(40))
                # Sums of eighths of a second are exact.
                self.kit.advance(self.chance.choice((0.0, 0.375, 2.0)))
                if self.kit.blocked():
                    self.kit.decide("q", "retry", "all")
                    self.waiting.clear()
                self.kit.hand_over()
                self.passed = [0, 0]
            sent = [row[0] for row in self.kit.broker.reader("q", 0).fetch(1000)]
        assert [begun for begun, _ in self.starts] == [right for _, right in self.starts]
        assert sorted(self.over) == sent


def play(seed: int, *left_out: tuple[Any, str, Any]) -> None:
    """Play a history; while the oldest message waits, more ranges than are recorded may be done."""
    runs = lane.RUNS if seed % 2 else RUNS
    bounds = (priorities, "STARTS", STARTS), (priorities, "RANGES", RANGES), (lane, "RUNS", runs)
    with pytest.MonkeyPatch.context() as patch:
        for each in (*bounds, *left_out):
            patch.setattr(*each)
        PriorityHistory(seed).play()


@pytest.mark.parametrize("seed", range(10))
def test_the_most_urgent_runs_first(seed: int) -> None:
    """P1 to P4, whatever fails; no message runs again after a clean handover."""
    play(seed)


wants_more = Lanes._wants_more


def reads_if_idle(self: Any) -> bool:
    return not (self._ready or self._running) and wants_more(self)


MUTANTS: dict[str, tuple[Any, str, Any]] = {
    "P1: the first lane is next": (Priorities, "first_of", lambda self, ready: next(iter(ready))),
    "P1: the queue is not read before each start": (Lanes, "_wants_more", reads_if_idle),
    "P1: a lane runs to its end": (Lanes, "admits", lambda self, lane: True),
    "P1: a blocked message is waited for": (
        Priorities,
        "first_of",
        lambda self, ready: min(
            ready, key=priorities._position if self._progress.ranges >= RANGES else lambda a: a.key
        ),
    ),
    "P2: no message waits for another": (lanes, "_LANE_OF", {"priority": lambda row: row[1::-1]}),
    "P3: no bound of ranges": (priorities, "RANGES", inf),
    "P4: no bound of starts": (priorities, "STARTS", inf),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_rule_left_out_is_found(mutant: str) -> None:
    with pytest.raises((AssertionError, qdo.QdoError)):
        [play(seed, MUTANTS[mutant]) for seed in range(10)]


def test_another_order_keeps_its_order() -> None:
    """P5: its jobs see the priority."""
    app, seen = qdo.App("test"), []
    app.job("q")(lambda message, context: seen.append(message.priority))
    with TestKit(app) as kit:
        app.send_many([qdo.NewMessage("q", 0, priority=each) for each in (7, 5, 0, 3)])
        kit.send("q", 0, headers={"qdo-priority": "1"})
        kit.run_until_idle()
    assert seen == [7, 5, 0, 3, 5]
