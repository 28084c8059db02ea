"""Timers in real workers: leaders that are killed at each step, and frozen; commands."""

from __future__ import annotations

import json
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from qdo.brokers.registry import open_broker
from qdo.coordination.client import Client, connect
from qdo.coordination.znodes.layout import Layout
from qdo.coordination.znodes.worker_node import parse_leader
from qdo.fleet.audit import read_entries
from tests.support.brokers import ADDRESSES
from tests.support.cli import QDO, WORKER, Ended, clean_environment, command
from tests.support.doc_pages import blocks, read
from tests.support.processes import Proc, alive, children, freeze, wait_until

APP = """
import os
import pathlib
import signal

import qdo
from qdo.fleet.timer_node import TimerLedger
from qdo.worker.duties.timers import TimerSender

app = qdo.App("clock")
app.timer("each", every_seconds=1, queue="each", missed="all")
app.timer("poll", every_seconds=1, queue="poll", unless_waiting=True)


@app.job("each")
def job(message, context):
    pass


def dying(kind, name, step):
    real = getattr(kind, name)

    def once(self, *arguments):
        done = real(self, *arguments) if step == "after" else None
        if arguments[0] and not pathlib.Path("killed").exists():
            pathlib.Path("killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return done if step == "after" else real(self, *arguments)

    setattr(kind, name, once)


STEPS = {
    "before sending": (TimerSender, "_sent", "before"),
    "after sending": (TimerSender, "_sent", "after"),
    "after recording": (TimerSender, "_record", "after"),
}
if os.environ.get("TESTS_KILL_AT"):
    dying(*STEPS[os.environ["TESTS_KILL_AT"]])
"""


class Clocks:
    """An app with timers, its messages, and its nodes."""

    def __init__(self, folder: Path, coordinator: str, broker: str) -> None:
        self.folder = folder
        (folder / "clocks.py").write_text(APP)
        self.environment = {
            "QDO_APP": "clocks:app",
            "QDO_COORDINATOR": coordinator,
            "QDO_BROKER": broker,
            "QDO_SESSION_TIMEOUT_SECONDS": "2.5",
        }
        self.broker_url = broker
        self.client: Client = connect(coordinator)
        self.client.open()
        self.layout = Layout.of("clock")

    def work(self, *options: str, **environment: str) -> Proc:
        merged = {**clean_environment(), **self.environment, **environment}
        return Proc.python(*WORKER, "clocks:app", *options, cwd=self.folder, env=merged)

    def qdo(self, *argv: str) -> Ended:
        return command(*QDO, *argv, cwd=self.folder, env=self.environment)

    def items(self, *argv: str, code: int = 0) -> list[dict[str, Any]]:
        ended = self.qdo(*argv, "-o", "json")
        assert ended.code == code, ended.err
        found: list[dict[str, Any]] = json.loads(ended.out)["items"]
        return found

    def diagnosis(self) -> dict[str, Any]:
        found = json.loads(self.qdo("doctor", "-o", "json").out)["items"]
        return next(each for each in found if each["check"] == "timers")

    def times(self, queue: str) -> list[int]:
        """Return the times of the messages in a queue, in its order."""
        broker = open_broker(self.broker_url, "clock")
        try:
            if queue not in broker.catalog.names():
                return []
            rows = broker.reader(queue, 0).fetch(1000)
            texts = [json.loads(row[1])["at"] for row in rows]
        finally:
            broker.close()
        return [round(time.mktime(time.strptime(each, "%Y-%m-%dT%H:%M:%SZ"))) for each in texts]

    def leader(self) -> int:
        """Return the pid of the leading process."""
        name, _ = parse_leader(self.client.get(self.layout.rebalancer)[0])
        wait_until(lambda: name in self.workers(), "the leader has reported")
        return self.workers()[name]

    def workers(self) -> dict[str, int]:
        return {each["worker"]: each["pid"] for each in self.items("workers") if each.get("pid")}

    def close(self) -> None:
        self.client.stop()
        self.client.close()


@pytest.fixture(params=["embedded", "postgresql"])
def clocks(
    tmp_path: Path, coordinator_url: str, request: pytest.FixtureRequest
) -> Iterator[Clocks]:
    broker = ADDRESSES[request.param](tmp_path, "clock", request)
    made = Clocks(tmp_path, coordinator_url, broker)
    yield made
    made.close()


GERRIT = """
import os, time

def stream_events(since):
    seen = since is None
    with open("events") as source:
        while True:
            line = source.readline().strip()
            if line and seen:
                yield {"id": line, "body": line}
            elif not line:
                yield None
                time.sleep(0.02)
            seen = seen or line == since
"""


def test_the_gatherer_of_the_documentation_goes_on_elsewhere(tmp_path: Path) -> None:
    """It ends when its worker stops, and a kill repeats no event."""
    page = {each.options.get("caption"): each.text for each in blocks(read("timers"))}
    (tmp_path / "gather.py").write_text(page["gather.py"])
    (tmp_path / "gerrit.py").write_text(GERRIT)
    source = tmp_path / "events"
    source.write_text("e1\ne2\n")
    arguments = (*WORKER, "gather:app", "--log-level", "warning", "--drain-seconds", "60")

    def stored() -> list[str]:
        if not (tmp_path / "qdo-data/messages.db").exists():
            return []
        broker = open_broker(f"sqlite:{tmp_path / 'qdo-data/messages.db'}", "gather")
        try:
            return [json.loads(row[1]) for row in broker.reader("events", 0).fetch(100)]
        finally:
            broker.close()

    def wait_for(*events: str) -> None:
        wait_until(lambda: stored() == list(events), f"the events {events}", 60)

    with Proc.python(*arguments, cwd=tmp_path) as parent:
        wait_for("e1", "e2")
        parent.send(signal.SIGTERM)
        assert parent.wait(30) == 0, parent.output
    source.write_text("e1\ne2\ne3\n")
    with Proc.python(*arguments, cwd=tmp_path) as parent:
        wait_for("e1", "e2", "e3")
        os.kill(children(parent.pid)[0], signal.SIGKILL)
        with source.open("a") as file:
            file.write("e4\n")
        wait_for("e1", "e2", "e3", "e4")


