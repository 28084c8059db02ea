"""Soak the example `ci` of the documentation: ``python -m tests.soak.ci_fleet --seconds 300``.

Signed webhooks for many projects go to two receivers behind proxies that cut. Two parents with four
workers each decide and build, while something goes wrong every 3 seconds. The rules are those of
`ci_rules`. And at the end no request waits, no shard is hidden, no node and no process is left, no
process has grown, and each queue had one owner at every zxid.
"""

from __future__ import annotations

import argparse
import itertools
import json
import logging
import random
import signal
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import Any

from sqlalchemy import create_engine

import qdo
from qdo.brokers.streams import merge, split
from qdo.errors import QdoError
from qdo.message import Message
from qdo.ops.streams import reshard
from qdo.state import KeyedState
from tests.soak.app import TIMEOUT_SECONDS
from tests.soak.broker_server import REPEAT_SECONDS, BrokerServer, send_surely
from tests.soak.checks import Judged, check_log
from tests.soak.ci_rules import CiFacts, check_ci, check_owners, told
from tests.soak.growth import Growth
from tests.soak.request_fleet import HEAL_SECONDS, RequestFleet
from tests.soak.request_steps import read_steps
from tests.support.cli import QDO
from tests.support.postgresql.proxy import CuttingProxy
from tests.support.processes import Proc
from tests.support.webhook_sender import SECRET, post, signed
from tests.support.zookeeper import free_ports
from tests.support.zookeeper_txn_log import read_log

PROJECTS, SENDERS, RECEIVERS, PARENTS, PROCESSES = 300, 4, 2, 2, 4
FAULT_SECONDS = 3.0
LAYOUTS = {"gate": ["push"]}, {"gate": ["push"], "docs": ["push"]}
COMMAND = """
n=$(od -An -N2 -tu2 /dev/urandom); sleep $((n % 2)).$((n / 2 % 10)); code=$((n % 7 == 0))
echo "$CI_ID $CI_TAKE $code" >> "$SOAK_BUILDS"; exit $code
"""
"""A build of 0 to 2 seconds, some of which fail; it writes to a ledger of its own."""


