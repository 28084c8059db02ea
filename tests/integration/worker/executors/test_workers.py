"""Whole worker processes whose jobs never yield, and the fate of their processes."""

from __future__ import annotations

import contextlib
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from qdo.app import App
from tests.support.paths import ROOT
from tests.support.processes import Proc, alive, children, descendants, wait_until, whole_lines

JOBS = "from tests.apps.busy import app\n"


def words_of(pid: int) -> list[str]:
    """Return the command line of a process."""
    return Path(f"/proc/{pid}/cmdline").read_text().split("\0")[:-1]


class Held:
    """A worker program of that app."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "held.py").write_text(JOBS)
        self.app = App("held", broker=f"sqlite:{folder / 'messages.db'}")

    def start(self, *options: str) -> Proc:
        return Proc.python(
            *("-m", "qdo.cli.worker", "held:app"),
            *("--broker", f"sqlite:{self.folder / 'messages.db'}"),
            *("--coordinator", f"sqlite:{self.folder / 'coordination.db'}"),
            *options,
            cwd=self.folder,
            env={"PYTHONPATH": str(ROOT)},
        )

    def said(self, word: str) -> list[list[str]]:
        path = self.folder / "said"
        lines = whole_lines(path)
        return [line.split()[1:] for line in lines if line.split()[0] == word]


@pytest.fixture
def held(tmp_path: Path) -> Iterator[Held]:
    one = Held(tmp_path)
    yield one
    one.app.close()


@pytest.mark.parametrize("queue", ["thread", "process"])
@pytest.mark.parametrize("how", ["c", "python"])
def test_a_job_that_never_yields_loses_no_session(held: Held, queue: str, how: str) -> None:
    """For three session timeouts; another queue's messages are processed all the while."""
    held.app.send(queue, 3.0, headers={"how": how})
    with held.start("--session-timeout-seconds", "1") as worker:
        wait_until(lambda: len(held.said("begin")) == 1, "the long job began")
        done = 0
        while not held.said("end"):
            held.app.send("quick", done)
            done += 1
            wait_until(lambda number=done: len(held.said("quick")) >= number, "a quick job")  # type: ignore[misc]
        # A machine may stall for a second, but 3 s have no room for five that wait for a look.
        assert done >= 5
        worker.send(signal.SIGTERM)
        assert worker.wait() == 0
        assert "session is over" not in worker.output
    assert len(held.said("begin")) == 1


@pytest.mark.exec  # `ps` reads command lines
def test_ps_tells_the_processes_of_an_app_apart(held: Held) -> None:
    """The parent, its workers and their job processes; the app does not see the titles."""
    held.app.send("argv", 60.0)
    with held.start("--processes", "2") as parent:
        wait_until(lambda: len(held.said("argv")) == 1, "the job process runs")
        workers = children(parent.pid)
        titles = [words_of(pid)[-1] for pid in workers]
        jobs = [words_of(pid)[-1] for pid in descendants(parent.pid) if pid not in workers]
        assert "held:app" in words_of(parent.pid)
    assert titles == ["process 1 of held:app", "process 2 of held:app"]
    assert jobs == 2 * ["job argv of held:app (app held)"]  # its keeper, and itself
    assert held.said("argv") == [["1"]]


def test_every_executor_in_a_worker_that_gevent_has_patched(held: Held) -> None:
    """Waiting, helper threads and sending work in each; so does a deadline."""
    held.app.send_many([("hangs", "x"), ("waits", "a"), ("async", "b"), ("sends", "c")])
    config = held.folder / "qdo.toml"
    config.write_text("attempts = 1\n")
    with held.start("-c", str(config), "--burst") as worker:
        assert worker.wait() == 0
        assert "JobTimeoutError" in worker.output
    assert sorted(words[0] for words in held.said("echo")) == ["a", "b", "c"]


def test_deadlines_reach_threads_however_busy_the_process_is(held: Held) -> None:
    """Some threads compute, others wait, for long and ever so shortly: all end."""
    bodies = ["compute", 60_000, 1, "compute", 50, 0]
    held.app.send_many([(f"mixed-{n}", body) for n, body in enumerate(bodies) for _ in range(5)])
    config = held.folder / "qdo.toml"
    config.write_text("attempts = 1\n")
    with held.start("-c", str(config), "--burst") as worker:
        assert worker.wait(60) == 0
        expected = re.compile(r"^ +qdo\.(outcomes\.JobInterrupt|errors\.JobTimeoutError)\b", re.M)
        assert worker.output.count("Traceback (") == len(expected.findall(worker.output))
    letters = held.app.broker.dead_letters.records()
    assert len(letters) == 5 * len(bodies)
    assert {letter.error.partition(":")[0] for letter in letters} == {"JobTimeoutError"}


def test_no_job_process_outlives_a_killed_worker(held: Held) -> None:
    """kill -9 of the worker process in the middle of a job that never yields."""
    held.app.send("process", 600)
    with held.start("--session-timeout-seconds", "2") as worker:
        wait_until(lambda: len(held.said("begin")) == 1, "the job began")
        job = int(held.said("begin")[0][2])
        (child,) = children(worker.pid)
        assert (os.getpgid(job), os.getsid(job)) == (job, child)
        os.kill(child, signal.SIGKILL)
        wait_until(lambda: not alive(job), "the job's process is dead")
        # And the message is run again, by the process that takes the dead one's place.
        wait_until(lambda: len(held.said("begin")) == 2, "the next attempt")
        for number in (signal.SIGTERM, signal.SIGTERM):
            worker.send(number)
            with contextlib.suppress(AssertionError):
                worker.wait(0.5)
        worker.wait()
        family = descendants(worker.pid)
    assert family == []


def test_no_job_process_outlives_the_whole_program(held: Held) -> None:
    """Parent and worker process are killed at once: nothing is left to clean up."""
    held.app.send("process", 600)
    with held.start("--session-timeout-seconds", "2") as worker:
        wait_until(lambda: len(held.said("begin")) == 1, "the job began")
        job = int(held.said("begin")[0][2])
        (child,) = children(worker.pid)
        worker.send(signal.SIGSTOP)
        os.kill(child, signal.SIGKILL)
        worker.send(signal.SIGKILL)
        wait_until(lambda: not alive(job), "the job's process is dead")


def test_a_signal_to_every_process_drains(held: Held) -> None:
    """As an init system sends it to the whole service: jobs in processes end in peace."""
    held.app.send("process", 1.0)
    with held.start() as worker:
        wait_until(lambda: len(held.said("begin")) == 1, "the job began")
        for pid in (*descendants(worker.pid), worker.pid):
            if pid not in children(worker.pid):
                os.kill(pid, signal.SIGTERM)
        assert worker.wait() == 0
    assert len(held.said("end")) == 1


def test_a_thread_that_cannot_be_stopped_ends_its_process(held: Held) -> None:
    """At the end of the drain; its message is repeated, and never runs twice at once."""
    held.app.send("thread", 600, headers={"how": "c"})
    with held.start("--drain-seconds", "0.1", "--session-timeout-seconds", "2") as worker:
        wait_until(lambda: len(held.said("begin")) == 1, "the job began")
        worker.send(signal.SIGTERM)
        assert worker.wait() == 1
        assert "1 job did not stop; exiting" in worker.output
    assert held.said("end") == []
