"""Discovery and retention, without I/O and without a real clock."""

from __future__ import annotations

import logging
import time
from dataclasses import replace
from typing import Any

import pytest

from qdo.brokers.base import Outgoing
from qdo.brokers.streams import first_shards, split
from qdo.coordination.protocol.claims import Claim
from qdo.coordination.znodes.queue_node import NEW, QueueNode
from qdo.errors import UnreachableError
from qdo.settings.live import SettingsInForce
from qdo.settings.settings import Settings
from qdo.testing.memory_broker import MemoryBroker, MemoryStore
from qdo.worker.duties.queues import Discovery
from qdo.worker.duties.retention import (
    DEAD_LETTERS_SECONDS,
    PERIOD_MAX_SECONDS,
    PERIOD_MIN_SECONDS,
    Retention,
)
from qdo.worker.duties.streams import OPEN_SECONDS
from qdo.worker.engine.slot import Slot
from tests.support.fakes.clocks import SettableClock
from tests.support.fakes.member import FakeMember
from tests.support.fakes.scripted_broker import ScriptedBroker

LOGGER = "qdo.worker.duties.queues"


class DiscoverySetup:
    """A discovery, its broker, and a member that leads."""

    def __init__(self, broker: Any = None) -> None:
        self.clock = SettableClock(1000.0)
        self.broker = ScriptedBroker() if broker is None else broker
        self.member = FakeMember(None, now=self.clock)
        self.member.leading = True
        self.discovery = Discovery(self.broker, self.clock)

    @property
    def created(self) -> list[str]:
        return self.member.created

    def step(self, after_seconds: float = 0.0) -> float:
        """Let time pass, and the leader step once; return the pause that it makes."""
        self.clock.now += after_seconds
        return self.discovery.step(self.member)

    def list(self) -> float:
        """Step when the next list of the broker is due."""
        return self.step(self.broker.catalog.list_seconds)

    def retention(self, queues: int, **settings: Any) -> tuple[Retention, dict[str, Slot]]:
        """Return the retention of a worker with queues, and these; queue N has done N messages."""
        slots = {}
        for number in range(queues):
            slots[f"q{number}"] = slot = Slot(f"q{number}")
            slot.claim = Claim(slot.queue, 1, number, self.member.lease)
        in_force = SettingsInForce(Settings(**settings))
        return Retention(self.broker, slots, in_force, self.clock), slots


@pytest.fixture
def stage() -> DiscoverySetup:
    """With the queues a and b."""
    stage = DiscoverySetup()
    for name in "ab":
        stage.broker.put(name, b"1")
    return stage


def test_discovery_creates_queues_only_as_leader(stage: DiscoverySetup) -> None:
    """A worker that is not sure whether it leads does not lead."""
    stage.member.leading = False
    stage.discovery.names_received(["new"])
    stage.step()
    stage.discovery.step(None)
    assert stage.created == []


def test_new_leader_creates_every_listed_queue(stage: DiscoverySetup) -> None:
    """Immediately, and nothing again in the next step."""
    stage.step()
    stage.step()
    assert stage.created == ["a", "b"]


def test_queue_that_gets_a_message_is_created_without_a_list(stage: DiscoverySetup) -> None:
    """Once, however often its name arrives."""
    stage.step()
    assert stage.discovery.names_received(["a", "new"])
    stage.step()
    assert not stage.discovery.names_received(["new"])
    stage.step()
    assert stage.created == ["a", "b", "new"]