def has_stored(clocks: Clocks, count: int) -> Callable[[], bool]:
    return lambda: len(clocks.times("each")) >= count


def check_each_second_once(clocks: Clocks) -> None:
    found = clocks.times("each")
    assert found == list(range(found[0], found[0] + len(found))), Counter(found).most_common(3)
    assert len(clocks.times("poll")) == 1, "the first one waits"


@pytest.mark.parametrize("step", ["before sending", "after sending", "after recording"])
def test_a_leader_killed_between_its_steps(clocks: Clocks, step: str) -> None:
    """Its parent starts another process; each second has one message all the same."""
    with clocks.work(TESTS_KILL_AT=step):
        wait_until((clocks.folder / "killed").exists, "it is killed", 60)
        killed = len(clocks.times("each"))
        wait_until(has_stored(clocks, killed + 3), "its successor sends", 60)
        check_each_second_once(clocks)


@pytest.mark.long("several leaders, one after the other")
def test_leaders_killed_and_frozen_one_after_the_other(clocks: Clocks) -> None:
    """A frozen one wakes up when another leads, and adds nothing."""
    with clocks.work("--processes", "3"):
        for number in (signal.SIGKILL, signal.SIGSTOP, signal.SIGKILL):
            stored = len(clocks.times("each"))
            wait_until(has_stored(clocks, stored + 2), "the leader sends", 60)
            pid = clocks.leader()
            if number is signal.SIGSTOP:
                freeze(pid, clocks.environment["QDO_COORDINATOR"], clocks.broker_url)
            else:
                os.kill(pid, number)
                wait_until(lambda pid=pid: not alive(pid), "it is dead")
            stored = len(clocks.times("each"))
            wait_until(has_stored(clocks, stored + 4), "another one sends", 60)
            if number is signal.SIGSTOP:
                os.kill(pid, signal.SIGCONT)
        check_each_second_once(clocks)


def test_timers_in_commands(clocks: Clocks) -> None:
    missing = clocks.items("timers", "list")
    assert [each["is_well"] for each in missing] == [False, False], "no leader has them"
    with clocks.work():
        wait_until(has_stored(clocks, 2), "the leader sends", 60)
        found = clocks.items("timers", "list")
        assert [(each["timer"], each["when"], each["queue"], each["state"]) for each in found] == [
            ("each", "every 1 s", "each", "ok"),
            ("poll", "every 1 s", "poll", "ok"),
        ]
        assert clocks.diagnosis()["status"] == "ok"
    ran = clocks.items("timers", "run", "poll", "--reason", "asked by finance")
    assert ran[0]["executed"]
    assert len(clocks.times("poll")) == 2
    headers = [each["headers"]["qdo-timer"] for each in clocks.items("peek", "poll", "--body")]
    assert [each.endswith("/run") for each in headers] == [False, True]
    entries = read_entries(clocks.client, clocks.layout, limit=10)
    [entry] = [each for each in entries if each.command == "timers run"]
    assert (entry.target, entry.reason) == ("poll", "asked by finance")
    assert entry.after["id"] == ran[0]["id"]


def test_timers_run_changes_nothing_in_a_dry_run(clocks: Clocks) -> None:
    assert not clocks.items("timers", "run", "poll", "--dry-run")[0]["executed"]
    assert clocks.times("poll") == []
    assert clocks.qdo("timers", "run", "pol").code == 6
    assert clocks.qdo("timers", "run", "poll", "--app", "clock").code == 2


def test_timers_that_need_a_look(clocks: Clocks) -> None:
    """Overdue, damaged, of another version, and removed: seen by `list` and `qdo doctor`."""
    folder = clocks.layout.fleet.timers
    node = {"last": "2026-01-01T00:00:00Z", "next": "2026-01-01T00:00:01Z", "queue": "each"}
    for name, value in {
        "each": json.dumps({**node, "when": "every 1 s"}).encode(),
        "poll": json.dumps({**node, "when": "every 2 s"}).encode(),
        "old": json.dumps({**node, "when": ""}).encode(),
        "odd": b"[]",
    }.items():
        clocks.client.create(f"{folder}/{name}", value, makepath=True)
    found = {each["timer"]: each for each in clocks.items("timers", "list")}
    assert {name: each["is_well"] for name, each in found.items()} == {
        "each": False,
        "poll": False,
        "old": True,
        "odd": False,
    }
    assert found["each"]["state"].startswith("overdue by")
    assert "another version" in found["poll"]["state"]
    assert "JSON" in found["odd"]["state"]
    diagnosis = clocks.diagnosis()
    assert diagnosis["status"] == "warning"
    assert all(name in diagnosis["reason"] for name in ("each", "poll", "odd"))
