"""How soon the pages of the dashboard answer with 100,000 queues, and what ten open ones cost.

``python -m bench.dashboard``.

The pages are asked for while the dashboard reads the app again and again, because one is open all
the time. The cost is that for a worker with 5,000 busy queues: its throughput, and the requests at
ZooKeeper, in turns with ten open dashboards and without any; and the time of the dashboard's own
process.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import os
import re
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from urllib.parse import quote

from bench.support import report, services
from bench.support.processes import Program
from bench.support.services import ServerTraffic
from bench.support.statistics import Goal
from qdo import App
from qdo.coordination.client import Client, connect
from qdo.coordination.znodes.layout import Layout
from qdo.coordination.znodes.queue_node import FailureRecord, QueueNode
from tests.support.cli import clean_environment
from tests.support.zookeeper import Ensemble

APP = Layout.of("bench")
IN_A_TRANSACTION = 250
AT_ONCE = 5000
PAGES = {
    "overview": "/",
    "queues, worst first": "/queues",
    "queues, page 1,000 by name": "/queues?sort=name&page=1000",
    "queues, filtered": "/queues?glob=tenant-00*7&sort=age",
    "queues, one state": "/queues?state=blocked",
    "one queue": f"/queue?name={quote('tenant-0000007')}",
    "workers": "/workers",
    "events": "/events",
    "dead letters": "/dead-letters",
    "holds": "/holds",
    "audit": "/audit",
    "settings": "/settings",
}
PAGE_GOAL_SECONDS = 1.0
LOSS_GOAL = 0.02
REQUESTS_GOAL = 10.0
PROCESSOR_GOAL = 0.1
CLIENTS = 10
PATIENCE_SECONDS = 300.0
POLL_SECONDS = 2.0
"""As in dashboard.js."""


@dataclass(slots=True)
class PageTimes:
    """The answers of one dashboard, in seconds by page."""

    coordinator: str
    queues: int
    reading_seconds: float = 0.0
    memory_mib: float = 0.0
    pages: dict[str, list[float]] = field(default_factory=dict)


@dataclass(slots=True)
class WatchCost:
    """Messages and requests a second, in turns without and with open dashboards."""

    queues: int
    alone: list[float] = field(default_factory=list)
    watched: list[float] = field(default_factory=list)
    alone_packets: list[float] = field(default_factory=list)
    watched_packets: list[float] = field(default_factory=list)
    processors: list[float] = field(default_factory=list)

    @property
    def loss(self) -> float:
        """Share of the throughput that is lost."""
        return 1 - statistics.median(self.watched) / statistics.median(self.alone)

    @property
    def requests(self) -> float:
        """Requests of the dashboard in a second; a server answers 10,000 and more."""
        return statistics.median(self.watched_packets) - statistics.median(self.alone_packets)

    @property
    def processor(self) -> float:
        """Share of one processor that the dashboard uses."""
        return statistics.median(self.processors)


class MeasuredDashboard:
    """A process of `qdo dashboard`, and clients of it."""

    def __init__(self, environment: dict[str, str], folder: Path) -> None:
        self.port = services.free_port()
        listen = f"127.0.0.1:{self.port}"
        command = [sys.executable, "-m", "qdo", "dashboard", "--listen", listen]
        self.program = Program(command, folder=folder, environment=environment)

    def get(self, path: str) -> tuple[float, str]:
        """Return the seconds until an answer is complete, and its text."""
        client = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        with contextlib.closing(client):
            began = time.perf_counter()
            client.request("GET", path)
            text = client.getresponse().read().decode()
            return time.perf_counter() - began, text

    @contextlib.contextmanager
    def watched(self, clients: int) -> Iterator[None]:
        """Keep pages open that follow the app, as browsers do."""
        stop = threading.Event()
        threads = [
            threading.Thread(target=self._follow, args=(stop,), daemon=True) for _ in range(clients)
        ]
        for each in threads:
            each.start()
        try:
            yield
        finally:
            stop.set()

    def _follow(self, stop: threading.Event) -> None:
        client = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        with contextlib.closing(client):
            known = b""
            while not stop.wait(POLL_SECONDS):
                client.request("GET", "/reading")
                newest = client.getresponse().read()
                if newest != known:
                    known = newest
                    self.get("/")

    def wait_until_read(self) -> None:
        """Wait until the app has been read."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while time.monotonic() < deadline:
            with contextlib.suppress(ConnectionRefusedError):
                if "Queues by state" in self.get("/")[1]:
                    return
            time.sleep(0.1)
        raise TimeoutError("the dashboard has not read the app")


