"""The operators of a soak, and what befalls them; see `operators`."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import signal
import threading
from collections import Counter
from pathlib import Path

import qdo
from qdo.brokers.base import Broker
from qdo.brokers.registry import open_broker
from qdo.coordination.bulk_reads import read_children
from qdo.coordination.client import connect
from qdo.coordination.znodes.layout import Layout
from qdo.errors import NotFailingError, QdoError
from qdo.fleet.actions import list_workers
from qdo.fleet.audit import read_entries
from qdo.fleet.pauses import read_pauses, resume_pause
from qdo.ops.decisions import decide
from qdo.ops.delete import delete, plan_deletion
from qdo.ops.fleet import Fleet
from qdo.ops.peek import waiting_rows
from tests.soak.app import CREW_QUEUES, KEPT
from tests.soak.broker_server import send_surely
from tests.soak.ledger import OperatorRequest, RequestLedger, read_ledger
from tests.soak.operator_rules import CrewFacts, StoredMessage
from tests.support.paths import ROOT
from tests.support.processes import Proc, alive, whole_lines

SEND_EVERY = 0.2
DELAYED = 0.2
"""Share of messages that are delayed."""
KINDS = (*("quick",) * 14, *("wait",) * 4, *("stuck",) * 2)
_LAYOUT = Layout.of("soak")


class OperatorCrew:
    """Several operators, and the messages of the queues that they change.

    :ivar sent: how many messages each queue got.
    :ivar faults: what befell operators, and how often.
    """

    def __init__(self, folder: Path, environment: dict[str, str], seed: int, size: int) -> None:
        self.sent = dict.fromkeys(CREW_QUEUES, 0)
        self.faults: Counter[str] = Counter()
        self._folder = folder
        self._environment = {**environment, "QDO_APP": "soak"}
        self._random = random.Random(seed)
        self._seeds = itertools.count(1000 * seed)
        self._client = connect(environment["QDO_COORDINATOR"], handler="threading")
        self._client.open(10.0)
        self._app = qdo.App("soak", broker=environment["QDO_BROKER"])
        self._broker: Broker = open_broker(environment["QDO_BROKER"], "soak")
        self._fleet = Fleet(self._client, _LAYOUT, self._broker)
        self._own = RequestLedger(folder / "ledger-own")
        self._size = size
        self._operators: list[Proc] = []
        self._ended: list[Proc] = []
        self._failed: list[Proc] = []
        self._thaws: list[threading.Timer] = []
        self._over = threading.Event()
        self._threads = [threading.Thread(target=each) for each in (self._send, self._befall)]

    def begin(self) -> None:
        """Start operators, and messages for them."""
        for thread in self._threads:
            thread.start()

    # --- messages -------------------------------------------------------------------------

    def _send(self) -> None:
        while not self._over.wait(SEND_EVERY):
            batch = []
            for queue in CREW_QUEUES:
                number = self.sent[queue]
                kind = self._random.choice(KINDS)
                body = {"n": number, "kind": kind, "seconds": 0.3 if kind == "wait" else 0.0}
                late = self._random.random() < DELAYED
                delay = self._random.uniform(0.5, 4.0) if late else None
                key = f"k{number % 3}"
                batch.append(
                    qdo.NewMessage(queue, body, key=key, delay_seconds=delay, dedup_key=str(number))
                )
                self.sent[queue] = number + 1
            send_surely(self._app, batch)

    # --- operators ------------------------------------------------------------------------

    def _start(self) -> None:
        ledger = self._folder / f"ledger-{next(self._seeds)}"
        seed = ledger.name.rpartition("-")[2]
        arguments = ("-m", "tests.soak.operators", seed, str(ledger))
        self._operators.append(Proc.python(*arguments, env=self._environment, cwd=ROOT))

    def _befall(self) -> None:
        for _ in range(self._size):
            self._start()
        while not self._over.wait(self._random.uniform(0.5, 3.0)):
            operator = self._random.choice(self._operators)
            if not alive(operator.pid):
                self._failed.append(operator)
                self._operators.remove(operator)
                self._start()
            elif self._random.random() < 0.5:
                self.faults["killed"] += 1
                self._signal(operator, signal.SIGKILL)
                self._operators.remove(operator)
                self._ended.append(operator)
                self._start()
            else:
                self.faults["frozen"] += 1
                self._signal(operator, signal.SIGSTOP)
                thaw = threading.Timer(
                    self._random.choice((0.5, 2.0, 6.0)), self._signal, (operator, signal.SIGCONT)
                )
                thaw.start()
                self._thaws.append(thaw)

    def _signal(self, operator: Proc, number: signal.Signals) -> None:
        """Send a signal to an operator and to the command that it runs."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(operator.pid, number)

    def errors(self) -> list[str]:
        """Return the last lines of operators that ended by themselves."""
        return [f"operator: {each.output[-2000:]}" for each in self._failed]

    # --- the end --------------------------------------------------------------------------

    def end(self) -> None:
        """End all operators in the middle of what they do."""
        self._over.set()
        for thread in self._threads:
            if thread.ident is not None:
                thread.join()
        for thaw in self._thaws:
            thaw.join()
        for operator in self._operators:
            self._signal(operator, signal.SIGKILL)
            operator.__exit__(None, None, None)
        self._ended += self._operators
        self._operators = []

    def heal(self) -> bool:
        """End what stops a queue, as an operator; return whether all queues are idle."""
        with contextlib.suppress(QdoError):
            for pause in read_pauses(self._client, _LAYOUT).node.pauses:
                if not pause.by:
                    id = self._own.asks("resume", " ".join(pause.queues), hold=pause.id)
                    resume_pause(self._client, _LAYOUT, pause.id, id)
                    self._own.told(id)
            busy = [self._is_busy(queue) for queue in CREW_QUEUES]
            return not any(busy)
        return False

    def _is_busy(self, queue: str) -> bool:
        node = self._fleet.node(queue)
        if node is not None and node.deleted:
            self._delete(queue)
            return True
        if node is not None and node.failures:
            self._skip(queue)
        if self._broker.delayed.numbers(queue):
            return True
        done = 0 if node is None else node.last
        return next(waiting_rows(self._broker, queue, done, 1), None) is not None

    def _skip(self, queue: str) -> None:
        with contextlib.suppress(NotFailingError):
            id = self._own.asks("decide", queue, decision="skip", which="all")
            decided = decide(self._client, _LAYOUT, queue, "skip", "all", id)
            self._own.told(id, positions=[each.position for each in decided])

    def _delete(self, queue: str) -> None:
        """Repeat a deletion that was interrupted."""
        plan = plan_deletion(self._fleet, queue, with_messages=True)
        id = self._own.asks("delete", queue)
        delete(self._fleet, plan, reason=id)
        self._own.told(id)

    def facts(self) -> CrewFacts:
        """Return the facts beside the journal, once all queues are idle."""
        stored: list[StoredMessage] = []
        letters: set[tuple[str, int]] = set()
        for queue in CREW_QUEUES:
            for row in waiting_rows(self._broker, queue, 0, 1_000_000):
                number = json.loads(row.body)["n"]
                stored.append(StoredMessage(queue, row.position, number, row.key or ""))
            for letter in self._broker.dead_letters.records(queue):
                letters.add((queue, json.loads(letter.body)["n"]))
        entries = read_entries(self._client, _LAYOUT, limit=100_000)
        return CrewFacts(
            sent=self.sent,
            stored=stored,
            letters=letters,
            requests=self.requests(),
            logged=Counter(entry.reason for entry in entries),
        )

    def requests(self) -> list[OperatorRequest]:
        """Return all requests of all operators, by time."""
        found = [read_ledger(whole_lines(path)) for path in self._folder.glob("ledger-*")]
        return sorted(itertools.chain(*found), key=lambda each: each.asked)

    def left_behind(self) -> list[str]:
        """Return what operators have left although all workers live and all queues are idle."""
        kept = [_LAYOUT.fleet.actions_of(name) for name in list_workers(self._client, _LAYOUT)]
        actions = read_children(self._client, kept)
        found = [
            f"left: action {name} of {path}" for path in kept for name in actions.get(path, ())
        ]
        pauses = read_pauses(self._client, _LAYOUT).node.pauses
        found += [f"left: {pause}" for pause in pauses if not pause.by]
        for queue in KEPT:
            node = self._fleet.node(queue)
            if node is not None and (node.out_of_order or node.failures):
                found.append(f"left: {queue} {node}")
        return found

    def close(self) -> None:
        """End everything."""
        self.end()
        for operator in (*self._ended, *self._failed):
            operator.__exit__(None, None, None)
        self._client.stop()
        self._client.close()
        self._broker.close()
        self._app.close()
