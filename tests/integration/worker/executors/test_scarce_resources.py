"""Threads and descriptors that the system refuses: messages wait, and no attempt is charged."""

from __future__ import annotations

import contextlib
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from qdo.message import Message
from qdo.system.native import start_thread
from tests.support.app_runs import AppRuns
from tests.support.engine import EngineSetup, until
from tests.support.processes import children, wait_until

APP = """
import os
import resource

import gevent
import qdo

app = qdo.App("desk", attempts=2)

def ran(message):
    with open("out", "a") as file:
        print(message.queue, message.body, message.attempt, os.getpid(), file=file)

@app.job("thread-*", executor="thread")
def thread(message, context):
    ran(message)

@app.job("loop")
async def loop(message, context):
    ran(message)

@app.job("limit")
def limit(message, context):
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = os.dup(0)
    os.close(free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free + message.body, before[1]))
    while not os.path.exists("enough"):
        gevent.sleep(0.01)
    resource.setrlimit(resource.RLIMIT_NOFILE, before)
"""


@pytest.fixture
def runs(tmp_path: Path) -> Iterator[AppRuns]:
    runs = AppRuns("desk", tmp_path, f"sqlite:{tmp_path / 'coordination.db'}")
    yield runs
    runs.close()


@pytest.mark.parametrize("free", [0, 3])
def test_messages_wait_for_descriptors_of_threads(runs: AppRuns, free: int) -> None:
    """The event loop of a thread needs some: libev wrote 20 MB of errors a second, forever."""
    queues = ["loop", *(f"thread-{number}" for number in range(3))]
    runs.app.send("limit", free)
    proc = runs.start(APP)
    wait_until(lambda: bool(children(proc.pid)), "the worker process")
    (pid,) = children(proc.pid)
    before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    wait_until(lambda: resource.prlimit(pid, resource.RLIMIT_NOFILE) != before, "the limit")
    runs.app.send_many([(queue, 0) for queue in queues])
    for what in ("a thread", "the asyncio loop"):
        proc.wait_for_line(f"ERROR .* cannot start {what} of job")
    (runs.folder / "enough").touch()
    for queue in queues:
        wait_until(lambda queue=queue: runs.runs(queue) == [("0", 1)], queue)  # type: ignore[misc]
    assert len(proc.output) < 50_000


@pytest.mark.parametrize("is_async", [False, True])
def test_a_message_waits_for_a_thread_of_the_system(
    tmp_path: Path, is_async: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A limit of processes, as containers have it, was charged to messages."""
    attempts: list[int] = []
    failing = iter(range(3))

    def start(*given: Any) -> int:
        if next(failing, None) is not None:
            raise RuntimeError("can't start new thread")
        return start_thread(*given)

    for module in ("aio", "thread"):
        monkeypatch.setattr(f"qdo.worker.executors.{module}.start_thread", start)

    def job(message: Message, context: Any) -> None:
        attempts.append(message.attempt)

    async def coroutine(message: Message, context: Any) -> None:
        attempts.append(message.attempt)

    with contextlib.closing(EngineSetup(tmp_path, attempts=2)) as engine:
        if is_async:
            engine.app.job()(coroutine)
        else:
            engine.app.job(executor="thread")(job)
        engine.send("q", 1)
        engine.start("q")
        until(lambda: attempts)
    assert attempts == [1]
