"""Discovery and retention, without I/O and without a real clock."""

from __future__ import annotations

import logging
import time
from dataclasses import replace

import pytest

from qdo.brokers.base import Outgoing
from qdo.brokers.streams import first_shards, split
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


@pytest.fixture
def clock() -> SettableClock[float]:
    return SettableClock(1000.0)


@pytest.fixture
def broker() -> ScriptedBroker:
    made = ScriptedBroker()
    made.put("a", b"1")
    made.put("b", b"1")
    return made


@pytest.fixture
def member(clock: SettableClock[float]) -> FakeMember:
    made = FakeMember(None, now=clock)
    made.leading = True
    return made


@pytest.fixture
def discovery(broker: ScriptedBroker, clock: SettableClock[float]) -> Discovery:
    return Discovery(broker, clock)


def test_discovery_creates_queues_only_as_leader(discovery: Discovery, member: FakeMember) -> None:
    """A worker that is not sure whether it leads does not lead."""
    member.leading = False
    discovery.names_received(["new"])
    discovery.step(member)
    discovery.step(None)
    assert member.created == []


def test_new_leader_creates_every_listed_queue(discovery: Discovery, member: FakeMember) -> None:
    """Immediately, and nothing again in the next step."""
    discovery.step(member)
    discovery.step(member)
    assert member.created == ["a", "b"]


def test_queue_that_gets_a_message_is_created_without_a_list(
    discovery: Discovery, member: FakeMember
) -> None:
    """Once, however often its name arrives."""
    discovery.step(member)
    assert discovery.names_received(["a", "new"])
    discovery.step(member)
    assert not discovery.names_received(["new"])
    discovery.step(member)
    assert member.created == ["a", "b", "new"]


