"""What many queues that come and go, and their doorbells, cost: ``python -m bench.many``.

A worker that becomes the leader reads the nodes of all queues once; then it compares lists of the
broker with them. An owner listens at the bells of its queues that rest. All of it on a real
ZooKeeper and on the embedded coordinator, with a broker that is nothing but a list of names.
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

from bench import report, services
from bench.measure import Goal
from qdo.coordination.client import Client, connect
from qdo.coordination.layout import Layout, QueueNode
from qdo.coordination.lease import clock
from qdo.coordination.member import Member
from qdo.coordination.ringing import PAUSE_SECONDS, Ringer
from qdo.filters import QueueFilter
from qdo.worker.discovery import Discovery
from qdo.worker.tending import CHANGED_AT_ONCE
from tests.support.fleet import Engine
from tests.support.shard_broker import ShardBroker
from tests.support.zookeeper import wait_until

APP = Layout.of("bench")
NOTHING = QueueFilter(queues=("none",))
"""What the member takes: claims are measured elsewhere."""
IN_A_TRANSACTION = 250
PATIENCE_SECONDS = 300.0
LIST_GOAL_SECONDS = 0.5
RING_GOAL_MS = 50.0


@dataclass(slots=True)
class Entry:
    """What was measured on one coordinator; seconds, and milliseconds for rings."""

    name: str
    read_seconds: float = 0.0
    list_seconds: list[float] = field(default_factory=list)
    retire_seconds: float = 0.0
    listen_seconds: float = 0.0
    listen_cpu_seconds: float = 0.0
    rings_ms: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Plan:
    """How many queues there are, of which so many vanish, and so many rest."""

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
    """Return the seconds that something took."""
    began = time.perf_counter()
    act()
    return time.perf_counter() - began


def measure(entry: Entry, url: str, plan: Plan) -> None:
    """Measure everything on one coordinator."""
    names = [f"tenant-{number:07}" for number in range(plan.queues)]
    with_nodes = connect(url)
    with_nodes.open(15.0)
    create(with_nodes, names)
    heard: list[str] = []
    member = Member(
        connect(url, session_timeout_seconds=20.0),
        APP,
        Engine([]),
        component={"host": "bench"},
        takes=NOTHING,
        told_aside=True,
        on_ring=heard.append,
    )
    member.start()
    try:
        wait_until(member.is_leader, PATIENCE_SECONDS, "it leads")
        measure_lists(entry, member, names, plan)
        measure_bells(entry, url, member, heard, names[-plan.resting :], plan)
    finally:
        member.stop()
        with_nodes.stop()
        with_nodes.close()


def measure_lists(entry: Entry, member: Member, names: list[str], plan: Plan) -> None:
    """Measure the first look of a leader, lists with nothing new, and queues that vanish."""
    broker = ShardBroker(*names)
    broker.finished_text = None
    now = clock()
    discovery = Discovery(broker, lambda: now)
    wait_until(lambda: member.queue_names() is not None, PATIENCE_SECONDS, "nodes are listed")
    entry.read_seconds = timed(lambda: discovery.step(member))
    for _ in range(5):
        now += broker.list_seconds
        entry.list_seconds.append(timed(lambda: discovery.step(member)))
    broker.names = names[plan.vanish :]
    began = time.perf_counter()
    for _ in range(3):
        now += broker.list_seconds
        discovery.step(member)
    for _ in range(plan.vanish // CHANGED_AT_ONCE):
        discovery.step(member)
    entry.retire_seconds = time.perf_counter() - began
    left = member.read_queues(names[: plan.vanish])
    if not all(node.deleted for node in left.values()):
        raise RuntimeError("not all queues that vanished were retired")


def measure_bells(
    entry: Entry, url: str, member: Member, heard: list[str], resting: list[str], plan: Plan
) -> None:
    """Measure listening at all bells, and how long a ring takes."""
    bells = member._bells
    if bells is None:
        raise RuntimeError("the member hears no bells")
    used, began = time.process_time(), time.perf_counter()
    member.attend_bells(resting)
    wait_until(
        lambda: len(bells._seen) == len(resting), PATIENCE_SECONDS, "all are listened to", 0.001
    )
    entry.listen_seconds = time.perf_counter() - began
    entry.listen_cpu_seconds = time.process_time() - used
    ringer = Ringer(url, APP)
    ringer.ring(resting[:1])  # makes its connection
    wait_until(lambda: bool(heard), PATIENCE_SECONDS, "the first ring", 0.001)
    for queue in resting[1 : plan.rings + 1]:
        heard.clear()
        began = time.perf_counter()
        ringer.ring([queue])
        wait_until(lambda: bool(heard), PAUSE_SECONDS * 10, "a ring", 0.0002)
        entry.rings_ms.append((time.perf_counter() - began) * 1000)
    ringer.close()


# --- the command ------------------------------------------------------------------------


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.many", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a smoke run: 2,000 queues")
    parser.add_argument("--queues", type=int, default=100_000)
    given = parser.parse_args()
    if given.quick:
        given.queues = 2_000
    return given


def main() -> int:
    """Measure, print, write the JSON."""
    given = arguments()
    logging.getLogger("qdo").setLevel(logging.ERROR)  # that nobody takes the queues is intended
    described = report.machine()
    plan = Plan(given.queues, given.queues // 100, given.queues // 10, 100)
    networked, embedded = Entry("ZooKeeper"), Entry("embedded")
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
        Goal.at_most("seconds for a list with nothing new", LIST_GOAL_SECONDS, listing, ".3f"),
        Goal.at_most("ms from a ring to the owner", RING_GOAL_MS, ring, ".1f"),
    ]
    return report.finish("many", result, [] if given.quick else goals)


def header(plan: Plan) -> tuple[str, ...]:
    """Return the heads of the columns."""
    return (
        "coordinator",
        f"read {plan.queues:,}, s",
        "compare a list, s",
        f"retire {plan.vanish:,}, s",
        f"listen at {plan.resting:,}, s",
        "ring, ms",
    )


def row(entry: Entry) -> tuple[str, ...]:
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
