"""Whole worker processes, started as their parent starts them."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from qdo.app import App
from qdo.coordination.client import Client, connect
from qdo.coordination.znodes.layout import Layout
from qdo.ops.worker_status import worker_statuses
from qdo.settings.settings import Settings
from tests.support.paths import ROOT
from tests.support.postgresql.proxy import cutting
from tests.support.postgresql.server import PostgresqlDatabase
from tests.support.processes import freeze, wait_until, whole_lines
from tests.support.zookeeper import Ensemble

DEADLINE_SECONDS = 60.0

JOBS = """
import os, signal, time
import gevent
from gevent.event import Event

out = open("out", "a", 1)

def write(message, context):
    time.sleep(0.001)
    out.write(f"{message.queue} {message.body} {message.fence} {os.getpid()}\\n")

def gated(message, context):
    while not os.path.exists("open"):
        time.sleep(0.005)
    write(message, context)

def slow(message, context):
    out.write(f"begin {message.body}\\n")
    time.sleep(0.5)
    out.write(f"end {message.body}\\n")

def endless(message, context):
    out.write(f"begin {message.body}\\n")
    Event().wait()

def blocking(message, context):
    out.write(f"begin {message.body}\\n")
    while True:
        pass
"""


class Child:
    """A worker process, and the parent's end of its pipe."""

    def __init__(self, folder: Path, settings: Settings) -> None:
        self.pipe, theirs = socket.socketpair()
        told = {
            "settings": dataclasses.asdict(settings),
            "target": None,
            "pipe": theirs.fileno(),
        }
        self._errors = (folder / f"errors-{time.monotonic_ns()}").open("wb+")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "qdo.worker.main"],
            env={**os.environ, "QDO_CHILD": json.dumps(told), "PYTHONPATH": str(ROOT)},
            cwd=folder,
            pass_fds=(theirs.fileno(),),
            stderr=self._errors,
        )
        theirs.close()

    def errors(self) -> str:
        return Path(self._errors.name).read_text()

    def told(self) -> list[dict[str, Any]]:
        """Return the reports of the ended process about its sessions to its parent."""
        data = b""
        while chunk := self.pipe.recv(65536):
            data += chunk
        reports = [json.loads(line) for line in data.splitlines()]
        assert [*reports[0]] == ["settings"]
        return reports[1:]

    def wait(self) -> int:
        return self.process.wait(DEADLINE_SECONDS)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self.pipe.close()
        self._errors.close()


