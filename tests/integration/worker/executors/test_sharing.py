"""Objects that jobs share in one worker process: each line of the table in docs/executors.rst."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from tests.support.app_runs import AppRuns

APP = """
import asyncio
import multiprocessing
import os
import queue
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import qdo

app = qdo.App("desk", attempts=5, backoff_seconds=0.01)
locks = {
    "lock": threading.Lock(),
    "rlock": threading.RLock(),
    "semaphore": threading.BoundedSemaphore(1),
    "condition": threading.Condition(),
}
queues = {"queue": queue.Queue(), "simple": queue.SimpleQueue()}
pool = ThreadPoolExecutor(2)
event = threading.Event()
waiting = set()
inside = dict.fromkeys(locks, 0)
short = threading.Lock()

async def nap():
    await asyncio.sleep(0.05)

def use(kind, queue):
    if kind in locks:
        for _ in range(5):
            with locks[kind]:
                inside[kind] += 1
                assert inside[kind] == 1
                time.sleep(0.001)
                inside[kind] -= 1
    elif kind == "short":
        for _ in range(1000):
            with short:
                pass
    elif kind in queues:
        queues[kind].put(queue)
        assert queues[kind].get(timeout=20) is not None
    elif kind == "pool":
        assert pool.submit(lambda: time.sleep(0.001) or 7).result(timeout=20) == 7
    elif kind == "thread":
        thread = threading.Thread(target=time.sleep, args=(0.001,))
        thread.start()
        thread.join()
    elif kind == "event":
        waiting.add(queue)
        if len(waiting) == 4:
            event.set()
        assert event.wait(20)
    elif kind == "run":
        asyncio.run(nap())
    elif kind == "processes":
        with multiprocessing.Pool(1) as processes:
            assert processes.map(abs, [-1]) == [1]

def job(message, context):
    kind = message.queue.split(".")[1]
    use(kind, message.queue)
    with open("out", "a") as file:
        print(message.queue, 0, message.attempt, os.getpid(), file=file)

async def coroutine(message, context):
    if ".executor." in message.queue:
        for number in range(5):
            loop = asyncio.get_running_loop()
            assert await loop.run_in_executor(pool, lambda: time.sleep(0.001) or 7) == 7
            await asyncio.sleep(0)
    job(message, context)

app.job("thread.*", executor="thread")(job)
app.job("process.*", executor="process")(job)
app.job("async.*")(coroutine)
app.job("greenlet.*")(job)
"""
SHARED = ("lock", "rlock", "semaphore", "condition", "short", "queue", "simple", "pool", "event")
MESSAGES = 6


def unfinished(folder: Path, queues: list[str], messages: int = MESSAGES) -> list[str]:
    """Process messages of these queues; return the queues with fewer runs."""
    desk = AppRuns("desk", folder, f"sqlite:{folder / 'coordination.db'}")
    with contextlib.closing(desk) as runs:
        runs.app.send_many([(queue, 0) for queue in queues for _ in range(messages)])
        assert runs.start(APP, "--burst").wait(90.0) == 0
        return [queue for queue in queues if len(runs.runs(queue)) != messages]


@pytest.mark.parametrize("executors", [["thread"] * 4, ["thread", "greenlet"] * 2])
def test_jobs_in_threads_and_greenlets_share(tmp_path: Path, executors: list[str]) -> None:
    """Locks hung: the idle thread that had to notify the next owner did not run its loop."""
    queues = [f"{name}.{kind}.{n}" for n, name in enumerate(executors) for kind in SHARED]
    assert unfinished(tmp_path, queues) == []


@pytest.mark.parametrize(
    ("executor", "kinds"),
    [
        ("thread", ["thread", "run"]),
        ("greenlet", ["thread"]),
        ("async", ["pool", "thread", "executor"]),
        ("process", ["pool", "thread", "run", "processes"]),
    ],
)
def test_what_else_jobs_of_an_executor_may_use(
    tmp_path: Path, executor: str, kinds: list[str]
) -> None:
    queues = [f"{executor}.{kind}.{n}" for n in range(2) for kind in kinds]
    assert unfinished(tmp_path, queues, 1) == []


@pytest.mark.parametrize(
    ("executor", "kind", "error"),
    [
        ("async", "run", "cannot be called from a running event loop"),
        ("greenlet", "run", "cannot be called from a running event loop"),
        ("thread", "processes", "child watchers are only available on the default loop"),
    ],
)
def test_what_jobs_of_an_executor_may_not_use(
    tmp_path: Path, executor: str, kind: str, error: str
) -> None:
    desk = AppRuns("desk", tmp_path, f"sqlite:{tmp_path / 'coordination.db'}")
    with contextlib.closing(desk) as runs:
        runs.app.send_many([(f"{executor}.{kind}.{n}", 0) for n in range(4)])
        assert runs.start(APP, "--burst").wait(60.0) == 0
        letters = runs.broker.dead_letters
        found = [each.error for n in range(4) for each in letters.records(f"{executor}.{kind}.{n}")]
    assert found
    assert all(error in each for each in found)
