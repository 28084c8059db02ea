"""Queues that come and go: which get a node, are retired, restored, or marked finished."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from kazoo.exceptions import BadVersionError, NoNodeError, RolledBackError
from kazoo.handlers.threading import SequentialThreadingHandler
from kazoo.protocol.serialization import SetData, Transaction

from qdo.coordination.znodes.layout import Layout
from qdo.coordination.znodes.queue_node import QueueNode
from qdo.errors import CoordinatorUnreachableError
from qdo.worker.duties.queues import CHANGED_AT_ONCE, RECONCILE_SECONDS, Discovery
from tests.support.fakes.shard_broker import ShardBroker

LAYOUT = Layout.of("test")
END = "SHARD_END"


class Nodes:
    """The part of a client that `queue_admin` needs, with nodes in memory."""

    def __init__(self) -> None:
        self.stored: dict[str, tuple[bytes, int]] = {}
        self.chroot = ""
        self.handler = SequentialThreadingHandler()

    def _call(self, request: Any, answer: Any) -> None:
        if isinstance(request, Transaction):
            answer.set(self._committed(request.operations))
        elif request.path not in self.stored:
            answer.set_exception(NoNodeError())
        else:
            data, version = self.stored[request.path]
            answer.set((data, SimpleNamespace(version=version, mzxid=0, ephemeralOwner=0)))

    def answer_to(self, pending: Any, timeout_seconds: float) -> Any:
        return pending.get(timeout=timeout_seconds)

    def _committed(self, changes: Sequence[SetData]) -> list[Any]:
        for change in changes:
            if self.stored[change.path][1] != change.version:
                return [BadVersionError(), *[RolledBackError()] * (len(changes) - 1)]
        for change in changes:
            self.stored[change.path] = change.data, change.version + 1
        return [None] * len(changes)


class FakeLeader:
    """A leading member with nodes in memory.

    :ivar excluded: the queues it last excluded from assignment.
    :ivar reads: the names of each read of nodes.
    """

    def __init__(self) -> None:
        self.nodes = Nodes()
        self.leading = True
        self.listed = True
        self.excluded: frozenset[str] = frozenset()
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

    def exclude_deleted(self, names: frozenset[str]) -> None:
        self.excluded = names

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


class ReconcilerSetup:
    """A discovery, its broker and its leader, on a clock that the test sets."""

    def __init__(self, log: pytest.LogCaptureFixture) -> None:
        log.set_level("INFO")
        self._log = log
        self.broker = broker = ShardBroker()
        self.leader = FakeLeader()
        self.now = 1000.0
        self.discovery = Discovery(broker, lambda: self.now)

    def run(self, seconds: float = 5.0) -> None:
        """Step as the worker does, for this long."""
        until = self.now + seconds
        while self.now < until:
            self.now += self.discovery.step(self.leader)

    def names(self) -> list[str]:
        return sorted(self.leader.queue_names() or ())

    def said(self, level: str) -> list[Any]:
        """Return the arguments of the lines of a level."""
        return [each.args for each in self._log.records if each.levelname == level]


@pytest.fixture
def stage(caplog: pytest.LogCaptureFixture) -> ReconcilerSetup:
    return ReconcilerSetup(caplog)


# --- vanishing and returning --------------------------------------------------------


def test_a_queue_that_vanishes_is_retired(stage: ReconcilerSetup) -> None:
    """After several lists in a row without it; its node stays unchanged otherwise."""
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
    assert stage.leader.excluded == {"b"}
    assert not stage.leader["a"].deleted
    assert stage.said("INFO") == [("1 queue", "b")]


def test_only_missing_lists_in_a_row_retire_a_queue(stage: ReconcilerSetup) -> None:
    """A failed list is not a miss."""
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
    warned = [args for args in stage.said("WARNING") if args and args[0] == "1 queue"]
    assert warned == [("1 queue", "3 such responses")] * 2


def test_returned_queue_is_restored(stage: ReconcilerSetup) -> None:
    """From its recorded `last`, even in a later term."""
    stage.leader.put("a", last=7)
    stage.run(60)
    assert stage.leader["a"].deleted
    stage.leader.leading = False
    stage.run(1)
    stage.leader.leading = True
    stage.broker.names = ["a"]
    stage.run(1)
    assert stage.leader["a"] == QueueNode(last=7)
    assert stage.leader.excluded == frozenset()


def test_queue_deleted_by_an_operator_stays_deleted(stage: ReconcilerSetup) -> None:
    """Although the broker lists it. It is excluded from assignment."""
    stage.broker.names = ["a"]
    stage.leader.put("a", deleted=True)
    stage.run(30)
    assert stage.leader["a"].deleted
    assert stage.leader.excluded == {"a"}
    stage.leader.put("a", deleted=False)
    stage.run(11)
    assert stage.leader.excluded == frozenset()


def test_corrupt_node_is_not_changed(stage: ReconcilerSetup) -> None:
    """It is logged once, although it is read repeatedly."""
    path = LAYOUT.queue("spoilt")
    stage.leader.nodes.stored[path] = b'{"last": "x"}', 3
    stage.run(200)
    assert stage.leader.nodes.stored[path][1] == 3
    assert [args[0] for args in stage.said("ERROR")] == ["spoilt"]


def test_queues_of_a_broker_without_retirement_stay(stage: ReconcilerSetup) -> None:
    """A node without a queue belongs to an app that will send there."""
    stage.broker.can(missing_lists_before_retire=None)
    stage.leader.put("a")
    stage.run(200)
    assert not stage.leader["a"].deleted


# --- parents and children -------------------------------------------------------------


@pytest.mark.parametrize("order", [*itertools.permutations(["p1", "p2", "merged", "child"])])
def test_children_start_after_parents_in_any_discovery_order(
    stage: ReconcilerSetup, order: Sequence[str]
) -> None:
    """Two parents were merged and split again; names arrive or are listed in every order.

    Listed together with its children, a parent without a node starts first.
    """
    stage.broker.descent = {"merged": ("p1", "p2"), "child": ("merged",)}
    stage.broker.faults = [OSError("away")] * 2
    for name in order:
        stage.discovery.names_received([name])
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


def test_parents_without_list_entry_and_node_are_over(stage: ReconcilerSetup) -> None:
    """They were finished long ago."""
    stage.broker.add("child", "long-gone")
    stage.run(1)
    assert stage.names() == ["child"]


def test_children_of_a_recreated_queue_wait_for_it(stage: ReconcilerSetup) -> None:
    """Its node belongs to the finished queue of the same name; an operator starts it."""
    stage.leader.put("parent", position=END)
    stage.broker.open_ones = {"parent"}
    stage.broker.add("parent")
    stage.broker.add("child", "parent")
    stage.run(20)
    assert stage.names() == ["parent"]
    assert stage.said("ERROR") == [("parent", "qdo seek parent earliest --yes")]
    stage.leader.put("parent", position=None, last=1, deleted=False)
    stage.run(20)
    assert "parent" not in stage.leader.excluded
    stage.broker.open_ones = set()
    stage.leader.put("parent", position=END)
    stage.run(3)
    assert stage.names() == ["child", "parent"]


def test_recreated_queue_does_not_wait_for_former_parents(stage: ReconcilerSetup) -> None:
    """It has the name of a queue that waited, and is not a child itself."""
    stage.broker.add("parent")
    stage.broker.add("child", "parent")
    stage.run(20)
    assert stage.names() == ["parent"]
    stage.broker.descent = {}
    stage.run(20)
    assert stage.names() == ["child", "parent"]


def test_children_start_at_the_child_start_of_the_broker(stage: ReconcilerSetup) -> None:
    """Even if their parents are no longer listed, unless the app had no queue before."""
    stage.broker.catalog.child_start = 7
    stage.broker.add("parent", "long-gone")
    stage.run(20)
    stage.leader.put("parent", position=END)
    stage.broker.names.remove("parent")
    stage.broker.add("grandchild", "never-seen")
    stage.broker.add("new")
    stage.run(20)
    lasts = {name: stage.leader[name].last for name in stage.names()}
    assert lasts == {"parent": 0, "grandchild": 7, "new": 0}


def test_child_of_a_retired_parent_starts(stage: ReconcilerSetup) -> None:
    """The parent vanished unfinished: its messages cannot be read any more."""
    stage.broker.add("parent")
    stage.broker.add("child", "parent")
    stage.run(20)
    stage.broker.names.remove("parent")
    stage.run(45)
    assert stage.leader["parent"].deleted
    assert "child" in stage.names()


def test_finished_queue_is_marked_for_good(stage: ReconcilerSetup) -> None:
    """It keeps its position, and is neither started again nor restored while it is listed."""
    stage.broker.add("alone")
    stage.run(1)
    stage.leader.put("alone", last=9, position=END, owner="")
    stage.run(100)
    assert stage.leader["alone"] == QueueNode(last=9, position=END, deleted=True)
    assert stage.leader.excluded == {"alone"}
    assert stage.said("INFO") == [("1 queue", "alone")]
    stage.broker.names.clear()
    stage.run(100)
    stage.broker.add("alone")
    stage.run(100)
    assert stage.leader["alone"].deleted
    assert stage.leader.writes == 1


def test_finished_queue_is_kept_until_all_children_have_nodes(stage: ReconcilerSetup) -> None:
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


def test_while_children_wait_only_their_parents_are_read(stage: ReconcilerSetup) -> None:
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


def test_parents_are_read_from_the_broker_once(stage: ReconcilerSetup) -> None:
    """A list may be long. Only waiting queues may have other parents in the next list."""
    stage.broker.add("parent")
    stage.broker.add("child", "parent")
    stage.run(35)
    assert stage.broker.asked.count("parent") == 1
    assert stage.broker.asked.count("child") == 4
    stage.leader.put("parent", position=END)
    stage.run(65)
    assert stage.broker.asked.count("parent") == 1
    assert stage.broker.asked.count("child") == 4


def test_unknown_parents_delay_only_until_the_next_list(
    stage: ReconcilerSetup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The list without parents is ignored, the next one counts."""
    stage.broker.add("child", "parent")

    def fail(queue: str) -> Sequence[str]:
        raise OSError("away")

    monkeypatch.setattr(stage.broker.catalog, "parents", fail)
    stage.run(5)
    assert stage.names() == []
    assert {*stage.said("WARNING")} == {("OSError: away",)}
    monkeypatch.undo()
    stage.run(10)
    assert stage.names() == ["child"]


