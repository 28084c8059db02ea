"""The cost of ordering, batches and idle queues: ``python -m bench.jobs``.

All in one run, with `qdo-worker`, one worker process, and the embedded broker and coordinator:

- a queue with ``order="key"``: jobs of 10 ms, 100 keys, concurrency 100. The ideal rate is 10,000
  per second; compared with a bare loop of 100 greenlets that only wait as long;
- a no-op job with batches of 500, compared with the bare loop of `bench.throughput`;
- a job that counts in the state of its queue (`qdo.state`), in SQLite and in PostgreSQL; each
  message is a transaction that waits for the disk;
- the memory of a worker that owns 10,000 idle queues, compared with 10.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sqlite3
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import qdo
from bench.peers import common as tally
from bench.support import report
from bench.support.postgresql_runs import postgresql
from bench.support.processes import Program, ProgramError, tree
from bench.support.statistics import Goal, Spread
from bench.throughput import APP, PATIENCE_SECONDS, SEND_BATCH, WORKER, counting, fill, run_bare
from qdo.state import KeyedState
from tests.support.paths import ROOT

JOB_SECONDS = 0.010
KEYS = 100
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_GREENLETS = f"""
import gevent.monkey
gevent.monkey.patch_all()
import time, gevent

def lane(count):
    for _ in range(count):
        time.sleep({JOB_SECONDS})