class CiFleet(RequestFleet):
    """Receivers, workers and senders of webhooks.

    :ivar accepted: commits that were answered with 202, in their order, by project.
    :ivar counts: of deliveries and their answers.
    """

    app = "tests.acceptance.ci_app:app"
    name = "ci"

    def __init__(self, folder: Path, seed: int, database: BrokerServer | None) -> None:
        url = "zookeeper" if database else f"sqlite:{folder / 'coordination.db'}"
        super().__init__(folder, url, seed, database)
        self.accepted: dict[str, list[str]] = defaultdict(list)
        self.counts: Counter[str] = Counter()
        self.builds = folder / "builds"
        broker, sql = self.environment["QDO_BROKER"], f"sqlite:///{folder}/ci.db?timeout=60"
        if database is not None:
            sql = broker.replace("postgresql:", "postgresql+psycopg:", 1)
        checkouts = folder / "checkouts"
        for number in range(PROJECTS):
            (checkouts / self._project(number)).mkdir(parents=True)
        ci = {"CI_DATABASE": sql, "CI_CHECKOUTS": str(checkouts), "CI_COMMAND": COMMAND}
        self.environment |= {**ci, "CI_SECRET": SECRET, "SOAK_BUILDS": str(self.builds)}
        times = {"SESSION_TIMEOUT": str(TIMEOUT_SECONDS), "CHECKPOINT": "0.1", "BACKOFF": "0.1"}
        times |= {"BACKOFF_MAX": "1", "CONNECT": "5"}
        self.environment |= {f"QDO_{name}_SECONDS": each for name, each in times.items()}
        self.own = qdo.App("ci", broker=broker, coordinator=self._url)
        self.own.documents("tenants").put("pipelines", LAYOUTS[0])
        self._ports = free_ports(RECEIVERS)
        self._proxies = [CuttingProxy(port) for port in self._ports]
        self._receivers = [self._receiver(port) for port in self._ports]
        self.commands: list[Proc] = []
        self._deck: list[Callable[[], None]] = []
        self._threads: list[threading.Thread] = []

    @staticmethod
    def _project(number: int) -> str:
        return f"acme/p{number}"

    def start_parent(self) -> None:
        argv = ("-m", "qdo.cli.worker", self.app, "--processes", str(PROCESSES))
        self._parents.append(Proc.python(*argv, env=self.environment))

    def _receiver(self, port: int) -> Proc:
        argv = (*QDO, "ingest", "--app", self.app, "--listen", f"127.0.0.1:{port}")
        return Proc.python(*argv, env=self.environment)

    def restart_ended(self) -> None:
        super().restart_ended()
        for index, each in enumerate(self._receivers):
            if each.ended:
                self.ended.append(each)
                self._receivers[index] = self._receiver(self._ports[index])

    # --- webhooks ---------------------------------------------------------------------

    def begin(self, webhooks: int, seconds: float) -> None:
        """Start to deliver so many webhooks within so many seconds."""
        share = webhooks // SENDERS
        for sender in range(SENDERS):
            given = (sender, share, seconds / share)
            self._start(self._deliver, *given)

    def _start(self, call: Callable[..., None], *given: Any) -> None:
        thread = threading.Thread(target=call, args=given)
        thread.start()
        self._threads.append(thread)

    def _deliver(self, sender: int, count: int, pause_seconds: float) -> None:
        """Deliver webhooks of some projects, each after the one before; a sixth of them twice."""
        dice, began = random.Random(f"{sender} {self.random.random()}"), time.monotonic()
        for number in range(count):
            time.sleep(max(0.0, began + number * pause_seconds - time.monotonic()))
            project = self._project(dice.randrange(sender, PROJECTS, SENDERS))
            commit = f"{sender}-{number}"
            body = json.dumps({"repository": {"full_name": project}, "after": commit}).encode()
            for again in range(1 + (dice.random() < 1 / 6)):
                self.counts["repeated"] += again
                headers = {**signed("github", body, commit), "x-github-event": "push"}
                while (status := self._post(dice, body, headers)) != 202:
                    self.counts[f"answered {status}"] += 1
                    time.sleep(REPEAT_SECONDS)
            self.accepted[project].append(commit)

    def _post(self, dice: random.Random, body: bytes, headers: dict[str, str]) -> int:
        return post(dice.choice(self._proxies).port, "/github", body, headers)

    def delivering(self) -> bool:
        return any(each.is_alive() for each in self._threads)

    # --- faults -----------------------------------------------------------------------

    def _faults(self) -> list[Callable[[], None]]:
        if not self._deck:
            self._deck = [self._kill_child, self._kill_tree, self._kill_parent, self._freeze_child]
            self._deck += [self._freeze_family, self._kill_receiver, self._cut_webhooks]
            self._deck += [self._split, self._merge, self._change_settings, self._reconfigure]
            self._deck += [self._split, self._merge, self._kill_child, self._reconfigure]
            if self._ensemble is not None:
                self._deck += [self._kill_leader, self._kill_leader]
            if self._database is not None:
                self._deck += self._database.faults(self.random)
            self.random.shuffle(self._deck)
        return [self._deck.pop()]

    def _kill_receiver(self) -> None:
        self.random.choice(self._receivers).kill()

    def _cut_webhooks(self) -> None:
        proxy = self.random.choice(self._proxies)
        proxy.cut_all()
        proxy.cut_after("answer", self.random.randrange(100))

    def _split(self) -> None:
        with suppress(QdoError):  # the database is away
            shards = self.broker.streams.shards("project")
            shard = self.random.choice([each for each in shards if each.end is None])
            reshard(self.broker, split(shards, shard.queue))
            self.counts["splits"] += 1

    def _merge(self) -> None:
        with suppress(QdoError):
            shards = self.broker.streams.shards("project")
            found = sorted((each.low, each.queue) for each in shards if each.end is None)
            pairs = [*itertools.pairwise(name for _, name in found)]
            reshard(self.broker, merge(shards, *self.random.choice(pairs)))
            self.counts["merges"] += 1

    def _change_settings(self) -> None:
        change = ("fetch", str(self.random.randint(10, 2000)), "--reason", "soak")
        argv = (*QDO, "settings", "set", "--app", "ci", *change)
        self.commands.append(Proc.python(*argv, env=self.environment))

    def _reconfigure(self) -> None:
        once = str(self.random.random())
        message = qdo.NewMessage("manage", self.random.choice(LAYOUTS), dedup_key=once)
        self._start(send_surely, self.own, [message])

    # --- the end ----------------------------------------------------------------------

    def stored(self, queue: str) -> list[Message]:
        """Return the messages of a queue."""
        reader, found = self.broker.reader(queue, 0), list[Message]()
        while rows := reader.fetch(1000):
            for position, body, key, _ in rows:
                found.append(Message(queue, position, json.loads(body), key))
        return found

    def wishes(self) -> list[Message]:
        """Return the messages of all shards, in the order in which they were stored."""
        shards = [each.queue for each in self.broker.streams.shards("project")]
        return sorted(itertools.chain(*map(self.stored, shards)), key=lambda each: each.position)

    def is_over(self) -> bool:
        with suppress(QdoError):
            idle = not self.broker.requests.counts()
            if idle and not any(each.hidden for each in self.broker.streams.shards()):
                names = {*self.broker.catalog.names()} - {"tick"}
                done = {each.number for each in self.entries() if each.kind == "E"}
                stored = itertools.chain(*map(self.stored, names))
                return all(each.position in done for each in stored)
        return False

    def ci_facts(self) -> CiFacts:
        """Return the facts, once all is over."""
        stored = {name: self.stored(name) for name in ("github", "reports", "tick")}
        wishes, states = self.wishes(), {}
        engine = create_engine(self.environment["CI_DATABASE"])
        with engine.connect() as connection:
            for name in {each.key or "" for each in wishes}:
                states[name] = KeyedState().read(connection, "project", name)
        engine.dispose()
        codes = [each.split() for each in self.builds.read_text().splitlines()]
        return CiFacts(
            self.accepted,
            {**stored, "project": wishes},
            states,
            read_steps(self.environment["QDO_BROKER"]),
            {(id, int(take)): int(code) for id, take, code in codes},
            self.entries(),
            Judged({}, stopped=self.stopped, unkept=self.unkept, outages=self.outages),
            time.time() - time.monotonic(),
        )

    def check_owners(self) -> list[str]:
        """Return violations of the rule of one owner, at every zxid."""
        servers = self._ensemble.servers if self._ensemble is not None else []
        logs = [[*read_log(each.folder / "data")] for each in servers]
        return check_owners(max(logs, key=len), self.name) if logs else []

    def left_behind(self) -> Iterator[str]:
        for each in self._receivers:
            each.send(signal.SIGTERM)
        self.own.close()
        yield from super().left_behind()

    def close(self) -> None:
        for thread in self._threads:
            thread.join()
        for each in (*self._receivers, *self.commands):
            each.__exit__(None, None, None)
        for proxy in self._proxies:
            proxy.close()
        self.own.close()
        super().close()


