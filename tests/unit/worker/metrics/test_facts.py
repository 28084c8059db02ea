"""The facts of the app: the leader reads them, and publishes only what it has just read."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from qdo import App
from qdo.brokers.dead_letters import DeadLetterRecord
from qdo.brokers.embedded.broker import EmbeddedBroker
from qdo.brokers.outgoing import Outgoing, SendOptions
from qdo.brokers.requests import PoolCounts
from qdo.coordination.bulk_reads import NodeValue
from qdo.coordination.znodes.queue_node import QueueNode
from qdo.coordination.znodes.worker_node import WorkerNode
from qdo.errors import CoordinatorUnreachableError
from qdo.fleet.timer_node import TimerNode
from qdo.queues import QueueFilter
from qdo.worker.engine.meters import MOST_GLOBS, OTHERS
from qdo.worker.metrics import catalog, facts
from qdo.worker.metrics.facts import AppFacts, pool_states


def app_of(*globs: str) -> App:
    app = App("a")
    for glob in globs:
        app.job(glob, pool=True)(lambda request, context: None)
    return app


def test_pools_are_counted_by_the_globs_of_their_jobs() -> None:
    """A job whose pools are empty has zeros; pools without a job count together."""
    counts = {f"build-{zone}": PoolCounts(2, 1, 0, 1.0) for zone in ("eu", "us")}
    counts |= {"gone": PoolCounts(0, 0, 3, None)}
    app = app_of("build-*", "mail")
    app.job("gone")(lambda message, context: None)
    expected = Counter(
        {("build-*", "waiting"): 4, ("build-*", "running"): 2, (OTHERS, "paused"): 3}
    )
    found = pool_states(counts, app)
    assert found == expected
    assert {glob for glob, _ in found} == {"build-*", "mail", OTHERS}


def test_the_page_stays_small() -> None:
    """Whatever the number of jobs."""
    names = [f"pool-{number}" for number in range(MOST_GLOBS + 2)]
    counts = {name: PoolCounts(1, 0, 0, None) for name in names}
    found = pool_states(counts, app_of(*names))
    assert len({glob for glob, _ in found}) == MOST_GLOBS + 1
    assert found[OTHERS, "waiting"] == 2


class Leading:
    """A worker that may lead, with nodes of its own. The broker is a file.

    :ivar away: the coordinator does not answer.
    """

    def __init__(self, broker: EmbeddedBroker, monkeypatch: pytest.MonkeyPatch) -> None:
        self.leads, self.away = True, False
        self.broker = broker
        self.nodes: dict[str, QueueNode] = {}
        self.workers: dict[str, WorkerNode] = {}
        self.timers: dict[str, TimerNode] = {}
        self.refused_rows, self.waiting_rows = {"t": 2}, {"t": 1}
        self.leader: Any = self
        self.member: Any = self
        self.lease = SimpleNamespace(until=5.0)
        self.app = App("a")
        self.facts = AppFacts(self.app, broker, self)  # type: ignore[arg-type]
        monkeypatch.setattr(facts, "names_below", lambda client, path: list(self.workers))
        monkeypatch.setattr(facts, "read_nodes", self._read_workers)
        monkeypatch.setattr(facts, "read_timers", lambda client, layout, names: self.timers)

    def _read_workers(self, client: Any, paths: list[str]) -> list[NodeValue]:
        nodes = zip(paths, self.workers.values(), strict=True)
        return [NodeValue(path, node.encode(), 0, 1, 0.0) for path, node in nodes]

    def is_leader(self) -> bool:
        return self.leads

    def with_fence(self, act: Any) -> int:
        if self.away:
            raise CoordinatorUnreachableError(url="x", reason="gone")
        done: int = act(None, SimpleNamespace(workers="/workers"), None)
        return done

    def queue_names(self) -> tuple[str, ...]:
        return tuple(self.nodes)

    def read_queues(self, names: list[str]) -> dict[str, QueueNode]:
        return {name: self.nodes[name] for name in names if name in self.nodes}

    def values(self) -> dict[str, float]:
        """Read the facts; return the values that are not 0 by the metric's name and labels."""
        self.facts.step()
        found = {
            " ".join((metric.name, *labels)): value
            for metric, rows in self.facts.values().items()
            for labels, (value,) in rows
        }
        return {name: value for name, value in found.items() if value}


OUTBOX = {"qdo_outbox_refused t": 2.0, "qdo_outbox_waiting t": 1.0}


