"""Handovers between real workers while they process messages.

Ten `qdo-worker` commands, each with its child process, share the queues on ZooKeeper. Some queues
get a message every 50 ms. Ownership comes from watches of the worker nodes, waiting times from the
jobs' journals. Then an eleventh worker starts, one is drained with SIGTERM, and the child process
of one is killed with SIGKILL; its parent process starts another.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from bench.apps import traffic as traffic_app
from bench.support import members as crews
from bench.support.handover_analysis import Handover, OwnershipEvent, handover, owners_at
from bench.support.processes import Program, tree
from bench.throughput import WORKER
from qdo.coordination.client import Client
from qdo.coordination.znodes.layout import Layout
from qdo.coordination.znodes.worker_node import WorkerNode

PROBES = 100
EVERY_SECONDS = 0.05
CALM_SECONDS = 3.0
"""Waiting times are measured this long before a change, for comparison, and this long after it."""


@dataclass(frozen=True, slots=True)
class ProbeStart:
    """One job of a probe queue."""

    queue: str
    number: int
    sent_ns: int
    at_ns: int

    @property
    def waited(self) -> float:
        return (self.at_ns - self.sent_ns) / 1e9


@dataclass(frozen=True, slots=True)
class Upheaval:
    """One change of the fleet.

    :ivar calm_wait: longest wait of any message before the change, in seconds.
    :ivar unmoved_wait: longest wait in queues that kept their owner, around the change.
    :ivar moved_wait: longest wait in queues that changed their owner.
    :ivar repeated: messages whose job started more than once.
    :ivar missing: messages whose job never started.
    :ivar disordered: jobs that started after a later one of their queue, without repetitions
        after a crash.
    """

    cause: str
    effect: Handover
    calm_wait: float
    unmoved_wait: float
    moved_wait: float
    repeated: int
    missing: int
    disordered: int


class Observer:
    """Records the owners of queues as watches of the worker nodes report them."""

    def __init__(self, client: Client, layout: Layout) -> None:
        self._client = client
        self._layout = layout
        self._lock = threading.Lock()
        self._held: dict[str, frozenset[str]] = {}
        self._events: list[OwnershipEvent] = []
        self.first_seen: dict[str, int] = {}
        client.ensure_path(layout.workers)
        client.ChildrenWatch(layout.workers, self._workers)

    def _workers(self, names: list[str]) -> None:
        for name in names:
            if name not in self.first_seen:
                self.first_seen[name] = time.monotonic_ns()
                self._client.DataWatch(self._layout.worker(name), partial(self._saw, name))

    def _saw(self, name: str, data: bytes | None, *_: object) -> bool:
        """Record the difference; return False to end the watch of a worker that is gone."""
        now = time.monotonic_ns()
        queues = frozenset(WorkerNode.parse(data).queues) if data is not None else frozenset()
        with self._lock:
            before = self._held.get(name, frozenset())
            self._events += [
                OwnershipEvent(now, "stopped", name, queue) for queue in before - queues
            ]
            self._events += [
                OwnershipEvent(now, "claimed", name, queue) for queue in queues - before
            ]
            if data is None:
                self._held.pop(name, None)
            else:
                self._held[name] = queues
        return data is not None

    @property
    def events(self) -> list[OwnershipEvent]:
        with self._lock:
            return list(self._events)

    def held(self) -> dict[str, int]:
        """Return how many queues each worker owns."""
        with self._lock:
            return {name: len(queues) for name, queues in self._held.items()}

    def add(self, events: Sequence[OwnershipEvent]) -> None:
        """Add an event that no watch can report in time."""
        with self._lock:
            self._events += events


class BenchFleet:
    """The workers, and the folder of their journals."""

    def __init__(self, folder: Path, coordinator: str, observer: Observer, queues: int) -> None:
        self.broker = f"sqlite:{folder}/messages.db"
        self.journals = folder / "journals"
        self.journals.mkdir()
        self._coordinator = coordinator
        self._observer = observer
        self.queues = queues
        self.workers: list[Program] = []

    def start(self, count: int) -> None:
        """Start `count` workers."""
        command = [*WORKER, "bench.apps.traffic:app", "--broker", self.broker]
        command += ["--coordinator", self._coordinator]
        environment = {traffic_app.FOLDER: str(self.journals)}
        self.workers += [Program(command, environment=environment) for _ in range(count)]

    def close(self) -> None:
        """Stop all workers at once."""
        for worker in self.workers:
            with contextlib.suppress(ProcessLookupError):
                os.kill(worker.pid, signal.SIGTERM)
        for worker in self.workers:
            worker.stop(30.0)

    def drain(self) -> int:
        """Stop one worker cleanly; return the time of the signal."""
        worker = self.workers.pop(0)
        began = time.monotonic_ns()
        os.kill(worker.pid, signal.SIGTERM)
        worker.wait(60.0)
        worker.stop()
        return began

    def kill_child(self) -> int:
        """Kill the child process of one worker; return the time."""
        children = [pid for pid, _ in tree(self.workers[0].pid)[1:]]
        began = time.monotonic_ns()
        os.kill(children[0], signal.SIGKILL)
        return began

    def shared_out(self, workers: int) -> bool:
        """Return whether `workers` workers own all queues, evenly."""
        held = list(self._observer.held().values())
        return len(held) == workers and sum(held) == self.queues and max(held) - min(held) <= 1

    def starts(self) -> list[ProbeStart]:
        """Return every job that any worker started."""
        found: list[ProbeStart] = []
        for path in self.journals.iterdir():
            for line in path.read_text().splitlines():
                queue, number, sent, at = line.split()
                found.append(ProbeStart(queue, int(number), int(sent), int(at)))
        return sorted(found, key=lambda start: start.at_ns)


def measure(
    client: Client, coordinator: str, layout: Layout, queues: int, workers: int, patience: float
) -> list[Upheaval]:
    """Run a fleet through a join, a leave and a crash.

    :param client: connected to `coordinator`, which has the queue nodes.
    """
    observer = Observer(client, layout)
    with tempfile.TemporaryDirectory(prefix="bench-fleet-") as name:
        fleet = BenchFleet(Path(name), coordinator, observer, queues)
        command = [*("python", "-m", "bench.support.traffic"), fleet.broker]
        command[0] = WORKER[0]
        try:
            fleet.start(workers)
            ready = crews.wait_for(lambda: fleet.shared_out(workers), patience)
            crews.require(ready, f"{workers} workers have {observer.held()}")
            sending = [*command, str(min(PROBES, queues)), str(EVERY_SECONDS)]
            with Program(sending, talk=True) as sender:
                marks = _upheavals(fleet, observer, workers, patience)
                if sender.process.stdin is not None:
                    sender.process.stdin.close()
                rounds = json.loads(sender.read_line(60.0))["rounds"]
                done = crews.wait_for(lambda: _complete(fleet, rounds, queues), 30.0, 0.5)
        finally:
            fleet.close()
        starts = fleet.starts()
    missing = 0 if done else _missing(starts, rounds, queues)
    return [_judge(mark, observer.events, starts, missing) for mark in marks]


@dataclass(frozen=True, slots=True)
class Mark:
    """Start and end of a change, and the workers at its end."""

    cause: str
    began_ns: int
    ended_ns: int
    names: tuple[str, ...]


def _upheavals(fleet: BenchFleet, observer: Observer, workers: int, patience: float) -> list[Mark]:
    _calm()
    marks: list[Mark] = []

    def note(cause: str, began_ns: int, done: Callable[[], bool]) -> None:
        settled = crews.wait_for(done, patience, 0.01)
        crews.require(settled, f"{cause}: workers own {observer.held()} after {patience:g} s")
        marks.append(Mark(cause, began_ns, time.monotonic_ns(), tuple(observer.held())))
        _calm()

    known = set(observer.first_seen)
    fleet.start(1)
    started = crews.wait_for(lambda: len(observer.first_seen) > len(known), patience, 0.005)
    crews.require(started, "the eleventh worker did not register")
    (newcomer,) = set(observer.first_seen) - known
    began = observer.first_seen[newcomer]
    note("join", began, lambda: fleet.shared_out(workers + 1))
    note("leave (SIGTERM)", fleet.drain(), lambda: fleet.shared_out(workers))
    alive = set(observer.held())
    began = fleet.kill_child()
    # Its parent process soon starts another, which is one more join: measure only the orphans.
    note("kill -9", began, lambda: _reowned(observer, alive, fleet.queues))
    crews.require(
        crews.wait_for(lambda: fleet.shared_out(workers), patience),
        f"after the restart workers own {observer.held()}",
    )
    _calm()
    return marks


def _reowned(observer: Observer, alive: set[str], queues: int) -> bool:
    """Return whether one of `alive` is gone and every queue has an owner again."""
    held = observer.held()
    return bool(alive - set(held)) and sum(held.values()) == queues


def _calm() -> None:
    threading.Event().wait(CALM_SECONDS)


def _complete(fleet: BenchFleet, rounds: int, queues: int) -> bool:
    return _missing(fleet.starts(), rounds, queues) == 0


def _missing(starts: Sequence[ProbeStart], rounds: int, queues: int) -> int:
    wanted = rounds * min(PROBES, queues)
    return wanted - len({(start.queue, start.number) for start in starts})


def _judge(
    mark: Mark, events: Sequence[OwnershipEvent], starts: Sequence[ProbeStart], missing: int
) -> Upheaval:
    window = [event for event in events if event.at_ns <= mark.ended_ns]
    effect = handover(window, mark.began_ns, mark.names)
    before = owners_at(window, mark.began_ns)
    after = owners_at(window, mark.ended_ns)
    moved = {queue for queue, owner in before.items() if after.get(queue) != owner}
    calm = int(CALM_SECONDS * 1e9)
    around = [s for s in starts if mark.began_ns <= s.sent_ns <= mark.ended_ns + calm // 3]
    # Messages sent before the change and started after it also waited for it.
    around += [s for s in starts if s.sent_ns < mark.began_ns <= s.at_ns]
    quiet = [s for s in starts if mark.began_ns - calm * 2 // 3 <= s.sent_ns < mark.began_ns]
    quiet = [s for s in quiet if s.at_ns < mark.began_ns]
    part = [s for s in starts if mark.began_ns <= s.at_ns <= mark.ended_ns + calm]
    repeated, disordered = _order(starts, part)
    return Upheaval(
        mark.cause,
        effect,
        max((s.waited for s in quiet), default=0.0),
        max((s.waited for s in _firsts(around) if s.queue not in moved), default=0.0),
        max((s.waited for s in _firsts(around) if s.queue in moved), default=0.0),
        repeated,
        missing,
        disordered,
    )


def _firsts(starts: Sequence[ProbeStart]) -> list[ProbeStart]:
    """Return the first start of each message."""
    seen: dict[Any, ProbeStart] = {}
    for start in sorted(starts, key=lambda start: start.at_ns):
        seen.setdefault((start.queue, start.number), start)
    return list(seen.values())


def _order(starts: Sequence[ProbeStart], part: Sequence[ProbeStart]) -> tuple[int, int]:
    """Return how many starts in `part` were repetitions, and how many were too early."""
    highest: dict[str, int] = {}
    repeated = disordered = 0
    inside = set(map(id, part))
    for start in starts:
        last = highest.get(start.queue, -1)
        if id(start) in inside:
            repeated += start.number <= last
            disordered += start.number > last + 1
        highest[start.queue] = max(last, start.number)
    return repeated, disordered
