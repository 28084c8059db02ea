"""Documents and live settings beside kazoo's recipes, on one server: ``python -m bench.documents``.

How long until a copy is complete, what a read and a write cost, and when a change has reached many
sessions. kazoo's `TreeCache` and `DataWatch` do the same on the same server in the same run, and
Celery's `control.broadcast` changes a value of as many worker processes, over Redis.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import sys
import threading
import time
import tracemalloc
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from kazoo.recipe.cache import TreeCache
from kazoo.recipe.watchers import DataWatch

from bench.support import report, services
from bench.support.celery_fleet import celery_fleet
from bench.support.statistics import Goal
from qdo.coordination.client import Client, connect
from qdo.coordination.side import SideConnection
from qdo.coordination.transactions import make_folder
from qdo.coordination.znodes.layout import Layout
from qdo.fleet.audit import AuditTrail
from qdo.fleet.documents import CoordinatorDocuments, Documents
from qdo.fleet.live_settings import propose, put_into_force
from qdo.fleet.settings_machine import SettingsReport, SettingsVersion, SettingsWatch
from qdo.settings.live import read_live

LAYOUT = Layout.of("bench")
PATIENCE_SECONDS = 120.0
READS = 200_000
VALUE = {"quota": 100, "name": "plan of a tenant", "features": ["a", "b", "c"]}


def opened(url: str, stack: ExitStack) -> Client:
    """Return a connected client, which the stack closes."""
    client = connect(url)
    client.open()
    stack.callback(client.close)
    stack.callback(client.stop)
    return client


def documents_of(url: str, name: str, stack: ExitStack) -> Documents:
    """Return a set of documents with a connection of its own."""
    client = connect(url)
    client.open()
    store = CoordinatorDocuments(client, LAYOUT, PATIENCE_SECONDS, "bench")
    stack.callback(store.close)
    return Documents(name, lambda: store)


def durations(act: Callable[[int], object], count: int) -> list[float]:
    """Return how long each call took, in seconds."""
    found = []
    for number in range(count):
        began = time.perf_counter()
        act(number)
        found.append(time.perf_counter() - began)
    return found


def measure_writes(url: str, count: int, stack: ExitStack) -> dict[str, float]:
    """Measure one writer: documents, and bare `set` calls of kazoo."""
    plans = documents_of(url, "writes", stack)
    copy = documents_of(url, "writes", stack)
    bare = opened(url, stack)
    bare.create("/bare", b"")
    plans.put("acme", VALUE)
    len(copy)
    puts = durations(lambda number: plans.put("acme", number), count)
    sets = durations(lambda number: bare.set("/bare", b"%d" % number), count)

    def fresh(number: int) -> None:
        copy.fresh(plans.put("acme", number))

    both = durations(fresh, count // 4)
    return {
        "put_ms": 1000 * statistics.median(puts),
        "puts_per_second": count / sum(puts),
        "kazoo_set_ms": 1000 * statistics.median(sets),
        "kazoo_sets_per_second": count / sum(sets),
        "put_and_fresh_elsewhere_ms": 1000 * statistics.median(both),
    }


def measure_reads(url: str, stack: ExitStack) -> dict[str, float]:
    """Measure a read from a copy, and one from a dict."""
    plans = documents_of(url, "writes", stack)
    plain = {"acme": VALUE}
    len(plans)

    def per_read(mapping: Any) -> float:
        began = time.perf_counter()
        for _ in range(READS):
            mapping["acme"]
        return 1e6 * (time.perf_counter() - began) / READS

    return {"read_us": per_read(plans), "dict_us": per_read(plain)}


def measure_copies(url: str, count: int, stack: ExitStack) -> dict[str, float]:
    """Measure how long a complete copy takes, and its memory, beside kazoo's TreeCache."""
    writer = opened(url, stack)
    folder = LAYOUT.fleet.document_set("many")
    writer.ensure_path(folder)
    data = b'{"value": {"quota": 100, "name": "plan of a tenant", "features": ["a", "b", "c"]}}'
    for start in range(0, count, 500):
        transaction = writer.transaction()
        for number in range(start, min(start + 500, count)):
            transaction.create(f"{folder}/tenant-{number:06}", data)
        transaction.commit()
    many = documents_of(url, "many", stack)
    tracemalloc.start()
    used = tracemalloc.get_traced_memory()[0]
    if len(many) != count:
        raise RuntimeError(f"the copy has {len(many)} documents instead of {count}")
    mebibytes = (tracemalloc.get_traced_memory()[0] - used) / 2**20
    tracemalloc.stop()
    again = documents_of(url, "many", stack)
    began = time.perf_counter()
    len(again)
    seconds = time.perf_counter() - began
    ready = threading.Event()
    cache = TreeCache(opened(url, stack), folder)
    cache.listen(lambda event: ready.set() if event.event_type == event.INITIALIZED else None)
    began = time.perf_counter()
    cache.start()
    if not ready.wait(PATIENCE_SECONDS):
        raise RuntimeError("kazoo's TreeCache is not complete")
    kazoo_seconds = time.perf_counter() - began
    cache.close()
    return {"copy_seconds": seconds, "copy_mib": mebibytes, "treecache_seconds": kazoo_seconds}


