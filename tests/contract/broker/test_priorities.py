"""A worker with ``order="priority"`` on every broker whose positions are stable."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

import qdo
from qdo.message import Message
from tests.support.brokers import bench
from tests.support.engine import EngineSetup, until


@pytest.mark.parametrize(
    ("kind", "count"), [("embedded", 9_000), ("postgresql", 300), ("kinesis", 300)]
)
def test_messages_run_as_in_a_sorted_list(
    kind: str, count: int, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """One that is sent while another runs is next if it is more urgent, behind any number."""
    chance = random.Random(20261127)
    sent = [(chance.choice((0, 3, 5, 7)) if n < 300 else 9, n) for n in range(count)]
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
            until(lambda: len(begun) > 300, "the urgent messages")
        finally:
            engine.close()
    expected = sorted(sent)
    expected.insert(100, (0, "urgent"))
    assert begun[:301] == expected[:301]