def fill(url: str, folder: Path, queues: int, each: int, blocked: int = 0) -> dict[str, str]:
    """Send messages to queues; return the environment of processes."""
    broker = f"sqlite:{folder / 'messages.db'}"
    names = [f"tenant-{number:07}" for number in range(queues)]
    with App("bench", broker=broker, coordinator=url) as app:
        for start in range(0, queues * each, AT_ONCE):
            places = range(start, min(start + AT_ONCE, queues * each))
            app.send_many([(names[place % queues], place) for place in places])
    if blocked:
        client = connect(url, handler="threading")
        client.open(15.0)
        create(client, names, blocked)
        client.stop()
        client.close()
    places = {"QDO_BROKER": broker, "QDO_COORDINATOR": url, "QDO_APP": "bench.dashboard.app:app"}
    return clean_environment(places)


def create(client: Client, names: Sequence[str], blocked: int) -> None:
    """Create the nodes of queues; every n-th of them is blocked."""
    client.ensure_path(APP.queues)
    failure = FailureRecord(135471512647131001, 2, "ValueError: no", blocked_since=time.time())
    fine, bad = QueueNode(last=1).encode(), QueueNode(last=1, failure=failure).encode()
    for start in range(0, len(names), IN_A_TRANSACTION):
        transaction = client.transaction()
        for place in range(start, min(start + IN_A_TRANSACTION, len(names))):
            transaction.create(APP.queue(names[place]), fine if place % blocked else bad)
        transaction.commit()


def measure_pages(entry: PageTimes, url: str, rounds: int) -> None:
    """Measure each page several times while the app is read again and again."""
    with tempfile.TemporaryDirectory(prefix="bench-dashboard-") as name:
        environment = fill(url, Path(name), entry.queues, 1, blocked=100)
        dashboard = MeasuredDashboard(environment, Path(name))
        with dashboard.program as program:
            dashboard.wait_until_read()
            with dashboard.watched(1):
                for _ in range(rounds):
                    for page, path in PAGES.items():
                        entry.pages.setdefault(page, []).append(dashboard.get(path)[0])
                    time.sleep(1)
            entry.reading_seconds = _reading_seconds(dashboard.get("/")[1])
            status = Path(f"/proc/{program.pid}/status").read_text()
            found = re.search(r"VmHWM:\s+(\d+) kB", status)
            entry.memory_mib = int(found[1]) / 1024 if found else 0.0


def _reading_seconds(page: str) -> float:
    found = re.search(r"A reading took ([\d.]+) (ms|s);", page)
    if found is None:
        return float("nan")
    return float(found[1]) / (1000 if found[2] == "ms" else 1)


def measure_cost(
    entry: WatchCost, ensemble: Ensemble, messages: int, turns: int, seconds: float
) -> None:
    """Measure a worker in turns with open dashboards and without."""
    with tempfile.TemporaryDirectory(prefix="bench-dashboard-") as name:
        folder = Path(name)
        environment = fill(ensemble.url("/cost"), folder, entry.queues, messages)
        counted = folder / "counted"
        environment["TESTS_COUNTED"] = str(counted)
        worker = Program(
            [sys.executable, "-m", "qdo.cli.worker"], folder=folder, environment=environment
        )
        dashboard = MeasuredDashboard(environment, folder)
        with worker, dashboard.program:
            dashboard.wait_until_read()
            _wait_for_work(counted)
            for _ in range(turns):
                for rates, packets, clients in (
                    (entry.alone, entry.alone_packets, 0),
                    (entry.watched, entry.watched_packets, CLIENTS),
                ):
                    with dashboard.watched(clients):
                        time.sleep(2)
                        used, began = _processor_seconds(dashboard), time.monotonic()
                        rate, requests = _one_turn(counted, ensemble, seconds)
                        used = _processor_seconds(dashboard) - used
                    if clients:
                        entry.processors.append(used / (time.monotonic() - began))
                    rates.append(rate)
                    packets.append(requests)


