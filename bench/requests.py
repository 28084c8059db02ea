"""Requests of a pool beside jobs with results of others: ``python -m bench.requests``.

Two worker processes have four places each. How many no-op jobs a second, with 100 outstanding? How
long from asking to the value, one at a time? How long do naps take, 5 % of which last ten times as
long, beside an ideal distribution? And how soon does another process run the job of one that is
killed? See `bench.peers.with_results`. Redis does not sync each write; SQLite and PostgreSQL do.

Then of qdo alone: what 40 idle processes cost, and how many requests a second one worker takes and
ends in PostgreSQL beside the dead rows that an open transaction keeps.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from bench.support import report, services
from bench.support.postgresql_runs import postgresql
from bench.support.processes import Program, ProgramError, cpu_seconds, tree
from bench.support.statistics import Goal
from qdo.app import App
from qdo.brokers.registry import open_broker
from qdo.brokers.requests import NewRequest
from tests.support.postgresql.schema import prepared
from tests.support.postgresql.server import PostgresqlServer

QDO = "qdo"
REDIS, POSTGRESQL = ("celery", "rq", "dramatiq"), ("procrastinate", "pgqueuer")
PROGRAMS = {"procrastinate": 2, "pgqueuer": 2}
"""How many programs a peer needs for two worker processes, by default one."""
COLUMNS = {
    "rate": "jobs/s",
    "median": "p50 ms",
    "p99": "p99 ms",
    "naps": "naps/ideal",
    "killed": "killed, s",
}
DEAD_ROWS = (0, 10_000, 40_000, 200_000)


def compete(peer: str, python: Path, given: argparse.Namespace, **environment: str) -> Any:
    """Return the figures of a peer."""
    module = [str(python), "-m", "bench.peers.with_results"]
    with tempfile.TemporaryDirectory(prefix="bench-") as name, ExitStack() as stack:
        own = {**environment, "BENCH_PEER": peer, "QDO_LOG_LEVEL": "error"}
        if peer == QDO:
            own["QDO_COORDINATOR"] = f"sqlite:{name}/coordination.db"
            own.setdefault("QDO_BROKER", f"sqlite:{name}/messages.db")
        with Program([*module, "schema"], environment=own) as schema:
            schema.wait(60)
        for _ in range(PROGRAMS.get(peer, 1)):
            stack.enter_context(Program([*module, "worker"], environment=own))
        seconds, count = ("2", "20") if given.quick else ("15", "300")
        command = [*module, "ask", seconds, count]
        asker = Program(command, environment=own, folder=Path(name), talk=True)
        return json.loads(stack.enter_context(asker).read_line(300))


def contestants(stack: ExitStack, given: argparse.Namespace) -> Iterator[tuple[str, Any]]:
    """Yield names and figures."""
    server = stack.enter_context(postgresql()).address
    address = prepared(server.url(server.create_database()))
    yield "qdo, SQLite", compete(QDO, Path(sys.executable), given)
    yield "qdo, PostgreSQL", compete(QDO, Path(sys.executable), given, QDO_BROKER=address)
    if given.no_peers:
        return
    python = services.peers_python()
    for peer in REDIS:
        with services.redis() as url:
            yield peer, compete(peer, python, given, BENCH_REDIS=url)
    python = services.peers_python(services.POSTGRESQL_PEERS, services.POSTGRESQL_REQUIREMENTS)
    for peer in POSTGRESQL:
        address = server.url(server.create_database())
        if peer == "pgqueuer":
            install = Program([str(python.with_name("pgq")), "install"], environment=_pg(address))
            with install:
                install.wait(60)
        yield peer, compete(peer, python, given, BENCH_POSTGRESQL=address)


def _pg(address: str) -> dict[str, str]:
    return {"PGDSN": address}


def idle_ms(processes: int, seconds: float) -> float:
    """Return the milliseconds of processor time that an idle process takes in a second."""
    with tempfile.TemporaryDirectory(prefix="bench-") as name:
        settings = {
            "QDO_BROKER": f"sqlite:{name}/messages.db",
            "QDO_COORDINATOR": f"sqlite:{name}/coordination.db",
            "QDO_LOG_LEVEL": "error",
            "BENCH_PEER": QDO,
        }
        worker = "import sys; from qdo.__main__ import worker; sys.exit(worker())"
        argv = [sys.executable, "-c", worker, "bench.peers.with_results:peer.app"]
        with (
            Program([*argv, "--processes", str(processes)], environment=settings) as program,
            App("bench", **_addresses(settings)) as app,
        ):
            app.request("noop", 0).result(60.0)
            limit = time.monotonic() + 60
            while len(tree(program.pid)) <= processes and time.monotonic() < limit:
                time.sleep(0.1)
            time.sleep(seconds)  # until they have started
            before = cpu_seconds(program.pid)
            time.sleep(seconds)
            return 1e3 * (cpu_seconds(program.pid) - before) / seconds / processes


def _addresses(settings: Mapping[str, str]) -> dict[str, str]:
    return {"broker": settings["QDO_BROKER"], "coordinator": settings["QDO_COORDINATOR"]}


def beside_dead_rows(server: PostgresqlServer, count: int, seconds: float) -> float:
    """Return the requests a second that are asked for, taken and ended, one at a time."""
    name = server.address.create_database()
    broker = open_broker(prepared(server.address.url(name)), "bench")
    store, done = broker.requests, 0

    def pass_one(number: int) -> None:
        store.ask([NewRequest("p", str(number), (b"1", None), b"1")])
        (taken,) = store.take("w", "p", 1, []).requests
        store.end(taken.take, "done", (b"1", None))

    with server.address.connect(name) as sql, server.address.connect(name) as other:
        sql.execute("ALTER TABLE qdo.requests SET (autovacuum_enabled = false)")
        other.execute("BEGIN ISOLATION LEVEL REPEATABLE READ")
        other.execute("SELECT txid_current()")
        for start in range(0, count, 1000):
            ids = map(str, range(-start - 1000, -start))
            store.ask([NewRequest("p", each, (b"1", None), b"1") for each in ids])
        for state in (1, 2):
            sql.execute("UPDATE qdo.requests SET state = %s, owner = 'w'", [state])
        sql.execute("DELETE FROM qdo.requests")
        pass_one(0)
        began = time.monotonic()
        while time.monotonic() < began + seconds:
            done += 1
            pass_one(done)
        rate = done / (time.monotonic() - began)
    broker.close()
    return rate


def main() -> int:
    """Measure, print and write the JSON."""
    parser = argparse.ArgumentParser(prog="python -m bench.requests", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a smoke run")
    parser.add_argument("--no-peers", action="store_true", help="qdo alone")
    given = parser.parse_args()
    found: dict[str, Any] = {}
    with ExitStack() as stack:
        try:
            for name, figures in contestants(stack, given):
                report.say(f"{name}: {figures}")
                found[name] = figures
        except ProgramError as error:
            report.say(str(error))
            return 1
    rows = [
        (name, *("never" if each[key] is None else f"{each[key]:,.2f}" for key in COLUMNS))
        for name, each in found.items()
    ]
    print(report.table(("", *COLUMNS.values()), rows))
    idle = idle_ms(4 if given.quick else 40, 2.0 if given.quick else 10.0)
    print(f"idle: {idle:.1f} ms of processor time a second for each process")
    dead: dict[int, float] = {}
    with contextlib.closing(PostgresqlServer()) as server:
        server.start()
        for count in DEAD_ROWS[:2] if given.quick else DEAD_ROWS:
            dead[count] = beside_dead_rows(server, count, 1.0 if given.quick else 5.0)
            print(f"{count:,} dead rows: {dead[count]:,.0f} requests/s")
    sqlite, postgres = found["qdo, SQLite"], found["qdo, PostgreSQL"]
    goals = [
        Goal.at_least("requests a second, SQLite", 3_000, sqlite["rate"]),
        Goal.at_least("requests a second, PostgreSQL", 1_500, postgres["rate"]),
        Goal.at_most("ask to value, SQLite, ms", 8, sqlite["median"]),
        Goal.at_most("ask to value, PostgreSQL, ms", 12, postgres["median"]),
        Goal.at_most("killed process to value, s", 0.5, sqlite["killed"] or 60.0),
    ]
    result = {"machine": report.machine(), "figures": found, "idle": idle, "dead_rows": dead}
    return report.finish("requests", result, goals)


if __name__ == "__main__":
    sys.exit(main())