def test_no_queue_is_created_beyond_the_limit(
    stage: DiscoverySetup, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The refused ones are named once, and created as soon as there is room."""
    nodes: list[tuple[str, ...] | None] = [None]
    monkeypatch.setattr(stage.member, "queue_names", lambda: nodes[0])
    stage.broker.max_queues = 3
    stage.broker.put("c", b"1")
    stage.broker.put("d", b"1")
    assert stage.step() < 1.0
    assert stage.created == []  # the number of nodes is unknown
    nodes[0] = ("old",)
    stage.step()
    assert stage.created == ["a", "b"]
    nodes[0] = ("old", "a", "b")
    for _ in range(3):
        stage.list()
    assert stage.created == ["a", "b"]
    errors = [record.args for record in caplog.records if record.levelname == "ERROR"]
    assert errors == [("2 new queues are", "1 queue", "c, d")]
    nodes[0] = ("a", "b")
    stage.list()
    assert stage.created == ["a", "b", "c"]


def test_leader_lists_all_queues_periodically(stage: DiscoverySetup) -> None:
    """So a lost node or a missed wake-up is repaired."""
    pause = stage.step()
    assert pause <= stage.broker.catalog.list_seconds
    stage.list()
    assert stage.created == ["a", "b", "a", "b"]


def test_second_term_starts_without_memory_of_the_first(stage: DiscoverySetup) -> None:
    """Another leader may have deleted nodes in the meantime."""
    stage.step()
    stage.member.leading = False
    stage.step()
    stage.member.leading = True
    stage.step()
    assert stage.created == ["a", "b", "a", "b"]


def test_names_that_no_znode_can_have_are_one_line(
    stage: DiscoverySetup, caplog: pytest.LogCaptureFixture
) -> None:
    """Once, however many a sender makes up; the other queues are created."""
    for number in range(200):
        stage.broker.put(f"\ue000{number}", b"1")
    stage.step()
    stage.list()
    assert stage.created == ["a", "b"] * 2
    (record,) = [each for each in caplog.records if each.levelname == "ERROR"]
    assert record.args is not None
    assert record.args[0] == "200 new queues are"


def test_failed_list_is_retried(stage: DiscoverySetup, caplog: pytest.LogCaptureFixture) -> None:
    """Discovery continues."""
    stage.broker.faults = [OSError("away")]
    stage.step()
    assert stage.created == []
    assert [r.name for r in caplog.records] == [LOGGER]
    assert caplog.records[0].levelname == "WARNING"
    stage.list()
    assert stage.created == ["a", "b"]


def test_retention_spreads_its_deletes_over_a_period(stage: DiscoverySetup) -> None:
    """One queue at a time, up to its processed position; a queue without progress is skipped."""
    retention, _ = stage.retention(10, retention_seconds=100.0)
    assert retention.step() == PERIOD_MIN_SECONDS
    stage.clock.now += PERIOD_MIN_SECONDS
    for _ in range(10):
        pause = retention.step()
        assert 0 <= pause <= PERIOD_MIN_SECONDS
        stage.clock.now += pause
    assert sorted(stage.broker.retired) == [(f"q{n}", n, 100.0) for n in range(1, 10)]


def test_failed_trim_waits_for_the_next_round(
    stage: DiscoverySetup, caplog: pytest.LogCaptureFixture
) -> None:
    """A queue released in the meantime is skipped."""
    caplog.set_level(logging.WARNING)
    retention, slots = stage.retention(3, retention_seconds=100.0)
    stage.clock.now += PERIOD_MIN_SECONDS
    stage.broker.faults = [OSError("busy")]
    retention.step()
    del slots["q1"]
    retention.step()
    retention.step()
    assert stage.broker.retired == []
    (record,) = caplog.records
    assert record.args == ("q2", "OSError: busy")


def test_retention_limits_the_dead_letters_of_each_queue(
    stage: DiscoverySetup, caplog: pytest.LogCaptureFixture
) -> None:
    """Also of queues without progress. The log has the number and the limit."""
    caplog.set_level(logging.WARNING)
    pruned: list[tuple[str, int | None, float | None]] = []

    def prune(queue: str, *, keep: int | None = None, before: float | None = None) -> int:
        pruned.append((queue, keep, before))
        return 7 if queue == "q0" else 0

    stage.broker.dead_letters.prune = prune  # type: ignore[method-assign]
    limits = {"dead_letter_limit": 5, "dead_letter_retention_seconds": 60.0}
    retention, _ = stage.retention(2, **limits)
    stage.clock.now += DEAD_LETTERS_SECONDS
    began = time.time()
    for _ in range(2):
        stage.clock.now += retention.step()
    assert [(queue, keep) for queue, keep, _ in pruned] == [
        (queue, keep) for queue in ("q1", "q0") for keep in (5, None)
    ]
    assert all(before is None or began - 61 < before < began for _, _, before in pruned)
    assert [record.args for record in caplog.records] == [
        ("q0", "7 dead letters", 5),
        ("q0", "7 dead letters", 60.0),
    ]


def test_dead_letters_are_kept_by_default(stage: DiscoverySetup) -> None:
    stage.broker.dead_letters.prune = None  # type: ignore[assignment, method-assign]
    retention, _ = stage.retention(1)
    stage.clock.now += PERIOD_MAX_SECONDS
    retention.step()


def test_hidden_shards_get_nodes_once_their_parents_are_done(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Not before, however often a listener names them; then at once, without a list."""
    stage = DiscoverySetup(MemoryBroker(MemoryStore(), "app"))
    stage.broker.streams.add(first_shards("s", 1))
    stage.broker.send(Outgoing("s.-", b"1", "key"))
    last = {"s.-": 0}

    def read_queues(names: list[str]) -> dict[str, QueueNode]:
        return {name: replace(NEW, last=last[name]) for name in names}

    monkeypatch.setattr(stage.member, "read_queues", read_queues, raising=False)
    stage.step()
    children = [each.queue for each in split(stage.broker.streams.shards(), "s.-")]
    stage.broker.streams.add(split(stage.broker.streams.shards(), "s.-"))
    assert stage.discovery.names_received(children)
    assert stage.step() <= OPEN_SECONDS
    assert not stage.discovery.names_received(children), "it is known to be hidden"
    stage.list()
    assert {*stage.created} == {"s.-"}
    last["s.-"] = stage.broker.catalog.head("s.-")
    stage.clock.now += OPEN_SECONDS
    stage.step()
    assert stage.created[-2:] == children
    assert stage.broker.streams.resharded() == []


def test_a_silent_broker_lets_no_hidden_shard_through(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A name is created only once the broker has said what is hidden."""
    stage = DiscoverySetup(MemoryBroker(MemoryStore(), "app"))
    stage.step()
    resharded = stage.broker.streams.resharded
    monkeypatch.setattr(stage.broker.streams, "resharded", _silent)
    stage.discovery.names_received(["q"])
    stage.step()
    assert stage.created == []
    monkeypatch.setattr(stage.broker.streams, "resharded", resharded)
    stage.step()
    assert stage.created == ["q"]


def _silent() -> None:
    raise UnreachableError(what="the broker", reason="it is silent")
