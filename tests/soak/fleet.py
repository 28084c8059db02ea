"""The fleet of a soak, and what befalls it."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

from kazoo.exceptions import KazooException
from kazoo.handlers.threading import KazooTimeoutError

import qdo
from qdo.brokers.registry import open_broker
from qdo.coordination.bulk_reads import read_nodes
from qdo.coordination.znodes.worker_node import parse_leader
from qdo.errors import QdoError
from tests.soak.app import MOST_AT_ONCE, TIMEOUT_SECONDS
from tests.soak.broker_server import BrokerServer, RedisBroker, send_surely
from tests.soak.checks import Entry, Judged, check_log, read_journal
from tests.soak.shared import LAYOUT, SharedParts
from tests.support.paths import ROOT
from tests.support.processes import Proc, alive, children, descendants
from tests.support.zookeeper import Ensemble
from tests.support.zookeeper_txn_log import Txn, read_log

QUEUES = (
    *(f"plain-{number}" for number in range(12)),
    *(f"thread-{number}" for number in range(3)),
    *(f"key-{number}" for number in range(3)),
    *("block-0", "block-1"),
    *(f"limit-{number}" for number in range(6)),
    *(f"lock-{number}" for number in range(3)),
)
KINDS = (
    *(("quick", 0.0),) * 1200,
    *(("wait", 0.3),) * 160,
    *(("wait", 2.0),) * 20,
    *(("fail", 0.0),) * 20,
    ("die", 0.0),
)
"""Kinds of messages with their seconds, as often as they shall be sent."""
BLOCKS = 0.04, 0.003
"""Share of messages that block in the queues for such messages, and in others."""
ENDLESS = 0.003
"""Share of messages that block for ever, in the queues for such messages."""
PROCESSES = 3
"""Of each parent."""
AWHILE = 0.05
HEAL_SECONDS = 120.0
"""Once the faults are over, no such time may pass without a run before all is over. Processes that
died several times in a row are restarted after a pause of up to 30 s."""

AWAY = (KazooException, KazooTimeoutError, QdoError, OSError)


class SoakFleet:
    """Parents with their processes, on one coordinator and one broker.

    :param coordinator: "embedded", "zookeeper", "postgresql", or the address of a file.
    :param database: the server of the broker, None for a file.
    :param older: a checkout of another version; every second parent runs it.
    :ivar stopped: when which process was frozen: pid, begin and end on `time.monotonic`.
    :ivar unkept: the same for processes whose parent was frozen or killed, and kept no session.
    :ivar outages: when the coordinator did not respond: begin and end.
    :ivar sent: how many messages each queue got, and which of them never end.
    """

    app = "tests.soak.app:app"
    servers = 1
    """Of ZooKeeper."""
    fails_over = False
    """A standby that lacks the last commits takes over a coordinator in PostgreSQL."""

    def __init__(
        self,
        folder: Path,
        coordinator: str,
        seed: int,
        older: Path | None = None,
        database: BrokerServer | RedisBroker | None = None,
    ) -> None:
        self.folder = folder
        self._trees = itertools.cycle([older or ROOT, ROOT])
        self.random = random.Random(seed)
        self.stopped: list[tuple[int, float, float]] = []
        self.outages: list[tuple[float, float]] = []
        self.unkept: list[tuple[int, float, float]] = []
        self.sent: dict[str, int] = dict.fromkeys(QUEUES, 0)
        self.endless: set[tuple[str, int]] = set()
        self.journal = folder / "journal"
        self.faults: list[str] = []
        self._read = 0
        self._entries: list[Entry] = []
        file = f"sqlite:{folder / 'coordination.db'}"
        self._url = file if coordinator == "embedded" else coordinator
        self._database = database
        self._ensemble: Ensemble | None = None
        if coordinator == "zookeeper":
            self._ensemble = Ensemble(folder / "zookeeper", self.servers)
            self._ensemble.start()
            self._url = self._ensemble.url()
        self._coordination: BrokerServer | None = None
        if coordinator == "postgresql":
            shared = database if isinstance(database, BrokerServer) else None
            self._coordination = shared or BrokerServer()
            self._coordination.record()
            self._url, self.outages = self._coordination.url, self._coordination.outages
        self.environment = {
            "QDO_BROKER": database.url if database else f"sqlite:{folder / 'messages.db'}",
            "QDO_COORDINATOR": self._url,
            "SOAK_JOURNAL": str(self.journal),
            "PYTHONPATH": os.pathsep.join((str(ROOT), *(database.folders if database else ()))),
        }
        self._app = qdo.App("soak", broker=self.environment["QDO_BROKER"])
        self._most_at_once = MOST_AT_ONCE if older is None else len(QUEUES)
        self.shared = SharedParts(self._url, seed)
        self.died: list[tuple[int, float]] = []
        self.trees: list[tuple[int, float]] = []
        self.killed_leaders = 0
        self._parents: list[Proc] = []
        self.ended: list[Proc] = []

    # --- messages ---------------------------------------------------------------------

    def send(self) -> None:
        """Send one message to each queue."""
        batch: list[qdo.NewMessage] = []
        for queue in QUEUES:
            kind, seconds = self.random.choice(KINDS)
            number = self.sent[queue]
            dice, strict = self.random.random(), queue.startswith("block")
            if strict:
                seconds = min(seconds, 0.3)  # less than the time limit of their job
            if strict and dice < ENDLESS:
                kind = "endless"
                self.endless.add((queue, number))
            elif dice < BLOCKS[0 if strict else 1] and not queue.startswith("thread"):
                kind = "block"
                seconds = TIMEOUT_SECONDS * self.random.uniform(0.3, 0.9 if strict else 1.5)
            self.sent[queue] = number + 1
            body = {"n": number, "kind": kind, "seconds": seconds}
            key, once = f"k{number % 3}", str(number)
            batch.append(qdo.NewMessage(queue, body, key=key, dedup_key=once))
        send_surely(self._app, batch)

    # --- workers ----------------------------------------------------------------------

    def start_parent(self) -> None:
        """Start a parent with its processes."""
        options = (self.app, "--processes", str(PROCESSES))
        tree = next(self._trees)
        path = self.environment["PYTHONPATH"].replace(str(ROOT), str(tree), 1)
        environment = {**self.environment, "PYTHONPATH": path}
        proc = Proc.python("-m", "qdo.cli.worker", *options, env=environment, cwd=tree)
        self._parents.append(proc)

    def _parent(self) -> Proc:
        return self.random.choice(self._parents)

    def _child(self) -> int | None:
        found = children(self._parent().pid)
        return self.random.choice(found) if found else None

    def _signal(self, pid: int, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)

    def _freeze(self, pids: list[int], seconds: float) -> None:
        began = time.monotonic()
        orphans = [each for pid in pids for each in children(pid)]
        for pid in pids:
            self._signal(pid, signal.SIGSTOP)

        def thaw() -> None:
            for pid in pids:
                self._signal(pid, signal.SIGCONT)
                self.stopped.append((pid, began, time.monotonic()))
            self.unkept += [(pid, began, time.monotonic()) for pid in orphans]

        threading.Timer(seconds, thaw).start()

    # --- faults -----------------------------------------------------------------------

    def befall(self) -> None:
        """Let one thing go wrong."""
        fault = self.random.choice(self._faults())
        self.faults.append(fault.__name__.strip("_"))
        fault()

    def _faults(self) -> list[Callable[[], None]]:
        usual: list[Callable[[], None]] = [
            *(self._kill_child,) * 4,
            *(self._freeze_child,) * 4,
            *(self._drain_child, self._restart_parent, self._replace_parent),
            *(self._kill_parent, self._freeze_parent, self._freeze_family),
        ]
        if self._ensemble is not None:
            usual += [self._freeze_server] * 2
        if self._database is not None:
            usual += self._database.faults(self.random)
        if self._coordination is not None and self._coordination is not self._database:
            usual += self._coordination.faults(self.random)
            usual += [self._coordination.fail_over] * self.fails_over
        return usual

    def _kill_child(self) -> None:
        pid = self._child()
        if pid is not None:
            self.died.append((pid, time.monotonic()))
            self._signal(pid, signal.SIGKILL)

    def _kill_container(self) -> None:
        """Kill a parent with all its processes at once: none sees another one die."""
        proc = self._parent()
        family, now = [proc.pid, *descendants(proc.pid)], time.monotonic()
        self.trees += [(pid, now) for pid in family]
        for pid in family:
            self._signal(pid, signal.SIGSTOP)
        proc.kill()
        self._leave(proc)

    def _kill_leading_worker(self) -> None:
        """Kill the worker that leads the others."""
        client, folder = self.shared.client, f"{LAYOUT.components}/worker"
        with contextlib.suppress(*AWAY):  # the coordinator, or no worker leads yet
            name, _ = parse_leader(client.get(LAYOUT.rebalancer)[0])
            for node in read_nodes(client, [f"{folder}/{x}" for x in client.get_children(folder)]):
                value = json.loads(node.data or b"{}")
                if name and value.get("worker") == name:
                    self.killed_leaders += 1
                    self.died.append((value["pid"], time.monotonic()))
                    self._signal(value["pid"], signal.SIGKILL)

    def _drain_child(self) -> None:
        pid = self._child()
        if pid is not None:
            self._signal(pid, signal.SIGTERM)

    def _freeze_child(self) -> None:
        pid = self._child()
        if pid is not None:
            self._freeze([pid], TIMEOUT_SECONDS * self.random.choice((0.3, 0.8, 1.3, 2.5)))

    def _freeze_parent(self) -> None:
        self._freeze([self._parent().pid], TIMEOUT_SECONDS * self.random.uniform(0.2, 2.0))

    def _freeze_family(self) -> None:
        parent = self._parent().pid
        self._freeze([parent, *children(parent)], TIMEOUT_SECONDS * self.random.uniform(0.2, 2.0))

    def _kill_parent(self) -> None:
        """Its children drain by themselves."""
        proc = self._parent()
        now = time.monotonic()
        self.unkept += [(pid, now, float("inf")) for pid in children(proc.pid)]
        self._signal(proc.pid, signal.SIGKILL)
        self._leave(proc)

    def _restart_parent(self) -> None:
        proc = self._parent()
        proc.send(signal.SIGTERM)
        self._leave(proc)

    def _replace_parent(self) -> None:
        """Start the new one first, as a rolling deployment does."""
        proc = self._parent()
        self.start_parent()
        proc.send(signal.SIGTERM)
        self._parents.remove(proc)
        self.ended.append(proc)

    def _leave(self, proc: Proc) -> None:
        self._parents.remove(proc)
        self.ended.append(proc)
        self.start_parent()

    def restart_ended(self) -> None:
        """Start the parents that could not start, because of an outage, as systemd does."""
        for proc in [each for each in self._parents if each.ended]:
            self._leave(proc)

    def _freeze_server(self) -> None:
        """Freeze ZooKeeper's only server."""
        if self._ensemble is None:
            return
        server = self._ensemble.servers[0]
        began = time.monotonic()
        server.stop()

        def thaw() -> None:
            server.cont()
            self.outages.append((began, time.monotonic()))

        threading.Timer(TIMEOUT_SECONDS * self.random.choice((0.2, 0.6, 1.5)), thaw).start()

    def suffer(self, goes_on: Callable[[], bool], pause_seconds: float) -> None:
        """Let things go wrong while `goes_on`, with pauses of that mean."""
        fault_at = time.monotonic() + 5.0
        while goes_on():
            if time.monotonic() >= fault_at:
                self.befall()
                fault_at = time.monotonic() + pause_seconds * self.random.uniform(0.5, 1.5)
            self.restart_ended()
            time.sleep(AWHILE)

    def heal(self, is_over: Callable[[], bool]) -> None:
        """Wait until all is over, as long as the journal grows."""
        lines, limit = 0, time.monotonic() + HEAL_SECONDS
        while not is_over() and time.monotonic() < limit:
            self.restart_ended()
            if lines != len(self.entries()):  # a backlog may take longer, but must become smaller
                lines, limit = len(self.entries()), time.monotonic() + HEAL_SECONDS
            time.sleep(10 * AWHILE)

    # --- the end ----------------------------------------------------------------------

    def entries(self) -> list[Entry]:
        """Return the journal; each call reads only what was added since the call before."""
        if self.journal.exists():
            with self.journal.open("rb") as file:
                file.seek(self._read)
                added = file.read()
            added = added[: added.rfind(b"\n") + 1]
            self._read += len(added)
            self._entries += read_journal(added.decode())
        return self._entries

    def facts(self) -> Judged:
        """Return the facts beside the journal."""
        return Judged(
            self.sent,
            self.endless,
            self._dead_letters(),
            self.stopped,
            self.unkept,
            self.outages,
            self.shared.sections,
            self._most_at_once,
            [*self.died, *self._died_by_themselves()],
        )

    def _died_by_themselves(self) -> Iterator[tuple[int, float]]:
        """Return the processes that died in the middle of a run, and when it began."""
        begun: dict[tuple[int, str, int], float] = {}
        for each in self.entries():
            run = each.pid, each.queue, each.number
            if each.kind == "S":
                begun[run] = each.at
            elif each.kind in "EX":
                begun.pop(run, None)
        for (pid, _, _), at in begun.items():
            if not alive(pid):
                yield pid, at

    def _dead_letters(self) -> set[tuple[str, int]]:
        """Return queue and number of every dead letter."""
        broker = open_broker(self.environment["QDO_BROKER"], "soak")
        try:
            return {
                (queue, json.loads(each.body)["n"])
                for queue in QUEUES
                for each in broker.dead_letters.records(queue)
            }
        finally:
            broker.close()

    def transactions(self) -> Iterator[Txn]:
        """Return the servers' own record of all transactions; nothing with a file."""
        if self._ensemble is not None:
            yield from read_log(self._ensemble.servers[0].folder / "data")
        if self._coordination is not None:
            yield from self._coordination.transactions()

    def outputs(self) -> Iterator[tuple[int, str]]:
        """Return pid and output of every parent."""
        for proc in (*self.ended, *self._parents):
            yield proc.pid, proc.output

    def logged(self) -> list[str]:
        """Return the violations in what parents have logged."""
        return [line for _, output in self.outputs() for line in check_log(output)]

    def report(self, found: list[str], *lines: object) -> None:
        """Print lines about the round, its faults, and the first violations."""
        rules = Counter(each.partition(":")[0] for each in found)
        faults = f"{len(self.faults)} faults {dict(Counter(self.faults))}"
        violations = f"{len(found)} violations {dict(rules)}"
        print(*lines, faults, violations, *found[:20], sep="\n  ", flush=True)

    def pids(self) -> list[int]:
        """Return the processes of all parents that run, and the parents."""
        parents = [proc.pid for proc in self._parents]
        return [*parents, *(pid for each in parents for pid in children(each))]

    def _orphans(self) -> Iterator[int]:
        """Return the processes of this soak, whose parents may be dead."""
        mark = f"SOAK_JOURNAL={self.journal}".encode()
        for folder in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                if folder.name.isdigit() and mark in (folder / "environ").read_bytes().split(b"\0"):
                    yield int(folder.name)

    def end_workers(self) -> None:
        """End all workers, and wait for it."""
        for proc in self._parents:
            proc.send(signal.SIGTERM)
        limit = time.monotonic() + 30
        while time.monotonic() < limit and any(alive(proc.pid) for proc in self._parents):
            time.sleep(0.05)
        for proc in (*self._parents, *self.ended):
            proc.__exit__(None, None, None)
        for pid in self._orphans():
            self._signal(pid, signal.SIGKILL)

    def close(self) -> None:
        """End everything, and wait for it."""
        self.shared.end()
        self.end_workers()
        self.shared.close()
        self._app.close()
        if self._ensemble is not None:
            self._ensemble.close()
        if self._coordination is not None and self._coordination is not self._database:
            self._coordination.close()