class Arrivals:
    """When each of many sessions has seen a change."""

    def __init__(self, sessions: int) -> None:
        self._sessions = sessions
        self._changed = threading.Condition()
        self._seen: dict[int, list[float]] = {}

    def seen(self, number: int) -> None:
        with self._changed:
            self._seen.setdefault(number, []).append(time.perf_counter())
            self._changed.notify()

    def wait(self, number: int, began: float) -> list[float]:
        """Return the milliseconds until each session had seen a change."""
        with self._changed:
            whole = self._changed.wait_for(
                lambda: len(self._seen.get(number, ())) >= self._sessions, PATIENCE_SECONDS
            )
            if not whole:
                raise RuntimeError(f"change {number} has not reached every session")
            return [1000 * (at - began) for at in self._seen[number]]


def measure_changes(url: str, sessions: int, rounds: int, stack: ExitStack) -> dict[str, float]:
    """Measure when a change has reached every session, beside kazoo's DataWatch."""
    found: dict[str, float] = {}
    plans = documents_of(url, "changes", stack)
    plans.put("acme", -1)
    copies, watched = Arrivals(sessions), Arrivals(sessions)
    writer = opened(url, stack)
    writer.create("/watched", b"-1")

    def noted(data: bytes | None, *rest: Any) -> None:
        if data is not None and int(data) >= 0:
            watched.seen(int(data))

    for _ in range(sessions):
        copy = documents_of(url, "changes", stack)
        copy.on_change(lambda name, value: copies.seen(value))
        len(copy)
        DataWatch(opened(url, stack), "/watched", noted)
    writes: list[tuple[str, Arrivals, Callable[[int], object]]] = [
        ("documents", copies, lambda number: plans.put("acme", number)),
        ("datawatch", watched, lambda number: writer.set("/watched", b"%d" % number)),
    ]
    for name, arrivals, write in writes:
        taken = []
        for number in range(rounds):
            began = time.perf_counter()
            write(number)
            taken.append(arrivals.wait(number, began))
        found[f"{name}_median_ms"] = statistics.median(at for each in taken for at in each)
        found[f"{name}_all_ms"] = statistics.median(max(each) for each in taken)
        found[f"{name}_worst_ms"] = max(max(each) for each in taken)
    return found


class SeenSettings:
    """A session with live settings, which says when it uses a version."""

    def __init__(self, accepted: Arrivals, arrivals: Arrivals) -> None:
        self.in_use: SettingsVersion | None = None
        self._accepted = accepted
        self._arrivals = arrivals

    def check(self, version: SettingsVersion) -> str | None:
        read_live(version.text)
        self._accepted.seen(version.number)
        return None

    def use(self, version: SettingsVersion | None) -> None:
        self.in_use = version
        if version is not None:
            self._arrivals.seen(version.number)

    def answer(self, report: SettingsReport) -> None:
        pass