def play(fleet: CiFleet, webhooks: int, seconds: float) -> list[str]:
    """Play one round; return the violations."""
    growth = Growth()
    for _ in range(PARENTS):
        fleet.start_parent()
    fleet.begin(webhooks, seconds)
    fault_at = time.monotonic() + 3 * FAULT_SECONDS
    while fleet.delivering():
        if time.monotonic() >= fault_at:
            fleet.befall()
            fault_at = time.monotonic() + FAULT_SECONDS
        _look(fleet, growth)
    lines, limit, calm = 0, time.monotonic() + HEAL_SECONDS, 0
    while calm < 2 and time.monotonic() < limit:
        _look(fleet, growth)
        calm = calm + 1 if fleet.is_over() else 0
        if lines != len(fleet.entries()):
            lines, limit = len(fleet.entries()), time.monotonic() + HEAL_SECONDS
        time.sleep(0.5)
    found = [] if calm else ["left: not all is over"]
    facts = fleet.ci_facts()
    found += [*check_ci(facts), *fleet.left_behind(), *growth.violations()]
    found += fleet.check_owners()
    for _, output in fleet.outputs():
        found += check_log(output)
    refused = sum(each.wait() != 0 for each in fleet.commands)
    fleet.counts.update(settings=len(fleet.commands), refused=refused)
    print(told(facts), dict(fleet.counts), f"{len(fleet.faults)} faults", Counter(fleet.faults))
    print(f"{growth.summary()}: {len(found)} violations", *found[:20], sep="\n  ", flush=True)
    return found


def _look(fleet: CiFleet, growth: Growth) -> None:
    fleet.restart_ended()
    if growth.due():
        growth.sample(fleet.pids(), None)
    time.sleep(0.05)


def main() -> int:
    """Play the round that the command line asks for."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak.ci_fleet")
    parser.add_argument("--kind", choices=("embedded", "postgresql"), default="embedded")
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--webhooks", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--keep", type=Path, help="folder for the files")
    arguments = parser.parse_args()
    logging.getLogger().addHandler(logging.NullHandler())  # kazoo logs each outage
    with ExitStack() as stack:
        folder = arguments.keep or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folder.mkdir(parents=True, exist_ok=True)
        is_file = arguments.kind == "embedded"
        database = None if is_file else stack.enter_context(closing(BrokerServer()))
        fleet = stack.enter_context(closing(CiFleet(folder.absolute(), arguments.seed, database)))
        found = play(fleet, arguments.webhooks, arguments.seconds)
        for pid, text in fleet.outputs():
            (folder / f"process-{pid}.log").write_text(text)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
