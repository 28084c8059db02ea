"""What the person on call waits for: ``python -m bench.ops``.

Three workers have 5,000 queues, of which some are blocked, failing, stuck, paused, late, without a
job or without a worker. How long until the verdicts on all of them are right; how long each command
takes, with the start of Python, the median of several runs. The same over ZooKeeper and over the
embedded coordinator.

Then 100,000 queues without a worker, in files: the time and the memory of `qdo queues`.
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
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.support import report, services
from bench.support.postgresql_runs import postgresql
from bench.support.processes import Program, ProgramError
from bench.support.statistics import Goal
from qdo import App
from qdo.brokers.registry import open_broker
from qdo.coordination.client import connect
from qdo.coordination.znodes.layout import Layout
from qdo.ops.status import Statuses, queue_statuses
from qdo.ops.verdicts import QueueHealth, VerdictRules, judge_all

APP = """
import time
import gevent
import qdo

app = qdo.App("bench")

@app.job("ok-*")
@app.job("excluded-*")
@app.job("paused-*")
def fine(message, context):
    pass

@app.job("blocked-*", policy=qdo.Policy(attempts=1, then="block"))
def block(message, context):
    raise ValueError("no such tenant")

@app.job("failing-*", policy=qdo.Policy(attempts=9, backoff_seconds=600, backoff_max_seconds=600))
def fail(message, context):
    raise LookupError("not yet")

@app.job("stuck-*")
def hang(message, context):
    gevent.sleep(3600)

@app.job("late-*")
def slow(message, context):
    gevent.sleep(0.5)
