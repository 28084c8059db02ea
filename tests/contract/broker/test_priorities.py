"""A worker with ``order="priority"`` on every broker whose positions are stable."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

import qdo
from qdo.message import Message
from tests.support.consumers import bench
from tests.support.engine import EngineSetup, until


@pytest.mark.parametrize("kind", ["embedded", "postgresql", "kinesis"])
def test_messages_run_as_in_a_sorted_list(
    kind: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Those that were sent while one runs are next if they are more urgent."""
    chance = random.Random(20261127)
    sent = [(chance.choice((0, 3, 5, 7, 9)), number) for number in range(300)]
    begun: list[tuple[int, Any]] = []
    with bench(kind, tmp_path, request) as made:
        engine, queue = EngineSetup(tmp_path, broker=made.url), made.queue(0)

        @engine.app.job(order="priority")
        def job(message: Message, context: Any) -> None:
            begun.append((message.priority, message.body))
            if len(begun) == 100:
                engine.app.send(queue, "urgent", priority=qdo.URGENT)
                lanes: Any = engine.dispatcher.slots[queue].lanes
                until(lambda: not lanes._tip, "the worker is woken")

        try:
            engine.app.send_many([qdo.NewMessage(queue, n, priority=each) for each, n in sent])
            engine.start(queue)
            until(lambda: len(begun) == len(sent) + 1, "the end of the queue")
        finally:
            engine.close()
    assert begun.index((0, "urgent")) == 100
    begun.remove((0, "urgent"))
    assert begun == sorted(sent)


def test_an_urgent_message_behind_9000_is_next(tmp_path: Path) -> None:
    begun: list[Any] = []
    engine = EngineSetup(tmp_path)

    @engine.app.job(order="priority")
    def job(message: Message, context: Any) -> None:
        begun.append(message.body)
        if message.body == 4:
            engine.app.send("q", "urgent", priority=qdo.URGENT)
            lanes: Any = engine.dispatcher.slots["q"].lanes
            until(lambda: not lanes._tip, "the worker is woken")

    try:
        engine.send("q", *range(9_000))
        engine.start("q")
        until(lambda: len(begun) > 5)
    finally:
        engine.close()
    assert begun[:6] == [0, 1, 2, 3, 4, "urgent"]
