"""Middleware and the job context in every executor: around each job, once per worker."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from qdo.testing import TestKit
from tests.apps.executors import async_hooks
from tests.support.app_runs import AppRuns
from tests.support.engine import EngineSetup, until
from tests.support.paths import ROOT

APP = "tests.apps.executors.hooks"


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[EngineSetup]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    app = importlib.import_module(APP).app
    one = EngineSetup(tmp_path, app=app, target=f"{APP}:app", log_level="error")
    yield one
    one.close()
    sys.modules.pop(APP)


@pytest.mark.parametrize("executor", ["greenlet", "thread", "process", "asyncio"])
def test_hooks_go_with_the_job(engine: EngineSetup, tmp_path: Path, executor: str) -> None:
    """Middleware runs around every attempt, where the job runs; the context outlives the last."""
    engine.send(executor, 1, "fail", 2)
    engine.start(executor)
    until(lambda: engine.worker.state == "running")
    path = tmp_path / "said"
    until(lambda: path.exists() and "after 2\n" in path.read_text(), "the last message")
    assert engine.end() == 0
    lines = [line.split() for line in path.read_text().splitlines()]
    own = str(os.getpid())
    there = [line for line in lines if (line[0] == own) != (executor == "process")]
    around_each = [
        [["before", body], ["job", executor, body], ["after", body]]
        for body in ("1", "fail", "fail", "2")
    ]
    expected = [["enter"], *(step for steps in around_each for step in steps), ["leave"]]
    assert [line[1:] for line in there] == expected
    # The worker of a process job has a context of its own, for job_failure.
    here = [line[1:] for line in lines if line[0] == own]
    assert here[0] == ["enter"]
    assert here[-1] == ["leave"]
    assert here.count(["enter"]) == here.count(["leave"]) == 1


SENT = [("q", 1), ("q", "fail")]
ASYNC_STEPS = (
    "enter, before 1, job 1 1, event done, before fail, job fail 2, failure fail 2 no, event retry"
    ", before fail, job fail 3, failure fail 3 no, event dead-letter, leave"
)


@pytest.mark.parametrize("where", ["worker", "kit"])
def test_async_hooks_run_on_the_loop_of_the_jobs(
    local_runs: AppRuns, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the order of those that are no coroutines."""
    if where == "worker":
        local_runs.app.send_many(SENT)
        proc = local_runs.start("from tests.apps.executors.async_hooks import app\n", "--burst")
        assert proc.wait(60.0) == 0, proc.output
    else:
        monkeypatch.chdir(local_runs.folder)
        with TestKit(async_hooks.app) as kit:
            async_hooks.app.send_many(SENT)
            kit.run_until_settled()
    steps = (local_runs.folder / "said").read_text().splitlines()
    assert ", ".join(each.removesuffix(" loops=1") for each in steps) == ASYNC_STEPS
