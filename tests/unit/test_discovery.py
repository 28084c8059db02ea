"""New queues and old messages; no I/O, no real clock."""

from __future__ import annotations

import logging

import pytest

from qdo.worker.discovery import RETIRE_MIN_SECONDS, Discovery, Retention
from qdo.worker.slot import Slot
from tests.support.fake_member import FakeMember
from tests.support.memory_broker import MemoryBroker


class Clock:
    """A clock that the test sets."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def broker() -> MemoryBroker:
    made = MemoryBroker()
    made.put("a", b"1")
    made.put("b", b"1")
    return made


@pytest.fixture
def member(clock: Clock) -> FakeMember:
    made = FakeMember(None, now=clock)
    made.leader = True
    return made


def test_only_the_leader_creates(broker: MemoryBroker, member: FakeMember, clock: Clock) -> None:
    """Whoever is not sure, is not."""
    discovery = Discovery(broker, clock)
    member.leader = False
    discovery.heard(["new"])
    discovery.step(member)
    discovery.step(None)
    assert member.created == []


def test_a_new_leader_creates_all_there_is(
    broker: MemoryBroker, member: FakeMember, clock: Clock
) -> None:
    """At once, and nothing again with the next step."""
    discovery = Discovery(broker, clock)
    discovery.step(member)
    discovery.step(member)
    assert member.created == ["a", "b"]


def test_a_queue_that_gets_a_message_is_created_without_a_listing(
    broker: MemoryBroker, member: FakeMember, clock: Clock
) -> None:
    """Once, however often it is heard of."""
    discovery = Discovery(broker, clock)
    discovery.step(member)
    assert discovery.heard(["a", "new"])
    discovery.step(member)
    assert not discovery.heard(["new"])
    discovery.step(member)
    assert member.created == ["a", "b", "new"]


def test_everything_is_compared_now_and_then(
    broker: MemoryBroker, member: FakeMember, clock: Clock
) -> None:
    """A node that was lost, or a wake that was missed, is made good."""
    discovery = Discovery(broker, clock)
    pause = discovery.step(member)
    assert pause <= broker.list_seconds
    clock.now += broker.list_seconds
    discovery.step(member)
    assert member.created == ["a", "b", "a", "b"]


def test_a_leader_in_a_second_term_starts_afresh(
    broker: MemoryBroker, member: FakeMember, clock: Clock
) -> None:
    """What another leader deleted meanwhile is not remembered."""
    discovery = Discovery(broker, clock)
    discovery.step(member)
    member.leader = False
    discovery.step(member)
    member.leader = True
    discovery.step(member)
    assert member.created == ["a", "b", "a", "b"]


def test_a_name_that_no_znode_can_have_is_named_once(
    broker: MemoryBroker, member: FakeMember, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    """The other queues go on."""
    broker.put("bad/name", b"1")
    discovery = Discovery(broker, clock)
    discovery.step(member)
    clock.now += broker.list_seconds
    discovery.step(member)
    assert member.created == ["a", "b"] * 2
    assert caplog.text.count("'bad/name' is not processed") == 1


def test_a_broker_that_cannot_list_is_asked_again(
    broker: MemoryBroker, member: FakeMember, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    """Discovery goes on."""
    broker.faults = [OSError("away")]
    discovery = Discovery(broker, clock)
    discovery.step(member)
    assert member.created == []
    assert "cannot be listed" in caplog.text
    clock.now += broker.list_seconds
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


def test_old_messages_are_deleted_spread_over_a_period(
    broker: MemoryBroker, member: FakeMember, clock: Clock
) -> None:
    """One queue at a time, up to where it is done; a queue without progress is left alone."""
    slots = owned(member, 10)
    retention = Retention(broker, 100.0, clock)
    assert retention.step(slots) == RETIRE_MIN_SECONDS
    clock.now += RETIRE_MIN_SECONDS
    for _ in range(10):
        pause = retention.step(slots)
        assert 0 <= pause <= RETIRE_MIN_SECONDS
        clock.now += pause
    assert sorted(broker.retired) == [(f"q{n}", n, 100.0) for n in range(1, 10)]


def test_what_cannot_be_deleted_stays_for_now(
    broker: MemoryBroker, member: FakeMember, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    """The next round tries again; a queue given up meanwhile is passed over."""
    caplog.set_level(logging.WARNING)
    slots = owned(member, 3)
    retention = Retention(broker, 100.0, clock)
    clock.now += RETIRE_MIN_SECONDS
    broker.faults = [OSError("busy")]
    retention.step(slots)
    del slots["q1"]
    retention.step(slots)
    retention.step(slots)
    assert broker.retired == []
    assert "old messages stay for now" in caplog.text
