"""The cost of many queues that appear and disappear, and of their doorbells.

``python -m bench.queue_lifecycle``.

A worker that becomes leader reads the nodes of all queues once. Then it compares the broker's lists
with them. An owner listens to the doorbells of its idle queues. Measured on ZooKeeper and on the
embedded coordinator, with a broker that is only a list of names.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field

from bench.support import report, services
from bench.support.statistics import Goal
from qdo.coordination.client import Client, connect
from qdo.coordination.doorbell_notifier import PAUSE_SECONDS, DoorbellNotifier
from qdo.coordination.member import Member
from qdo.coordination.protocol.ownership import MemberOptions
from qdo.coordination.znodes.layout import Layout
from qdo.coordination.znodes.queue_node import QueueNode
from qdo.queues import QueueFilter
from qdo.system.clock import clock
from qdo.worker.duties.queues import CHANGED_AT_ONCE, Discovery
from tests.support.fakes.shard_broker import ShardBroker
from tests.support.fleet import CountingEngine
from tests.support.processes import wait_until

APP = Layout.of("bench")
NOTHING = QueueFilter(queues=("none",))
"""Callbacks of the member. They do nothing: claims are measured elsewhere."""
IN_A_TRANSACTION = 250
PATIENCE_SECONDS = 300.0
LIST_GOAL_SECONDS = 0.5
RING_GOAL_MS = 50.0


@dataclass(slots=True)
class LifecycleResult:
    """The results of one coordinator, in seconds, and in milliseconds for doorbells."""

    name: str
    read_seconds: float = 0.0
    list_seconds: list[float] = field(default_factory=list)
    retire_seconds: float = 0.0
    listen_seconds: float = 0.0
    listen_cpu_seconds: float = 0.0
    rings_ms: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class LifecyclePlan:
    """The number of all queues, of queues that disappear, and of idle queues."""

    queues: int
    vanish: int
    resting: int
    rings: int


def create(client: Client, names: list[str]) -> None:
    """Create the nodes of queues."""
    client.ensure_path(APP.queues)
    data = QueueNode(last=135471512647131000).encode()
    for start in range(0, len(names), IN_A_TRANSACTION):
        transaction = client.transaction()
        for name in names[start : start + IN_A_TRANSACTION]:
            transaction.create(APP.queue(name), data)
        transaction.commit()


def timed(act: Callable[[], object]) -> float:
    """Return the duration of a call in seconds."""
    began = time.perf_counter()
    act()
    return time.perf_counter() - began


def measure(entry: LifecycleResult, url: str, plan: LifecyclePlan) -> None:
    """Measure everything on one coordinator."""
    names = [f"tenant-{number:07}" for number in range(plan.queues)]
    with_nodes = connect(url)
    with_nodes.open(15.0)
    create(with_nodes, names)
    heard: list[str] = []
    member = Member(
        connect(url, session_timeout_seconds=20.0),
        APP,
        CountingEngine([]),
        component={"host": "bench"},
        on_doorbell=heard.append,
        options=MemberOptions(filter=NOTHING, wait_for_deleted=True),
    )
    member.start()
    try:
        wait_until(member.leader.is_leader, "it leads", PATIENCE_SECONDS)
        measure_lists(entry, member, names, plan)
        measure_bells(entry, url, member, heard, names[-plan.resting :], plan)
    finally:
        member.stop()
        with_nodes.stop()
        with_nodes.close()


def measure_lists(
    entry: LifecycleResult, member: Member, names: list[str], plan: LifecyclePlan
) -> None:
    """Measure a leader's first read, unchanged lists, and queues that disappear."""
    broker = ShardBroker(*names)
    broker.can(end_position_text=None)
    now = clock()
    discovery = Discovery(broker, lambda: now)
    wait_until(
        lambda: member.leader.queue_names() is not None, "nodes are listed", PATIENCE_SECONDS
    )
    entry.read_seconds = timed(lambda: discovery.step(member.leader))
    for _ in range(5):
        now += broker.catalog.list_seconds
        entry.list_seconds.append(timed(lambda: discovery.step(member.leader)))
    broker.names = names[plan.vanish :]
    began = time.perf_counter()
    for _ in range(3):
        now += broker.catalog.list_seconds
        discovery.step(member.leader)
    for _ in range(plan.vanish // CHANGED_AT_ONCE):
        discovery.step(member.leader)
    entry.retire_seconds = time.perf_counter() - began
    left = member.leader.read_queues(names[: plan.vanish])
    if not all(node.deleted for node in left.values()):
        raise RuntimeError("some queues that disappeared were not retired")


def measure_bells(
    entry: LifecycleResult,
    url: str,
    member: Member,
    heard: list[str],
    resting: list[str],
    plan: LifecyclePlan,
) -> None:
    """Measure listening to all doorbells, and how long a notification takes."""
    bells = member._watches
    if bells is None:
        raise RuntimeError("the member does not listen to doorbells")
    used, began = time.process_time(), time.perf_counter()
    member.watch_doorbells(resting)
    wait_until(
        lambda: len(bells._seen) == len(resting),
        "the member listens to all doorbells",
        PATIENCE_SECONDS,
        0.001,
    )
    entry.listen_seconds = time.perf_counter() - began
    entry.listen_cpu_seconds = time.process_time() - used
    ringer = DoorbellNotifier(url, APP)
    ringer.ring(resting[:1])  # makes its connection
    wait_until(lambda: bool(heard), "the first ring", PATIENCE_SECONDS, 0.001)
    for queue in resting[1 : plan.rings + 1]:
        heard.clear()
        began = time.perf_counter()
        ringer.ring([queue])
        wait_until(lambda: bool(heard), "a ring", PAUSE_SECONDS * 10, 0.0002)
        entry.rings_ms.append((time.perf_counter() - began) * 1000)
    ringer.close()


# --- the command ------------------------------------------------------------------------


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.queue_lifecycle", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a smoke run: 2,000 queues")
    parser.add_argument("--queues", type=int, default=100_000)
    given = parser.parse_args()
    if given.quick:
        given.queues = 2_000
    return given


