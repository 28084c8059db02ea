"""`qdo demo` as a person runs it, on a smaller scale."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

from tests.support.procs import Proc, alive, children, wait_until

PROGRAM = "from qdo.cli.main import main; main()"
LIMIT_SECONDS = 90.0


def demo(folder: Path, *options: str) -> Proc:
    scale = ("--queues", "60", "--messages", "6000")
    return Proc.python("-c", PROGRAM, "demo", *scale, *options, env={"TMPDIR": str(folder)})


def test_the_demo_shows_a_kill_and_a_join_and_accounts_for_every_message(tmp_path: Path):
    with demo(tmp_path) as proc:
        code = proc.wait(LIMIT_SECONDS)
        said = proc.output
        assert code == 0, said
    assert re.search(r"kill -9: \d+ queues owned again after \d+ ms", said)
    assert "6,000 of 6,000 messages processed" in said
    assert "60 of 60 queues recorded as done, and given back" in said
    assert "now 15 + 15 + 15 + 15" in said
    assert "✗" not in said
    assert list(tmp_path.iterdir()) == []


def test_queues_of_the_killed_worker_do_not_wait_for_its_session_time_out(tmp_path: Path):
    with demo(tmp_path, "--keep") as proc:
        assert proc.wait(LIMIT_SECONDS) == 0, proc.output
        (found,) = proc.wait_for_line(r"owned again after (\d+) ms, all at work after (\d+) ms")
    assert int(found[1]) < 3000
    assert int(found[2]) < 5000
    (kept,) = tmp_path.iterdir()
    assert {"messages.db", "coordination.db", "ledger", "workers.log"} <= {
        each.name for each in kept.iterdir()
    }


def test_the_demo_fails_and_says_why_when_its_workers_end(tmp_path: Path):
    with demo(tmp_path) as proc:
        proc.wait_for_line("queues shared as", timeout_seconds=LIMIT_SECONDS)
        (parent,) = children(proc.pid)
        os.kill(parent, signal.SIGKILL)
        assert proc.wait(LIMIT_SECONDS) == 1
        proc.wait_for_line("qdo-worker ended with exit code -9")
        proc.wait_for_line(f"kept in {tmp_path}")
    assert len(list(tmp_path.iterdir())) == 1


def test_an_interrupted_demo_leaves_nothing_behind(tmp_path: Path):
    with demo(tmp_path) as proc:
        proc.wait_for_line("queues shared as", timeout_seconds=LIMIT_SECONDS)
        workers = [pid for parent in children(proc.pid) for pid in (parent, *children(parent))]
        proc.send(signal.SIGINT)
        assert proc.wait(LIMIT_SECONDS) == 130
        wait_until(lambda: not any(map(alive, workers)), "all workers have ended")
    assert list(tmp_path.iterdir()) == []


def test_fewer_messages_than_queues_are_refused():
    with Proc.python("-c", PROGRAM, "demo", "--queues", "9", "--messages", "3") as proc:
        assert proc.wait() == 2
        proc.wait_for_line("every queue needs a message")