start = time.perf_counter()
gevent.joinall([gevent.spawn(lane, %d) for _ in range({KEYS})])
print(time.perf_counter() - start)
"""


def worker(app: str, folder: Path, fresh: str) -> list[str]:
    """Return the command of a worker with a new coordinator."""
    return [
        *WORKER,
        f"bench.apps.jobs:{app}",
        "--broker",
        f"sqlite:{folder / 'messages.db'}",
        "--coordinator",
        f"sqlite:{fresh}/coordination.db",
    ]


def rate(app: str, folder: Path, total: int, **more: str) -> float:
    """Return the messages per second from the first to the last.

    :param more: variables of the worker's environment.
    """
    with (
        tempfile.TemporaryDirectory(prefix="bench-coordination-", dir=folder) as fresh,
        counting(total) as (pipe, environment),
        Program(worker(app, folder, fresh), environment={**environment, **more}) as program,
    ):
        found = pipe.read(PATIENCE_SECONDS, program)
        return float(found["jobs"] / found["seconds"])


def fill_keyed(folder: Path, total: int) -> None:
    """Send messages of all keys in turn to one queue."""
    with qdo.App(APP, broker=f"sqlite:{folder / 'messages.db'}") as app:
        for start in range(0, total, SEND_BATCH):
            app.send_many(
                ("keyed", tally.body(number), f"key-{number % KEYS}")
                for number in range(start, min(total, start + SEND_BATCH))
            )


def stateful(url: str, folder: Path, total: int) -> float:
    """Return the rate of a job with state by key in an empty table of a database."""
    if url.startswith("postgresql:"):
        import psycopg

        session: Any = psycopg.connect(url)
    else:
        session = contextlib.closing(sqlite3.connect(url))
    with session as database:
        database.execute("DROP TABLE IF EXISTS qdo_state")
        KeyedState().create(database)
        database.commit()
    return rate("stateful", folder, total, BENCH_STATES=url)


def greenlets(total: int) -> float:
    """Return the rate of greenlets that only wait."""
    code = _GREENLETS % (total // KEYS)
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return total / float(done.stdout)


def memory(folder: Path, queues: int) -> int:
    """Return the resident bytes of a worker that has processed one message of each queue."""
    with qdo.App(APP, broker=f"sqlite:{folder / 'messages.db'}") as app:
        app.send_many((tally.set_member(number), number) for number in range(queues))
    with (
        tempfile.TemporaryDirectory(prefix="bench-coordination-", dir=folder) as fresh,
        counting(queues) as (pipe, environment),
        Program(worker("idle", folder, fresh), environment=environment) as program,
    ):
        pipe.read(PATIENCE_SECONDS, program)
        time.sleep(3.0)  # checkpoints, and everything else that follows work
        child = next((pid for pid, _ in tree(program.pid) if pid != program.pid), None)
        if child is None:
            raise ProgramError("the worker has no child process")
        return int(Path(f"/proc/{child}/statm").read_text().split()[1]) * _PAGE_BYTES


def main() -> int:
    """Measure, print and write the JSON."""
    parser = argparse.ArgumentParser(prog="python -m bench.jobs", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a smoke run with few messages")
    parser.add_argument("--runs", type=int, default=3)
    given = parser.parse_args()
    keyed, batched, many = (2_000, 32_000, 500) if given.quick else (40_000, 1_600_000, 10_000)
    counted = 2_000 if given.quick else 40_000
    described = report.machine()
    found: dict[str, list[float]] = {}
    names = ("order=key", "100 greenlets that wait", "batches of 500", "bare loop")
    names += ("state in SQLite", "state in PostgreSQL")
    with tempfile.TemporaryDirectory(prefix="bench-jobs-") as name, postgresql() as server:
        for part in ("keyed", "plain", "counted", "few", "many"):
            (Path(name) / part).mkdir()
        fill_keyed(Path(name) / "keyed", keyed)
        fill(Path(name) / "plain", batched)
        fill(Path(name) / "counted", counted)
        for run in range(1 if given.quick else given.runs):
            report.say(f"run {run + 1}")
            bare: dict[str, Any] = run_bare(Path(name) / "plain", batched)
            rates = (
                rate("keyed", Path(name) / "keyed", keyed),
                greenlets(keyed),
                rate("batched", Path(name) / "plain", batched),
                bare["jobs"] / bare["seconds"],
                stateful(f"{name}/states.db", Path(name) / "counted", counted),
                stateful(server.address.url("postgres"), Path(name) / "counted", counted),
            )
            for each, value in zip(names, rates, strict=True):
                found.setdefault(each, []).append(value)
        report.say("memory")
        few, lot = memory(Path(name) / "few", 10), memory(Path(name) / "many", many)
    spreads = {each: Spread.of_rates(values) for each, values in found.items()}
    print(
        report.table(
            ("program", "messages/s, median", "best", "worst"),
            [(n, f"{s.median:,.0f}", f"{s.best:,.0f}", f"{s.worst:,.0f}")
             for n, s in spreads.items()],
        )
    )  # fmt: skip
    each_queue = (lot - few) / (many - 10)
    print(f"an idle queue takes {each_queue:,.0f} bytes ({many:,} queues, {lot / 2**20:.0f} MiB)")
    keyed_share = spreads[names[0]].median * JOB_SECONDS / KEYS
    batch_share = spreads[names[2]].median / spreads[names[3]].median
    in_sqlite, in_postgresql = (spreads[each].median for each in names[4:])
    goals = [
        Goal("order=key of the ideal rate", ">= 0.60", f"{keyed_share:.2f}", keyed_share >= 0.6),
        Goal("batches of the bare loop", ">= 0.60", f"{batch_share:.2f}", batch_share >= 0.6),
        Goal("state in SQLite", ">= 5000", f"{in_sqlite:,.0f}", in_sqlite >= 5000),
        Goal("state in PostgreSQL", ">= 1500", f"{in_postgresql:,.0f}", in_postgresql >= 1500),
        Goal("bytes for an idle queue", "< 2048", f"{each_queue:,.0f}", each_queue < 2048),
    ]
    result = {
        "machine": described,
        "versions": report.versions(["gevent", "greenlet", "ujson"]),
        "messages": {"keyed": keyed, "batched": batched, "counted": counted},
        "rates": spreads,
        "idle": {"queues": many, "bytes_each": each_queue, "resident_bytes": lot},
    }
    return report.finish("jobs", result, [] if given.quick else goals)


if __name__ == "__main__":
    sys.exit(main())