class ProcessFleet:
    """Worker processes of one app in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.broker = f"sqlite:{folder / 'messages.db'}"
        self.address = f"sqlite:{folder / 'coordination.db'}"
        self.children: list[Child] = []
        (folder / "jobs.py").write_text(JOBS)
        self.app = App("fleet", broker=self.broker)

    def start(self, **settings: Any) -> Child:
        chosen: dict[str, Any] = {
            "app": "fleet",
            "job": "jobs:write",
            "broker": self.broker,
            "coordinator": self.address,
            "session_timeout_seconds": 2.0,
            **settings,
        }
        child = Child(self.folder, Settings(**chosen))
        self.children.append(child)
        return child

    def freeze(self, child: Child) -> None:
        freeze(child.process.pid, self.broker, self.address)

    def lines(self) -> list[list[str]]:
        path = self.folder / "out"
        return [line.split() for line in whole_lines(path)]

    def bodies(self) -> dict[str, list[int]]:
        """Return the bodies by queue, in the order of processing."""
        found: dict[str, list[int]] = {}
        for queue, body, _, _ in self.lines():
            found.setdefault(queue, []).append(int(body))
        return found

    @contextlib.contextmanager
    def coordinator(self) -> Iterator[Client]:
        """Yield a client that looks on."""
        client = connect(self.address)
        client.open()
        try:
            yield client
        finally:
            client.stop()
            client.close()

    def assigned(self) -> list[int]:
        """Return how many queues each registered worker has or is to get."""
        with self.coordinator() as client:
            return [status.assigned for status in worker_statuses(client, Layout.of("fleet"))]

    def close(self) -> None:
        for child in self.children:
            child.close()
        self.app.close()


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[ProcessFleet]:
    with contextlib.closing(ProcessFleet(tmp_path)) as made:
        yield made


def once(bodies: list[int]) -> list[int]:
    """Return bodies without repetitions, in the order of their first processing."""
    return list(dict.fromkeys(bodies))


def test_burst_workers_share_the_queues_and_leave_nothing(fleet: ProcessFleet) -> None:
    """Each queue in order, nothing twice; sessions are reported and closed."""
    fleet.app.send_many([(f"q{n % 20}", n // 20) for n in range(2000)])
    children = [fleet.start(burst=True, job="jobs:gated") for _ in range(2)]
    wait_until(lambda: fleet.assigned() == [10, 10], "both have a share", DEADLINE_SECONDS)
    (fleet.folder / "open").touch()
    assert [child.wait() for child in children] == [0, 0], [child.errors() for child in children]
    assert fleet.bodies() == {f"q{n}": list(range(100)) for n in range(20)}
    assert len({pid for *_, pid in fleet.lines()}) == 2
    for child in children:
        opened, closed = child.told()
        assert int(opened["session"], 16)
        assert len(bytes.fromhex(opened["password"])) == 16
        assert closed == {"session": None}


def test_a_worker_outlives_its_coordinator(fleet: ProcessFleet, zookeeper_server: Ensemble) -> None:
    """ZooKeeper is away for longer than the lease: the worker waits, and continues afterwards."""
    url = zookeeper_server.url(f"/test-{uuid.uuid4().hex[:12]}")
    child = fleet.start(coordinator=url)
    fleet.app.send("q", 0)
    wait_until(lambda: len(fleet.lines()) == 1, "the first message")
    (server,) = zookeeper_server.servers
    server.kill()

    def paused() -> bool:
        return "WARNING qdo.worker.engine.dispatcher[" in child.errors()

    def settled(count: int) -> bool:
        return len(fleet.lines()) == count or paused()

    try:
        sent = 1
        while not paused():  # each wake finds the lease still running, or over
            fleet.app.send("q", sent)
            sent += 1
            wait_until(partial(settled, sent), "the message, or the end of the lease")
        started = len(fleet.lines())
        fleet.app.send("q", sent)  # the one before may have been done just before the pause
        sent += 1
        assert child.process.poll() is None
    finally:
        server.restart()
    wait_until(lambda: len(once(fleet.bodies()["q"])) == sent, "the rest")
    assert once(fleet.bodies()["q"]) == list(range(sent))
    assert started < sent
    child.process.terminate()
    assert child.wait() == 0


def test_sigterm_drains(fleet: ProcessFleet) -> None:
    """The message in flight ends, no other begins; the next worker repeats nothing."""
    fleet.app.send_many([("q", 1), ("q", 2)])
    child = fleet.start(job="jobs:slow")
    wait_until(lambda: bool(fleet.lines()), "the first message")
    child.process.terminate()
    assert child.wait() == 0
    assert fleet.lines() == [["begin", "1"], ["end", "1"]]
    assert fleet.start(job="jobs:slow", burst=True).wait() == 0
    assert fleet.lines()[2:] == [["begin", "2"], ["end", "2"]]


def test_a_second_sigterm_aborts_and_releases(fleet: ProcessFleet) -> None:
    """Exit code 1, and the message is named; it is free for the next worker at once."""
    fleet.app.send("q", 1)
    child = fleet.start(job="jobs:endless")
    wait_until(lambda: bool(fleet.lines()), "the message")
    child.process.terminate()
    wait_until(lambda: "step 2" in child.errors(), "the drain")
    child.process.terminate()
    assert child.wait() == 1
    assert "aborting message" in child.errors()
    assert child.told()[-1] == {"session": None}


def test_a_third_sigterm_exits_even_where_a_job_blocks(fleet: ProcessFleet) -> None:
    """The event loop never turns; its watchdog ends the process."""
    fleet.app.send("q", 1)
    child = fleet.start(job="jobs:blocking")
    wait_until(lambda: "has been blocked for" in child.errors(), "the watchdog")

    def ended() -> bool:
        # More than three: Python counts two as one that come before its handler has run.
        child.process.terminate()
        return child.process.poll() is not None

    wait_until(ended, "the end of the process")
    assert child.wait() == 1
    assert "third stop signal" in child.errors()
    assert "jobs:blocking" in child.errors()


def test_the_parents_death_drains(fleet: ProcessFleet) -> None:
    """An orphan without a supervisor releases its queues."""
    fleet.app.send_many([("q", 1), ("q", 2)])
    child = fleet.start(job="jobs:slow")
    wait_until(lambda: bool(fleet.lines()), "the first message")
    child.pipe.close()
    assert child.wait() == 0
    assert fleet.lines() == [["begin", "1"], ["end", "1"]]
    assert "the parent process died" in child.errors()


def test_a_worker_starts_before_the_server_of_its_broker(
    fleet: ProcessFleet, database_url: str, postgresql: PostgresqlDatabase
) -> None:
    """It tries for `connect_seconds`, as it does for a coordinator."""
    App("fleet", broker=database_url).send("q", 1)
    with cutting(postgresql.server.port) as proxy:
        proxy.refusing = True
        url = database_url.replace(f":{postgresql.server.port}", f":{proxy.port}")
        assert fleet.start(broker=url, connect_seconds=0.5).wait() == 3
        child = fleet.start(broker=url, connect_seconds=DEADLINE_SECONDS)
        wait_until(lambda: "retrying" in child.errors(), "the worker has tried")
        proxy.refusing = False
        wait_until(lambda: fleet.bodies() == {"q": [1]}, "the worker runs jobs")
        child.process.terminate()
        assert child.wait() == 0


def test_a_drain_after_a_lost_session_is_not_a_clean_stop(fleet: ProcessFleet) -> None:
    """A worker that was frozen beyond its session, and is then told to stop, exits with 1."""
    fleet.app.send_many([(f"q{number % 4}", number) for number in range(40)])
    frozen = fleet.start(job="jobs:gated")
    wait_until(lambda: fleet.assigned() == [4], "the first worker has all queues")
    other = fleet.start(job="jobs:gated")
    wait_until(lambda: fleet.assigned() == [2, 2], "each has half of them")
    fleet.freeze(frozen)
    wait_until(lambda: fleet.assigned() == [4], "the other worker has all queues")
    frozen.process.send_signal(signal.SIGTERM)
    frozen.process.send_signal(signal.SIGCONT)
    (fleet.folder / "open").touch()
    assert frozen.wait() == 1
    assert "session was lost" in frozen.errors()
    totals = re.search(r"(\d+) claimed, (\d+) released, (\d+) lost", frozen.errors())
    assert totals is not None
    claimed, released, lost = map(int, totals.groups())
    assert claimed == released + lost
    assert lost > 0
    other.process.send_signal(signal.SIGTERM)
    assert other.wait() == 0
