"""Requests of a pool: ``python -m bench.requests``.

A worker with two processes runs no-op jobs on SQLite and on PostgreSQL. How many requests a second,
each with a message for ``then=``, while 100 are outstanding? How long from asking to the value, one
at a time? And how soon does another process run the request of one that is killed?
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import sys
import tempfile
import time
from collections import deque
from contextlib import ExitStack
from pathlib import Path

from bench.support import report
from bench.support.postgresql_runs import postgresql
from bench.support.processes import Program, ProgramError
from bench.support.statistics import Goal, percentile
from qdo.app import App
from qdo.brokers.requests import RUNNING
from tests.support.paths import ROOT
from tests.support.postgresql.schema import prepared

OUTSTANDING = 100
APP = """
import os
import time

import qdo

app = qdo.App("bench")


@app.job("noop", pool=True, concurrency=50)
def noop(request, context):
    return request.body


@app.job("hold", pool=True)
def hold(request, context):
    request.progress(str(os.getpid()))
    time.sleep(600 if request.take == 1 else 0)
    return request.take


@app.job("told")
def told(message, context):
    pass
"""


def throughput(app: App, seconds: float) -> float:
    """Return requests a second with `OUTSTANDING` at once, asked in tens."""
    open_ids: deque[list[str]] = deque()
    done, began = 0, time.monotonic()
    while time.monotonic() < began + seconds:
        terms = [{"pool": "noop", "body": {"n": done}, "then": "told"}] * 10
        open_ids.append([each.id for each in app.request_many(terms)])
        if len(open_ids) == OUTSTANDING // 10:
            for id in open_ids.popleft():
                app.handle(id).result(60.0)
            done += 10
    return done / (time.monotonic() - began)


def latencies(app: App, count: int) -> list[float]:
    """Return the milliseconds from asking to the value, one request at a time."""
    found = []
    for number in range(count):
        began = time.perf_counter()
        app.request("noop", {"n": number}).result(60.0)
        found.append(1e3 * (time.perf_counter() - began))
    return found


def recovery_ms(app: App) -> float:
    """Return the time from the kill of a worker to the result that another one returns."""
    handle = app.request("hold", None)
    deadline = time.monotonic() + 60.0
    while (record := app.broker.requests.find(handle.id)) is None or not record.note:
        if time.monotonic() > deadline or (record and record.state > RUNNING):
            raise ProgramError("the request does not run")
        time.sleep(0.01)
    os.kill(int(record.note), signal.SIGKILL)
    began = time.perf_counter()
    handle.result(60.0)
    return 1e3 * (time.perf_counter() - began)


def measure(broker: str, folder: Path, quick: bool) -> dict[str, float]:
    (folder / "requests_app.py").write_text(APP)
    settings = {
        "QDO_BROKER": broker,
        "QDO_COORDINATOR": f"sqlite:{folder}/coordination.db",
        "PYTHONPATH": f"{folder}:{ROOT}",
        "QDO_LOG_LEVEL": "error",
    }
    worker = "import sys; from qdo.__main__ import worker; sys.exit(worker())"
    argv = [sys.executable, "-c", worker, "requests_app:app", "--processes", "2"]
    with (
        App("bench", broker=broker, coordinator=settings["QDO_COORDINATOR"]) as app,
        Program(argv, environment=settings, folder=folder),
    ):
        app.request("noop", 0).result(60.0)
        times = sorted(latencies(app, 20 if quick else 300))
        rate = throughput(app, 2.0 if quick else 15.0)
        recoveries = [recovery_ms(app) for _ in range(1 if quick else 3)]
    return {
        "requests a second": rate,
        "ask to value, p50 ms": percentile(times, 50),
        "ask to value, p99 ms": percentile(times, 99),
        "killed worker to value, ms": statistics.median(recoveries),
    }


def main() -> int:
    """Measure, print and write the JSON."""
    parser = argparse.ArgumentParser(prog="python -m bench.requests", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a smoke run")
    given = parser.parse_args()
    found: dict[str, dict[str, float]] = {}
    with ExitStack() as stack:
        for name in ("sqlite", "postgresql"):
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-")))
            if name == "sqlite":
                broker = f"sqlite:{folder}/messages.db"
            else:
                address = stack.enter_context(postgresql()).address
                broker = prepared(address.url(address.create_database()))
            found[name] = measure(broker, folder, given.quick)
    rows = [(key, *(f"{each[key]:,.1f}" for each in found.values())) for key in found["sqlite"]]
    print(report.table(("figure", *found), rows))
    goals = [
        Goal.at_least("requests a second, SQLite", 3_000, found["sqlite"]["requests a second"]),
        Goal.at_least(
            "requests a second, PostgreSQL", 1_500, found["postgresql"]["requests a second"]
        ),
        Goal.at_most("ask to value, SQLite, ms", 8, found["sqlite"]["ask to value, p50 ms"]),
        Goal.at_most(
            "ask to value, PostgreSQL, ms", 12, found["postgresql"]["ask to value, p50 ms"]
        ),
    ]
    result = {"machine": report.machine(), "figures": found}
    return report.finish("requests", result, goals)


if __name__ == "__main__":
    sys.exit(main())
