"""What the process of a job has started ends with it, however it ends and whatever it was."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.app_runs import AppRuns
from tests.support.processes import alive, children, descendants, wait_until, whole_lines

JOBS = "from tests.apps.descendants import app\n"


class Groups(AppRuns):
    """Workers of that app, and what their jobs have started."""

    def left(self) -> list[int]:
        """Return the processes that jobs have started."""
        return [int(line) for line in whole_lines(self.folder / "left")]

    def jobs(self) -> list[int]:
        """Return the processes of jobs that have started theirs."""
        return [int(pid) for (pid,) in self.said("left")]


@pytest.fixture
def groups(tmp_path: Path, embedded_url: str) -> Iterator[Groups]:
    for name in ("said", "left"):
        (tmp_path / name).touch()
    with contextlib.closing(Groups("desk", tmp_path, embedded_url)) as made:
        yield made
    for pid in filter(alive, made.left()):  # a test that failed
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize(
    ("queue", "body", "error"),
    [
        ("late", 1, "JobTimeoutError"),
        ("crashes", "exit", "JobCrashedError"),
        ("crashes", "signal", "JobCrashedError"),
    ],
)
def test_a_failed_attempt_leaves_no_program(
    groups: Groups, queue: str, body: str, error: str
) -> None:
    """Three attempts: programs in the job's group, in a session of their own, and daemons."""
    groups.app.send(queue, body)
    with groups.start(JOBS) as worker:
        wait_until(lambda: groups.errors() == [error], "the dead letter", 40.0)
        assert len(groups.left()) == 12
        assert not any(map(alive, groups.left()))
        worker.send(signal.SIGTERM)
        assert worker.wait() == 0


@pytest.mark.parametrize("queue", ["recycled", "plain"])
def test_a_process_that_ends_leaves_no_program(groups: Groups, queue: str) -> None:
    """When it is recycled, and at the end of a drain."""
    groups.app.send(queue, 0)
    with groups.start(JOBS, "--burst") as worker:
        assert worker.wait() == 0, worker.output
        assert len(groups.left()) == 4
        assert not any(map(alive, groups.left()))


def test_an_aborted_job_leaves_no_program(groups: Groups) -> None:
    groups.app.send("plain", 600)
    with groups.start(JOBS) as worker:
        wait_until(lambda: len(groups.jobs()) == 1, "the job has started its programs")
        worker.send(signal.SIGTERM)
        worker.wait_for_line("draining")
        worker.send(signal.SIGTERM)
        assert worker.wait() == 1, worker.output
        assert not any(map(alive, groups.left()))


def test_a_killed_worker_leaves_no_program(groups: Groups) -> None:
    """kill -9: all of the former attempt has ended before the message is run again."""
    groups.app.send("plain", 600)
    with groups.start(JOBS, "--session-timeout-seconds", "4") as worker:
        wait_until(lambda: len(groups.jobs()) == 1, "the job has started its programs")
        (child,) = children(worker.pid)
        os.kill(child, signal.SIGKILL)
        wait_until(lambda: len(groups.left()) > 4, "the next attempt")
        assert not any(map(alive, [*groups.jobs()[:1], *groups.left()[:4]]))
        wait_until(lambda: len(groups.jobs()) == 2, "its programs")
        # The same, with nothing left to clean up after it.
        (child,) = children(worker.pid)
        worker.send(signal.SIGSTOP)
        os.kill(child, signal.SIGKILL)
        worker.send(signal.SIGKILL)
        wait_until(lambda: not any(map(alive, [*groups.jobs(), *groups.left()])), "all are dead")


def test_a_dead_keeper_takes_the_job_with_it(groups: Groups) -> None:
    groups.app.send("plain", 600)
    with groups.start(JOBS) as worker:
        wait_until(lambda: len(groups.jobs()) == 1, "the job has started its programs")
        (job,) = groups.jobs()
        (child,) = children(worker.pid)
        (keeper,) = children(child)
        assert job in children(keeper)
        os.kill(keeper, signal.SIGKILL)
        wait_until(lambda: not alive(job), "the job is dead")


def test_a_job_that_forks_leaves_no_copy(groups: Groups) -> None:
    """64 copies in each of three attempts."""
    groups.app.send("forks", 1)
    with groups.start(JOBS) as worker:
        wait_until(lambda: groups.errors() == ["JobTimeoutError"], "the dead letter", 40.0)
        assert len(groups.left()) > 100
        assert not any(map(alive, groups.left()))
        worker.send(signal.SIGTERM)
        assert worker.wait() == 0
        assert descendants(worker.pid) == []


def test_the_memory_of_all_programs_of_a_job_counts(groups: Groups) -> None:
    """Together, wherever they are; pages that copies share count once."""
    groups.app.send_many([("memory", "shared"), ("memory", "apart")])
    with groups.start(JOBS, "--burst") as worker:
        assert worker.wait(60) == 0
    assert groups.errors() == ["JobCrashedError"]
    assert groups.said("done") == [["shared"]]
