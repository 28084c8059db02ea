"""Workers that end by themselves: after so many messages, after so long."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gevent
import pytest

from qdo.message import Message
from qdo.outcomes import Retry
from tests.support.engine import EngineSetup, until


@pytest.mark.parametrize("executor", ["greenlet", "thread"])
def test_a_worker_ends_after_exactly_so_many_messages(
    make: Callable[..., EngineSetup], executor: str
) -> None:
    """It finishes started messages; the next one is not started, and runs first elsewhere."""
    engine = make(max_messages=7, executor=executor)
    seen = engine.collect("queue", "body")
    for queue in ("a", "b"):
        engine.send(queue, *range(10))
    engine.start("a", "b")
    assert engine.join() == 0
    assert len(seen) == 7
    for queue in ("a", "b"):
        count = sum(name == queue for name, _ in seen)
        assert [body for name, body in seen if name == queue] == list(range(count))
        left = engine.registrar.recorded.get(queue, 0)
        reader = iter(engine.app.broker.reader(queue, left).fetch(100))
        assert len(list(reader)) == 10 - count


def test_every_attempt_counts(make: Callable[..., EngineSetup]) -> None:
    engine = make(max_messages=3)
    attempts: list[int] = []

    @engine.app.job()
    def job(message: Message, context: Any) -> None:
        attempts.append(message.attempt)
        raise Retry(after=0)

    engine.send("q", 1)
    engine.start("q")
    assert engine.join() == 0
    assert attempts == [1, 2, 3]


def test_a_worker_ends_when_its_time_is_over(make: Callable[..., EngineSetup]) -> None:
    engine = make(max_seconds=0.2)
    seen: list[Any] = []

    @engine.app.job()
    def job(message: Message, context: Any) -> None:
        gevent.sleep(0.01)
        seen.append(message.body)

    engine.send("q", *range(1000))
    engine.start("q")
    assert engine.join() == 0
    until(lambda: seen)
    assert seen == list(range(len(seen)))
    assert len(seen) < 1000
