"""Timers in real workers: leaders that are killed at each step, and frozen; commands."""

from __future__ import annotations

import json
import os
import signal
import time
from calendar import timegm
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from qdo.brokers.registry import open_broker
from qdo.coordination.znodes.worker_node import parse_leader
from tests.support.app_runs import OperatorDesk
from tests.support.brokers import ADDRESSES
from tests.support.cli import WORKER, clean_environment
from tests.support.doc_pages import blocks, read
from tests.support.processes import Proc, alive, children, freeze, wait_until

APP = """
import itertools, os, pathlib, signal
import qdo
from qdo.worker.duties import timers

app = qdo.App("clock")
app.timer("each", every_seconds=1, queue="each")
app.timer("poll", every_seconds=1, queue="poll", unless_waiting=True)


@app.job("each")
def job(message, context):
    pass


def dying(name, step):
    real, calls = getattr(timers, name), itertools.count()

    def once(*arguments):
        done = real(*arguments) if step == "after" else None
        if arguments[-1] and next(calls) and not pathlib.Path("killed").exists():
            pathlib.Path("killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return done if step == "after" else real(*arguments)

    setattr(timers, name, once)


if os.environ.get("TESTS_KILL_AT"):
    dying(*os.environ["TESTS_KILL_AT"].split())
"""


class Clocks(OperatorDesk):
    """An app with timers, its messages, and its nodes."""

    @property
    def environment(self) -> dict[str, str]:
        own = {"QDO_APP": "clocks:app", "QDO_SESSION_TIMEOUT_SECONDS": "2.5"}
        return {**super().environment, **own}

    def run(self, *options: str, **environment: str) -> Proc:
        merged = {**clean_environment(), **self.environment, **environment}
        return Proc.python(*WORKER, "clocks:app", *options, cwd=self.folder, env=merged)

    def diagnosis(self) -> dict[str, Any]:
        found = json.loads(self.qdo("doctor", "-o", "json").out)["items"]
        return next(each for each in found if each["check"] == "timers")

    def sent(self, queue: str) -> list[tuple[int, int]]:
        """Return the time of each message in a queue, and how many it stands for."""
        known = queue in self.broker.catalog.names()
        rows = self.broker.reader(queue, 0).fetch(1000) if known else ()
        bodies = [json.loads(row[1]) for row in rows]
        form = "%Y-%m-%dT%H:%M:%SZ"
        return [(timegm(time.strptime(each["at"], form)), each["missed"]) for each in bodies]

    def leader(self) -> int:
        """Return the pid of the leading process."""
        name, _ = parse_leader(self.client.get(self.layout.rebalancer)[0])
        wait_until(lambda: name in self.workers(), "the leader has reported")
        return self.workers()[name]

    def workers(self) -> dict[str, int]:
        return {each["worker"]: each["pid"] for each in self.items("workers") if each.get("pid")}

    def wait_for_more(self, count: int) -> None:
        stored = len(self.sent("each"))
        wait_until(lambda: len(self.sent("each")) >= stored + count, "a leader sends", 60)

    def check_each_second_once(self) -> None:
        found = self.sent("each")
        times, seconds = [at for at, _ in found], range(found[0][0], found[-1][0] + 1)
        assert times == sorted(set(times))
        missed = {at - each for at, count in found for each in range(1, count + 1)}
        assert set(seconds) <= missed.union(times)
        assert len(self.sent("poll")) == 1, "the first one waits"


@pytest.fixture
def clocks(
    tmp_path: Path, coordinator_url: str, request: pytest.FixtureRequest
) -> Iterator[Clocks]:
    """On the broker that a test's parameter names, or on the embedded one."""
    (tmp_path / "clocks.py").write_text(APP)
    broker = getattr(request, "param", "embedded")
    address = ADDRESSES[broker](tmp_path, "clock", request)
    with closing(Clocks("clock", tmp_path, coordinator_url, address)) as made:
        yield made


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


@pytest.mark.parametrize(
    "clocks", [pytest.param("embedded", id="file"), "postgresql"], indirect=True
)
@pytest.mark.parametrize(
    "step", ["send_occurrences before", "send_occurrences after", "write_timers after"]
)
def test_a_leader_killed_between_its_steps(clocks: Clocks, step: str) -> None:
    """Its parent starts another process; each second has one message all the same."""
    with clocks.run(TESTS_KILL_AT=step):
        wait_until((clocks.folder / "killed").exists, "it is killed", 60)
        clocks.wait_for_more(3)
        clocks.check_each_second_once()


@pytest.mark.long("several leaders, one after the other")
def test_leaders_killed_and_frozen_one_after_the_other(clocks: Clocks) -> None:
    """A frozen one wakes up when another leads, and adds nothing."""
    with clocks.run("--processes", "3"):
        for number in (signal.SIGKILL, signal.SIGSTOP, signal.SIGKILL):
            clocks.wait_for_more(2)
            pid = clocks.leader()
            if number is signal.SIGSTOP:
                freeze(pid, clocks.coordinator, clocks.broker_url)
            else:
                os.kill(pid, number)
                wait_until(partial(lambda dead: not alive(dead), pid), "it is dead")
            clocks.wait_for_more(2)
            if number is signal.SIGSTOP:
                os.kill(pid, signal.SIGCONT)
        clocks.check_each_second_once()


def test_timers_in_commands(clocks: Clocks) -> None:
    missing = clocks.items("timers", "list")
    assert [each["is_well"] for each in missing] == [False, False], "no leader has them"
    with clocks.run():
        clocks.wait_for_more(2)
        found = clocks.items("timers", "list")
        assert [(each["timer"], each["when"], each["queue"], each["state"]) for each in found] == [
            ("each", "every 1 s", "each", "ok"),
            ("poll", "every 1 s", "poll", "ok"),
        ]
        assert clocks.diagnosis()["status"] == "ok"
    (ran,) = clocks.items("timers", "run", "poll")
    headers = [each["headers"]["qdo-timer"] for each in clocks.items("peek", "poll", "--body")]
    assert [each.endswith("/run") for each in headers] == [False, True]
    (entry,) = clocks.audit("timers run")
    assert (entry.target, entry.after) == ("poll", {"queue": "poll", "id": ran["id"]})
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
    assert [name for name, each in found.items() if each["is_well"]] == ["old"]
    for name, state in (("each", "overdue by"), ("poll", "another version"), ("odd", "JSON")):
        assert state in found[name]["state"]
    diagnosis = clocks.diagnosis()
    assert diagnosis["status"] == "warning"
    assert all(name in diagnosis["reason"] for name in ("each", "poll", "odd"))