"""
RULES = VerdictRules(late_seconds=5.0, stuck_seconds=5.0)
STATES = {
    "ok": QueueHealth.IDLE,
    "paused": QueueHealth.PAUSED,
    "blocked": QueueHealth.BLOCKED,
    "failing": QueueHealth.FAILING,
    "stuck": QueueHealth.STUCK,
    "late": QueueHealth.LAGGING,
    "excluded": QueueHealth.NO_WORKER,
    "orphan": QueueHealth.NO_JOB,
}
"""The right verdict on the queues whose names begin so."""
FAULTY, LATE_MESSAGES = 50, 1000
LAYOUT = Layout.of("bench")
WORKER = "WORKER"
"""Stands for the name of a worker."""
CODES = {"check": (0, 1, 2), "doctor": (0, 1)}
"""Exit codes of commands that tell their result in this way; 0 for all others."""
PATIENCE_SECONDS = 120.0
COMMANDS = (
    ("status",),
    ("queues",),
    ("queues", "--state", "blocked"),
    ("queues", "--sort", "age", "--limit", "20"),
    ("queues", "blocked-1"),
    ("queues", "--by", "prefix"),
    ("workers",),
    ("workers", WORKER),
    ("ps",),
    ("workers", "--all"),
    ("check",),
    ("doctor",),
    ("dead-letters", "list"),
    ("peek", "late-1"),
    ("move", "--plan"),
    ("admin", "checkpoints", "export"),
    ("pause", "--list"),
    ("limits", "list"),
    ("locks",),
    ("documents", "list"),
    ("settings", "show"),
    ("audit",),
    ("events", "--follow", "--for", "0s"),
)
"""Each command that lists something."""
VERDICT_GOAL_SECONDS, LIST_GOAL_SECONDS, STATUS_GOAL_SECONDS = 10.0, 1.0, 0.5
MANY, MANY_GOAL_SECONDS, MANY_GOAL_MIB = 100_000, 5.0, 300.0


@dataclass(frozen=True, slots=True)
class Cost:
    """What a command costs.

    :ivar processor: seconds of processor time. On a busy machine it tells more than `seconds`.
    """

    seconds: float
    processor: float
    memory_mib: float

    @classmethod
    def median(cls, costs: Sequence[Cost]) -> Cost:
        """Return the medians, and the largest memory."""
        return cls(
            statistics.median(each.seconds for each in costs),
            statistics.median(each.processor for each in costs),
            max(each.memory_mib for each in costs),
        )


@dataclass(frozen=True)
class Scene:
    """The files and servers of a fleet.

    :ivar environment: the settings of commands and workers.
    """

    folder: Path
    coordinator: str
    broker: str = ""

    @property
    def environment(self) -> dict[str, str]:
        return {
            "QDO_APP": "bench",
            "QDO_COORDINATOR": self.coordinator,
            "QDO_BROKER": self.broker or f"sqlite:{self.folder / 'messages.db'}",
            "QDO_SESSION_TIMEOUT_SECONDS": "10",
        }

    def run(self, *arguments: str) -> Cost:
        """Run a command; return what it costs."""
        argv = [sys.executable, "-m", "qdo", *arguments]
        environment = {**os.environ, **self.environment}
        # An installed qdo has its bytecode.
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        began = time.perf_counter()
        with tempfile.TemporaryFile() as said, open(os.devnull, "wb") as nowhere:
            process = subprocess.Popen(
                argv, env=environment, cwd=self.folder, stdout=nowhere, stderr=said
            )
            _, status, used = os.wait4(process.pid, 0)
            seconds = time.perf_counter() - began
            process.returncode = os.waitstatus_to_exitcode(status)
            if process.returncode not in CODES.get(arguments[0], (0,)):
                said.seek(0)
                raise ProgramError(
                    f"qdo {' '.join(arguments)} ended with {process.returncode}:"
                    f" {said.read().decode()[-1000:]}"
                )
        return Cost(seconds, used.ru_utime + used.ru_stime, used.ru_maxrss / 1024)


def fill(scene: Scene, queues: int) -> int:
    """Send the messages that the workers will fail at, and others; return the number of queues."""
    names = [f"{kind}-{number}" for kind in STATES if kind != "ok" for number in range(FAULTY)]
    names += [f"ok-{number}" for number in range(queues - len(names))]
    late = [f"late-{number}" for number in range(FAULTY) for _ in range(LATE_MESSAGES)]
    with App("bench", broker=scene.environment["QDO_BROKER"]) as app:
        app.send_many([(name, 1) for name in [*names, *late]])
    return len(names)


def wrong(statuses: Statuses) -> dict[str, int]:
    """Return how many queues of each kind have another verdict than the right one."""
    found: dict[str, int] = {}
    for status, verdict in judge_all([statuses], RULES):
        kind = status.queue.partition("-")[0]
        if verdict.state is not STATES[kind]:
            found[kind] = found.get(kind, 0) + 1
    return found


def seconds_to_verdicts(scene: Scene, queues: int, program: Program) -> dict[str, float]:
    """Return for each kind of queue how long it took until the last verdict was right."""
    client = connect(scene.coordinator)
    broker = open_broker(scene.environment["QDO_BROKER"], "bench")
    began, right = time.monotonic(), dict[str, float]()
    client.open()
    try:
        while len(right) < len(STATES):
            statuses = queue_statuses(client, LAYOUT, broker)
            at = time.monotonic() - began
            bad = wrong(statuses)
            complete = len(statuses.queues) == queues
            right = {kind: right.get(kind, at) for kind in STATES if complete and kind not in bad}
            if at > PATIENCE_SECONDS:
                raise program.failure(f"wrong verdicts after {at:.0f} s: {bad}")
            time.sleep(0.1)
    finally:
        broker.close()
        client.stop()
        client.close()
    return right


def measure_fleet(url: str, queues: int, times: int) -> dict[str, Any]:
    """Measure one coordinator with three workers."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-ops-")))
        scene = Scene(folder, url or f"sqlite:{folder / 'coordination.db'}")
        (folder / "app.py").write_text(APP)
        count = fill(scene, queues)
        scene.run("pause", "paused-*", "--allow-none", "--yes", "--reason", "bench")
        argv = [sys.executable, "-m", "qdo.cli.worker", "app:app", "--processes", "3"]
        program = stack.enter_context(
            Program(
                [*argv, "--exclude", "excluded-*"],
                environment=scene.environment | {"PYTHONPATH": os.getcwd()},
                folder=folder,
            )
        )
        verdicts = seconds_to_verdicts(scene, count, program)
        commands = {}
        worker = worker_name(scene)
        for command in COMMANDS:
            words = [worker if word is WORKER else word for word in command]
            commands[" ".join(command)] = Cost.median([scene.run(*words) for _ in range(times)])
        return {"queues": count, "verdicts": verdicts, "commands": commands}