def measure_settings(url: str, sessions: int, rounds: int, stack: ExitStack) -> dict[str, float]:
    """Measure when live settings that come into force are in use in every session."""
    writer = opened(url, stack)
    make_folder(writer, LAYOUT.fleet.settings)
    make_folder(writer, LAYOUT.fleet.actionlog)
    accepted, arrivals = Arrivals(sessions), Arrivals(sessions)
    for _ in range(sessions):
        client = connect(url)
        client.open()
        side = SideConnection(client)
        stack.callback(side.close)
        watch = SettingsWatch(LAYOUT.fleet.settings, SeenSettings(accepted, arrivals))
        side.add(watch)
        side.wait(watch.when_read, PATIENCE_SECONDS)
    taken = []
    trail = AuditTrail(writer, LAYOUT, "bench")
    for number in range(1, rounds + 1):
        proposal = propose(writer, LAYOUT, lambda node, number=number: f"attempts = {number}\n")  # type: ignore[misc]
        if proposal is None:
            raise RuntimeError("nothing was proposed")
        accepted.wait(number, 0.0)
        began = time.perf_counter()
        put_into_force(writer, LAYOUT, proposal, trail)
        taken.append(arrivals.wait(number, began))
    return {
        "settings_median_ms": statistics.median(at for each in taken for at in each),
        "settings_all_ms": statistics.median(max(each) for each in taken),
        "settings_worst_ms": max(max(each) for each in taken),
    }


def measure_broadcast(python: Path, workers: int, rounds: int) -> dict[str, float]:
    """Measure when each of many Celery workers has confirmed a change that was broadcast."""
    with celery_fleet(python, workers) as ask:
        taken = [1000 * float(value) for value in ask("flip", str(rounds), str(workers))]
    return {"celery_all_ms": statistics.median(taken), "celery_worst_ms": max(taken)}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.documents", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a smoke run")
    parser.add_argument("--documents", type=int, default=10_000)
    parser.add_argument("--sessions", type=int, default=100)
    parser.add_argument("--no-peers", action="store_true", help="without Celery")
    parser.add_argument("--peers-venv", type=Path, default=services.PEERS)
    given = parser.parse_args()
    if given.quick:
        given.documents, given.sessions = 500, 5
    return given


def main() -> int:
    """Measure, print and write the JSON."""
    given = arguments()
    logging.getLogger("kazoo").setLevel(logging.CRITICAL)
    described = report.machine()
    found: dict[str, float] = {}
    with services.zookeeper() as ensemble:
        parts: list[tuple[str, Callable[[str, ExitStack], dict[str, float]]]] = [
            ("writes", lambda url, stack: measure_writes(url, 100 if given.quick else 1000, stack)),
            ("reads", measure_reads),
            ("copies", lambda url, stack: measure_copies(url, given.documents, stack)),
            ("changes", lambda url, stack: measure_changes(url, given.sessions, 20, stack)),
            ("settings", lambda url, stack: measure_settings(url, given.sessions, 20, stack)),
        ]
        for name, measure in parts:
            report.say(name)
            with ExitStack() as stack:
                found |= measure(ensemble.url("/documents"), stack)
    python = None if given.no_peers else services.peers_python(given.peers_venv)
    if python is not None:
        report.say("broadcast")
        found |= measure_broadcast(python, given.sessions, 20)
    rows = [(name, f"{value:,.3f}") for name, value in found.items()]
    print(report.table(("figure", "found"), rows))
    goals = [
        Goal.at_most("ms for a put", 2.0, found["put_ms"], ".2f"),
        Goal.at_most("us for a read", 0.5, found["read_us"], ".2f"),
        Goal.at_most("s for a copy of 10,000", 1.0, found["copy_seconds"], ".2f"),
        Goal.at_most("MiB for a copy of 10,000", 40.0, found["copy_mib"], ".1f"),
        Goal.at_most("ms until 100 sessions see it", 100.0, found["documents_worst_ms"], ".1f"),
        Goal.at_most("ms until 100 use settings", 100.0, found["settings_worst_ms"], ".1f"),
    ]
    result = {
        "machine": described,
        "versions": report.versions(("kazoo", "gevent", "ujson")),
        "peers": report.versions(("celery", "redis"), python) if python else {},
        "plan": {"documents": given.documents, "sessions": given.sessions},
        "figures": found,
    }
    return report.finish("documents", result, [] if given.quick else goals)


if __name__ == "__main__":
    sys.exit(main())
