"""`qdo action` asks workers whose event loop is blocked by a job: their parents answer."""

from __future__ import annotations

import signal
from typing import Any

import pytest

from qdo.coordination.znodes.layout import Layout
from tests.support.app_runs import AppRuns
from tests.support.processes import wait_until

APP = """
import os
import re

import qdo

app = qdo.App("desk", session_timeout_seconds=5)
policy = qdo.Policy(attempts=2, backoff_seconds=0.02)

def compute_until_released():
    while not os.path.exists("go"):
        pass

@app.job(policy=policy, timeout_seconds=120)  # until then the parent lets it block
def job(message, context):
    open("started", "w").close()
    if message.body == "compute":
        compute_until_released()
    if message.body == "lock":
        re.match("(a+)+$", 60 * "a" + "b")
"""
LAYOUT = Layout.of("desk")


def ask(runs: AppRuns, *arguments: str) -> dict[str, Any]:
    """Run `qdo action` for the only worker; return its result."""
    [worker] = runs.workers()
    [found] = runs.qdo("action", worker, *arguments, "-o", "json").items()
    assert found["outcome"] == "done"
    return dict(found)


def blocked(runs: AppRuns, body: str) -> None:
    """Start a worker, and wait until a job blocks it."""
    runs.app.send("q", body)
    runs.start(APP)
    # A worker that takes an action before it is blocked never answers it.
    wait_until((runs.folder / "started").exists, "the job")
    wait_until(lambda: "blocked" in ask(runs, "ping")["result"], "the answer of the parent")


@pytest.mark.parametrize(
    ("body", "function"), [("compute", "compute_until_released"), ("lock", "match")]
)
def test_stacks_show_the_job_that_blocks(runs: AppRuns, body: str, function: str) -> None:
    """Even one that holds the interpreter lock, when no Python code of the worker runs."""
    blocked(runs, body)
    stacks = ask(runs, "stacks")
    assert "event loop blocked for" in stacks["result"]
    assert f"in {function}" in stacks["output"]
    assert "jobs.py" in stacks["output"]


def test_the_worker_answers_again_after_the_job(runs: AppRuns) -> None:
    blocked(runs, "compute")
    (runs.folder / "go").touch()
    wait_until(lambda: "blocked" not in ask(runs, "ping")["result"], "the answer of the worker")
    assert ask(runs, "stacks")["output"].count("thread main") <= 1


def test_a_blocked_worker_drains_after_its_job(runs: AppRuns) -> None:
    """Its parent passes the wish on, and starts no other one."""
    blocked(runs, "compute")
    [worker] = runs.workers()
    [parent] = runs.procs
    assert "draining once the job returns" in ask(runs, "drain")["result"]
    assert runs.workers() == [worker]
    (runs.folder / "go").touch()
    assert parent.wait() == 0, parent.output
    assert runs.workers() == []


def test_a_blocked_worker_that_is_restarted_is_replaced(runs: AppRuns) -> None:
    blocked(runs, "compute")
    before = runs.workers()
    [parent] = runs.procs
    assert "restarting once the job returns" in ask(runs, "restart")["result"]
    (runs.folder / "go").touch()
    wait_until(lambda: runs.workers() and runs.workers() != before, "the new worker")
    parent.send(signal.SIGTERM)
    assert parent.wait() == 0, parent.output


def test_other_actions_wait_for_the_worker(runs: AppRuns) -> None:
    """The parent leaves what only the worker can do."""
    blocked(runs, "compute")
    [worker] = runs.workers()
    folder = LAYOUT.fleet.actions_of(worker)
    assert runs.qdo("action", worker, "log-level", "debug", "--timeout", "0.3s").code == 4
    assert len(runs.client.get_children(folder)) == 1
    (runs.folder / "go").touch()
    wait_until(lambda: not runs.client.get_children(folder), "the end of the action")
