"""Permits and locks beside kazoo's, and Dramatiq's limiter: ``python -m bench.permits``.

Six processes with four threads each run jobs of 2 ms, of which 12 or 4 may run at once. With qdo
each process has a share and hands out permits from memory; kazoo's `Semaphore` asks the coordinator
for each, on the same ZooKeeper server, and Dramatiq's `ConcurrentRateLimiter` asks Redis. All run
in processes of their own, one side after the other.

Then: how often can one process take a lock that no other wants, and how often can several
connections hand it on? kazoo's `Lock` does the same. qdo's lock adds a fence and a lease, and
leaves no contender behind when a caller gives up.
"""

from __future__ import annotations

import argparse
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any

from bench.support import report, services
from bench.support.statistics import Goal
from qdo import App
from qdo.coordination.client import connect
from qdo.coordination.znodes.layout import Layout
from qdo.fleet.limits import LimitWish, set_limit

PROCESSES = 6
THREADS = 4
JOB_SECONDS = 0.002
LAYOUT = Layout.of("bench")

TakePermit = Callable[[], AbstractContextManager[Any]]


def run_jobs(takers: Sequence[TakePermit], seconds: float, job_seconds: float) -> int:
    """Return how many jobs the threads of this process ran."""
    counts = [0] * len(takers)
    begin = threading.Barrier(len(takers))

    def run(number: int) -> None:
        with takers[number]():
            pass  # the first permit opens the connection
        begin.wait()
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            with takers[number]():
                time.sleep(job_seconds)
                counts[number] += 1

    threads = [threading.Thread(target=run, args=(number,)) for number in range(len(takers))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(counts)


def child(kind: str, url: str, most: int, seconds: float) -> int:
    """Run one of the processes; its output is the number of its jobs."""
    with ExitStack() as stack:
        if kind == "qdo":
            app = stack.enter_context(App("bench", coordinator=url, session_timeout_seconds=10))
            takers: list[TakePermit] = [lambda: app.limit(f"most-{most}")] * THREADS
        else:
            client = connect(url)
            client.open()
            stack.callback(client.close)
            stack.callback(client.stop)
            takers = [
                lambda: client.Semaphore(f"/most-{most}", max_leases=most) for _ in range(THREADS)
            ]
        print(run_jobs(takers, seconds, JOB_SECONDS), flush=True)
    return 0


def together(kind: str, url: str, most: int, seconds: float) -> list[int]:
    """Return the number of jobs of each of the processes that run at the same time."""
    argv = [sys.executable, "-m", "bench.permits", "--child", kind, url, str(most), str(seconds)]
    return counted(argv)


def counted(argv: Sequence[str], **environment: str) -> list[int]:
    """Return what each of the processes prints that run at the same time."""
    inherited = {**os.environ, **environment}
    running = [
        subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, env=inherited)
        for _ in range(PROCESSES)
    ]
    return [int(process.communicate()[0]) for process in running]


def compared(name: str, counts: Sequence[int], seconds: float) -> dict[str, float]:
    """Return the figures of the jobs of each process."""
    mean = sum(counts) / len(counts)
    return {
        f"{name}_per_second": sum(counts) / seconds,
        f"{name}_least_by_mean": min(counts) / mean,
        f"{name}_most_by_mean": max(counts) / mean,
    }


def measure_dramatiq(python: Path, seconds: float) -> dict[str, float]:
    """Measure Dramatiq's limiter with both numbers of permits."""
    found: dict[str, float] = {}
    with services.redis() as url:
        for most in (12, 4):
            report.say(f"dramatiq, {most} permits")
            argv = [str(python), "-m", "bench.peers.dramatiq_permits", str(most), str(seconds)]
            found |= compared(f"dramatiq_{most}", counted(argv, BENCH_REDIS=url), seconds)
    return found