def worker_name(scene: Scene) -> str:
    """Return the name of a registered worker."""
    client = connect(scene.coordinator)
    client.open()
    try:
        return client.get_children(LAYOUT.workers)[0]
    finally:
        client.stop()
        client.close()


def measure_many(queues: int, broker: str = "") -> Cost:
    """Measure `qdo queues` for many queues, in files by default, without a worker."""
    with tempfile.TemporaryDirectory(prefix="bench-ops-") as name:
        scene = Scene(Path(name), f"sqlite:{Path(name) / 'coordination.db'}", broker)
        if broker:
            scene.run("admin", "broker", "init")
        with App("bench", broker=scene.environment["QDO_BROKER"]) as app:
            app.send_many([(f"tenant-{number}", 1) for number in range(queues)])
        return Cost.median([scene.run("queues") for _ in range(3)])


def main() -> int:
    """Measure, print and write the JSON."""
    parser = argparse.ArgumentParser(prog="python -m bench.ops", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a smoke run")
    given = parser.parse_args()
    logging.getLogger("kazoo").setLevel(logging.CRITICAL)
    described = report.machine()
    queues, times, many = (600, 1, 2000) if given.quick else (5000, 5, MANY)
    found = {"embedded": measure_fleet("", queues, times)}
    with services.zookeeper() as ensemble:
        found["zookeeper"] = measure_fleet(ensemble.url("/ops"), queues, times)
    lists = {"sqlite": measure_many(many)}
    with postgresql() as server:
        lists["postgresql"] = measure_many(
            many, server.address.url(server.address.create_database())
        )
    _print(found, lists)
    goals = []
    for name, cost in lists.items():
        goals += [
            Goal.at_most(f"{name}: s for {many:,} queues", MANY_GOAL_SECONDS, cost.seconds),
            Goal.at_most(
                f"{name}: MiB for {many:,} queues", MANY_GOAL_MIB, cost.memory_mib, ",.0f"
            ),
        ]
    for name, each in found.items():
        slowest = max(cost.seconds for cost in each["commands"].values())
        last = max(each["verdicts"].values()) - RULES.stuck_seconds
        goals += [
            Goal.at_most(f"{name}: s until all verdicts", VERDICT_GOAL_SECONDS, last, ".1f"),
            Goal.at_most(f"{name}: s for any list", LIST_GOAL_SECONDS, slowest),
            Goal.at_most(
                f"{name}: s for qdo status", STATUS_GOAL_SECONDS, each["commands"]["status"].seconds
            ),
        ]
    result = {
        "machine": described,
        "versions": report.versions(("kazoo", "gevent", "ujson")),
        "fleets": found,
        "lists": lists,
    }
    return report.finish("ops", result, [] if given.quick else goals)


def _print(found: Mapping[str, Mapping[str, Any]], lists: Mapping[str, Cost]) -> None:
    kinds = found["embedded"]["verdicts"]
    rows = [(kind, *(f"{each['verdicts'][kind]:.2f}" for each in found.values())) for kind in kinds]
    print(report.table(("verdicts, s until right", *found), rows))
    header = ["command, s"]
    for name in found:
        header += [name, "processor"]
    lines = []
    for command in found["embedded"]["commands"]:
        costs = [each["commands"][command] for each in found.values()]
        lines.append([command, *(f"{s:.2f}" for c in costs for s in (c.seconds, c.processor))])
    print(f"\n{report.table(header, lines)}\n")
    for name, cost in lists.items():
        print(
            f"many queues in {name}: {cost.seconds:.2f} s,"
            f" {cost.processor:.2f} s of the processor, {cost.memory_mib:.0f} MiB"
        )


if __name__ == "__main__":
    try:
        sys.exit(main())
    except ProgramError as error:
        print(error, file=sys.stderr)
        sys.exit(1)
