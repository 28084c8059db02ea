"""A job pauses when all that it does fails, instead of using up attempts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from qdo import DeadLetter, Message, Policy, Retry, Rule
from qdo.backoff import Backoff
from qdo.worker.engine import breakers
from qdo.worker.engine.breakers import FAILURES, LINES, LOOK_SECONDS, OPEN_SECONDS, PAUSE, Breaker
from tests.support.engine import EngineSetup, until


class SteppedClock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> SteppedClock:
    return SteppedClock()


@pytest.fixture
def breaker(clock: SteppedClock) -> Breaker:
    return Breaker("mail", clock, lambda: 1.0)


def fail(breaker: Breaker, count: int, error: Exception | None = None, lines: int = LINES) -> bool:
    """Fail so many attempts, in so many queues in turn; return whether the last was excused."""
    excused = False
    for number in range(count):
        excused = breaker.failed((f"q{number % lines}", None), error or OSError("away"))
    return excused


def test_failures_in_a_row_pause_a_job(breaker: Breaker) -> None:
    assert not fail(breaker, FAILURES - 1)
    assert breaker.admit() == 0
    assert fail(breaker, 1)
    assert breaker.admit() > 0


@pytest.mark.parametrize(
    "between",
    [lambda breaker: breaker.succeeded(), lambda breaker: fail(breaker, 1, KeyError("other"))],
    ids=["a success", "an error of another class"],
)
def test_failures_are_counted_in_a_row(breaker: Breaker, between: Any) -> None:
    fail(breaker, FAILURES - 1)
    between(breaker)
    assert not fail(breaker, FAILURES - 2)
    assert not breaker.paused


def test_few_queues_pause_no_job(breaker: Breaker) -> None:
    """Their messages are to blame, and end by their policy."""
    assert not fail(breaker, 10 * FAILURES, lines=LINES - 1)


def test_one_attempt_is_made_for_each_pause(breaker: Breaker, clock: SteppedClock) -> None:
    """The pauses grow, and a message that waits looks often enough."""
    fail(breaker, FAILURES)
    expected = [PAUSE.delay(number, 1.0) for number in range(1, 9)]
    for seconds in expected:
        assert breaker.left_seconds() == pytest.approx(min(seconds, LOOK_SECONDS))
        clock.now += seconds
        assert breaker.admit() == 0
        assert breaker.admit() > 0
        assert fail(breaker, 1)


def test_a_success_ends_the_pause(breaker: Breaker, clock: SteppedClock) -> None:
    fail(breaker, FAILURES)
    clock.now += PAUSE.first_seconds
    assert breaker.admit() == 0
    breaker.succeeded()
    assert breaker.admit() == 0
    assert not fail(breaker, FAILURES - 1)


def test_attempts_count_again_after_a_quarter_of_an_hour(
    breaker: Breaker, clock: SteppedClock
) -> None:
    """A fault in the job must not keep its messages for ever; a success arms the breaker again."""
    fail(breaker, FAILURES)
    clock.now += OPEN_SECONDS
    assert not fail(breaker, 10 * FAILURES)
    assert breaker.admit() == 0
    breaker.succeeded()
    assert fail(breaker, FAILURES)


@pytest.fixture
def setup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[EngineSetup]:
    monkeypatch.setattr(breakers, "PAUSE", Backoff(0.02, 0.05))
    monkeypatch.setattr(breakers, "LOOK_SECONDS", 0.05)
    made = EngineSetup(tmp_path, attempts=2, backoff_seconds=0.2, backoff_max_seconds=0.2)
    yield made
    made.close()


class Dependency:
    """Something that jobs need; it is away."""

    def __init__(self) -> None:
        self.away = True
        self.calls = 0
        self.done: set[object] = set()

    def call(self, message: Message, error: Exception) -> None:
        self.calls += 1
        if self.away:
            raise error
        self.done.add(message.body)


def letters(setup: EngineSetup) -> int:
    return sum(setup.broker.dead_letters.counts().values())


@pytest.mark.parametrize(
    ("options", "queues"),
    [({"order": "queue"}, 40), ({"order": "key"}, 2), ({"order": "none"}, 1), ({"batch": 3}, 40)],
    ids=lambda value: next(iter(value.values())) if isinstance(value, dict) else None,
)
def test_no_message_is_given_up_while_a_dependency_is_away(
    setup: EngineSetup, options: dict[str, Any], queues: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever the order. Its attempts are used up neither before nor during the pause."""
    dependency = Dependency()

    def job(given: Any, context: Any) -> None:
        for message in given if options.get("batch") else (given,):
            dependency.call(message, OSError("away"))

    setup.app.job("mail-*", **options)(job)
    names = [f"mail-{number}" for number in range(queues)]
    count = 80
    for number in range(count):
        setup.app.send(names[number % queues], number, key=f"k{number % 40}")
    setup.start(*names)
    until(lambda: ": paused in this process" in caplog.text, "the job is paused")
    before = dependency.calls
    until(lambda: dependency.calls > before + 10, "ten more attempts")
    dependency.away = False
    until(lambda: dependency.done == set(range(count)), "all have run")
    assert ": continues after a pause" in caplog.text
    assert letters(setup) == 0


@pytest.mark.parametrize(
    ("error", "rules"),
    [
        (DeadLetter("bad"), ()),
        (Retry(after=0), ()),
        (OSError("known"), (Rule(OSError, attempts=2),)),
        (KeyError("a bug"), ()),
    ],
    ids=["a dead letter", "a retry", "an error with a rule", "a bug"],
)
def test_what_is_no_outage_pauses_no_job(
    setup: EngineSetup, error: Exception, rules: tuple[Rule, ...]
) -> None:
    dependency = Dependency()
    policy = Policy(rules=rules)
    setup.app.job("mail-*", policy=policy)(lambda message, context: dependency.call(message, error))
    names = [f"mail-{number}" for number in range(2 * FAILURES)]
    for name in names:
        setup.app.send(name, name)
    setup.start(*names)
    until(lambda: letters(setup) == len(names), "all messages are dead letters")
