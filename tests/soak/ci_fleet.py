"""Soak the example `ci` of the documentation: ``python -m tests.soak --app ci --seconds 300``.

Signed webhooks for many projects go to two receivers behind proxies that cut. Two parents with four
workers each decide and build, while something goes wrong every 3 seconds. Two slow operators answer
the questions of approvals. The rules are those of `ci_rules`. And at the end no request waits, no
shard is hidden, no message is in the outbox, no node and no process is left, no process has grown,
and each queue had one owner at every zxid.
"""

from __future__ import annotations

import itertools
import json
import random
import signal
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from sqlalchemy import create_engine, func, select
from sqlalchemy.exc import SQLAlchemyError

import qdo
from qdo.brokers.requests import PAUSED, RequestRecord
from qdo.brokers.streams import StreamShard, merge, split
from qdo.errors import QdoError, RequestStateError
from qdo.ops.streams import reshard
from qdo.outbox import Outbox
from qdo.requests.calls import Handle
from tests.soak import ci_rules
from tests.soak.app import TIMEOUT_SECONDS
from tests.soak.broker_server import REPEAT_SECONDS, BrokerServer, send_surely
from tests.soak.checks import Judged
from tests.soak.growth import Growth
from tests.soak.request_fleet import END_SECONDS, RequestFleet
from tests.soak.request_steps import read_steps
from tests.support.cli import QDO, WORKER
from tests.support.paths import ROOT
from tests.support.postgresql.proxy import CuttingProxy
from tests.support.processes import Proc, alive
from tests.support.webhook_sender import SECRET, post, signed
from tests.support.zookeeper import free_ports
from tests.support.zookeeper_txn_log import read_log

PROJECTS, SENDERS, RECEIVERS, PARENTS, PROCESSES = 300, 4, 2, 2, 4
OPERATORS, HESITATIONS = 2, (*(0.0,) * 9, 0.5)
PROJECT = "acme/p{}"
WEBHOOKS_A_SECOND = 3.5
FAULT_SECONDS = 3.0
LAYOUTS = {"gate": ["push"]}, {"gate": ["push"], "docs": ["push"]}
COMMAND = """
n=$(od -An -N2 -tu2 /dev/urandom); sleep $((n % 2)).$((n / 2 % 10)); code=$((n % 7 == 0))
echo "$(cat {0}.$PPID) $code" >> {0}; exit $code
"""
"""A build of 0 to 2 seconds, some of which fail; it writes to a ledger of its own."""
ENDED = "CREATE TABLE ended (place {} PRIMARY KEY, project TEXT, number INT)"
"""The rows that `ci_app` writes beside messages of its outbox."""


class SlowHandle(Handle):
    """A handle whose `resume` acts on an earlier look at the request."""

    def __init__(self, app: qdo.App, looked: RequestRecord) -> None:
        super().__init__(app, looked.id)
        self._looked = looked

    def _record(self) -> RequestRecord:
        return self._looked


