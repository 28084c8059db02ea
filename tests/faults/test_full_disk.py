"""The disk of the embedded coordinator is full for a while: workers pause, and nothing moves."""

from __future__ import annotations

import contextlib
import re
import signal
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from qdo.app import App
from qdo.errors import DatabaseFullError
from qdo.system.clock import clock
from tests.faults.full_disk import full
from tests.support.processes import Proc, wait_until, whole_lines

SESSION_SECONDS = 2.0
QUEUES = [f"q{number}" for number in range(6)]

JOBS = """
import os, time

out = open("out", "a", 1)

def run(message, context):
    out.write(f"begin {message.queue} {message.body} {os.getpid()}\\n")
    time.sleep(3.0 if message.queue == "slow" else 0.02)
    out.write(f"end {message.queue} {message.body} {os.getpid()}\\n")
"""


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 2 MiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(folder)],
        check=False,
        capture_output=True,
    )
    if mounted.returncode:
        pytest.skip("mounting a file system needs root")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def lines(folder: Path) -> list[list[str]]:
    return [line.split() for line in whole_lines(folder / "out")]


def owners(folder: Path) -> dict[str, str]:
    """Return the process that ran the last message of each queue."""
    return {line[1]: line[3] for line in lines(folder)}


def shares(folder: Path) -> list[int]:
    return sorted(Counter(owners(folder).values()).values())


def test_a_full_disk_of_the_coordinator_ends_no_worker(tmp_path: Path, small_disk: Path) -> None:
    """No process ends, no session is closed, no queue moves, and all queues continue."""
    (tmp_path / "jobs.py").write_text(JOBS)
    broker = f"sqlite:{tmp_path / 'messages.db'}"
    with contextlib.closing(App("full", broker=broker)) as app:
        app.send_many([("slow", number) for number in range(3)])
        app.send_many([(queue, number) for queue in QUEUES for number in range(400)])
    worker = Proc.python(
        *("-m", "qdo.cli.worker", "--app", "full", "--job", "jobs:run", "--processes", "2"),
        *("--broker", broker, "--coordinator", f"sqlite:{small_disk / 'coordination.db'}"),
        *("--session-timeout-seconds", str(SESSION_SECONDS)),
        cwd=tmp_path,
    )
    with worker:
        wait_until(lambda: shares(tmp_path) == [3, 4], "two processes share the queues")
        before = owners(tmp_path)
        with full(small_disk):
            worker.wait_for_line("cannot grow")
            began = clock()
            wait_until(lambda: clock() - began > 1.5 * SESSION_SECONDS, "sessions would be over")
        started = len(lines(tmp_path))
        wait_until(
            lambda: {line[1] for line in lines(tmp_path)[started:]} >= set(QUEUES),
            "all queues continue",
        )
        assert owners(tmp_path) == before
        assert not re.search(" (ERROR|CRITICAL) ", worker.output)
        worker.send(signal.SIGTERM)
        assert worker.wait() == 0
    _check_order(lines(tmp_path))


@pytest.mark.parametrize("burst", [["--burst"], []], ids=["burst", "service"])
def test_a_worker_that_starts_on_a_full_disk_ends(
    burst: list[str], tmp_path: Path, small_disk: Path
) -> None:
    """The coordinator's file cannot be created: exit code 3, and the reason is in the log."""
    (tmp_path / "jobs.py").write_text(JOBS)
    broker = f"sqlite:{tmp_path / 'messages.db'}"
    with contextlib.closing(App("full", broker=broker)) as app:
        app.send("q", 1)
    with (
        full(small_disk),
        Proc.python(
            *("-m", "qdo.cli.worker", "--app", "full", "--job", "jobs:run", *burst),
            *("--broker", broker, "--coordinator", f"sqlite:{small_disk / 'coordination.db'}"),
            cwd=tmp_path,
        ) as worker,
    ):
        assert worker.wait() == DatabaseFullError.exit_code == 3
        assert len(re.findall(r"process 1 started", worker.output)) == 1
        worker.wait_for_line("^qdo-worker: database .*coordination.db")


def _check_order(found: list[list[str]]) -> None:
    """Check that each queue ran one message at a time, in order, and none twice."""
    for queue in ("slow", *QUEUES):
        of_queue = [(what, int(body)) for what, name, body, _ in found if name == queue]
        count = len(of_queue) // 2
        assert of_queue == [
            (what, number) for number in range(count) for what in ("begin", "end")
        ], queue
