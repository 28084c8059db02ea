"""Queues that come and go: which get their node, which are retired, laid to rest, brought back."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from kazoo.exceptions import BadVersionError, NoNodeError, RolledBackError

from qdo.coordination.layout import Layout, QueueNode
from qdo.errors import CoordinatorUnreachableError
from qdo.worker.discovery import TEND_SECONDS, Discovery
from qdo.worker.tending import CHANGED_AT_ONCE
from tests.support.shard_broker import ShardBroker

LAYOUT = Layout.of("test")
END = "SHARD_END"


class Nodes:
    """As much of a client as `operator` needs, over nodes in memory."""

    def __init__(self) -> None:
        self.stored: dict[str, tuple[bytes, int]] = {}

    def get(self, path: str) -> tuple[bytes, Any]:
        if path not in self.stored:
            raise NoNodeError
        data, version = self.stored[path]
        return data, SimpleNamespace(version=version)

    def transaction(self) -> Any:
        changes: list[tuple[str, bytes, int]] = []

        def commit() -> list[Any]:
            for path, _, version in changes:
                if self.stored[path][1] != version:
                    return [BadVersionError(), *[RolledBackError()] * (len(changes) - 1)]
            for path, data, version in changes:
                self.stored[path] = data, version + 1
            return [None] * len(changes)

        return SimpleNamespace(set_data=lambda *change: changes.append(change), commit=commit)


class Leader:
    """A leading member over nodes in memory.

    :ivar aside: what it was last told to grant to nobody.
    :ivar reads: the names of each read of nodes.
    """

    def __init__(self) -> None:
        self.nodes = Nodes()
        self.leading = True
        self.listed = True
        self.aside: frozenset[str] = frozenset()
        self.reads: list[list[str]] = []
        self.writes = 0
        self.away = False
        self._names: tuple[str, ...] = ()

    def __getitem__(self, name: str) -> QueueNode:
        return QueueNode.parse(self.nodes.stored[LAYOUT.queue(name)][0])

    def put(self, name: str, **values: Any) -> None:
        path = LAYOUT.queue(name)
        data, version = self.nodes.stored.get(path, (b"", -1))
        self.nodes.stored[path] = replace(QueueNode.parse(data), **values).encode(), version + 1

    def is_leader(self) -> bool:
        return self.leading

    def create_queues(self, names: Iterable[str], last: int = 0) -> None:
        for name in names:
            if LAYOUT.queue(name) not in self.nodes.stored:
                self.put(name, last=last)

    def queue_names(self) -> tuple[str, ...] | None:
        names = tuple(path.rpartition("/")[2] for path in self.nodes.stored)
        if names != self._names:
            self._names = names
        return self._names if self.listed else None

    def set_aside(self, names: frozenset[str]) -> None:
        self.aside = names

    def read_queues(self, names: Sequence[str]) -> dict[str, QueueNode]:
        if self.away:
            raise CoordinatorUnreachableError(url="there", reason="away")
        self.reads.append(list(names))
        known = self.nodes.stored
        return {name: self[name] for name in names if LAYOUT.queue(name) in known}

    def change_queue(self, change: Any, name: str) -> QueueNode:
        self.writes += 1
        node: QueueNode = change(self.nodes, LAYOUT, name)
        return node


class Stage:
    """A discovery, its broker and its leader, on a clock of the test's."""

    def __init__(self, broker: ShardBroker) -> None:
        self.broker = broker
        self.leader = Leader()
        self.now = 1000.0
        self.discovery = Discovery(broker, lambda: self.now)

    def run(self, seconds: float = 5.0) -> None:
        """Step as the worker does, for so long."""
        until = self.now + seconds
        while self.now < until:
            self.now += self.discovery.step(self.leader)

    def names(self) -> list[str]:
        return sorted(self.leader.queue_names() or ())


@pytest.fixture
def stage() -> Stage:
    return Stage(ShardBroker())


# --- vanishing and coming back --------------------------------------------------------