class CiFleet(RequestFleet):
    """Receivers, workers, operators and senders of webhooks.

    :ivar accepted: commits that were answered with 202, in their order, by project.
    :ivar counts: of deliveries and their answers.
    """

    app = "tests.acceptance.ci_app:app"
    name = "ci"

    def __init__(
        self, folder: Path, coordinator: str, seed: int, database: BrokerServer | None
    ) -> None:
        super().__init__(folder, coordinator, seed, database)
        self.accepted: dict[str, list[str]] = defaultdict(list)
        self.counts: Counter[str] = Counter()
        self.builds = folder / "builds"
        broker, sql = self.environment["QDO_BROKER"], f"sqlite:///{folder}/ci.db?timeout=60"
        if database is not None:
            sql = broker.replace("postgresql:", "postgresql+psycopg:", 1)
        checkouts = folder / "checkouts"
        for number in range(PROJECTS):
            (checkouts / PROJECT.format(number)).mkdir(parents=True)
        values = {"CI_DATABASE": sql, "CI_CHECKOUTS": checkouts, "CI_SECRET": SECRET}
        values |= {"CI_COMMAND": COMMAND.format(self.builds), "SOAK_BUILDS": self.builds}
        values |= {"QDO_SESSION_TIMEOUT_SECONDS": TIMEOUT_SECONDS, "QDO_CHECKPOINT_SECONDS": 0.1}
        values |= {"QDO_BACKOFF_SECONDS": 0.1, "QDO_BACKOFF_MAX_SECONDS": 1}
        self.environment |= {name: str(each) for name, each in values.items()}
        self.own = qdo.App("ci", broker=broker, coordinator=self._url)
        self.engine = create_engine(sql, pool_pre_ping=True)
        self.outbox = Outbox(self.own, self.engine)
        self._ports = free_ports(RECEIVERS)
        self._proxies = [CuttingProxy(port) for port in self._ports]
        self._receivers: list[Proc] = []
        self._deck: list[Callable[[], None]] = []
        self.commands: list[Proc] = []
        self._threads: list[threading.Thread] = []
        self._ending = threading.Event()

    def start_parent(self) -> None:
        options = (self.app, "--processes", str(PROCESSES))
        self._parents.append(Proc.python(*WORKER, *options, env=self.environment))

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
        """Start everything, and to deliver so many webhooks within so many seconds."""
        with Proc.python(str(ROOT / "docs/examples/ci.py"), env=self.environment) as example:
            example.wait()  # it makes its table
        with self.engine.begin() as connection:
            self.outbox.create(connection)
            connection.exec_driver_sql(ENDED.format("SERIAL" if self._database else "INTEGER"))
        self.own.documents("tenants").put("pipelines", LAYOUTS[0])
        self._receivers += map(self._receiver, self._ports)
        for _ in range(PARENTS):
            self.start_parent()
        for _ in range(OPERATORS):
            self._start(self._operate)
        share = webhooks // SENDERS
        for sender in range(SENDERS):
            self._start(self._deliver, sender, share, seconds / share)

    def _start(self, call: Callable[..., None], *given: Any) -> None:
        thread = threading.Thread(target=call, args=given)
        thread.start()
        self._threads.append(thread)

    def _deliver(self, sender: int, count: int, pause_seconds: float) -> None:
        """Deliver webhooks of some projects, each after the one before; a sixth of them twice."""
        dice, began = random.Random(f"{sender} {self.random.random()}"), time.monotonic()
        for number in range(count):
            if self._ending.wait(max(0.0, began + number * pause_seconds - time.monotonic())):
                return
            project = PROJECT.format(dice.randrange(sender, PROJECTS, SENDERS))
            commit = f"{sender}-{number}"
            body = json.dumps({"repository": {"full_name": project}, "after": commit}).encode()
            for again in range(1 + (dice.random() < 1 / 6)):
                self.counts["repeated"] += again
                headers = {**signed("github", body, commit), "x-github-event": "push"}
                to = "/github", body, headers
                while (status := post(dice.choice(self._proxies).port, *to)) != 202:
                    self.counts[f"answered {status}"] += 1
                    time.sleep(REPEAT_SECONDS)
            self.accepted[project].append(commit)

    def pids(self) -> list[int]:
        return [*super().pids(), *(each.pid for each in self._receivers)]

    def delivering(self) -> bool:
        return any(each.is_alive() for each in self._threads[OPERATORS:])  # the first are theirs

    # --- operators --------------------------------------------------------------------

    def _operate(self) -> None:
        while not self._ending.wait(random.uniform(0.0, 0.3)):
            self.resume_paused()

    def resume_paused(self) -> None:
        """Give each paused request the answer to what it asked when it was looked at."""
        with suppress(QdoError):  # the broker is away
            for each in self.broker.requests.records(states=[PAUSED]):
                time.sleep(random.choice(HESITATIONS))
                try:
                    SlowHandle(self.own, each).resume(each.note)
                    self.counts["answers"] += 1
                except RequestStateError:
                    self.counts["late answers"] += 1

    # --- faults -----------------------------------------------------------------------

    def _faults(self) -> list[Callable[[], None]]:
        if not self._deck:
            self._deck = [self._kill_child, self._kill_parent, self._freeze_child]
            self._deck += [self._kill_container, self._kill_container]
            self._deck += [self._freeze_family, self._kill_receiver, self._cut_webhooks]
            self._deck += [self._split, self._merge, self._change_settings, self._reconfigure]
            self._deck += [self._split, self._merge, self._kill_child, self._reconfigure]
            if self._ensemble is not None:
                self._deck += [self._kill_leader, self._kill_leader]
            if self._database is not None:
                self._deck += self._database.faults(self.random)
            if self._coordination is not None and self._coordination is not self._database:
                self._deck += self._coordination.faults(self.random)
            self.random.shuffle(self._deck)
        return [self._deck.pop()]

    def _kill_receiver(self) -> None:
        self.random.choice(self._receivers).kill()

    def _cut_webhooks(self) -> None:
        proxy = self.random.choice(self._proxies)
        proxy.cut_all()
        proxy.cut_after("answer", self.random.randrange(100))

    def _split(self) -> None:
        self._reshard(lambda known, names: split(known, self.random.choice(names)))

    def _merge(self) -> None:
        pair, pairs = self.random.choice, itertools.pairwise
        self._reshard(lambda known, names: merge(known, *pair([*pairs(names)])))

    def _reshard(self, plan: Callable[[list[StreamShard], list[str]], list[StreamShard]]) -> None:
        with suppress(QdoError, IndexError):  # the database is away; there is only one shard
            known = self.broker.streams.shards("project")
            names = sorted((each.low, each.queue) for each in known if each.end is None)
            reshard(self.broker, plan(known, [name for _, name in names]))
            self.counts["reshards"] += 1

    def _change_settings(self) -> None:
        change = "fetch", str(self.random.randint(10, 2000)), "--reason", "soak"
        argv = (*QDO, "settings", "set", "--app", "ci", *change)
        self.commands.append(Proc.python(*argv, env=self.environment))

    def _reconfigure(self) -> None:
        once = str(self.random.random())
        message = qdo.NewMessage("manage", self.random.choice(LAYOUTS), dedup_key=once)
        self._start(send_surely, self.own, [message])

    # --- the end ----------------------------------------------------------------------

    def is_over(self) -> bool:
        with suppress(QdoError, SQLAlchemyError):
            idle = not self.broker.requests.counts() and not self.unsent()
            if idle and not any(each.hidden for each in self.broker.streams.shards()):
                names = {*self.broker.catalog.names()} - {"tick"}
                done = {each.number for each in self.entries() if each.kind == "E"}
                stored = (ci_rules.read_messages(self.broker, each) for each in names)
                return all(each.position in done for each in itertools.chain(*stored))
        return False

    def unsent(self) -> int:
        """Return the number of messages in the outbox."""
        with self.engine.connect() as connection:
            return connection.scalar(select(func.count()).select_from(self.outbox.table)) or 0

    def ci_facts(self) -> ci_rules.CiFacts:
        """Return the facts, once all is over."""
        stored = ci_rules.read_stored(self.broker)
        return ci_rules.CiFacts(
            self.accepted,
            stored,
            ci_rules.read_states(self.engine, stored["project"]),
            ci_rules.read_rows(self.engine),
            read_steps(self.environment["QDO_BROKER"]),
            ci_rules.read_codes(self.builds),
            self.entries(),
            Judged({}, stopped=self.stopped, unkept=self.unkept, outages=self.outages),
            time.time() - time.monotonic(),
        )

    def check_owners(self) -> list[str]:
        """Return violations of the rule of one owner, at every zxid."""
        if self._ensemble is not None:
            logs = [[*read_log(each.folder / "data")] for each in self._ensemble.servers]
            return ci_rules.check_owners(logs, self.name)
        log = [replace(each, zxid=number) for number, each in enumerate(self.transactions())]
        return ci_rules.check_owners([log], self.name) if log else []

    def left_behind(self) -> Iterator[str]:
        if unsent := self.unsent():
            yield f"left: {unsent} messages in the outbox"
        pids = [*self.pids(), *(pid for pid, _, _ in self.unkept)]  # a fork has no environment
        for each in self._receivers:
            each.send(signal.SIGTERM)
        yield from super().left_behind()
        limit = time.monotonic() + END_SECONDS
        while any(map(alive, pids)) and time.monotonic() < limit:
            time.sleep(0.1)
        yield from (f"left: process {each}" for each in pids if alive(each))

    def close(self) -> None:
        self._ending.set()
        for thread in self._threads:
            thread.join()
        self.engine.dispose()
        for each in (*self._receivers, *self.commands):
            each.__exit__(None, None, None)
        for proxy in self._proxies:
            proxy.close()
        self.own.close()
        super().close()


