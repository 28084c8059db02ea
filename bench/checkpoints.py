"""How many queues per second one worker process records: ``python -m bench.checkpoints``.

One member owns all queues, and all of them progress continuously. The benchmark counts the writes
of queue nodes at the coordinator, from the start to the last write. It compares plain kazoo, with
one ``set`` after another, and with a thousand concurrent ones.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from bench.handover import APP, Scale, create_queues, queue_names
from bench.support import report, services
from bench.support.access import access_of
from bench.support.processes import Program, ProgramError
from bench.support.statistics import Goal, Spread
from qdo.coordination.client import Client, connect
from qdo.coordination.znodes.layout import Layout
from qdo.coordination.znodes.queue_node import QueueNode
from tests.support.zookeeper import Ensemble

PATIENCE_SECONDS = 180.0
GOAL = 30_000


@dataclass(slots=True)
class CheckpointRuns:
    """All runs of one way of recording.

    :ivar rates: queues recorded per second.
    :ivar busy: share of a core.
    :ivar claims: queues claimed per second, by qdo.
    """

    name: str
    how: str
    rates: list[float] = field(default_factory=list)
    busy: list[float] = field(default_factory=list)
    claims: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class CheckpointPlan:
    """The number of queues and the duration."""

    queues: int
    seconds: float
    interval: float


@contextlib.contextmanager
def opened(url: str) -> Iterator[Client]:
    """Yield a connected client."""
    client = connect(url, access=access_of(Layout.of(APP)))
    client.open(15.0)
    try:
        yield client
    finally:
        client.stop()
        client.close()


def _ask(command: list[str]) -> dict[str, Any]:
    with Program(command, talk=True) as program:
        found: dict[str, Any] = json.loads(program.read_line(PATIENCE_SECONDS))
        return found


def measure_qdo(entry: CheckpointRuns, url: str, plan: CheckpointPlan) -> None:
    """Measure one member that records its progress in all queues."""
    layout = Layout.of(APP)
    names = queue_names(Scale(plan.queues, 1, PATIENCE_SECONDS))
    with opened(url) as client:
        create_queues(client, layout, names)
        command = [sys.executable, "-m", "bench.support.progress", url, APP, str(plan.queues)]
        found = _ask([*command, str(plan.seconds), str(plan.interval)])
        answers = [client.get_async(layout.queue(name)) for name in names]
        nodes = [answer.get(timeout=60) for answer in answers]
    wrong = sum(QueueNode.parse(data).last != found["done"] for data, _ in nodes)
    if wrong:
        raise ProgramError(f"{wrong} queues have no recorded progress")
    # Two of the writes are claim and release.
    written = sum(stat.version - 1 for _, stat in nodes)
    ended = max(stat.mtime for _, stat in nodes) / 1000
    entry.rates.append(written / (ended - found["began_unix"]))
    entry.busy.append(found["busy"])
    entry.claims.append(plan.queues / found["claim_seconds"])


def measure_kazoo(
    entry: CheckpointRuns, ensemble: Ensemble, path: str, way: str, plan: CheckpointPlan
) -> None:
    """Measure plain kazoo writing the same nodes."""
    root = f"{path}/queues"
    with opened(ensemble.url()) as client:
        client.ensure_path(root)
        names = queue_names(Scale(plan.queues, 1, PATIENCE_SECONDS))
        for answer in [client.create_async(f"{root}/{name}", b"") for name in names]:
            answer.get(timeout=60)
    command = [sys.executable, "-m", "bench.peers.with_kazoo", ensemble.hosts, root]
    found = _ask([*command, str(plan.queues), way, str(plan.seconds)])
    entry.rates.append(found["rate"])
    entry.busy.append(found["busy"])


# --- the command ------------------------------------------------------------------------


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.checkpoints", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a smoke run: 500 queues, 1 s")
    parser.add_argument("--queues", type=int, default=10_000)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--interval", type=float, default=0.05, help="checkpoint_seconds")
    parser.add_argument("--runs", type=int, default=3)
    given = parser.parse_args()
    if given.quick:
        given.queues, given.seconds, given.runs = 500, 1.0, 1
    return given


def main() -> int:
    """Measure, print and write the JSON."""
    given = arguments()
    described = report.machine()
    plan = CheckpointPlan(given.queues, given.seconds, given.interval)
    how = f"{plan.queues:,} queues, every {plan.interval:g} s, transactions of many"
    networked = CheckpointRuns("qdo on ZooKeeper", how)
    embedded = CheckpointRuns("qdo, embedded coordinator", how)
    tabled = CheckpointRuns("qdo on PostgreSQL", how)
    naive = CheckpointRuns("kazoo set()", "one after another")
    pipelined = CheckpointRuns("kazoo set_async()", "1,000 concurrent")
    with services.zookeeper() as ensemble, services.coordinator("postgresql") as postgresql:
        for run in range(given.runs):
            report.say(f"run {run + 1} of {given.runs}")
            measure_qdo(networked, ensemble.url(f"/qdo-{run}"), plan)
            with tempfile.TemporaryDirectory(prefix="bench-") as folder:
                measure_qdo(embedded, f"sqlite:{folder}/coordination.db", plan)
            measure_qdo(tabled, postgresql.fresh(f"qdo-{run}"), plan)
            measure_kazoo(naive, ensemble, f"/naive-{run}", "set", plan)
            measure_kazoo(pipelined, ensemble, f"/pipelined-{run}", "async", plan)
    entries = [networked, tabled, embedded, naive, pipelined]
    print(report.table(HEADER, [row(entry) for entry in entries], left=("set-up",)))
    result = {
        "machine": described,
        "versions": report.versions(("kazoo", "gevent", "ujson")),
        "queues": plan.queues,
        "programs": [asdict(entry) for entry in entries],
    }
    rate = statistics.median(networked.rates)
    goal = Goal.at_least("queues recorded per second on ZooKeeper", GOAL, rate, ",.0f")
    return report.finish("checkpoints", result, [] if given.quick else [goal])


HEADER = ("way", "queues/s", "best", "spread", "% of a core", "set-up")


def row(entry: CheckpointRuns) -> tuple[str, ...]:
    """Return one line of the table."""
    spread = Spread.of_rates(entry.rates)
    return (
        entry.name,
        f"{spread.median:,.0f}",
        f"{spread.best:,.0f}",
        f"{spread.spread:.0%}",
        f"{100 * statistics.median(entry.busy):.0f}",
        entry.how,
    )


if __name__ == "__main__":
    sys.exit(main())
