"""Priorities within a queue: ``python -m bench.priorities``.

First the rate: no-op messages of one queue per second of processor time, in one process, with
``order="priority"`` beside the orders "none" and "queue". Then an urgent message is sent while the
first of 9,000 messages runs: how many others start before it, and how long after the job in flight
it starts. Celery on Redis does the same with four levels of priority, one process and its default
prefetching, and with a prefetch of one message.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from gevent import monkey

monkey.patch_all()

import qdo  # noqa: E402
from bench.support import report, services  # noqa: E402
from bench.support.processes import Program, Report  # noqa: E402
from bench.support.statistics import Goal  # noqa: E402
from tests.support.engine import EngineSetup, until  # noqa: E402

URGENT_SHARE = {"equal": 0.0, "1 % urgent": 0.01, "half urgent": 0.5}
JOB_SECONDS = 0.01


def rate(order: str, messages: int, urgent: float) -> float:
    """Return messages per second of processor time."""
    chance, done = random.Random(20261127), [0]
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        engine = EngineSetup(Path(folder), fetch=1000)

        @engine.app.job(order=order)
        def job(message: qdo.Message, context: Any) -> None:
            done[0] += 1

        priorities = (0 if chance.random() < urgent else 5 for _ in range(messages))
        engine.app.send_many([qdo.NewMessage("q", {"n": 1}, priority=each) for each in priorities])
        began = time.process_time()
        try:
            engine.start("q")
            until(lambda: done[0] == messages, "the end of the queue")
            return messages / (time.process_time() - began)
        finally:
            engine.close()


def overtake(waiting: int) -> tuple[int, float]:
    """Return the messages that start before an urgent one, and its delay in seconds."""
    begun: list[Any] = []
    times: list[float] = []
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        engine = EngineSetup(Path(folder))

        @engine.app.job(order="priority")
        def job(message: qdo.Message, context: Any) -> None:
            begun.append(message.body)
            times.append(time.monotonic())
            if len(begun) == 10:
                engine.app.send("q", "urgent", priority=qdo.URGENT)
            time.sleep(JOB_SECONDS)

        try:
            engine.send("q", *range(waiting))
            engine.start("q")
            until(lambda: "urgent" in begun, "the urgent message starts")
        finally:
            engine.close()
    place = begun.index("urgent")
    return place - 10, times[place] - times[place - 1] - JOB_SECONDS


def celery(python: Path, waiting: int, prefetch: int) -> tuple[int, float]:
    """Return the same of Celery."""
    with contextlib.ExitStack() as stack:
        url = stack.enter_context(services.redis())
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-"))
        pipe = stack.enter_context(Report(Path(folder)))
        environment = {"BENCH_REDIS": url, "BENCH_REPORT": str(pipe.path)}
        environment |= {"BENCH_PREFETCH": str(prefetch), "BENCH_JOB_SECONDS": str(JOB_SECONDS)}
        module = "bench.peers.celery_priorities"
        fill = [str(python), "-m", module, str(waiting)]
        subprocess.run(fill, env={**os.environ, **environment}, check=True)
        argv = [str(python), "-m", "celery", "-A", module, "worker", "-c", "1", "-l", "warning"]
        worker = stack.enter_context(Program(argv, environment=environment))
        found = pipe.read(120.0, worker)
        return found["passed"], found["seconds"]


def main() -> int:
    """Measure, print and write the JSON."""
    parser = argparse.ArgumentParser(prog="python -m bench.priorities", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a smoke run")
    parser.add_argument("--no-peers", action="store_true", help="without Celery")
    parser.add_argument("--peers-venv", type=Path, default=services.PEERS)
    given = parser.parse_args()
    messages, runs = (2_000, 1) if given.quick else (10_000, 5)
    figures: dict[str, float] = {}
    kinds = [("none", "equal"), ("queue", "equal"), *(("priority", each) for each in URGENT_SHARE)]
    found: dict[str, list[float]] = {f"{order}, {kind}": [] for order, kind in kinds}
    for _ in range(runs):
        for order, kind in kinds:
            found[f"{order}, {kind}"].append(rate(order, messages, URGENT_SHARE[kind]))
    for name, rates in found.items():
        figures[f"order {name}: messages per second"] = statistics.median(rates)
    measured = {"qdo": [overtake(9_000) for _ in range(runs)]}
    if not given.no_peers:
        python = services.peers_python(given.peers_venv)
        for prefetch in (4, 1):
            name = f"Celery, prefetch {prefetch}"
            measured[name] = [celery(python, 9_000, prefetch)]
    for name, passed in measured.items():
        figures[f"{name}: others before an urgent one"] = max(each for each, _ in passed)
        figures[f"{name}: its delay in ms"] = 1e3 * statistics.median(each for _, each in passed)
    print(report.table(("figure", "found"), [(n, f"{value:,.1f}") for n, value in figures.items()]))
    result = {"machine": report.machine(), "figures": figures}
    least = min(statistics.median(each) for name, each in found.items() if "priority" in name)
    passed = max(each for each, _ in measured["qdo"])
    goals = [
        Goal.at_least("messages per second with priorities", 20_000, least, ",.0f"),
        Goal.at_most("others before an urgent message", 0, passed, ",.0f"),
    ]
    return report.finish("priorities", result, goals)


if __name__ == "__main__":
    sys.exit(main())
