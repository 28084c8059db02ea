"""Soak requests: ``python -m tests.soak --app requests --broker embedded --coordinator zookeeper``.

Two parents with three workers each run what asker processes ask for, while every 1 to 3 seconds
something goes wrong. The rules are those of `request_rules`.
"""

from __future__ import annotations

import argparse
import itertools
import json
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from qdo.brokers.registry import open_broker
from qdo.brokers.requests import OVER, PAUSED, RequestRecord
from qdo.coordination.client import connect
from qdo.coordination.znodes.layout import Layout
from qdo.errors import QdoError
from tests.soak.app import TIMEOUT_SECONDS
from tests.soak.broker_server import BrokerServer
from tests.soak.checks import Judged
from tests.soak.fleet import SoakFleet
from tests.soak.request_app import QUEUES
from tests.soak.request_askers import read_asked
from tests.soak.request_rules import RequestFacts, check_requests, recoveries, spread, waits
from tests.soak.request_steps import read_steps, record_steps
from tests.support.processes import Proc

PARENTS = 2
ASKERS = 3
EXPIRY_SECONDS = 45.0
"""The leader deletes expired requests every 30 s."""
END_SECONDS = 30.0
QUIET_SECONDS = TIMEOUT_SECONDS * 3
"""After a fault, places may be missing for so long."""


class RequestFleet(SoakFleet):
    """A fleet of workers and askers."""

    app = "tests.soak.request_app:app"
    name = "soak"
    servers = 3

    def __init__(
        self, folder: Path, coordinator: str, seed: int, database: BrokerServer | None
    ) -> None:
        super().__init__(folder, coordinator, seed, database=database)
        self.journal.touch()
        self.broker = open_broker(self.environment["QDO_BROKER"], self.name)
        record_steps(self.environment["QDO_BROKER"])
        self.fault_times: list[float] = []
        self._askers: list[Proc] = []
        self._ledgers: list[tuple[Path, int]] = []
        self._seeds = itertools.count(1000 * seed)
        self._repair = threading.Thread()

    # --- askers -----------------------------------------------------------------------

    def start_asker(self, count: int) -> None:
        """Start a process that asks for so many requests."""
        seed = next(self._seeds)
        ledger = self.folder / f"asked-{seed}"
        arguments = ("-m", "tests.soak.request_askers", str(seed), str(count), str(ledger))
        self._askers.append(Proc.python(*arguments, env=self.environment))
        self._ledgers.append((ledger, count))

    def asked(self) -> list[tuple[str, list[str]]]:
        """Return the lines of all ledgers."""
        return list(read_asked(path for path, _ in self._ledgers))

    def asking(self) -> bool:
        """Return whether askers have more to ask for."""
        return any(not each.ended for each in self._askers)

    def _kill_asker(self) -> None:
        """Another one asks for the rest."""
        running = [index for index, each in enumerate(self._askers) if not each.ended]
        if running:
            index = self.random.choice(running)
            self._askers[index].kill()
            ledger, count = self._ledgers[index]
            asked = sum(len(ids) for word, ids in read_asked([ledger]) if word == "asked")
            if asked < count:
                self.start_asker(count - asked)

    def failed_askers(self) -> list[str]:
        """Return the output of askers that ended by themselves, with an error."""
        return [f"asker: {each.output[-2000:]}" for each in self._askers if each.wait() > 0]

    # --- faults -----------------------------------------------------------------------

    def _faults(self) -> list[Callable[[], None]]:
        more = [self._kill_asker, self._kill_container, self._kill_container]
        if self._ensemble is not None:
            more += [self._kill_leader] * 2
        return [*super()._faults(), *more]

    def befall(self) -> None:
        self.fault_times.append(time.time())
        super().befall()
        self.resume_paused()

    def _kill_leader(self) -> None:
        """Kill ZooKeeper's leader, and start it again after a while."""
        if self._ensemble is None or self._repair.is_alive():
            return
        server, began = self._ensemble.leader(), time.monotonic()
        server.kill()
        seconds = TIMEOUT_SECONDS * self.random.choice((0.0, 1.0, 3.0))

        def repair() -> None:
            time.sleep(seconds)
            server.restart()
            self.outages.append((began, time.monotonic()))

        self._repair = threading.Thread(target=repair)
        self._repair.start()

    # --- the end ----------------------------------------------------------------------

    def resume_paused(self) -> None:
        """Resume what is paused: it takes the places of others."""
        with suppress(QdoError):
            for each in self.broker.requests.records(states=[PAUSED]):
                self._app.handle(each.id).resume()

    def is_over(self) -> bool:
        """Resume what is paused; return whether all are over, and their queues empty."""
        self.resume_paused()
        with suppress(QdoError):
            if not self.broker.requests.counts():
                journal = self.entries()
                told = {each.queue.rpartition("|")[0] for each in journal if each.kind == "D"}
                return told.issuperset(f"{queue}|{id}" for queue, id in self._last_told())
        return False

    def _last_told(self) -> Iterator[tuple[str, str]]:
        for queue, told in self.told().items():
            yield queue, told[-1][0]

    def told(self) -> dict[str, list[tuple[str, str]]]:
        """Return request and outcome of each message, by queue."""
        found: dict[str, list[tuple[str, str]]] = {}
        for queue in {*QUEUES} & {*self.broker.catalog.names()}:
            reader = self.broker.reader(queue, 0)
            while rows := reader.fetch(1000):
                bodies = [json.loads(each[1]) for each in rows]
                told = [(each["request"], each["outcome"]) for each in bodies]
                found.setdefault(queue, []).extend(told)
        return found

    def request_facts(self) -> RequestFacts:
        """Return the facts, once all is over."""
        judged = Judged({}, stopped=self.stopped, unkept=self.unkept, outages=self.outages)
        records = [self.broker.requests.find(each.id) for each in self._over()]
        return RequestFacts(
            self.asked(),
            read_steps(self.environment["QDO_BROKER"]),
            [each for each in records if each is not None],
            self.entries(),
            self.told(),
            judged,
            time.time() - time.monotonic(),
            self._database is None,
        )

    def _over(self) -> list[RequestRecord]:
        return self.broker.requests.records(states=[OVER], limit=10_000_000)

    def left_behind(self) -> Iterator[str]:
        """End all workers gracefully; return what they leave."""
        now, limit = time.time(), time.monotonic() + EXPIRY_SECONDS
        while (old := [each for each in self._over() if each.until < now]) and (
            time.monotonic() < limit
        ):
            time.sleep(0.5)
        yield from (f"left: {each.take} was to expire" for each in old[:3])
        yield from (f"left: {each} owns requests" for each in self.broker.requests.owners())
        for proc in self._parents:
            proc.send(signal.SIGTERM)
        limit = time.monotonic() + END_SECONDS
        while (pids := [*self._orphans()]) and time.monotonic() < limit:
            time.sleep(0.1)
        yield from (f"left: process {each}" for each in pids)
        yield from (f"left: node of {each}" for each in self._nodes())

    def _nodes(self) -> list[str]:
        """Return the nodes of workers, once those of killed ones had time to expire."""
        client = connect(self.environment["QDO_COORDINATOR"], handler="threading")
        client.open(10.0)
        limit = time.monotonic() + END_SECONDS
        while (names := client.get_children(Layout.of(self.name).workers)) and time.monotonic() < (
            limit
        ):
            time.sleep(0.1)
        client.stop()
        client.close()
        return [*names]

    def close(self) -> None:
        for asker in self._askers:
            asker.__exit__(None, None, None)
        if self._repair.is_alive():
            self._repair.join()
        super().close()
        self.broker.close()


