"""Jobs that read documents, in a real worker: each executor sees what its messages ask for."""

from __future__ import annotations

import signal
from contextlib import closing
from pathlib import Path

import pytest

import qdo
from tests.support.app_runs import AppRuns
from tests.support.processes import paused, wait_until, whole_lines
from tests.support.zookeeper import Ensemble

JOBS = "from tests.apps.documents import app, plans\n"
QUEUES = ["greenlet", "thread", "process", "asyncio", "batch"]


def said(runs: AppRuns) -> list[str]:
    return whole_lines(runs.folder / "said")


def test_each_executor_sees_what_its_message_asks_for(runs: AppRuns) -> None:
    """Every message is sent right after its write: without the wait, copies would be behind."""
    plans = runs.app.documents("plans")
    for number in range(20):
        stamp = plans.put("acme", number)
        for queue in QUEUES:
            runs.app.send(queue, number, after=stamp)
    assert runs.start(JOBS, "--burst").wait() == 0
    found = [line.split() for line in said(runs)]
    assert len(found) == 20 * len(QUEUES)
    assert all(int(value) >= int(body) for _, body, value in found)


def test_no_job_starts_once_the_lease_is_over(tmp_path: Path, zookeeper_server: Ensemble) -> None:
    """Its message waits for documents while the coordinator, and so the lease, is away."""
    runs = AppRuns("desk", tmp_path, zookeeper_server.url(f"/{tmp_path.name}"))
    stamp = runs.app.documents("plans").put("acme", 0)
    for queue in QUEUES:
        runs.app.send(queue, "first", after=stamp)
    (server,) = zookeeper_server.servers
    with closing(runs), runs.start(JOBS, "--session-timeout-seconds", "2") as worker:
        wait_until(lambda: len(said(runs)) == len(QUEUES), "all have run")
        with paused(server.pid):
            for queue in QUEUES:
                runs.app.send(queue, "second", after=stamp + 10**9)
            late = "gets older documents"
            wait_until(lambda: worker.output.count(late) == len(QUEUES), "all have waited")
            worker.wait_for_line("the lease expired")
            assert len(said(runs)) == len(QUEUES)
        again = {f"{queue} second 0" for queue in QUEUES}
        wait_until(lambda: again <= {*said(runs)}, "all have run again")
        worker.send(signal.SIGTERM)
        assert worker.wait() == 0


def test_jobs_see_changes_while_the_worker_runs(runs: AppRuns) -> None:
    plans = runs.app.documents("plans")
    runs.app.send("greenlet", 0, after=plans.put("acme", 0))
    with runs.start(JOBS):
        wait_until(lambda: len(said(runs)) == 1, "the first job")
        for number in range(1, 50):
            stamp = plans.put("acme", number)
            runs.app.send_many(
                [qdo.NewMessage(queue, number, after=stamp) for queue in ("greenlet", "thread")]
            )
        wait_until(lambda: len(said(runs)) == 99, "all jobs")
        for line in said(runs):
            _, body, value = line.split()
            assert int(value) >= int(body)


@pytest.mark.parametrize("first", ["thread", "asyncio", "greenlet"])
def test_the_first_use_may_be_in_any_thread(runs: AppRuns, first: str) -> None:
    """The connection belongs to the worker's event loop, not to the thread that needs it first."""
    plans = runs.app.documents("plans")
    runs.app.send(first, 0, after=plans.put("acme", 0))
    with runs.start(JOBS):
        wait_until(lambda: len(said(runs)) == 1, "the first job")
        for number, queue in enumerate(["greenlet", "locked", "asyncio", "batch", first], 1):
            runs.app.send(queue, number, after=plans.put("acme", number))
            wait_until(lambda number=number: len(said(runs)) == number + 1, queue)  # type: ignore[misc]
    assert all(line.split()[1] == line.split()[2] for line in said(runs))
