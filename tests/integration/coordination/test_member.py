"""Members on real coordinators: claims, handover, seeks, lost connections, ended sessions."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest
from kazoo.exceptions import BadVersionError, ConnectionLoss

from qdo.coordination import queue_admin as operator
from qdo.coordination.client import Client, connect
from qdo.coordination.member import Member
from qdo.coordination.znodes.queue_node import FailureRecord, QueueNode
from qdo.errors import CorruptNodeError
from tests.support.fleet import LAYOUT, CountingEngine, MemberFleet
from tests.support.processes import wait_until


@pytest.fixture
def fleet(coordinator_url: str) -> Iterator[MemberFleet]:
    fleet = MemberFleet(coordinator_url)
    yield fleet
    fleet.close()


def names(count: int) -> list[str]:
    return [f"queue-{number:03}" for number in range(count)]


def test_an_ended_session_loses_its_queues_to_the_others(fleet: MemberFleet) -> None:
    """The member hears of it, drops everything, and its replacement gets a share."""
    fleet.join()
    fleet.join()
    fleet.create_queues(names(20))
    fleet.wait(lambda: fleet.balanced(20), "two workers share the queues")
    gone = fleet.members[0][0].name
    fleet.end_session(0)
    fleet.wait(lambda: fleet.balanced(20), "the queues are shared again")
    assert gone not in {member.name for member, _ in fleet.members}


@pytest.mark.parametrize("leads", [True, False])
def test_the_leader_names_a_worker_that_released_nothing(
    fleet: MemberFleet, caplog: pytest.LogCaptureFixture, leads: bool
) -> None:
    """Also if it led itself: then the next leader does."""
    for _ in range(3):
        fleet.join()
    fleet.create_queues(names(9))
    fleet.wait(lambda: fleet.balanced(9), "three workers share the queues")
    (index, *_) = [
        at for at, (each, _) in enumerate(fleet.members) if each.leader.is_leader() == leads
    ]
    gone = fleet.members[index][0].name
    fleet.end_session(index)
    fleet.wait(lambda: fleet.balanced(9), "the queues are owned again")
    leader = next(member for member, _ in fleet.members if member.leader.is_leader())
    fleet.wait(lambda: leader.leader.facts()["lost_workers"], "the leader has noticed")
    (lost,) = leader.leader.facts()["lost_workers"]
    assert (lost.name, lost.process, lost.queues) == (gone, "test pid 7", 3)
    assert abs(lost.at - time.time()) < 60.0
    records = [each for each in caplog.records if each.name.endswith(".worker_roll")]
    assert [(each.levelname, each.args and gone in each.args) for each in records] == [
        ("WARNING", True)
    ]


def test_a_worker_that_released_its_queues_is_not_lost(fleet: MemberFleet) -> None:
    """However fast it goes, and whoever leads."""
    for _ in range(3):
        fleet.join()
    fleet.create_queues(names(9))
    fleet.wait(lambda: fleet.balanced(9), "three workers share the queues")
    fleet.leave(0)
    fleet.wait(lambda: fleet.balanced(9), "two workers share the queues")
    fleet.leave(0)
    fleet.wait(lambda: fleet.balanced(9), "one worker has the queues")
    assert fleet.members[0][0].leader.facts() == {"lost_workers": None, "refused_rows": None}


def test_a_dropped_connection_moves_nothing(fleet: MemberFleet) -> None:
    """The session lives on: the same claims, the same fences, and checkpoints continue."""
    fleet.join()
    fleet.join()
    fleet.create_queues(names(20))
    fleet.wait(lambda: fleet.balanced(20), "two workers share the queues")
    before = {c.queue: c.fence for _, engine in fleet.members for c in engine.claims.values()}
    for _ in range(5):
        fleet.drop_connection(0)
        member, engine = fleet.members[0]
        claim = next(iter(engine.claims.values()))
        assert member.record(claim, 20.0)
    fleet.wait(lambda: fleet.balanced(20), "all is settled")
    after = {c.queue: c.fence for _, engine in fleet.members for c in engine.claims.values()}
    assert after == before


def test_a_connection_lost_while_starting_is_waited_out(coordinator_url: str) -> None:
    """A worker that starts while a server restarts registers a moment later."""
    client = connect(coordinator_url)
    client.open()
    make, calls = client.ensure_path, []

    def lost_twice(path: str) -> None:
        calls.append(path)
        if len(calls) in (2, 5):
            raise ConnectionLoss
        make(path)

    client.ensure_path = lost_twice
    member = Member(client, LAYOUT, CountingEngine([]), component={"host": "test"})
    member.start(20.0)
    assert member.name
    assert len(calls) > 5
    member.stop()


def test_an_owner_keeps_an_attempt_that_was_counted_late(
    fleet: MemberFleet, outsider: Client
) -> None:
    """The former owner counts it when it wakes; checkpoints of the new one must not erase it."""
    fleet.join()
    (queue,) = names(1)
    fleet.create_queues([queue])
    fleet.wait(lambda: fleet.balanced(1), "the queue is claimed")
    path = LAYOUT.queue(queue)

    def node() -> QueueNode:
        return QueueNode.parse(outsider.get(path)[0])

    fleet.wait(lambda: node().last > 0, "a checkpoint")
    late = FailureRecord(2**40, 1, "its session expired", crashed=True)
    counted: list[int] = []

    def count() -> bool:
        data, stat = outsider.get(path)
        found = QueueNode.parse(data)
        with contextlib.suppress(BadVersionError):
            outsider.set(path, replace(found, failure=late).encode(), stat.version)
            counted.append(found.last)
        return bool(counted)

    fleet.wait(count, "the attempt is counted")
    fleet.wait(lambda: node().last > counted[0] + 100, "later checkpoints")
    assert node().failure == late


def test_a_seek_moves_a_live_queue(fleet: MemberFleet, outsider: Client) -> None:
    """The owner resumes at the operator's position, and keeps the queue."""
    fleet.join()
    fleet.create_queues(["busy"])
    fleet.wait(lambda: fleet.balanced(1), "the queue is owned")
    wait_until(lambda: len(fleet.ledger) > 20, "the queue is being processed")
    fence = fleet.ledger[-1][2]
    operator.seek(outsider, LAYOUT, "busy", 1_000_000)
    wait_until(lambda: ("busy", 1_000_001, fence) in fleet.ledger, "it goes on from there")
    again = len(fleet.ledger)  # before the seek: it may start afresh before that returns
    operator.seek(outsider, LAYOUT, "busy", 0)
    wait_until(lambda: ("busy", 1, fence) in fleet.ledger[again:], "it starts afresh")