def play(fleet: RequestFleet, arguments: argparse.Namespace) -> list[str]:
    """Play one round; return the violations."""
    count = arguments.requests
    fleet.fault_times.append(time.time())  # places are missing until the workers have started
    for _ in range(PARENTS):
        fleet.start_parent()
    for number in range(ASKERS):
        fleet.start_asker(count // ASKERS + (number < count % ASKERS))
    fleet.suffer(fleet.asking, arguments.pause)
    found = fleet.failed_askers()
    fleet.heal(fleet.is_over)
    facts = fleet.request_facts()
    found += [*check_requests(facts), *fleet.left_behind()]
    found += fleet.logged()
    runs = sum(each.kind == "S" for each in facts.journal)
    outcomes = Counter(each.outcome for each in facts.steps if each.state == OVER)
    asked = sum(len(ids) for word, ids in facts.asked if word == "asked")
    seconds = facts.steps[-1].at - facts.steps[0].at
    fleet.report(
        found,
        f"{asked} asked, {dict(outcomes)}, {runs} runs, {sum(map(len, facts.told.values()))}"
        f" messages in {seconds:.0f} s",
        f"waits with a place: {spread(waits(facts.steps, fleet.fault_times, QUIET_SECONDS))}",
        f"killed, parent alive, to given back: {spread(recoveries(facts, fleet.died))}",
        f"killed with its parent: {spread(recoveries(facts, fleet.trees))}",
    )
    return found
