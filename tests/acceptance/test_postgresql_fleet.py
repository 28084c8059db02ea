"""Three workers on ZooKeeper with the PostgreSQL broker, while everything is killed or frozen.

A worker is frozen and another killed, PostgreSQL is killed twice, and senders outside go on. Every
message whose sending was confirmed is run, each queue's in their order.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections import defaultdict
from pathlib import Path
from typing import Any

from qdo.brokers.base import Outgoing
from qdo.brokers.registry import open_broker
from qdo.errors import UnreachableError
from tests.support.app_runs import AppRuns
from tests.support.postgresql.schema import prepared
from tests.support.postgresql.server import PostgresqlServer
from tests.support.processes import Proc, children, wait_until

QUEUES = 8
WORKERS = 3
MESSAGES = 4000
JOBS = """
import time
from tests.apps.notes import app, note

@app.job()
def job(message, context):
    time.sleep(0.01)  # time to kill a worker midway
    note(message)
"""


class OutsideSenders:
    """Senders outside of the fleet, which write down what the broker has confirmed.

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
            try:
                broker = broker or open_broker(self._url, "desk")
                broker.send(Outgoing(queue, b"%d" % number))
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
    runs = AppRuns("desk", tmp_path, zookeeper_url, prepared(address.url(database), 1))
    senders = OutsideSenders(runs.broker_url, 4)

    def start() -> Proc:
        return runs.start(JOBS, "--session-timeout-seconds", "2.5")

    def started(worker: Proc) -> None:
        wait_until(lambda: not {*runs.pids()}.isdisjoint(children(worker.pid)), "it runs", 60.0)

    def wait_more() -> None:
        count = len(runs.pids()) + 100
        wait_until(lambda: len(runs.pids()) >= count, f"{count} runs", 60.0)

    with contextlib.closing(runs):
        frozen, killed, *others = [start() for _ in range(WORKERS)]
        senders.start()
        for worker in (frozen, killed, *others):
            started(worker)
        signal_all(frozen, signal.SIGSTOP)
        wait_more()
        postgresql_server.kill()
        postgresql_server.start()
        wait_more()
        signal_all(frozen, signal.SIGCONT)
        signal_all(killed, signal.SIGKILL)
        others.append(start())
        started(others[-1])
        postgresql_server.kill()
        postgresql_server.start()
        senders.join()
        wait_until(lambda: not missing(runs, senders), "all confirmed messages are run", 25.0)
        for worker in (frozen, *others):
            worker.send(signal.SIGTERM)
        for worker in (frozen, *others):
            assert worker.wait(60) == 0, worker.output
    check_order(runs, senders)
    address.drop_database(database)


def signal_all(worker: Proc, number: int) -> None:
    """Send a signal to a worker's processes, the supervisor first."""
    for pid in (worker.pid, *children(worker.pid)):
        os.kill(pid, number)


def first_runs(runs: AppRuns, queue: str) -> list[int]:
    """Return the messages of a queue in the order of their first runs."""
    return list(dict.fromkeys(int(body) for body, _ in runs.runs(queue)))


def missing(runs: AppRuns, senders: OutsideSenders) -> set[int]:
    """Return the confirmed messages that are not run yet."""
    confirmed = senders.confirmed.items()
    return {
        each for queue, numbers in confirmed for each in {*numbers} - {*first_runs(runs, queue)}
    }


def check_order(runs: AppRuns, senders: OutsideSenders) -> None:
    """The first runs of each queue's messages are in the order of sending.

    A message whose sending was not confirmed may be stored; then it has its place among the others.
    """
    assert len(senders.confirmed) == QUEUES
    assert missing(runs, senders) == set()
    for queue in senders.confirmed:
        assert first_runs(runs, queue) == sorted(first_runs(runs, queue))
