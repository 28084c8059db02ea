"""Whole worker processes whose jobs never yield, and the fate of their processes."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest

from tests.support.app_runs import AppRuns
from tests.support.processes import Proc, children, descendants, wait_until

JOBS = "from tests.apps.busy import app\n"


def words_of(pid: int) -> list[str]:
    """Return the command line of a process."""
    return Path(f"/proc/{pid}/cmdline").read_text().split("\0")[:-1]


@pytest.mark.parametrize("how", ["c", "python"])
def test_a_thread_that_never_yields_loses_no_session(local_runs: AppRuns, how: str) -> None:
    """For three session timeouts; another queue's messages are processed all the while."""
    local_runs.app.send("thread", 3.0, headers={"how": how})
    with local_runs.start(JOBS, "--session-timeout-seconds", "1") as worker:
        wait_until(lambda: len(local_runs.said("begin")) == 1, "the long job began")
        done = 0
        while not local_runs.said("end"):
            local_runs.app.send("quick", done)
            done += 1
            wait_until(lambda number=done: len(local_runs.said("quick")) >= number, "a quick job")  # type: ignore[misc]
        # A machine may stall for a second, but 3 s have no room for five that wait for a look.
        assert done >= 5
        worker.send(signal.SIGTERM)
        assert worker.wait() == 0
        assert "session is over" not in worker.output
    assert len(local_runs.said("begin")) == 1


@pytest.mark.exec  # `ps` reads command lines
def test_ps_tells_the_processes_of_an_app_apart(local_runs: AppRuns) -> None:
    """The parent, its workers and their job processes; the app does not see the titles."""
    local_runs.app.send("argv", 60.0)
    with local_runs.start(JOBS, "--processes", "2") as parent:
        wait_until(lambda: len(local_runs.said("argv")) == 1, "the job process runs")
        workers = children(parent.pid)
        titles = [words_of(pid)[-1] for pid in workers]
        jobs = [words_of(pid)[-1] for pid in descendants(parent.pid) if pid not in workers]
        assert "jobs:app" in words_of(parent.pid)
    assert titles == ["process 1 of jobs:app", "process 2 of jobs:app"]
    assert jobs == 2 * ["job argv of jobs:app (app desk)"]  # its keeper, and itself
    assert local_runs.said("argv") == [["1"]]


def test_every_executor_in_a_worker_that_gevent_has_patched(local_runs: AppRuns) -> None:
    """Waiting, helper threads and sending work in each; so does a deadline."""
    local_runs.app.send_many([("hangs", "x"), ("waits", "a"), ("async", "b"), ("sends", "c")])
    with local_runs.start(JOBS, "--burst", QDO_ATTEMPTS="1") as worker:
        assert worker.wait() == 0
        assert "JobTimeoutError" in worker.output
    assert sorted(words[0] for words in local_runs.said("echo")) == ["a", "b", "c"]


def test_deadlines_reach_threads_however_busy_the_process_is(local_runs: AppRuns) -> None:
    """Some threads compute, others wait, for long and ever so shortly: all end."""
    bodies = ["compute", 60_000, 1, "compute", 50, 0]
    local_runs.app.send_many(
        [(f"mixed-{n}", body) for n, body in enumerate(bodies) for _ in range(5)]
    )
    with local_runs.start(JOBS, "--burst", QDO_ATTEMPTS="1") as worker:
        assert worker.wait(60) == 0
        expected = re.compile(r"^ +qdo\.(outcomes\.JobInterrupt|errors\.JobTimeoutError)\b", re.M)
        assert worker.output.count("Traceback (") == len(expected.findall(worker.output))
    assert local_runs.errors() == 5 * len(bodies) * ["JobTimeoutError"]


def test_a_signal_to_every_process_drains(local_runs: AppRuns) -> None:
    """As an init system sends it to the whole service: jobs in processes end in peace."""
    local_runs.app.send("process", 1.0)
    with local_runs.start(JOBS) as worker:
        wait_until(lambda: len(local_runs.said("begin")) == 1, "the job began")
        for pid in (*descendants(worker.pid), worker.pid):
            if pid not in children(worker.pid):
                os.kill(pid, signal.SIGTERM)
        assert worker.wait() == 0
    assert len(local_runs.said("end")) == 1


def test_a_thread_that_cannot_be_stopped_ends_its_process(local_runs: AppRuns) -> None:
    """At the end of the drain; its message is repeated, and never runs twice at once."""
    local_runs.app.send("thread", 600, headers={"how": "c"})
    with local_runs.start(
        JOBS, "--drain-seconds", "0.1", "--session-timeout-seconds", "2"
    ) as worker:
        wait_until(lambda: len(local_runs.said("begin")) == 1, "the job began")
        worker.send(signal.SIGTERM)
        assert worker.wait() == 1
        assert "1 job did not stop; exiting" in worker.output
    assert local_runs.said("end") == []


def test_an_embedded_worker_outlasts_a_thread(local_runs: AppRuns) -> None:
    """It must not end its app's process, so it keeps its queues until the job has ended."""
    local_runs.app.send("thread", 5.0)
    program = ("-m", "tests.apps.embedded")
    with Proc.python(*program, env=local_runs.environment, cwd=local_runs.folder) as embedded:
        wait_until(lambda: (local_runs.folder / "lock").exists(), "the job began")
        with local_runs.start("from tests.apps.embedded import app\n", "--burst") as other:
            assert other.wait() == 0
        assert embedded.wait() == 1
        assert "keeps its session" in embedded.output
    assert local_runs.said("twice") == []
