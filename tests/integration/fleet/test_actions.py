"""`qdo action`: workers that do what operators ask for, on both coordinators."""

from __future__ import annotations

import json
import os
import re
import signal
from typing import Any

import pytest

from qdo.coordination.znodes.layout import Layout
from qdo.fleet.audit_entries import AuditEntry
from tests.support.app_runs import AppRuns
from tests.support.cli import Ended, Run
from tests.support.coordinator_process import connected
from tests.support.processes import Proc, children, freeze, wait_until

JOBS = """
import logging

import gevent
import qdo

app = qdo.App("desk")

@app.job("slow")
def slow(message, context):
    while not message.stopping:
        gevent.sleep(0.01)
        logging.debug("still there")

@app.job("*")
def job(message, context):
    pass
"""
LAYOUT = Layout.of("desk")
FLEET = LAYOUT.fleet


def started(runs: AppRuns, processes: int = 1, *options: str) -> Proc:
    """Start workers, and wait until all are registered."""
    proc = runs.start(JOBS, "--processes", str(processes), *options)
    wait_until(lambda: len(runs.workers()) == processes, "the workers")
    return proc


def action(runs: AppRuns, *arguments: str) -> Ended:
    """Run `qdo action`."""
    return runs.qdo("action", *arguments)


def items(ended: Ended, code: int = 0) -> list[dict[str, Any]]:
    assert ended.code == code, ended.err
    found = json.loads(ended.out)
    assert found["schema"] == "qdo.action/1"
    listed: list[dict[str, Any]] = found["items"]
    return listed


def entry(runs: AppRuns, id: str) -> AuditEntry:
    path = FLEET.log_entry(id)
    wait_until(lambda: runs.client.exists(path), "the entry of the action")
    return AuditEntry.parse(id, runs.client.get(path)[0])


def test_each_worker_answers_ping_in_the_action_log(runs: AppRuns) -> None:
    started(runs, 3)
    for _ in range(2):  # with and without a folder of the worker
        found = items(action(runs, "worker-*", "ping", "--reason", "to see", "-o", "json"))
        assert [each["worker"] for each in found] == runs.workers()
        assert {each["outcome"] for each in found} == {"done"}
        assert len({each["result"] for each in found}) == 3
    for each in found:
        logged = entry(runs, each["id"])
        assert (logged.command, logged.target) == ("action ping", each["worker"])
        assert logged.reason == "to see"
        assert logged.after == {"outcome": "done", "result": each["result"]}
        assert runs.client.get_children(FLEET.actions_of(each["worker"])) == []


def test_stacks_name_the_running_jobs(runs: AppRuns) -> None:
    runs.app.send("slow", {"secret": "s3cr3t"})
    started(runs)
    [worker] = runs.workers()

    def stacks() -> str:
        ended = action(runs, worker, "stacks")
        assert ended.code == 0, ended.err
        return ended.out

    wait_until(lambda: "queue slow" in stacks(), "the job in the stacks")
    found = stacks()
    assert re.search(r"job jobs:slow, queue slow, message \S+, in a greenlet", found)
    assert "gevent.sleep(0.01)" in found
    assert "s3cr3t" not in found
    [output] = runs.client.get_children(FLEET.actionoutput)[:1]
    assert runs.client.get(f"{FLEET.actionoutput}/{output}")[0]


def test_a_drained_worker_is_not_started_again(runs: AppRuns) -> None:
    """Its job ends first, and a second drain does not abort it."""
    parent = started(runs, 2)
    drained, other = runs.workers()
    [found] = items(action(runs, drained, "drain", "-o", "json"))
    assert found["result"] == "draining"
    wait_until(lambda: runs.workers() == [other], "the end of the worker")
    parent.wait_for_line(r"process \d: an operator asked for the action drain")
    [found] = items(action(runs, other, "ping", "-o", "json"))
    assert found["outcome"] == "done"
    assert runs.workers() == [other]
    [found] = items(action(runs, other, "reload", "--yes", "-o", "json"))
    wait_until(lambda: len(runs.workers()) == 2 and other not in runs.workers(), "new workers")


def test_a_parent_whose_workers_are_drained_ends(runs: AppRuns) -> None:
    runs.app.send("slow", 1)
    parent = started(runs)
    [worker] = runs.workers()
    assert items(action(runs, worker, "drain", "-o", "json"))[0]["outcome"] == "done"
    assert parent.wait() == 0, parent.output
    assert "abort" not in parent.output


def test_a_worker_writes_another_log_for_a_while(runs: AppRuns) -> None:
    runs.app.send("slow", 1)
    worker = started(runs)
    [found] = items(action(runs, "*", "log-level", "debug", "--for", "1s", "-o", "json"))
    assert found["result"].startswith("debug until ")
    worker.wait_for_line("DEBUG .* still there")
    worker.wait_for_line("the log has its configured level again")
    logged = entry(runs, found["id"]).after
    assert logged is not None
    assert (logged["level"], logged["seconds"]) == ("debug", 1.0)


def test_frozen_workers_are_named(runs: AppRuns) -> None:
    """F-1.2: the command does not wait for them, and they do not act later."""
    parent = started(runs, 1, "--session-timeout-seconds", "30")  # its session outlives the stop
    [worker] = runs.workers()
    [pid] = children(parent.pid)
    freeze(pid, runs.coordinator)
    try:
        ended = action(runs, worker, "drain", "--timeout", "0.3s", "-o", "json")
        [found] = items(ended, 4)
        assert found["outcome"] == "unanswered"
        assert worker in ended.err
    finally:
        os.kill(pid, signal.SIGCONT)
    logged = entry(runs, found["id"])
    assert logged.after is not None
    assert logged.after["outcome"] == "expired"
    assert runs.workers() == [worker]


MISTAKES = (
    (6, "worker-9*", "ping"),
    (2, "*", "log-level"),
    (2, "*", "log-level", "debug", "--for", "25h"),
    (2, "*", "log-level", "loud"),
    (2, "*", "ping", "now"),
    (2, "*", "ping", "--for", "1m"),
    (2, "*", "ping", "--timeout", "2h"),
    (2, "*", "explode"),
)


@pytest.mark.usefixtures("own_folder")
def test_mistakes_are_one_error(cli: Run) -> None:
    """And a worker is drained only with a confirmation."""
    for code, *arguments in MISTAKES:
        ended = cli("action", *arguments)
        assert (ended.code, "planned" in ended.out) == (code, False), arguments
    with connected("sqlite:qdo-data/coordination.db") as client:
        worker = Layout.of("a").worker("worker-0000000001")
        client.create(worker, b"{}", ephemeral=True, makepath=True)
        ended = cli("action", "*", "drain")
        assert (ended.code, "planned" in ended.out) == (5, True), ended.err