def measure(url: str, seconds: float) -> dict[str, float]:
    """Measure both sides with both numbers of permits, and one process alone."""
    found: dict[str, float] = {}
    client = connect(url)
    client.open()
    try:
        for most in (12, 4):
            set_limit(client, LAYOUT, f"most-{most}", LimitWish(max=str(most)))
            for kind in ("qdo", "kazoo"):
                report.say(f"{kind}, {most} permits")
                found |= compared(f"{kind}_{most}", together(kind, url, most, seconds), seconds)
    finally:
        client.stop()
        client.close()
    with App("bench", coordinator=url, session_timeout_seconds=10) as app:
        alone = run_jobs([lambda: app.limit("most-12")], seconds, 0.0)
    found["qdo_alone_per_second"] = alone / seconds
    return found


CONTENDERS = 6

TakeLock = Callable[[], AbstractContextManager[Any]]


def lock_rate(takers: list[TakeLock], seconds: float) -> tuple[float, float]:
    """Return acquisitions per second of all takers, and the least of one of them by the most."""
    counts = [0] * len(takers)
    end = time.perf_counter() + seconds

    def run(number: int) -> None:
        while time.perf_counter() < end:
            with takers[number]():
                counts[number] += 1

    threads = [threading.Thread(target=run, args=(number,)) for number in range(len(takers))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(counts) / seconds, min(counts) / max(1, max(counts))


def measure_locks(url: str, seconds: float) -> dict[str, float]:
    """Measure both locks, alone and contended."""
    found: dict[str, float] = {}
    with ExitStack() as stack:
        apps = [
            stack.enter_context(App("bench", coordinator=url, session_timeout_seconds=10))
            for _ in range(CONTENDERS)
        ]
        clients = []
        for _ in range(CONTENDERS):
            client = connect(url)
            client.open()
            stack.callback(client.close)
            stack.callback(client.stop)
            clients.append(client)
        qdo_locks: list[TakeLock] = [lambda app=app: app.lock("one") for app in apps]  # type: ignore[misc]
        kazoo_locks: list[TakeLock] = [
            lambda client=client: client.Lock("/one") for client in clients
        ]  # type: ignore[misc]
        for name, takers in (("qdo", qdo_locks), ("kazoo", kazoo_locks)):
            lock_rate(takers, 0.2)  # opens the connections
            found[f"{name}_lock_alone_per_second"] = lock_rate(takers[:1], seconds)[0]
            contended, fairness = lock_rate(takers, seconds)
            found[f"{name}_lock_contended_per_second"] = contended
            found[f"{name}_lock_least_by_most"] = fairness
    return found


def main() -> int:
    """Measure, print and write the JSON."""
    logging.getLogger("kazoo").setLevel(logging.CRITICAL)
    if "--child" in sys.argv:
        kind, url, most, seconds = sys.argv[2:]
        return child(kind, url, int(most), float(seconds))
    parser = argparse.ArgumentParser(prog="python -m bench.permits", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a smoke run")
    parser.add_argument("--no-peers", action="store_true", help="without Dramatiq")
    parser.add_argument("--peers-venv", type=Path, default=services.PEERS)
    given = parser.parse_args()
    quick, seconds = given.quick, 0.5 if given.quick else 10.0
    described = report.machine()
    with services.zookeeper() as ensemble:
        found = measure(ensemble.url("/permits"), seconds)
        found |= measure_locks(ensemble.url("/locks"), 0.2 if quick else 5.0)
    python = None if given.no_peers else services.peers_python(given.peers_venv)
    if python is not None:
        found |= measure_dramatiq(python, seconds)
    print(report.table(("figure", "found"), [(n, f"{value:,.2f}") for n, value in found.items()]))
    result = {
        "machine": described,
        "versions": report.versions(("kazoo", "gevent", "ujson")),
        "peers": report.versions(("dramatiq", "redis"), python) if python else {},
        "plan": {"processes": PROCESSES, "threads": THREADS, "job_seconds": JOB_SECONDS},
        "figures": found,
    }
    goals = [
        Goal.at_least("jobs/s with 12 permits", 5000, found["qdo_12_per_second"], ",.0f"),
        Goal.at_least("jobs/s with 4 permits", 1400, found["qdo_4_per_second"], ",.0f"),
    ]
    return report.finish("permits", result, [] if quick else goals)


if __name__ == "__main__":
    sys.exit(main())
