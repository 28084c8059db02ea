"""Middleware and the job context in every executor: around each job, once per worker."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.engine import EngineSetup, until
from tests.support.paths import ROOT

JOBS = """
import contextlib, os
import qdo

def say(*words):
    with open("said", "a") as file:
        file.write(" ".join(str(word) for word in (os.getpid(), *words)) + "\\n")

@contextlib.contextmanager
def resources():
    say("enter")
    yield {"open": True}
    say("leave")

app = qdo.App("test", job_context=resources)

def act(message, context):
    assert context["open"]
    say("job", message.queue, message.body)
    if message.body == "fail" and message.attempt == 1:
        raise ValueError("no")

@app.job("greenlet")
def greenlet(message, context):
    act(message, context)

@app.job("thread", executor="thread")
def thread(message, context):
    act(message, context)

@app.job("process", executor="process")
def process(message, context):
    act(message, context)

@app.job("asyncio")
async def coroutine(message, context):
    act(message, context)

@app.middleware(jobs="sync")
def around(call_next, message, context):
    say("before", message.body)
    try:
        call_next(message, context)
    finally:
        say("after", message.body)

@app.middleware(jobs="async")
async def async_around(call_next, message, context):
    say("before", message.body)
    try:
        await call_next(message, context)
    finally:
        say("after", message.body)
"""


@pytest.fixture
def engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Iterator[EngineSetup]:
    name = f"hooks_{abs(hash(request.node.name))}"
    (tmp_path / f"{name}.py").write_text(JOBS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    app = importlib.import_module(name).app
    one = EngineSetup(tmp_path, app=app, target=f"{name}:app", log_level="error")
    yield one
    one.close()
    sys.modules.pop(name, None)


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
