"""What an operator of 20 workers waits for: ``python -m bench.actions``.

How long until every worker has answered `qdo action 'worker-*' ping`: from a connected client, and
for the whole command with the start of Python. How long until 1,000 idle queues are paused in all
of them for a section; no peer has that.

`celery inspect ping` asks as many workers over Redis in the same run. It broadcasts, and waits for
its whole timeout, because it does not know how many will answer; so the time until the last answer
is given, too.
"""

from __future__ import annotations

import argparse
import logging
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from bench.support import report, services
from bench.support.celery_fleet import celery_fleet
from bench.support.processes import Program, ProgramError
from bench.support.statistics import Goal
from qdo import App
from qdo.coordination.bulk_reads import read_nodes
from qdo.coordination.client import Client, connect
from qdo.coordination.znodes.layout import Layout
from qdo.coordination.znodes.queue_node import QueueNode
from qdo.fleet.actions import ask_workers, list_workers, wait_for_results

WORKERS = 20
QUEUES = 1000
GOAL_MS = 150.0
SECTION_GOAL_MS = 50.0
PATIENCE_SECONDS = 120.0
APP = """
import qdo
app = qdo.App("bench")

@app.job()
def job(message, context):
    pass
"""
LAYOUT = Layout.of("bench")


def until(condition: Callable[[], bool], what: str, *programs: Program) -> None:
    """Wait for a condition."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        if time.monotonic() > deadline:
            raise programs[0].failure(f"{what}: not within {PATIENCE_SECONDS:g} s")
        time.sleep(0.2)


def timed(call: Callable[[], object], times: int) -> dict[str, float]:
    """Return the median and the longest time of several calls, in seconds."""
    call()
    found = []
    for _ in range(times):
        began = time.perf_counter()
        call()
        found.append(time.perf_counter() - began)
    return {"median": statistics.median(found), "worst": max(found)}


def sections(app: App, times: int) -> dict[str, float]:
    """Return the median and the longest time until queues are paused, in seconds."""
    found = []
    for _ in range(times + 1):
        began = time.perf_counter()
        with app.exclusive("idle-*"):
            found.append(time.perf_counter() - began)
    return {"median": statistics.median(found[1:]), "worst": max(found[1:])}


def fill_queues(app: App, client: Client, queues: int, program: Program) -> None:
    """Make queues, and wait until each has an owner and nothing to do."""
    app.send_many([(f"idle-{number}", number) for number in range(queues)])

    def done() -> bool:
        reads = read_nodes(client, [LAYOUT.queue(f"idle-{number}") for number in range(queues)])
        nodes = [QueueNode.parse(read.data) for read in reads]
        return len(nodes) == queues and all(node.last and node.owner for node in nodes)

    until(done, "the queues", program)


def measure_qdo(url: str, workers: int, times: int) -> dict[str, dict[str, float]]:
    """Ask the workers of one parent, over ZooKeeper."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-actions-")))
        (folder / "app.py").write_text(APP)
        places = {"QDO_COORDINATOR": url, "QDO_BROKER": f"sqlite:{folder / 'messages.db'}"}
        argv = [sys.executable, "-m", "qdo.cli.worker", "app:app", "--processes", str(workers)]
        program = stack.enter_context(Program(argv, environment=places, folder=folder))
        client = connect(url)
        client.open()
        stack.callback(client.close)
        stack.callback(client.stop)
        until(lambda: len(list_workers(client, LAYOUT)) == workers, "the workers", program)

        def ask() -> None:
            names = list_workers(client, LAYOUT)
            asked = ask_workers(client, LAYOUT, names, "ping", {}, within_seconds=10.0)
            wait_for_results(client, LAYOUT, asked, 10.0)
            answered = sum(each.outcome == "done" for each in asked)
            if answered != workers:
                raise program.failure(f"{answered} of {workers} workers answered")

        command = [sys.executable, "-m", "qdo", "action", "worker-*", "ping", "--app", "bench"]
        environment = {**os.environ, **places}

        def run() -> None:
            subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL)

        found = {"qdo, connected": timed(ask, times), "qdo action": timed(run, max(2, times // 4))}
        app = stack.enter_context(
            App("bench", coordinator=url, broker=places["QDO_BROKER"], session_timeout_seconds=10)
        )
        fill_queues(app, client, QUEUES, program)
        return {**found, "qdo, section": sections(app, times)}


def measure_celery(python: Path, workers: int, times: int) -> dict[str, dict[str, float]]:
    """Ask Celery workers with one process each, over Redis."""
    with celery_fleet(python, workers) as ask:
        found: dict[str, dict[str, float]] = {}
        for name, mode in (("celery, all of its timeout", "wait"), ("celery, last answer", "last")):
            values = [float(value) for value in ask(mode, str(times), str(workers))]
            found[name] = {"median": statistics.median(values), "worst": max(values)}
        return found


def main() -> int:
    """Measure, print and write the JSON."""
    parser = argparse.ArgumentParser(prog="python -m bench.actions", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a smoke run")
    parser.add_argument("--no-peers", action="store_true", help="without Celery")
    parser.add_argument("--peers-venv", type=Path, default=services.PEERS)
    given = parser.parse_args()
    logging.getLogger("kazoo").setLevel(logging.CRITICAL)
    described = report.machine()
    workers, times = (3, 2) if given.quick else (WORKERS, 20)
    with services.zookeeper() as ensemble:
        found = measure_qdo(ensemble.url("/actions"), workers, times)
    python = None if given.no_peers else services.peers_python(given.peers_venv)
    if python is not None:
        found |= measure_celery(python, workers, times)
    _print(found)
    median = found["qdo, connected"]["median"]
    what = f"ms for a ping of {workers} workers, connected"
    held = found["qdo, section"]["median"]
    goals = [
        Goal.at_most(what, GOAL_MS, 1000 * median, ".0f"),
        Goal.at_most(f"ms for {QUEUES} queues to pause", SECTION_GOAL_MS, 1000 * held, ".0f"),
    ]
    result = {
        "machine": described,
        "versions": report.versions(("kazoo", "gevent", "ujson")),
        "peers": report.versions(("celery", "redis"), python) if python else {},
        "figures": found,
    }
    return report.finish("actions", result, [] if given.quick else goals)


def _print(found: Mapping[str, Mapping[str, float]]) -> None:
    rows: list[tuple[Any, ...]] = [
        (name, f"{each['median'] * 1000:,.0f}", f"{each['worst'] * 1000:,.0f}")
        for name, each in found.items()
    ]
    print(report.table(("figure", "median, ms", "worst, ms"), rows))


if __name__ == "__main__":
    try:
        sys.exit(main())
    except ProgramError as error:
        print(error, file=sys.stderr)
        sys.exit(1)
