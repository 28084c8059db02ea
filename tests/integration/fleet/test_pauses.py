"""Paused queues, with real workers, on both coordinators."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from qdo.coordination import transactions
from qdo.coordination.client import Client
from qdo.coordination.protocol.machine import NoResponse, Op
from qdo.coordination.znodes.layout import Layout
from qdo.coordination.znodes.worker_node import WorkerNode
from qdo.fleet import pauses
from qdo.fleet.audit import read_entries
from qdo.fleet.pause_machine import MAX_PAUSES, PauseNode
from tests.support.app_runs import AppRuns, jobs
from tests.support.cli import Run
from tests.support.coordinator_process import connected
from tests.support.processes import Proc, wait_until

JOBS = f"""{jobs()}
app.job("lanes-*", order="none")(job)
app.job("slow-*", executor="thread")(job)
"""


@pytest.fixture
def qdo(runs: AppRuns) -> Run:
    """Run a command for the app."""
    return runs.qdo


def start(runs: AppRuns, *options: str) -> Proc:
    return runs.start(JOBS, "--session-timeout-seconds", "4", *options)


@pytest.mark.parametrize("queue", ["plain-1", "lanes-1"])
def test_a_paused_queue_starts_nothing_until_resumed(runs: AppRuns, qdo: Run, queue: str) -> None:
    runs.app.send(queue, 0)
    runs.app.send("other", 0)
    worker = start(runs)
    wait_until(lambda: runs.runs(queue) and runs.runs("other"), "the first runs")
    done = qdo("pause", f"{queue[:-1]}*", "--yes", "--reason", "disk full", "-o", "json")
    assert done.items()[0]["workers"] == 1
    runs.app.send(queue, 1)
    runs.app.send("other", 1)
    wait_until(lambda: len(runs.runs("other")) == 2, "the queue that is not paused")
    wait_until(lambda: runs.node(queue).last > 0, "progress is recorded")
    shown = {item["queue"]: item for item in qdo("queues", "-o", "json").items()}
    assert shown[queue]["held"] == "paused: disk full"
    assert shown[queue]["backlog"] == 1
    assert shown["other"]["held"] is None
    owner = runs.node(queue).owner
    assert owner
    # A worker that starts later knows of the pause by itself, and takes its share of the queues.
    second = start(runs)
    wait_until(lambda: len(runs.client.get_children(runs.layout.workers)) == 2, "the second worker")
    worker.send(15)
    assert worker.wait() == 0
    wait_until(lambda: runs.node(queue).owner not in ("", owner), "the new owner")
    runs.app.send("other", 2)
    wait_until(lambda: len(runs.runs("other")) == 3, "the second worker's first run")
    assert len(runs.runs(queue)) == 1
    assert qdo("resume", f"{queue[:-1]}*", "--yes", "-o", "json").items()
    wait_until(lambda: len(runs.runs(queue)) == 2, "the resumed queue")
    second.send(15)
    assert second.wait() == 0


def test_a_pause_waits_for_the_message_in_flight(runs: AppRuns, qdo: Run) -> None:
    held = runs.folder / "hold-0"
    held.touch()
    runs.app.send("slow-1", 0)
    runs.app.send("slow-1", 1)
    start(runs)
    wait_until(lambda: len(runs.runs("slow-1")) == 1, "the message in flight")
    late = qdo("pause", "slow-*", "--yes", "--timeout", "0.5s")
    assert late.code == 4, late
    assert "worker-" in late.err
    assert qdo("pause", "--list", "-o", "json").items()
    held.unlink()
    done = qdo("pause", "slow-*", "--yes", "-o", "json")
    assert done.items()[0]["workers"] == 1
    assert len(runs.runs("slow-1")) == 1
    qdo("resume", "slow-*", "--yes")
    wait_until(lambda: len(runs.runs("slow-1")) == 2, "the resumed queue")


def test_a_pause_ends_by_itself(runs: AppRuns, qdo: Run) -> None:
    runs.app.send("q", 0)
    start(runs)
    wait_until(lambda: runs.runs("q"), "the first run")
    assert qdo("pause", "q", "--for", "1s", "-o", "json").items()
    runs.app.send("q", 1)
    wait_until(lambda: len(runs.runs("q")) == 2, "the end of the pause")
    assert qdo("pause", "--list", "-o", "json").items() == []


def test_a_section_ends_with_its_maker_in_commands(runs: AppRuns, qdo: Run) -> None:
    """Also while no worker leads, who would remove it from the node."""
    runs.app.send("q", 0)
    maker = f"{runs.layout.components}/client/host-0000000001"
    runs.client.ensure_path(maker)
    pauses.add_pause(runs.client, runs.layout, replace(pauses.new_pause(["q"], "moves"), by=maker))
    assert [item["kind"] for item in qdo("pause", "--list", "-o", "json").items()] == ["section"]
    assert qdo("queues", "-o", "json").items()[0]["held"] == "section: moves"
    runs.client.delete(maker)
    assert qdo("pause", "--list", "-o", "json").items() == []
    assert qdo("queues", "-o", "json").items()[0]["held"] is None
    # Those that are over take no place.
    over = [replace(pauses.new_pause(["q"]), by=maker) for _ in range(MAX_PAUSES)]
    runs.client.set(runs.layout.fleet.holds, PauseNode(tuple(over)).encode())
    assert qdo("pause", "q", "--allow-none", "-o", "json").items()


HOSTILE = [
    b"null",
    b'{"holds": [null]}',
    b'{"holds": [{"id": "x", "queues": ["*"]}]}',
    b'{"holds": [{"id": "0123456789", "queues": "*"}]}',
    b'{"holds": [{"id": "0123456789", "queues": ["*"], "until": NaN}]}',
    b'{"holds": [{"id": "0123456789", "queues": ["*"], "until": 1e400}]}',
    b'{"holds": [{"id": "0123456789", "queues": ["*"], "by": "../x"}]}',
    b'{"holds": [{"id": "0123456789", "queues": ["*"], "by": "/a/\\ud800"}]}',
    b'{"holds": ' + b"[" * 5000 + b"]" * 5000 + b"}",
    b'{"holds": [' + b'{"id": "0123456789", "queues": ["*a*"]},' * 3000 + b"null]}",
]


def test_hostile_values_change_nothing(runs: AppRuns, qdo: Run, outsider: Client) -> None:
    """The last readable pauses stay in force; other queues continue."""
    runs.app.send("held", 0)
    runs.app.send("free", 0)
    worker = start(runs)
    wait_until(lambda: runs.runs("held") and runs.runs("free"), "the first runs")
    assert qdo("pause", "held", "-o", "json").items()
    for number, value in enumerate(HOSTILE, start=1):
        outsider.set(runs.layout.fleet.holds, value)
        runs.app.send("free", number)
        wait_until(lambda count=number + 1: len(runs.runs("free")) == count, f"after {value!r}")
    runs.app.send("held", 1)
    assert qdo("pause", "--list").code == 5
    assert qdo("pause", "free").code == 5
    wait_until(lambda: worker.output.count("cannot read") >= 2, "the report")
    outsider.delete(runs.layout.fleet.holds)
    wait_until(lambda: len(runs.runs("held")) == 2, "the end of the pause")
    assert qdo("pause", "held", "-o", "json").items()
    assert qdo("resume", "--all", "--yes").code == 0


def test_the_node_of_a_worker_says_what_it_obeys(runs: AppRuns, qdo: Run) -> None:
    """Nothing is written without a pause; the versions of the node stay those that it knows."""
    runs.app.send("q", 0)
    start(runs)
    wait_until(lambda: runs.runs("q"), "the first run")
    wait_until(lambda: runs.client.get_children(runs.layout.workers), "the worker")
    (name,) = runs.client.get_children(runs.layout.workers)

    def node() -> WorkerNode:
        return WorkerNode.parse(runs.client.get(runs.layout.worker(name))[0])

    assert node().holds == 0
    assert qdo("pause", "q", "-o", "json").items()
    stat = runs.client.get(runs.layout.fleet.holds)[1]
    assert node().holds == stat.mzxid
    # A queue that is claimed later keeps the acknowledgement.
    runs.app.send("new", 0)
    wait_until(lambda: runs.runs("new"), "the new queue")
    assert node().holds == stat.mzxid
    assert set(node().queues) == {"q", "new"}


BAD = [
    ("pause", ""),
    ("pause", "a/b"),
    ("pause", "x\ty"),
    ("pause", "q", "--for", "0"),
    ("pause", "q", "--for", "ten"),
    ("pause", "q", "--timeout", "-1"),
    ("pause", "q", "--reason", "r" * 10_000),
    ("pause", "q" * 201),
    ("resume",),
    ("resume", "q", "--all"),
]


@pytest.mark.usefixtures("own_folder")
def test_bad_calls_are_refused(cli: Run) -> None:
    with connected("sqlite:qdo-data/coordination.db") as client:
        client.ensure_path(Layout.of("a").queue("q"))
        for call in BAD:
            assert cli(*call).code == 2, call
        assert cli("pause", "unknown-*").code == 6
        assert cli("pause", "*").code == 5
        assert cli("resume", "q").code == 6
        assert cli("resume", "--id", os.urandom(4).hex()).code == 6
        for glob, options, count in (("unknown-*", ["--allow-none"], 0), ("*", [], 1)):
            (item,) = cli("pause", glob, "--yes", *options, "-o", "json").items()
            assert item["matching"] == count
        assert len(cli("pause", "--list", "-o", "json").items()) == 2


def test_a_pause_that_was_ended_before_its_answer(
    runs: AppRuns, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer is lost, and another operator resumes the queues: the pause is not made again."""
    runs.client.ensure_path(runs.layout.fleet.holds)
    commit = transactions.commit

    def lose(client: Client, ops: Sequence[Op]) -> Any:
        answer = commit(client, ops)
        if ops[0].path != runs.layout.fleet.holds:
            return answer
        monkeypatch.setattr(transactions, "commit", commit)
        pauses.end_all(client, runs.layout)
        return NoResponse()

    monkeypatch.setattr(transactions, "commit", lose)
    pauses.pause_queues(runs.client, runs.layout, pauses.new_pause(["plain-*"]))
    assert pauses.read_pauses(runs.client, runs.layout).node.pauses == ()
    assert len(read_entries(runs.client, runs.layout, limit=9)) == 1
