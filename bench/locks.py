"""Locks beside kazoo's, on one ZooKeeper server: ``python -m bench.locks``.

How often one process can take a lock that nobody else wants, and how often several connections can
hand it on. kazoo's `Lock` does the same on the same server in the same run. qdo's lock adds a fence
and a lease, and leaves no contender behind when a caller gives up.
"""

from __future__ import annotations

import argparse
import logging
import sys
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import Any

from bench.support import report, services
from qdo import App
from qdo.coordination.client import connect

CONTENDERS = 6

TakeLock = Callable[[], AbstractContextManager[Any]]


def rate(takers: list[TakeLock], seconds: float) -> tuple[float, float]:
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


def measure(url: str, seconds: float) -> dict[str, float]:
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
            rate(takers, 0.2)  # opens the connections
            found[f"{name}_alone_per_second"] = rate(takers[:1], seconds)[0]
            contended, fairness = rate(takers, seconds)
            found[f"{name}_contended_per_second"] = contended
            found[f"{name}_least_by_most"] = fairness
    return found


def main() -> int:
    """Measure, print and write the JSON."""
    parser = argparse.ArgumentParser(prog="python -m bench.locks", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a smoke run")
    quick = parser.parse_args().quick
    logging.getLogger("kazoo").setLevel(logging.CRITICAL)
    described = report.machine()
    with services.zookeeper() as ensemble:
        found = measure(ensemble.url("/locks"), 0.2 if quick else 5.0)
    print(report.table(("figure", "found"), [(n, f"{value:,.2f}") for n, value in found.items()]))
    result = {
        "machine": described,
        "versions": report.versions(("kazoo", "gevent", "ujson")),
        "figures": found,
    }
    return report.finish("locks", result, [])


if __name__ == "__main__":
    sys.exit(main())