def play(fleet: CiFleet, seconds: float) -> list[str]:
    """Play one round; return the violations."""
    growth, calm, done, limit = Growth(), 0, 0, float("inf")
    fleet.begin(int(seconds * WEBHOOKS_A_SECOND), seconds)
    fault_at = time.monotonic() + 3 * FAULT_SECONDS
    while calm < 2 and time.monotonic() < limit:
        fleet.restart_ended()
        if growth.due():
            growth.sample(fleet.pids())
        if not fleet.delivering():
            calm = calm + 1 if fleet.is_over() else 0
            if done != (count := sum(each.queue != "tick" for each in fleet.entries())):
                done, limit = count, time.monotonic() + 4 * END_SECONDS
        elif time.monotonic() >= fault_at:
            fleet.befall()
            fault_at = time.monotonic() + FAULT_SECONDS
        time.sleep(0.2)
    found = [] if calm else ["left: not all is over"]
    facts = fleet.ci_facts()
    found += [*ci_rules.check_ci(facts), *fleet.left_behind(), *growth.violations()]
    found += [*fleet.check_owners(), *fleet.logged()]
    fleet.counts["refused settings"] = sum(each.wait() != 0 for each in fleet.commands)
    fleet.report(found, ci_rules.told(facts), dict(fleet.counts), growth.summary())
    return found
