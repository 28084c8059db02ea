"""A message that runs for much longer than usual is named without anybody asking."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from qdo.worker.metrics.durations import ENOUGH
from tests.support.app_runs import AppRuns
from tests.support.cli import command
from tests.support.processes import wait_until

APP_NAME = "desk"
APP = """
import asyncio
import os
import time

import gevent
import qdo

app = qdo.App("desk", session_timeout_seconds=5)

def wait(message, sleep):
    while message.body == "hang" and not os.path.exists("go"):
        sleep(0.05)

@app.job("greenlet*")
def in_greenlet(message, context):
    wait(message, gevent.sleep)

@app.job("lanes", order="none", concurrency=5)
def in_lanes(message, context):
    wait(message, gevent.sleep)

@app.job("thread", executor="thread")
def in_thread(message, context):
    wait(message, time.sleep)

@app.job("process", executor="process")
def in_process(message, context):
    wait(message, time.sleep)

@app.job("async")
async def in_asyncio(message, context):
    while message.body == "hang" and not os.path.exists("go"):
        await asyncio.sleep(0.05)
"""
QUEUES = ("greenlet", "lanes", "thread", "process", "async")
SHOWN = ("greenlet", "lanes", "thread")
"""The executors of these tell where their code stands."""
MOST_SECONDS = 110.0
"""The first message of a process takes as long as its start, and is the usual duration."""


@pytest.mark.timeout(180)
def test_messages_that_hang_are_named(runs: AppRuns) -> None:
    """In the log, once, and in the verdicts; a queue without a history is not judged."""
    for queue in QUEUES:
        runs.app.send_many([(queue, "quick")] * ENOUGH)
    worker = runs.start(APP)
    wait_until(lambda: all(each["backlog"] == 0 for each in _queues(runs)), "a history")
    ids = {queue: runs.app.send(queue, "hang") for queue in QUEUES}
    first = runs.app.send("greenlet-new", "hang")

    def named() -> dict[str, str]:
        """Return the lines that name messages, by queue."""
        lines = [line for line in worker.output.splitlines() if "has run for" in line]
        found = {line.partition(", queue ")[2].partition(",")[0]: line for line in lines}
        assert len(found) == len(lines)
        return found

    wait_until(lambda: named().keys() == ids.keys(), "all are named", MOST_SECONDS)
    for queue, line in named().items():
        assert ids[queue] in line
        assert f"`qdo ps {queue} --stacks`" in line
        assert (re.search(r"jobs\.py:\d+ wait\b", line) is not None) == (queue in SHOWN), line
    wait_until(lambda: _reasons(runs).keys() >= ids.keys(), "their workers report them")
    for queue, item in _reasons(runs).items():
        assert ids[queue] in item["reason"]
        assert item["remedy"] == f"qdo ps {queue} --stacks"
        assert item["running"]["usual_seconds"] < item["running"]["seconds"] / 10
    assert first not in worker.output

    (runs.folder / "go").touch()
    wait_until(lambda: _reasons(runs) == {}, "they have ended")


def _reasons(runs: AppRuns) -> dict[str, dict[str, Any]]:
    """Return the queues whose message is named."""
    return {each["queue"]: each for each in _queues(runs) if "usually" in (each["reason"] or "")}


def _queues(runs: AppRuns) -> list[dict[str, Any]]:
    places = ("--app", "desk", "--coordinator", runs.coordinator, "--broker", runs.broker_url)
    ended = command("-m", "qdo", "queues", "-o", "json", *places, cwd=runs.folder)
    assert ended.code == 0, ended.err
    return list(json.loads(ended.out)["items"])