def _processor_seconds(dashboard: MeasuredDashboard) -> float:
    text = Path(f"/proc/{dashboard.program.pid}/stat").read_text()
    user, system = text.rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def _wait_for_work(counted: Path) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < deadline:
        if counted.exists() and _counted(counted)[1] > 10_000:
            return
        time.sleep(0.2)
    raise TimeoutError("the worker has not begun")


def _one_turn(counted: Path, ensemble: Ensemble, seconds: float) -> tuple[float, float]:
    began, before, traffic = time.monotonic(), _counted(counted), ServerTraffic.of(ensemble)
    time.sleep(seconds)
    after, later = _counted(counted), ServerTraffic.of(ensemble)
    passed = time.monotonic() - began
    rate = (after[1] - before[1]) / (after[0] - before[0])
    return rate, (later.packets - traffic.packets) / passed


def _counted(path: Path) -> tuple[float, int]:
    while len(words := path.read_text().split()) != 2:
        time.sleep(0.001)
    return float(words[0]), int(words[1])


# --- the command ------------------------------------------------------------------------


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.dashboard", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a smoke run: 2,000 queues")
    parser.add_argument("--queues", type=int, default=100_000)
    parser.add_argument("--busy-queues", type=int, default=5000)
    parser.add_argument("--messages", type=int, default=500, help="for each busy queue")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=10.0, help="of a turn")
    given = parser.parse_args()
    if given.quick:
        given.queues, given.busy_queues, given.messages = 2000, 100, 1000
        given.rounds, given.turns, given.seconds = 2, 1, 1.0
    return given


def main() -> int:
    """Measure, print and write the JSON."""
    given = arguments()
    described = report.machine()
    embedded = PageTimes("embedded", given.queues)
    networked = PageTimes("ZooKeeper", given.queues)
    cost = WatchCost(given.busy_queues)
    report.say(f"{given.queues:,} queues on the embedded coordinator")
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        measure_pages(embedded, f"sqlite:{folder}/coordination.db", given.rounds)
    report.say(f"{given.queues:,} queues on ZooKeeper")
    with services.zookeeper() as ensemble:
        measure_pages(networked, ensemble.url("/pages"), given.rounds)
    report.say(f"{CLIENTS} dashboards beside a worker with {given.busy_queues:,} queues")
    with services.zookeeper() as ensemble:
        measure_cost(cost, ensemble, given.messages, given.turns, given.seconds)
    entries = [embedded, networked]
    print(report.table(("page", *(f"{each.coordinator}, ms" for each in entries)), rows(entries)))
    for each in entries:
        print(
            f"{each.coordinator}: a reading took {each.reading_seconds:.1f} s, the process used"
            f" {each.memory_mib:.0f} MiB"
        )
    result = {
        "machine": described,
        "versions": report.versions(("kazoo", "gevent", "flask")),
        "pages": [asdict(each) for each in entries],
        "cost": asdict(cost),
    }
    if given.quick:
        return report.finish("dashboard", result, [])
    slowest = max(max(times) for each in entries for times in each.pages.values())
    goals = [
        Goal.at_most("seconds for the slowest page", PAGE_GOAL_SECONDS, slowest, ".3f"),
        Goal.at_most("share of throughput lost", LOSS_GOAL, cost.loss, ".3f"),
        Goal.at_most("requests a second at ZooKeeper", REQUESTS_GOAL, cost.requests, ".1f"),
        Goal.at_most("share of one processor", PROCESSOR_GOAL, cost.processor, ".3f"),
    ]
    return report.finish("dashboard", result, goals)


def rows(entries: Sequence[PageTimes]) -> list[tuple[str, ...]]:
    """Return the lines of the table: median and slowest of each page."""
    return [
        (
            page,
            *(
                f"{1000 * statistics.median(each.pages[page]):.0f}"
                f" (at most {1000 * max(each.pages[page]):.0f})"
                for each in entries
            ),
        )
        for page in PAGES
    ]


if __name__ == "__main__":
    sys.exit(main())
