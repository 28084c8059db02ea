"""Objects that jobs share in one worker process: each line of the table in docs/executors.rst."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

import pytest

from tests.support.app_runs import AppRuns
from tests.support.doc_pages import table

APP = "from tests.apps.sharing import app\n"
SHARED = ("lock", "rlock", "semaphore", "condition", "short", "queue", "simple", "pool", "event")
MESSAGES = 6
KINDS = {
    "threading.Lock": "lock",
    "threading.BoundedSemaphore": "semaphore",
    "threading.RLock": "rlock",
    "threading.Condition": "condition",
    "queue.Queue": "queue",
    "queue.SimpleQueue": "simple",
    "threading.Event": "event",
    "concurrent.futures.ThreadPoolExecutor": "pool",
    "threading.Thread": "thread",
    "asyncio.run": "run",
    "subprocess.run": "program",
    "multiprocessing.Pool": "processes",
}
ERRORS = {
    "rlock": "AssertionError",
    "condition": "AssertionError",
    "run": "cannot be called from a running event loop",
    "processes": "child watchers are only available on the default loop",
}
EXECUTORS = ("greenlet", "thread", "async", "process")


def cells(verdict: str) -> list[tuple[str, str]]:
    """Return the cells of the table that begin with a word, as executor and kind."""
    return [
        (executor, KINDS[name])
        for row in table("executors", "shared-objects").values()
        for name in re.findall("`([^`]+)`", row[0])
        for executor, cell in zip(EXECUTORS, row[1:], strict=True)
        if cell.partition(" ")[0].strip(":,") == verdict
    ]


def unfinished(folder: Path, queues: list[str], messages: int = MESSAGES) -> list[str]:
    """Process messages of these queues; return the queues with fewer runs."""
    desk = AppRuns("desk", folder, f"sqlite:{folder / 'coordination.db'}")
    with contextlib.closing(desk) as runs:
        runs.app.send_many([(queue, 0) for queue in queues for _ in range(messages)])
        worker = runs.start(APP, "--burst", QDO_EXECUTOR_PROCESSES="2")
        assert worker.wait(90.0) == 0
        return [queue for queue in queues if len(runs.runs(queue)) != messages]


@pytest.mark.parametrize("executors", [["thread"] * 4, ["thread", "greenlet"] * 2])
def test_jobs_in_threads_and_greenlets_share(tmp_path: Path, executors: list[str]) -> None:
    """Locks hung: the idle thread that had to notify the next owner did not run its loop."""
    queues = [f"{name}.{kind}.{n}" for n, name in enumerate(executors) for kind in SHARED]
    assert unfinished(tmp_path, queues) == []


def test_each_cell_of_the_table_has_a_verdict() -> None:
    verdicts = [cells(verdict) for verdict in ("works", "fails", "blocks")]
    assert all(verdicts)
    assert sum(map(len, verdicts)) == len(KINDS) * len(EXECUTORS)


@pytest.mark.parametrize("executor", EXECUTORS)
def test_objects_that_jobs_of_an_executor_may_use(tmp_path: Path, executor: str) -> None:
    kinds = [kind for name, kind in cells("works") if name == executor]
    if executor == "async":
        kinds.append("executor")  # run_in_executor with the pool
    count = 1 if executor == "process" else 4  # in processes of their own they share nothing
    queues = [f"{executor}.{kind}.{n}" for n in range(count) for kind in kinds]
    assert unfinished(tmp_path, queues, 1) == []


def test_objects_that_fail(local_runs: AppRuns) -> None:
    """Beside each other in one worker."""
    failing = cells("fails")
    local_runs.app.send_many(
        [(f"{executor}.{kind}.{n}", 0) for executor, kind in failing for n in range(4)]
    )
    worker = local_runs.start(APP)
    for executor, kind in failing:
        worker.wait_for_line(rf"queue {executor}\.{kind}\..* failed, .*{ERRORS[kind]}")


@pytest.mark.parametrize(("executor", "kind"), cells("blocks"))
def test_objects_that_block_a_loop(local_runs: AppRuns, executor: str, kind: str) -> None:
    """The log names the job: its messages waited forever without a line."""
    local_runs.app.send_many([(f"{executor}.{kind}.{n}", 0) for n in range(2)])
    line = "the event loop has been blocked"
    if executor == "async":
        line = rf"the asyncio loop has been blocked .* queue async\.{kind}\.\d, message .*, job "
    local_runs.start(APP).wait_for_line(line)