def test_a_queue_that_vanishes_is_retired(
    stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    """After so many lists in a row without it; its node stays, with all there was in it."""
    caplog.set_level("INFO")
    stage.broker.names = ["a", "b"]
    stage.run()
    stage.leader.put("b", last=7, position="here", owner="")
    stage.broker.names = ["a"]
    stage.run(20)
    assert not stage.leader["b"].deleted
    stage.run(10)
    assert stage.leader["b"].deleted
    assert (stage.leader["b"].last, stage.leader["b"].position) == (7, "here")
    assert stage.leader["b"].seek == 0
    assert stage.leader.aside == {"b"}
    assert not stage.leader["a"].deleted
    assert caplog.text.count("retired") == 1
    assert "deleted: b" in caplog.text


def test_lists_that_fail_or_have_it_again_count_for_nothing(
    stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    """Only misses in a row count, and what the broker did not say is no miss."""
    stage.broker.names = ["a"]
    stage.run()
    stage.broker.names = []
    stage.run(20)
    stage.broker.faults = [OSError("away")] * 5
    stage.run(50)
    assert stage.broker.faults == []
    assert not stage.leader["a"].deleted
    stage.broker.names = ["a"]
    stage.run(10)
    stage.broker.names = []
    stage.run(20)
    assert not stage.leader["a"].deleted
    stage.run(20)
    assert stage.leader["a"].deleted
    assert caplog.text.count("the broker lists none of its 1 queues any more") == 2


def test_a_queue_that_is_there_again_is_brought_back(stage: Stage) -> None:
    """From its recorded `last`, and in a later term as well."""
    stage.leader.put("a", last=7)
    stage.run(60)
    assert stage.leader["a"].deleted
    stage.leader.leading = False
    stage.run(1)
    stage.leader.leading = True
    stage.broker.names = ["a"]
    stage.run(1)
    assert stage.leader["a"] == QueueNode(last=7)
    assert stage.leader.aside == frozenset()


def test_what_an_operator_marked_as_deleted_stays_so(stage: Stage) -> None:
    """Though the broker lists it; and it is granted to nobody."""
    stage.broker.names = ["a"]
    stage.leader.put("a", deleted=True)
    stage.run(30)
    assert stage.leader["a"].deleted
    assert stage.leader.aside == {"a"}
    stage.leader.put("a", deleted=False)
    stage.run(11)
    assert stage.leader.aside == frozenset()


def test_a_node_that_cannot_be_read_is_left_as_it_is(
    stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    """It is named once, though it is looked at again and again."""
    path = LAYOUT.queue("spoilt")
    stage.leader.nodes.stored[path] = b'{"last": "x"}', 3
    stage.run(200)
    assert stage.leader.nodes.stored[path][1] == 3
    assert caplog.text.count("spoilt is left as it is") == 1


def test_a_broker_that_never_lets_queues_vanish_keeps_them(stage: Stage) -> None:
    """A node beside the broker's queues is somebody's who will send there."""
    stage.broker.vanish_misses = None
    stage.leader.put("a")
    stage.run(200)
    assert not stage.leader["a"].deleted


# --- parents and children -------------------------------------------------------------


@pytest.mark.parametrize("order", [*itertools.permutations(["p1", "p2", "merged", "child"])])
def test_children_begin_after_their_parents_in_any_order_of_discovery(
    stage: Stage, order: Sequence[str]
) -> None:
    """Two parents were merged and split again; heard of, or listed, the last ones first."""
    stage.broker.descent = {"merged": ("p1", "p2"), "child": ("merged",)}
    stage.broker.faults = [OSError("away")] * 2
    for name in order:
        stage.discovery.heard([name])
        stage.run(4)
    stage.broker.names = list(order)
    stage.run(20)
    assert stage.names() == ["p1", "p2"]
    stage.leader.put("p1", position=END)
    stage.run(12)
    assert stage.names() == ["p1", "p2"]
    stage.leader.put("p2", position=END)
    stage.run(3)
    assert stage.names() == ["merged", "p1", "p2"]
    assert stage.leader["p1"].deleted
    assert stage.leader["p2"].deleted
    stage.leader.put("merged", position=END)
    stage.run(3)
    assert stage.names() == ["child", "merged", "p1", "p2"]


def test_parents_that_the_broker_has_forgotten_are_over(stage: Stage) -> None:
    """Neither listed nor with a node: finished long ago."""
    stage.broker.add("child", "long-gone")
    stage.run(1)
    assert stage.names() == ["child"]


def test_children_of_a_queue_made_anew_wait_for_it(
    stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    """Its node is that of another one, which was finished; an operator begins with it."""
    stage.leader.put("parent", position=END)
    stage.broker.open_ones = {"parent"}
    stage.broker.add("parent")
    stage.broker.add("child", "parent")
    stage.run(20)
    assert stage.names() == ["parent"]
    assert caplog.text.count("queue parent stands still") == 1
    stage.leader.put("parent", position=None, last=1, deleted=False)
    stage.run(20)
    assert "parent" not in stage.leader.aside
    stage.broker.open_ones = set()
    stage.leader.put("parent", position=END)
    stage.run(3)
    assert stage.names() == ["child", "parent"]


def test_a_queue_made_anew_does_not_wait_for_the_parents_of_the_old_one(stage: Stage) -> None:
    """It had the name of one that waited, and is no child itself."""
    stage.broker.add("parent")
    stage.broker.add("child", "parent")
    stage.run(20)
    assert stage.names() == ["parent"]
    stage.broker.descent = {}
    stage.run(20)
    assert stage.names() == ["child", "parent"]


def test_children_begin_where_the_broker_lets_heirs_begin(stage: Stage) -> None:
    """Though their parents are gone from the list, unless the app had no queue before."""
    stage.broker.heir_last = 7
    stage.broker.add("parent", "long-gone")
    stage.run(20)
    stage.leader.put("parent", position=END)
    stage.broker.names.remove("parent")
    stage.broker.add("grandchild", "never-seen")
    stage.broker.add("new")
    stage.run(20)
    lasts = {name: stage.leader[name].last for name in stage.names()}
    assert lasts == {"parent": 0, "grandchild": 7, "new": 0}


def test_a_parent_that_is_listed_without_a_node_comes_first(stage: Stage) -> None:
    """Listed in one go with its child, it is begun and the child waits."""
    stage.broker.add("child", "parent")
    stage.broker.add("parent", "long-gone")
    stage.run(20)
    assert stage.names() == ["parent"]


def test_a_child_does_not_wait_for_ever_for_what_is_gone(stage: Stage) -> None:
    """A parent that vanished unfinished was retired: nothing of it can be had any more."""
    stage.broker.add("parent")
    stage.broker.add("child", "parent")
    stage.run(20)
    stage.broker.names.remove("parent")
    stage.run(45)
    assert stage.leader["parent"].deleted
    assert "child" in stage.names()


def test_a_finished_queue_is_laid_to_rest_for_good(
    stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    """It keeps its position, and is neither begun again nor brought back while it is listed."""
    caplog.set_level("INFO")
    stage.broker.add("alone")
    stage.run(1)
    stage.leader.put("alone", last=9, position=END, owner="")
    stage.run(100)
    assert stage.leader["alone"] == QueueNode(last=9, position=END, deleted=True)
    assert stage.leader.aside == {"alone"}
    assert caplog.text.count("at rest: alone") == 1
    stage.broker.names.clear()
    stage.run(100)
    stage.broker.add("alone")
    stage.run(100)
    assert stage.leader["alone"].deleted
    assert stage.leader.writes == 1


def test_a_finished_queue_is_kept_until_all_its_children_have_nodes(stage: Stage) -> None:
    """One of two children waits for its other parent."""
    stage.broker.add("a")
    stage.broker.add("b")
    stage.broker.add("left", "a")
    stage.broker.add("both", "a", "b")
    stage.run(2)
    stage.leader.put("a", position=END)
    stage.run(20)
    assert stage.names() == ["a", "b", "left"]
    assert not stage.leader["a"].deleted
    stage.leader.put("b", position=END)
    stage.run(3)
    assert stage.names() == ["a", "b", "both", "left"]
    assert stage.leader["a"].deleted


def test_while_children_wait_only_their_parents_are_looked_at(stage: Stage) -> None:
    """About every second, among a thousand others."""
    for number in range(1000):
        stage.broker.add(f"other{number}")
    stage.broker.add("parent")
    stage.broker.add("child", "parent")
    stage.run(1)
    stage.leader.reads.clear()
    stage.run(8)
    assert 6 <= len(stage.leader.reads) <= 9
    assert all(names == ["parent"] for names in stage.leader.reads)


def test_parents_are_asked_for_once(stage: Stage) -> None:
    """A list may be long; only of those that wait they may be others with the next list."""
    stage.broker.add("parent")
    stage.broker.add("child", "parent")
    stage.run(35)
    assert stage.broker.asked.count("parent") == 1
    assert stage.broker.asked.count("child") == 4
    stage.leader.put("parent", position=END)
    stage.run(65)
    assert stage.broker.asked.count("parent") == 1
    assert stage.broker.asked.count("child") == 4


def test_parents_that_cannot_be_told_keep_nobody_else_waiting(
    stage: Stage, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The list counts for nothing, and the next one does."""
    stage.broker.add("child", "parent")

    def fail(queue: str) -> Sequence[str]:
        raise OSError("away")

    monkeypatch.setattr(stage.broker, "parents", fail)
    stage.run(5)
    assert stage.names() == []
    assert "cannot be told" in caplog.text
    monkeypatch.undo()
    stage.run(10)
    assert stage.names() == ["child"]


# --- the leader -----------------------------------------------------------------------


def test_nothing_is_done_before_the_nodes_are_known(stage: Stage) -> None:
    """The rebalancer lists them first; a retired queue must not be begun anew meanwhile."""
    stage.broker.names = ["a"]
    stage.leader.listed = False
    stage.run(1)
    assert stage.leader.reads == []
    assert stage.leader.nodes.stored == {}
    stage.leader.listed = True
    stage.run(1)
    assert stage.names() == ["a"]


def test_a_coordinator_out_of_reach_is_asked_again(
    stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    """And what was heard meanwhile is not forgotten."""
    stage.broker.finished_text = None
    stage.leader.put("known")
    stage.leader.away = True
    stage.run(2)
    assert "cannot be looked after" in caplog.text
    stage.discovery.heard(["new"])
    stage.leader.away = False
    stage.run(2)
    assert stage.names() == ["known", "new"]


def test_aside_is_said_again_to_a_rebalancer_that_has_forgotten_it(stage: Stage) -> None:
    """Its term may have ended and begun between two looks."""
    stage.leader.put("a", deleted=True)
    stage.run(1)
    stage.leader.aside = frozenset({"forgotten"})
    stage.run(TEND_SECONDS)
    assert stage.leader.aside == {"a"}


def test_many_changes_are_made_in_parts(stage: Stage) -> None:
    """A step ends soon, so that children need not wait for thousands of retirements."""
    stage.broker.names = [f"q{number}" for number in range(CHANGED_AT_ONCE * 2 + 5)]
    stage.run(5)
    stage.broker.names = []
    stage.run(25)
    stage.now += 10
    written = []
    for _ in range(4):
        before = stage.leader.writes
        stage.now += stage.discovery.step(stage.leader)
        written.append(stage.leader.writes - before)
    assert written == [CHANGED_AT_ONCE, CHANGED_AT_ONCE, 5, 0]


def test_a_hundred_thousand_queues_cost_nothing_when_nothing_changes(stage: Stage) -> None:
    """Known queues are neither checked nor created nor read again; a round takes no second."""
    stage.broker.finished_text = None
    stage.broker.names = [f"tenant-{number:06}" for number in range(100_000)]
    stage.leader.create_queues(stage.broker.names)
    stage.run(1)
    assert sum(map(len, stage.leader.reads)) == 100_000
    stage.leader.reads.clear()
    names = stage.leader.queue_names()
    stage.leader.queue_names = lambda: names  # type: ignore[method-assign]
    began = time.process_time()
    stage.run(30)
    assert (time.process_time() - began) / 3 < 0.5
    assert stage.leader.reads == []
