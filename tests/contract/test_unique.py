"""``unique=`` on the brokers that can: one message waits or runs, and its end frees its text."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import qdo
from qdo.brokers.base import Broker, Capabilities
from qdo.brokers.streams import split
from qdo.errors import UnsupportedError, UsageError
from qdo.settings.settings import Settings
from qdo.testing import TestKit
from tests.support.brokers import rows


@pytest.fixture
def app(broker: Broker) -> Iterator[qdo.App]:
    app = qdo.App("app")
    with app.override_broker(broker, Settings(app="app")):
        yield app


def test_an_end_frees_the_text(app: qdo.App, broker: Broker) -> None:
    """Of its own message only; a delayed one waits, too; other texts and queues are free."""
    first = app.send("q", 1, unique="a", delay_seconds=0)
    assert app.send("q", 2, unique="a") == first
    later = app.send("q", 3, unique="late", delay_seconds=600)
    assert app.send("q", 4, unique="late") == later
    assert len({first, later, app.send("q", 5, unique="b"), app.send("r", 6, unique="a")}) == 4
    broker.delayed.free("q", None, "a", later)
    assert app.send("q", 7, unique="a") == first
    broker.delayed.free("q", None, "a", first)
    broker.delayed.free("none", None, "a", first)
    assert app.send("q", 8, unique="a") != first
    assert [row.body for row in rows(broker, "q")] == [b"1", b"5", b"8"]


def test_a_text_belongs_to_the_key_of_a_stream(app: qdo.App, broker: Broker) -> None:
    """Also after its shard is split."""
    app.stream("s", shards=1)
    first = app.stream("s").send("ada", 1, unique="a")
    assert app.stream("s").send("bob", 1, unique="a") != first
    shard = app.stream("s")._queue_of("ada")
    children = split(broker.streams.shards("s"), shard)
    broker.streams.add(children)
    broker.streams.open([each.queue for each in children])
    assert app.stream("s").send("ada", 2, unique="a") == first
    broker.delayed.free(shard, "ada", "a", first)
    assert app.stream("s").send("ada", 3, unique="a") != first


ENDS: dict[str, Callable[[], object]] = {
    "done": lambda: None,
    "skipped": lambda: fail(qdo.Skip("no")),
    "dead letter": lambda: fail(ValueError("no")),
    "dead letter at once": lambda: fail(qdo.DeadLetter("no")),
}


def fail(error: Exception) -> None:
    raise error


@pytest.mark.parametrize("batch", [None, 3])
@pytest.mark.parametrize("end", ENDS)
def test_each_end_frees_the_text_wherever_its_worker_dies(end: str, batch: int | None) -> None:
    """It is stored again once it is done, and not before; the job itself cannot store it."""
    app = qdo.App("clicks", attempts=2, backoff_seconds=0.01)

    @app.job("sync", batch=batch)
    def sync(message: Any, context: Any) -> None:
        held.append(held[:1] or app.send("sync", 2, unique="a") == message.id)
        ENDS[end]()

    for nth in itertools.count(1):
        held: list[Any] = []
        with TestKit(app) as kit:
            kit.crash_at(nth=nth)
            first = {app.send("sync", 1, unique="a") for _ in range(3)}
            kit.run_until_settled()
            second = app.send("sync", 1, unique="a")
            assert (len(first | {second}), held[0]) == (2, True), nth
            kit.run_until_settled()
            assert {each.body for each in kit.attempts("sync")} == {1}, nth
            if kit.faults_left:
                break
    assert nth > 5


WRONG: list[dict[str, Any]] = [
    {"unique": ""},
    {"unique": 1},
    {"unique": "a" * 1001},
    {"unique": "a", "dedup_key": "b"},
    {"unique": "a", "dedup_seconds": 5},
    {"unique": "a", "once": qdo.Message("q", 1, None)},
]


@pytest.mark.parametrize("options", WRONG, ids=str)
def test_wrong_texts_are_refused(options: dict[str, Any]) -> None:
    with TestKit(qdo.App("app")) as kit, pytest.raises(UsageError):
        kit.send("q", 1, **options)


@pytest.mark.parametrize("able", [{"dedup": False}, {"dedup": True, "dedup_seconds": 300.0}])
def test_other_brokers_refuse(able: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Kinesis has no keys, and those of SQS end by time alone."""
    with TestKit(qdo.App("app")) as kit:
        found = Capabilities(True, True, True, True, True, 100, **able)
        monkeypatch.setattr(type(kit.app.broker), "capabilities", found)
        with pytest.raises(UnsupportedError):
            kit.send("q", 1, unique="a")