# --- the leader -----------------------------------------------------------------------


def test_discovery_waits_until_the_nodes_are_known(stage: ReconcilerSetup) -> None:
    """The rebalancer lists them first. Until then no retired queue may be started again."""
    stage.broker.names = ["a"]
    stage.leader.listed = False
    stage.run(1)
    assert stage.leader.reads == []
    assert stage.leader.nodes.stored == {}
    stage.leader.listed = True
    stage.run(1)
    assert stage.names() == ["a"]


def test_unreachable_coordinator_is_retried(stage: ReconcilerSetup) -> None:
    """Names that arrive in the meantime are kept."""
    stage.broker.can(end_position_text=None)
    stage.leader.put("known")
    stage.leader.away = True
    stage.run(2)
    assert stage.said("WARNING")
    assert stage.said("ERROR") == []
    stage.discovery.names_received(["new"])
    stage.leader.away = False
    stage.run(2)
    assert stage.names() == ["known", "new"]


def test_excluded_queues_are_repeated_to_the_rebalancer(stage: ReconcilerSetup) -> None:
    """It may have lost and regained leadership between two steps, and have forgotten them."""
    stage.leader.put("a", deleted=True)
    stage.run(1)
    stage.leader.excluded = frozenset({"forgotten"})
    stage.run(RECONCILE_SECONDS)
    assert stage.leader.excluded == {"a"}


def test_many_changes_are_split_into_steps(stage: ReconcilerSetup) -> None:
    """Each step is short: children need not wait for thousands of retirements."""
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


@pytest.mark.slow
def test_unchanged_hundred_thousand_queues_cost_nothing(stage: ReconcilerSetup) -> None:
    """Known queues are neither checked, created nor read again."""
    stage.broker.can(end_position_text=None)
    stage.broker.names = [f"tenant-{number:06}" for number in range(100_000)]
    stage.leader.create_queues(stage.broker.names)
    stage.run(1)
    assert sum(map(len, stage.leader.reads)) == 100_000
    stage.leader.reads.clear()
    names = stage.leader.queue_names()
    stage.leader.queue_names = lambda: names  # type: ignore[method-assign]
    stage.run(30)
    assert stage.leader.reads == []
