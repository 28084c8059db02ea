"""Queues that come and go, on real coordinators: discovery leads, members own."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from qdo.coordination import queue_admin as operator
from qdo.coordination.bulk_reads import read_nodes
from qdo.coordination.client import Client
from qdo.coordination.znodes.queue_node import QueueNode
from qdo.system.clock import clock
from qdo.worker.duties.queues import Discovery
from tests.support.coordinator_process import connected
from tests.support.fakes.shard_broker import ShardBroker
from tests.support.fleet import LAYOUT, MemberFleet
from tests.support.processes import wait_until

END = "SHARD_END"


@pytest.fixture
def watcher(coordinator_url: str) -> Iterator[Client]:
    """A client that looks on."""
    with connected(coordinator_url) as client:
        yield client


class LifecycleSetup:
    """A fleet, a broker, and the discovery of each member of the fleet."""

    def __init__(self, url: str, watcher: Client) -> None:
        self.fleet = MemberFleet(url, told_aside=True)
        self.broker = ShardBroker()
        self.broker.catalog.list_seconds = 0.1
        self._watcher = watcher
        self._stop = threading.Event()
        self._threads: list[threading.Thread] = []

    def join(self) -> None:
        """Start one more member with its discovery."""
        member, _ = self.fleet.join()
        discovery = Discovery(self.broker, clock)

        def discover() -> None:
            while not self._stop.is_set() and any(m is member for m, _ in self.fleet.members):
                self._stop.wait(discovery.step(member.leader))

        self._threads.append(threading.Thread(target=discover))
        self._threads[-1].start()

    def node(self, queue: str) -> QueueNode:
        """Read a queue's node."""
        return QueueNode.parse(self._watcher.get(LAYOUT.queue(queue))[0])

    def exists(self, queue: str) -> bool:
        """Return whether a queue has a node."""
        return self._watcher.exists(LAYOUT.queue(queue)) is not None

    def finish(self, queue: str) -> None:
        """Write the end into a queue's node, as its owner does."""
        operator.change_node(
            self._watcher, LAYOUT, queue, lambda node: replace(node, position=END), sought=0
        )

    def wait(self, condition: Callable[[], bool], what: str) -> None:
        """Wait for a condition with a deadline."""
        self.fleet.wait(condition, what)

    def close(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(20.0)
            assert not thread.is_alive()
        self.fleet.close()


@pytest.fixture
def stage(coordinator_url: str, watcher: Client) -> Iterator[LifecycleSetup]:
    stage = LifecycleSetup(coordinator_url, watcher)
    yield stage
    stage.close()


def test_a_queue_that_vanishes_is_given_back_and_comes_back(stage: LifecycleSetup) -> None:
    """With all the progress its owner has made; the same node continues from there."""
    stage.broker.names = ["a", "b"]
    stage.join()
    stage.join()
    stage.wait(lambda: stage.fleet.balanced(2), "both queues are owned")
    stage.broker.names = ["a"]
    stage.wait(lambda: stage.node("b").deleted, "it is retired")
    stage.wait(lambda: stage.fleet.balanced(1), "and released")
    wait_until(lambda: not stage.node("b").owner, "its node names no owner")
    started = [number for queue, number, _ in stage.fleet.ledger if queue == "b"]
    assert stage.node("b").last == max(started)
    stage.broker.names = ["a", "b"]
    stage.wait(lambda: stage.fleet.balanced(2), "it is back")
    assert not stage.node("b").deleted

    def goes_on() -> bool:
        return ("b", max(started) + 1) in {(queue, n) for queue, n, _ in stage.fleet.ledger}

    stage.wait(goes_on, "it goes on where it was")


def test_children_are_claimed_after_their_parents(stage: LifecycleSetup) -> None:
    """And their parents stay as tombstones, released and without an owner."""
    stage.broker.add("child", "left", "right")
    stage.broker.add("left")
    stage.broker.add("right")
    stage.join()
    stage.wait(lambda: stage.fleet.balanced(2), "the parents are owned")
    stage.finish("left")
    assert not stage.exists("child")
    stage.finish("right")
    stage.wait(lambda: set(stage.fleet.owned()) == {"child"}, "only the child is owned")
    for parent in ("left", "right"):
        wait_until(lambda p=parent: not stage.node(p).owner, "released")  # type: ignore[misc]
        assert stage.node(parent).deleted
        assert stage.node(parent).position == END


def test_tombstones_are_nobodys_share(stage: LifecycleSetup, watcher: Client) -> None:
    """Live queues are shared out evenly beside many dead ones, also by the next leader."""
    watcher.ensure_path(LAYOUT.queues)
    for number in range(6):
        dead = QueueNode(last=5, position=END, deleted=True)
        watcher.create(LAYOUT.queue(f"a-dead-{number}"), dead.encode())
        stage.broker.add(f"a-dead-{number}")
    for number in range(6):
        stage.broker.add(f"live-{number}")
    stage.join()
    stage.wait(lambda: stage.fleet.balanced(6), "the one has all live queues")
    stage.join()
    stage.join()
    stage.wait(lambda: stage.fleet.balanced(6), "two each")
    stage.fleet.leave(0)
    stage.wait(lambda: stage.fleet.balanced(6), "three each")
    paths = [LAYOUT.assignment(member.name) for member, _ in stage.fleet.members]
    granted = [read.data.decode() for read in read_nodes(watcher, paths)]
    assert len(granted) == 2
    assert "a-dead" not in "".join(granted)


def test_orphans_do_not_wait_for_the_new_leaders_reads(stage: LifecycleSetup) -> None:
    """A queue granted to a worker is in use; the leader first checks whether others are."""
    stage.broker.names = [f"q{number}" for number in range(4)]
    stage.join()
    stage.wait(lambda: stage.fleet.balanced(4), "the queues are owned")
    stage.fleet.join()  # without a discovery: it never learns of excluded queues
    stage.wait(lambda: stage.fleet.balanced(4), "two each")
    stage.fleet.leave(0)
    stage.wait(lambda: stage.fleet.balanced(4), "the other has all")


@pytest.mark.slow
@pytest.mark.long("several leaders, one after the other")
def test_retirement_survives_lost_connections_and_leaders(stage: LifecycleSetup) -> None:
    """The next leader completes the steps of the previous one; no listed queue is touched."""
    names = [f"q{number:03}" for number in range(150)]
    stage.broker.names = list(names)
    stage.join()
    stage.join()
    stage.wait(lambda: stage.fleet.balanced(150), "all queues are owned")
    stage.broker.names = names[100:]
    stage.fleet.drop_connection(0)
    stage.wait(lambda: any(stage.node(name).deleted for name in names[:100]), "some are retired")
    leader = next(n for n, (each, _) in enumerate(stage.fleet.members) if each.leader.is_leader())
    stage.fleet.drop_connection(leader)
    stage.fleet.leave(leader)
    left = names[:100]

    def are_retired() -> bool:
        """Read each node until it is deleted: the fleet works in this process, too."""
        while left and stage.node(left[-1]).deleted:
            left.pop()
        return not left

    stage.wait(are_retired, "all others are retired")
    stage.wait(lambda: stage.fleet.balanced(50), "the other worker has what is left")
    assert not any(stage.node(name).deleted for name in names[100:])
    stage.broker.names = list(names)
    stage.wait(lambda: stage.fleet.balanced(150), "all are back")
    assert not any(stage.node(name).deleted for name in names)


def test_many_nodes_are_read_at_once(watcher: Client) -> None:
    """In the order asked for, without those that do not exist."""
    watcher.ensure_path(LAYOUT.queues)
    for number in range(600):
        watcher.create(LAYOUT.queue(f"q{number}"), b"%d" % number)
    wanted = [LAYOUT.queue(f"q{number}") for number in range(1200)]
    found = read_nodes(watcher, list(reversed(wanted)))
    assert [read.path for read in found] == list(reversed(wanted[:600]))
    assert [read.data for read in found] == [b"%d" % n for n in reversed(range(600))]
    assert read_nodes(watcher, []) == []
