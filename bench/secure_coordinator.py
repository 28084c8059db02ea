"""What TLS, accounts and rights cost at ZooKeeper: ``python -m bench.secure_coordinator``.

One server has a plain port and one with TLS. Each way of connecting has its turn in each run, in
alternating order: connecting, claiming all queues, recording progress in all of them, and handing
half of them over to a second member. A first turn does not count, because Java compiles the server
meanwhile.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

from bench.checkpoints import CheckpointPlan, CheckpointRuns, measure_qdo, opened
from bench.handover import APP, Scale, create_queues, queue_names
from bench.support import members as crews
from bench.support import report, services
from bench.support.access import secured
from bench.support.handover_analysis import handover
from bench.support.statistics import Spread
from qdo.coordination.znodes.layout import Layout
from tests.support.security.zookeeper import PASSWORDS, SecureZooKeeper, secure_zookeeper_server

CONNECTIONS = 20
INTERVAL_SECONDS = 0.05
PATIENCE_SECONDS = 60.0


@dataclass(slots=True)
class SecureWay:
    """One way of connecting, and its figures of all runs.

    :ivar settings: see `bench.support.access.secured`.
    :ivar connects: median seconds of a run until a client is connected.
    :ivar handovers: seconds until half of the queues had their new owner.
    """

    url: str
    settings: dict[str, str]
    progress: CheckpointRuns
    connects: list[float] = field(default_factory=list)
    handovers: list[float] = field(default_factory=list)


def ways(server: SecureZooKeeper, password: Path) -> list[SecureWay]:
    """Return the ways, the usual one first."""
    tls = {
        "coordinator_ca": str(server.authority.path),
        "coordinator_cert": str(server.client.cert),
        "coordinator_key": str(server.client.key),
    }
    account = {
        "coordinator_auth": "sasl:worker",
        "coordinator_password_file": str(password),
        "acl": "required",
    }
    password.touch(0o600)
    password.write_text(PASSWORDS["worker"])
    found = []
    for number, (name, settings) in enumerate(
        {"plain": {}, "TLS": tls, "account, rights": account, "all": {**tls, **account}}.items()
    ):
        address = server.url if "coordinator_ca" in settings else server.plain_url
        url = address(f"/way-{number}")
        found.append(SecureWay(url, {"coordinator": url, **settings}, CheckpointRuns(name, "")))
    return found


def connect_seconds(url: str) -> float:
    """Return the median time until a client is connected, and knows its chroot."""
    found = []
    for _ in range(CONNECTIONS):
        start = time.perf_counter()
        with opened(url):
            found.append(time.perf_counter() - start)
    return statistics.median(found)


def handover_seconds(url: str, queues: int) -> float:
    """Return the time in which a second member gets half of the queues."""
    with opened(url) as client:
        create_queues(client, Layout.of(APP), queue_names(Scale(queues, 2, PATIENCE_SECONDS)))
    command = [sys.executable, "-m", "bench.support.member_process", url, APP]
    with crews.Crew(command, queues) as crew:
        first, second = crew.hire(2)
        crew.join([first])
        crews.require(crew.wait_settled(PATIENCE_SECONDS), "the first member has not all queues")
        began = crew.join([second])
        crews.require(crew.wait_settled(PATIENCE_SECONDS), "the second member has not half of them")
        return handover(crew.collect(), began, crew.names()).settled_seconds


def measure(way: SecureWay, plan: CheckpointPlan, run: int, folder: Path) -> None:
    """Measure one way once."""
    with secured(folder / "settings.toml", way.settings):
        way.connects.append(connect_seconds(way.url))
        measure_qdo(way.progress, f"{way.url}/progress-{run}", plan)
        way.handovers.append(handover_seconds(f"{way.url}/handover-{run}", plan.queues))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.secure_coordinator", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a smoke run: 100 queues, 0.2 s")
    parser.add_argument("--queues", type=int, default=2000)
    parser.add_argument("--seconds", type=float, default=1.0, help="of recording progress")
    parser.add_argument("--runs", type=int, default=2)
    given = parser.parse_args()
    if given.quick:
        given.queues, given.seconds, given.runs = 100, 0.2, 1
    return given


def main() -> int:
    """Measure, print and write the JSON."""
    given = arguments()
    described = report.machine()
    plan = CheckpointPlan(given.queues, given.seconds, INTERVAL_SECONDS)
    with tempfile.TemporaryDirectory(prefix="bench-") as name:
        folder = Path(name)
        with secure_zookeeper_server(folder, services.JAVA_OPTIONS) as server:
            measure(ways(server, folder / "password")[-1], plan, given.runs, folder)
            found = ways(server, folder / "password")
            for run in range(given.runs):
                report.say(f"run {run + 1} of {given.runs}")
                for way in found[:: -1 if run % 2 else 1]:
                    measure(way, plan, run, folder)
    print(report.table(HEADER, [row(way) for way in found]))
    result = {
        "machine": described,
        "versions": report.versions(("kazoo", "gevent", "pure-sasl")),
        "queues": given.queues,
        "ways": [{**asdict(way), "settings": sorted(way.settings)} for way in found],
    }
    return report.finish("secure_coordinator", result, [])


HEADER = ("connection", "connect ms", "claims/s", "recorded/s", "CPU us/queue", "handover ms")


def row(way: SecureWay) -> tuple[str, ...]:
    """Return one line of the table: medians."""
    progress = way.progress
    cpu = [busy / rate for busy, rate in zip(progress.busy, progress.rates, strict=True)]
    return (
        progress.name,
        f"{1000 * Spread.of_costs(way.connects).median:.1f}",
        f"{Spread.of_rates(progress.claims).median:,.0f}",
        f"{Spread.of_rates(progress.rates).median:,.0f}",
        f"{1e6 * statistics.median(cpu):.1f}",
        f"{1000 * Spread.of_costs(way.handovers).median:,.0f}",
    )


if __name__ == "__main__":
    sys.exit(main())
