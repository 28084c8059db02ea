"""Tasks and greenlets that jobs leave in the background, and that exit: no message is charged."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from tests.support.app_runs import AppRuns

APP = """
import asyncio
import os
import sys

import gevent
import qdo

app = qdo.App("desk", attempts=2)

def ran(message):
    with open("out", "a") as file:
        print(message.queue, message.body, message.attempt, os.getpid(), file=file)

async def leave():
    sys.exit(3)

async def interrupt():
    raise KeyboardInterrupt

EXITS = {
    "task": lambda loop: loop.create_task(leave()),
    "interrupt": lambda loop: loop.create_task(interrupt()),
    "callback": lambda loop: loop.call_soon(sys.exit, 3),
    "stop": lambda loop: loop.stop(),
}

@app.job("async-*")
async def on_loop(message, context):
    left = EXITS[message.queue[6:]](asyncio.get_running_loop())
    await asyncio.sleep(0.05)
    ran(message)

@app.job("thread", executor="thread")
def in_thread(message, context):
    gevent.spawn(sys.exit, 3)
    gevent.sleep(0.05)
    ran(message)

@app.job("*")
def in_greenlet(message, context):
    gevent.spawn(sys.exit, 3)
    gevent.sleep(0.05)
    ran(message)
"""


@pytest.mark.parametrize(
    "queues",
    [
        ["async-task", "async-interrupt", "async-callback", "async-stop"],
        ["thread"],
        ["a", "b", "c"],
    ],
    ids=["async", "thread", "greenlet"],
)
def test_what_a_job_left_behind_ends_no_loop(tmp_path: Path, queues: list[str]) -> None:
    """The loop of all jobs, or the worker, ended: messages in flight failed, or hung."""
    desk = AppRuns("desk", tmp_path, f"sqlite:{tmp_path / 'coordination.db'}")
    with contextlib.closing(desk) as runs:
        runs.app.send_many([(queue, body) for queue in queues for body in range(2)])
        assert runs.start(APP, "--burst").wait(60.0) == 0
        for queue in queues:
            assert runs.runs(queue) == [("0", 1), ("1", 1)]