def test_a_corrupt_node_is_not_marked_as_deleted(outsider: Client) -> None:
    """Marking would write the node, and its readable parts would be lost."""
    outsider.create(LAYOUT.queue("broken"), b'{"last": "12x"}', makepath=True)
    with pytest.raises(CorruptNodeError) as raised:
        operator.mark_deleted(outsider, LAYOUT, "broken")
    assert raised.value.details["queue"] == "broken"
    assert outsider.get(LAYOUT.queue("broken"))[0] == b'{"last": "12x"}'


def test_a_deleted_queue_is_released_until_it_is_reset(
    fleet: MemberFleet, outsider: Client
) -> None:
    """Marking stops a live queue; resetting starts it from its beginning, in the same node."""
    fleet.join()
    fleet.create_queues(["short-lived"])
    fleet.wait(lambda: fleet.balanced(1), "the queue is owned")
    operator.mark_deleted(outsider, LAYOUT, "short-lived")
    path = LAYOUT.queue("short-lived")
    fleet.wait(lambda: not QueueNode.parse(outsider.get(path)[0]).owner, "it is released")
    assert not fleet.owned()
    assert QueueNode.parse(outsider.get(path)[0]).deleted
    started = len(fleet.ledger)
    operator.reset(outsider, LAYOUT, "short-lived")
    fleet.wait(lambda: len(fleet.ledger) > started, "it is processed again")
    assert fleet.ledger[started][1] == 1


def test_a_queue_is_deleted_with_its_node_and_created_again(
    fleet: MemberFleet, outsider: Client
) -> None:
    """Its node goes once its owner has released it; fences grow all the same."""
    fleet.join()
    fleet.join()
    fleet.create_queues(["kept", "short-lived"])
    fleet.wait(lambda: fleet.balanced(2), "both are owned")
    # The owner learns of its claim a moment after the node has its name.
    fleet.wait(
        lambda: any(queue == "short-lived" for queue, _, _ in fleet.ledger), "its owner knows"
    )
    path = LAYOUT.queue("short-lived")
    assert operator.remove(outsider, LAYOUT, "short-lived")  # the owner: it still has one
    operator.retire(outsider, LAYOUT, "short-lived")
    fleet.wait(lambda: not QueueNode.parse(outsider.get(path)[0]).owner, "it is released")
    fence = max(fence for queue, _, fence in fleet.ledger if queue == "short-lived")
    folder = outsider.get(LAYOUT.queues)[1].version
    assert operator.remove(outsider, LAYOUT, "short-lived") == ""
    assert outsider.exists(path) is None
    assert outsider.get(LAYOUT.queues)[1].version == folder + 1
    assert operator.remove(outsider, LAYOUT, "short-lived") == ""  # repeated: nothing is left
    started = len(fleet.ledger)
    fleet.wait(
        lambda: all("short-lived" not in (m.leader.queue_names() or ()) for m, _ in fleet.members),
        "the leader notices",
    )
    fleet.create_queues(["short-lived", "another"])
    fleet.wait(
        lambda: {"short-lived", "another"} <= {queue for queue, _, _ in fleet.ledger[started:]},
        "queues are claimed under the new version of their folder",
    )
    again = [fence for queue, _, fence in fleet.ledger[started:] if queue == "short-lived"]
    assert min(again) > fence


def test_a_deleted_worker_node_ends_the_registration(fleet: MemberFleet, outsider: Client) -> None:
    """An operator can evict a worker: it drops everything before others claim it."""
    member, engine = fleet.join()
    fleet.create_queues(names(3))
    fleet.wait(lambda: fleet.balanced(3), "all is owned")
    outsider.delete(LAYOUT.worker(member.name))
    wait_until(lambda: engine.expirations == 1, "the member notices")
    assert not engine.claims
    member.stop()
    fleet.members.clear()
    fleet.join()
    fleet.wait(lambda: fleet.balanced(3), "its replacement has everything")