def main() -> int:
    """Measure, print and write the JSON."""
    given = arguments()
    logging.getLogger("qdo").setLevel(
        logging.ERROR
    )  # it is intended that no worker takes the queues
    described = report.machine()
    plan = LifecyclePlan(given.queues, given.queues // 100, given.queues // 10, 100)
    networked, embedded = LifecycleResult("ZooKeeper"), LifecycleResult("embedded")
    report.say(f"{plan.queues:,} queues on ZooKeeper")
    with services.zookeeper() as ensemble:
        measure(networked, ensemble.url("/many"), plan)
    report.say(f"{plan.queues:,} queues on the embedded coordinator")
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        measure(embedded, f"sqlite:{folder}/coordination.db", plan)
    entries = [networked, embedded]
    print(report.table(header(plan), [row(entry) for entry in entries]))
    result = {
        "machine": described,
        "versions": report.versions(("kazoo", "gevent", "ujson")),
        "plan": asdict(plan),
        "coordinators": [asdict(entry) for entry in entries],
    }
    listing = statistics.median(networked.list_seconds)
    ring = statistics.median(networked.rings_ms)
    goals = [
        Goal.at_most("seconds for an unchanged list", LIST_GOAL_SECONDS, listing, ".3f"),
        Goal.at_most("ms from a notification to the owner", RING_GOAL_MS, ring, ".1f"),
    ]
    return report.finish("queue_lifecycle", result, [] if given.quick else goals)


def header(plan: LifecyclePlan) -> tuple[str, ...]:
    """Return the headers of the columns."""
    return (
        "coordinator",
        f"read {plan.queues:,}, s",
        "compare a list, s",
        f"retire {plan.vanish:,}, s",
        f"listen to {plan.resting:,}, s",
        "ring, ms",
    )


def row(entry: LifecycleResult) -> tuple[str, ...]:
    """Return one line of the table."""
    return (
        entry.name,
        f"{entry.read_seconds:.1f}",
        f"{statistics.median(entry.list_seconds):.3f}",
        f"{entry.retire_seconds:.1f}",
        f"{entry.listen_seconds:.2f}",
        f"{statistics.median(entry.rings_ms):.1f}",
    )


if __name__ == "__main__":
    sys.exit(main())