@pytest.fixture
def leading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Leading]:
    broker = EmbeddedBroker(str(tmp_path / "messages.db"), "a")
    yield Leading(broker, monkeypatch)
    broker.close()


def test_messages_of_the_app_are_counted(leading: Leading) -> None:
    """Behind the recorded positions; those that are not due count apart."""
    queues = ("old", "old", "new")
    leading.broker.send_many([Outgoing(queue, b"1") for queue in queues])
    later = SendOptions(due=time.time() + 3600)
    leading.broker.send_many([Outgoing("late", b"1", terms=later)])
    leading.broker.dead_letters.store(DeadLetterRecord("old", 7, b"", None, None, "", "", 1, "", 1))
    leading.workers = {"worker-1": WorkerNode()}
    done = QueueNode(last=leading.broker.catalog.backlog("old", 0).oldest or 0, owner="worker-1")
    leading.nodes = {"old": done, "new": QueueNode(owner="worker-1")}
    found = leading.values()
    assert found.pop("qdo_backlog_age_seconds") > 0
    assert found == OUTBOX | {
        "qdo_backlog_messages": 2.0,
        "qdo_delayed_messages": 1.0,
        "qdo_dead_letters message": 1.0,
    }


def test_queues_that_no_worker_processes_have_a_reason(leading: Leading) -> None:
    """One without messages has none, unless its node is damaged."""
    names = ("none", "excluded", "pool", "free", "gone", "bad", "owned")
    leading.broker.send_many([Outgoing(name, b"1") for name in names])
    takes = QueueFilter(exclude=("excluded",), jobs=("excluded", "free", "gone", "bad", "owned"))
    pools = QueueFilter(jobs=("x",), pools=("pool",), exclude=("pool",))
    leading.workers = {"worker-1": WorkerNode(filter=takes), "worker-2": WorkerNode(filter=pools)}
    leading.nodes = {name: QueueNode() for name in (*names, "empty")}
    leading.nodes |= {"owned": QueueNode(owner="worker-1"), "gone": QueueNode(owner="worker-0")}
    leading.nodes["bad"] = QueueNode.parse(b"{", None)
    found = leading.values()
    untaken = {name: count for name, count in found.items() if "untaken" in name}
    expected = {"no-job": 1, "excluded": 1, "pool": 1, "not-claimed": 2, "damaged": 1}
    assert untaken == {f"qdo_queues_untaken {name}": count for name, count in expected.items()}
    assert found["qdo_backlog_messages"] == len(names) - 1


def test_a_timer_that_does_not_send_is_late(leading: Leading) -> None:
    leading.app.timer("t", every_seconds=60, queue="q")
    now = int(time.time())
    leading.timers = {
        "late": TimerNode(now - 160, now - 100, "every 60 s", refused="why"),
        "next": TimerNode(now - 10, now + 50, "every 60 s"),
        "removed": TimerNode(now - 900, now - 800, ""),
    }
    found = leading.values()
    assert 100 <= found["qdo_timer_late_seconds"] < 800
    assert found["qdo_timers_refused"] == 1


def test_a_fact_that_cannot_be_read_hides_no_other(
    leading: Leading, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is left out, and the error of the broker is counted."""
    leading.broker.send_many([Outgoing("q", b"1")])
    whole = leading.values()
    assert whole["qdo_queues_untaken not-claimed"] == 1
    monkeypatch.setattr(leading.broker.catalog, "backlogs", lambda after: 1 / 0)
    assert leading.values() == OUTBOX
    assert leading.facts.broker_errors == 1
    assert catalog.DEAD_LETTERS in leading.facts.values()
    assert catalog.UNTAKEN not in leading.facts.values()


def test_only_the_leader_has_facts(leading: Leading) -> None:
    """At once after it was deposed, and not again before it has read them again."""
    leading.broker.send_many([Outgoing("q", b"1")])
    assert leading.values()["qdo_backlog_messages"] == 1
    assert leading.facts.holds_until() == 5.0
    leading.leads = False
    assert leading.facts.values() == {}
    assert leading.facts.holds_until() == 0.0
    assert leading.values() == {}
    leading.leads = True
    assert catalog.BACKLOG not in leading.facts.values()
    assert leading.values()["qdo_backlog_messages"] == 1
    leading.away = True
    assert leading.values() == OUTBOX
    assert leading.facts.broker_errors == 0
