"""What the process of a job has started ends with it, however it ends and whatever it was."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from qdo.app import App
from tests.support.paths import ROOT
from tests.support.processes import Proc, alive, children, descendants, wait_until, whole_lines

JOBS = """
import ctypes, mmap, os, subprocess, sys, time
import qdo

app = qdo.App("groups")
ENDS = qdo.Policy(attempts=3, backoff_seconds=0.01, backoff_max_seconds=0.01)
SLEEP = [sys.executable, "-c", "import os, time; print(os.getpid(), flush=True); time.sleep(600)"]
# A daemon: a session of its own, and init would be its parent. It starts another program.
DAEMON = '''
import os, subprocess, sys
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        print(os.getpid(), flush=True)
        subprocess.run(%r)
''' % (SLEEP,)

def say(*words):
    with open("said", "a") as file:
        file.write(" ".join(str(word) for word in words) + "\\n")

def leave_programs():
    with open("left", "a") as left:
        subprocess.Popen(SLEEP, stdout=left)
        subprocess.Popen(SLEEP, stdout=left, start_new_session=True)
        subprocess.run([sys.executable, "-c", DAEMON], stdout=left)
    wanted = 4 * (1 + len([line for line in open("said") if line.startswith("left")]))
    while len(open("left").read().split()) < wanted:
        time.sleep(0.01)
    say("left", os.getpid())

@app.job("late", executor="process", timeout_seconds=3, policy=ENDS)
def late(message, context):
    leave_programs()
    while True:
        pass

@app.job("crashes", executor="process", policy=ENDS)
def crashes(message, context):
    leave_programs()
    ctypes.string_at(0) if message.body == "signal" else os._exit(3)

@app.job("recycled", executor="process", recycle_after=1)
def recycled(message, context):
    leave_programs()

@app.job("plain", executor="process")
def plain(message, context):
    leave_programs()
    time.sleep(message.body)

@app.job("forks", executor="process", timeout_seconds=1, policy=ENDS)
def forks(message, context):
    # Each copy goes on forking, until the machine or the deadline stops them.
    say("left", os.getpid())
    for _ in range(6):
        os.fork()
    with open("left", "a") as file:
        file.write(f"{os.getpid()}\\n")
    while True:
        time.sleep(0.01)

@app.job("memory", executor="process", memory_mib=256, policy=ENDS)
def memory(message, context):
    # Two programs of 150 MiB each, or 150 MiB that four copies share.
    use = "m = bytearray(150 << 20); print(1, flush=True); import time; time.sleep(600)"
    if message.body == "apart":
        for _ in range(2):
            subprocess.Popen([sys.executable, "-c", use], start_new_session=True)
        time.sleep(600)
    kept = b"x" * (150 << 20)
    for _ in range(4):
        if os.fork() == 0:
            sum(kept[::4096])
            time.sleep(600)
    time.sleep(1.0)
    say("done", message.body)
"""


class Groups:
    """A worker program of that app."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "groups.py").write_text(JOBS)
        (folder / "said").touch()
        (folder / "left").touch()
        self.app = App("groups", broker=f"sqlite:{folder / 'messages.db'}")

    def start(self, *options: str) -> Proc:
        return Proc.python(
            *("-m", "qdo.cli.worker", "groups:app"),
            *("--broker", f"sqlite:{self.folder / 'messages.db'}"),
            *("--coordinator", f"sqlite:{self.folder / 'coordination.db'}"),
            *options,
            cwd=self.folder,
            env={"PYTHONPATH": str(ROOT)},
        )

    def left(self) -> list[int]:
        """Return the processes that jobs have started."""
        return [int(line) for line in whole_lines(self.folder / "left")]

    def jobs(self) -> list[int]:
        """Return the processes of jobs that have started theirs."""
        lines = whole_lines(self.folder / "said")
        return [int(line.split()[1]) for line in lines if line.startswith("left")]

    def errors(self) -> list[str]:
        letters = self.app.broker.dead_letters.records()
        return [letter.error.partition(":")[0] for letter in letters]


@pytest.fixture
def groups(tmp_path: Path) -> Iterator[Groups]:
    one = Groups(tmp_path)
    yield one
    one.app.close()
    for pid in filter(alive, one.left()):  # a test that failed
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
    with groups.start() as worker:
        wait_until(lambda: groups.errors() == [error], "the dead letter", 40.0)
        assert len(groups.left()) == 12
        assert not any(map(alive, groups.left()))
        worker.send(signal.SIGTERM)
        assert worker.wait() == 0


@pytest.mark.parametrize("queue", ["recycled", "plain"])
def test_a_process_that_ends_leaves_no_program(groups: Groups, queue: str) -> None:
    """When it is recycled, and at the end of a drain."""
    groups.app.send(queue, 0)
    with groups.start("--burst") as worker:
        assert worker.wait() == 0, worker.output
        assert len(groups.left()) == 4
        assert not any(map(alive, groups.left()))


def test_an_aborted_job_leaves_no_program(groups: Groups) -> None:
    groups.app.send("plain", 600)
    with groups.start() as worker:
        wait_until(lambda: len(groups.jobs()) == 1, "the job has started its programs")
        worker.send(signal.SIGTERM)
        worker.wait_for_line("draining")
        worker.send(signal.SIGTERM)
        assert worker.wait() == 1, worker.output
        assert not any(map(alive, groups.left()))


def test_a_killed_worker_leaves_no_program(groups: Groups) -> None:
    """kill -9: all of the former attempt has ended before the message is run again."""
    groups.app.send("plain", 600)
    with groups.start("--session-timeout-seconds", "4") as worker:
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
    with groups.start() as worker:
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
    with groups.start() as worker:
        wait_until(lambda: groups.errors() == ["JobTimeoutError"], "the dead letter", 40.0)
        assert len(groups.left()) > 100
        assert not any(map(alive, groups.left()))
        worker.send(signal.SIGTERM)
        assert worker.wait() == 0
        assert descendants(worker.pid) == []


def test_the_memory_of_all_programs_of_a_job_counts(groups: Groups) -> None:
    """Together, wherever they are; pages that copies share count once."""
    groups.app.send_many([("memory", "shared"), ("memory", "apart")])
    with groups.start("--burst") as worker:
        assert worker.wait(60) == 0
    assert groups.errors() == ["JobCrashedError"]
    assert whole_lines(groups.folder / "said") == ["done shared"]
