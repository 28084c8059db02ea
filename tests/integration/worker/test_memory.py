"""The memory that a worker process takes for the bodies of its messages is bounded."""

from __future__ import annotations

from collections.abc import Iterator
from copy import copy
from pathlib import Path
from typing import Any

import pytest
from gevent.event import Event

from qdo.brokers.postgresql import reader
from qdo.message import Batch, Message
from qdo.worker.engine import fetcher
from tests.support.engine import EngineSetup, until

BODY = 1 << 20
QUEUES = [f"q{number:02d}" for number in range(24)]


class Hoarder:
    """A worker whose jobs hold their messages until a gate opens.

    :ivar held: the messages in flight.
    :ivar done: their queues, as they ended.
    """

    def __init__(self, engine: EngineSetup) -> None:
        self.engine = engine
        self.gate = Event()
        self.held: list[Message] = []
        self.done: list[str] = []
        self.most = 0

    def job(self, given: Message | Batch, context: Any) -> None:
        message = given[0] if isinstance(given, Batch) else given
        self.held.append(message)
        self.most = max(self.most, self.fetched())
        self.gate.wait()
        self.held.remove(message)
        self.done.append(message.queue)

    def fetched(self) -> int:
        """Return the bytes in flight, and those of rows that wait in the process."""
        slots = self.engine.dispatcher.slots.values()
        rows = [row for slot in slots for row in (*copy(slot.rows or iter(())),)]
        return sum(map(len, (each.body for each in self.held))) + sum(len(row[1]) for row in rows)

    def send(self, count: int, size: int) -> None:
        for queue in QUEUES:
            self.engine.send(queue, *[b"x" * size] * count)


@pytest.fixture(params=["file", "postgresql"])
def hoarder(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Hoarder]:
    monkeypatch.setattr(reader, "FETCH_BYTES", BODY)
    server = request.param == "postgresql"
    broker = {"broker": request.getfixturevalue("postgresql_url")} if server else {}
    made = Hoarder(EngineSetup(tmp_path, max_body_bytes=BODY, turn_seconds=0.001, **broker))
    yield made
    made.gate.set()
    made.engine.close()


@pytest.mark.parametrize("batch", [None, 1])
def test_large_bodies_are_fetched_one_after_the_other(
    hoarder: Hoarder, monkeypatch: pytest.MonkeyPatch, batch: int | None
) -> None:
    """Jobs start while there is memory for their messages; each queue has its turn."""
    monkeypatch.setattr(fetcher, "HELD_BYTES", 8 * BODY)
    hoarder.engine.app.job(batch=batch)(hoarder.job)
    hoarder.send(2, BODY)
    hoarder.engine.start(*QUEUES)
    reads = hoarder.engine.pipeline._fetcher
    until(lambda: len(hoarder.held) >= 4 and len(reads._waiting) >= 16)
    assert hoarder.fetched() <= 8 * BODY
    hoarder.gate.set()
    until(lambda: len(hoarder.done) == 2 * len(QUEUES))
    assert hoarder.most <= 8 * BODY
    assert set(hoarder.done[: len(QUEUES) + 8]) == set(QUEUES)
    until(lambda: reads.held_bytes == 0)


def test_queues_between_their_turns_give_up_rows(
    hoarder: Hoarder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They read them again; nothing is lost, and nothing runs twice."""
    monkeypatch.setattr(fetcher, "HELD_BYTES", 4 * BODY)
    hoarder.engine.app.job()(hoarder.job)
    hoarder.send(16, BODY // 16)
    hoarder.gate.set()
    hoarder.engine.start(*QUEUES)
    until(lambda: len(hoarder.done) >= 16 * len(QUEUES))
    assert hoarder.most <= 4 * BODY
    assert sorted(hoarder.done) == sorted(QUEUES * 16)


def test_a_queue_that_waits_for_memory_is_released(
    hoarder: Hoarder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetcher, "HELD_BYTES", BODY)
    hoarder.engine.app.job()(hoarder.job)
    hoarder.send(1, BODY)
    hoarder.engine.start(*QUEUES)
    reads = hoarder.engine.pipeline._fetcher
    until(lambda: len(reads._waiting) == len(QUEUES) - 1)
    (running,) = {each.queue for each in hoarder.held}
    (other, *_) = set(QUEUES) - {running}
    hoarder.engine.member.take_back(other)
    until(lambda: ("finished", other) in hoarder.engine.member.events)