def test_no_queue_is_created_beyond_the_limit(
    discovery: Discovery,
    broker: ScriptedBroker,
    member: FakeMember,
    clock: SettableClock[float],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The refused ones are named once, and created as soon as there is room."""
    nodes: list[tuple[str, ...] | None] = [None]
    monkeypatch.setattr(member, "queue_names", lambda: nodes[0])
    broker.max_queues = 3
    broker.put("c", b"1")
    broker.put("d", b"1")
    assert discovery.step(member) < 1.0
    assert member.created == []  # the number of nodes is unknown
    nodes[0] = ("old",)
    discovery.step(member)
    assert member.created == ["a", "b"]
    nodes[0] = ("old", "a", "b")
    for _ in range(3):
        clock.now += broker.catalog.list_seconds
        discovery.step(member)
    assert member.created == ["a", "b"]
    errors = [record.args for record in caplog.records if record.levelname == "ERROR"]
    assert errors == [("2 new queues are", "1 queue", "c, d")]
    nodes[0] = ("a", "b")
    clock.now += broker.catalog.list_seconds
    discovery.step(member)
    assert member.created == ["a", "b", "c"]


def test_leader_lists_all_queues_periodically(
    discovery: Discovery, broker: ScriptedBroker, member: FakeMember, clock: SettableClock[float]
) -> None:
    """So a lost node or a missed wake-up is repaired."""
    pause = discovery.step(member)
    assert pause <= broker.catalog.list_seconds
    clock.now += broker.catalog.list_seconds
    discovery.step(member)
    assert member.created == ["a", "b", "a", "b"]


def test_second_term_starts_without_memory_of_the_first(
    discovery: Discovery, member: FakeMember
) -> None:
    """Another leader may have deleted nodes in the meantime."""
    discovery.step(member)
    member.leading = False
    discovery.step(member)
    member.leading = True
    discovery.step(member)
    assert member.created == ["a", "b", "a", "b"]


def test_names_that_no_znode_can_have_are_one_line(
    discovery: Discovery,
    broker: ScriptedBroker,
    member: FakeMember,
    clock: SettableClock[float],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Once, however many a sender makes up; the other queues are created."""
    for number in range(200):
        broker.put(f"\ue000{number}", b"1")
    discovery.step(member)
    clock.now += broker.catalog.list_seconds
    discovery.step(member)
    assert member.created == ["a", "b"] * 2
    (record,) = [each for each in caplog.records if each.levelname == "ERROR"]
    assert record.args is not None
    assert record.args[0] == "200 new queues are"


def test_failed_list_is_retried(
    discovery: Discovery,
    broker: ScriptedBroker,
    member: FakeMember,
    clock: SettableClock[float],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Discovery continues."""
    broker.faults = [OSError("away")]
    discovery.step(member)
    assert member.created == []
    assert [r.name for r in caplog.records] == [LOGGER]
    assert caplog.records[0].levelname == "WARNING"
    clock.now += broker.catalog.list_seconds
    discovery.step(member)
    assert member.created == ["a", "b"]


def owned(member: FakeMember, count: int) -> dict[str, Slot]:
    slots = {}
    member.listener = Silent()
    for number in range(count):
        (claim,) = member.grant(f"q{number}")
        claim.done = number
        slots[claim.queue] = slot = Slot(claim.queue)
        slot.claim = claim
    return slots


class Silent:
    """A listener that does nothing."""

    def claimed(self, claim: object) -> None:
        """Nothing."""


def test_retention_spreads_its_deletes_over_a_period(
    broker: ScriptedBroker, member: FakeMember, clock: SettableClock[float]
) -> None:
    """One queue at a time, up to its processed position; a queue without progress is skipped."""
    slots = owned(member, 10)
    retention = Retention(broker, slots, SettingsInForce(Settings(retention_seconds=100.0)), clock)
    assert retention.step() == PERIOD_MIN_SECONDS
    clock.now += PERIOD_MIN_SECONDS
    for _ in range(10):
        pause = retention.step()
        assert 0 <= pause <= PERIOD_MIN_SECONDS
        clock.now += pause
    assert sorted(broker.retired) == [(f"q{n}", n, 100.0) for n in range(1, 10)]


def test_failed_trim_waits_for_the_next_round(
    broker: ScriptedBroker,
    member: FakeMember,
    clock: SettableClock[float],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A queue released in the meantime is skipped."""
    caplog.set_level(logging.WARNING)
    slots = owned(member, 3)
    retention = Retention(broker, slots, SettingsInForce(Settings(retention_seconds=100.0)), clock)
    clock.now += PERIOD_MIN_SECONDS
    broker.faults = [OSError("busy")]
    retention.step()
    del slots["q1"]
    retention.step()
    retention.step()
    assert broker.retired == []
    (record,) = caplog.records
    assert record.args == ("q2", "OSError: busy")


def test_retention_limits_the_dead_letters_of_each_queue(
    broker: ScriptedBroker,
    member: FakeMember,
    clock: SettableClock[float],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Also of queues without progress. The log has the number and the limit."""
    caplog.set_level(logging.WARNING)
    slots = owned(member, 2)
    pruned: list[tuple[str, int | None, float | None]] = []

    def prune(queue: str, *, keep: int | None = None, before: float | None = None) -> int:
        pruned.append((queue, keep, before))
        return 7 if queue == "q0" else 0

    broker.dead_letters.prune = prune  # type: ignore[method-assign]
    settings = Settings(dead_letter_limit=5, dead_letter_retention_seconds=60.0)
    retention = Retention(broker, slots, SettingsInForce(settings), clock)
    clock.now += DEAD_LETTERS_SECONDS
    began = time.time()
    for _ in range(2):
        clock.now += retention.step()
    assert [(queue, keep) for queue, keep, _ in pruned] == [
        (queue, keep) for queue in ("q1", "q0") for keep in (5, None)
    ]
    assert all(before is None or began - 61 < before < began for _, _, before in pruned)
    assert [record.args for record in caplog.records] == [
        ("q0", "7 dead letters", 5),
        ("q0", "7 dead letters", 60.0),
    ]


def test_dead_letters_are_kept_by_default(
    broker: ScriptedBroker, member: FakeMember, clock: SettableClock[float]
) -> None:
    broker.dead_letters.prune = None  # type: ignore[assignment, method-assign]
    retention = Retention(broker, owned(member, 1), SettingsInForce(Settings()), clock)
    clock.now += PERIOD_MAX_SECONDS
    retention.step()


def test_hidden_shards_get_nodes_once_their_parents_are_done(
    member: FakeMember, clock: SettableClock[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not before, however often a listener names them; then at once, without a list."""
    broker = MemoryBroker(MemoryStore(), "app")
    broker.streams.add(first_shards("s", 1))
    broker.send(Outgoing("s.-", b"1", "key"))
    last = {"s.-": 0}

    def read_queues(names: list[str]) -> dict[str, QueueNode]:
        return {name: replace(NEW, last=last[name]) for name in names}

    monkeypatch.setattr(member, "read_queues", read_queues, raising=False)
    discovery = Discovery(broker, clock)
    discovery.step(member)
    children = [each.queue for each in split(broker.streams.shards(), "s.-")]
    broker.streams.add(split(broker.streams.shards(), "s.-"))
    assert discovery.names_received(children)
    assert discovery.step(member) <= OPEN_SECONDS
    assert not discovery.names_received(children), "it is known to be hidden"
    clock.now += broker.catalog.list_seconds
    discovery.step(member)
    assert {*member.created} == {"s.-"}
    last["s.-"] = broker.catalog.head("s.-")
    clock.now += OPEN_SECONDS
    discovery.step(member)
    assert member.created[-2:] == children
    assert broker.streams.resharded() == []


def test_a_silent_broker_lets_no_hidden_shard_through(
    member: FakeMember, clock: SettableClock[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A name is created only once the broker has said what is hidden."""
    broker = MemoryBroker(MemoryStore(), "app")
    discovery = Discovery(broker, clock)
    discovery.step(member)
    resharded = broker.streams.resharded
    monkeypatch.setattr(broker.streams, "resharded", _silent)
    discovery.names_received(["q"])
    discovery.step(member)
    assert member.created == []
    monkeypatch.setattr(broker.streams, "resharded", resharded)
    discovery.step(member)
    assert member.created == ["q"]


def _silent() -> None:
    raise UnreachableError(what="the broker", reason="it is silent")
