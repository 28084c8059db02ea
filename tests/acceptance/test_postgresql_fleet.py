"""Three workers on ZooKeeper with the PostgreSQL broker, while everything is killed or frozen.

A worker is frozen and another killed, PostgreSQL is killed twice, and senders outside go on. Every
message whose sending was confirmed is run, each queue's in their order.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections import defaultdict
from pathlib import Path
from typing import Any

from qdo.brokers.base import Outgoing
from qdo.brokers.registry import open_broker
from qdo.errors import UnreachableError
from tests.support.cli import WORKER, clean_environment
from tests.support.journal import ORDER_VARIABLE, PATH_VARIABLE, Journal
from tests.support.postgresql.schema import prepared
from tests.support.postgresql.server import PostgresqlServer
from tests.support.processes import Proc, children, wait_until

QUEUES = 8
WORKERS = 3
MESSAGES = 4000
SESSION_SECONDS = 2.5


class OutsideSenders:
    """A sender outside of the fleet, which writes down what the broker has confirmed.

    :ivar confirmed: numbers of messages by queue.
    """

    def __init__(self, url: str, senders: int) -> None:
        self._url = url
        self.confirmed: dict[str, list[int]] = defaultdict(list)
        self._lock = threading.Lock()
        self._threads = [
            threading.Thread(target=self._send, args=(number, senders)) for number in range(senders)
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def join(self) -> None:
        for thread in self._threads:
            thread.join(90)
            assert not thread.is_alive()

    def _send(self, own: int, senders: int) -> None:
        broker: Any = None
        pause = threading.Event()
        queues = [f"queue-{number}" for number in range(QUEUES) if number % senders == own]
        for number in range(own, MESSAGES, senders):
            queue = queues[number // senders % len(queues)]
            body = b'{"key": "%b", "number": %d}' % (queue.encode(), number)
            try:
                broker = broker or open_broker(self._url, "journal")
                broker.send(Outgoing(queue, body))
            except UnreachableError:
                pause.wait(0.05)  # a sender that has something else to do meanwhile
            else:
                with self._lock:
                    self.confirmed[queue].append(number)
            pause.wait(0.005)
        broker.close()


def test_a_fleet_on_several_hosts(
    postgresql_server: PostgresqlServer, zookeeper_url: str, tmp_path: Path
) -> None:
    address = postgresql_server.address
    database = address.create_database()
    url = prepared(address.url(database), 1)
    journal = Journal(tmp_path / "runs.db")
    environment = {
        **clean_environment(),
        "QDO_APP": "journal",
        "QDO_BROKER": url,
        "QDO_COORDINATOR": zookeeper_url,
        "QDO_SESSION_TIMEOUT_SECONDS": str(SESSION_SECONDS),
        PATH_VARIABLE: str(journal.path),
        ORDER_VARIABLE: "queue",
    }
    ledger = OutsideSenders(url, 4)

    def wait_done(count: int) -> None:
        wait_until(lambda: len(journal.done()) >= count, f"{count} messages are done", 60.0)

    def started(worker: Proc) -> None:
        def has_run() -> bool:
            return not {run.pid for run in journal.runs()}.isdisjoint(children(worker.pid))

        wait_until(has_run, "the worker runs jobs", 60.0)

    argv = [sys.executable, *WORKER, "tests.support.journal:app"]
    with contextlib.ExitStack() as stack:
        workers = [
            stack.enter_context(Proc(argv, cwd=tmp_path, env=environment)) for _ in range(WORKERS)
        ]
        ledger.start()
        for worker in workers:
            started(worker)
        signal_all(workers[0], signal.SIGSTOP)
        wait_done(len(journal.done()) + 100)
        postgresql_server.kill()
        postgresql_server.start()
        wait_done(len(journal.done()) + 100)
        signal_all(workers[0], signal.SIGCONT)
        signal_all(workers[1], signal.SIGKILL)
        workers.append(stack.enter_context(Proc(argv, cwd=tmp_path, env=environment)))
        started(workers[3])
        postgresql_server.kill()
        postgresql_server.start()
        ledger.join()
        sent = {number for numbers in ledger.confirmed.values() for number in numbers}
        wait_until(
            lambda: sent <= journal.done(), lambda: f"done: {sorted(sent - journal.done())}", 25.0
        )
        for worker in (workers[0], workers[2], workers[3]):
            worker.send(signal.SIGTERM)
        for worker in (workers[0], workers[2], workers[3]):
            assert worker.wait(60) == 0, worker.output
    check_order(journal, ledger)
    address.drop_database(database)


def signal_all(worker: Proc, number: int) -> None:
    """Send a signal to a worker's processes, the supervisor first."""
    for pid in (worker.pid, *children(worker.pid)):
        os.kill(pid, number)


def check_order(journal: Journal, ledger: OutsideSenders) -> None:
    """The first runs of each queue's messages are in the order of sending.

    A message whose sending was not confirmed may be stored; then it has its place among the others.
    """
    first: dict[str, list[int]] = defaultdict(list)
    for run in journal.runs():
        if run.number not in first[run.queue]:
            first[run.queue].append(run.number)
    assert set(first) == set(ledger.confirmed)
    for queue, numbers in first.items():
        assert numbers == sorted(numbers)
        assert set(ledger.confirmed[queue]) <= set(numbers)
