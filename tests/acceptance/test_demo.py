"""`qdo demo` as a user runs it, on a smaller scale."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

from tests.support.processes import Proc, alive, children, wait_until

PROGRAM = "from qdo.cli.main import main; main()"
LIMIT_SECONDS = 90.0
SESSION_MS = 10_000
"""The session timeout, which a worker whose parent died would cost."""


def demo(folder: Path, *options: str) -> Proc:
    scale = ("--queues", "60", "--messages", "6000")
    return Proc.python("-c", PROGRAM, "demo", *scale, *options, env={"TMPDIR": str(folder)})


def option_of(pid: int, name: str) -> str:
    """Return the value of an option of a running command."""
    words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    return words[words.index(name) + 1]


def test_demo_kills_and_adds_workers_and_loses_nothing(tmp_path: Path):
    with demo(tmp_path) as proc:
        code = proc.wait(LIMIT_SECONDS)
        output = proc.output
        assert code == 0, output
    assert re.search(r"all 20 queues .* \d+ ms, .* \d+ ms", output)
    assert "6,000 of 6,000 messages" in output
    assert "60 of 60 queues" in output
    assert "now 15 + 15 + 15 + 15" in output
    assert "✓" in output
    assert "✗" not in output
    assert list(tmp_path.iterdir()) == []


def test_queues_of_a_killed_worker_resume_at_once(tmp_path: Path):
    with demo(tmp_path, "--keep") as proc:
        assert proc.wait(LIMIT_SECONDS) == 0, proc.output
        (found,) = proc.wait_for_line(r"all \d+ queues .* (\d+) ms\b.* (\d+) ms")
    assert int(found[1]) <= int(found[2]) < SESSION_MS
    (kept,) = tmp_path.iterdir()
    assert {"messages.db", "coordination.db", "ledger", "workers.log"} <= {
        each.name for each in kept.iterdir()
    }


def test_demo_fails_with_the_reason_if_its_workers_exit(tmp_path: Path):
    with demo(tmp_path) as proc:
        proc.wait_for_line("20 [+] 20 [+] 20", timeout_seconds=LIMIT_SECONDS)
        (parent,) = children(proc.pid)
        assert option_of(parent, "--concurrency") == "60", "no queue waits for a free slot"
        os.kill(parent, signal.SIGKILL)
        assert proc.wait(LIMIT_SECONDS) == 1
        proc.wait_for_line("qdo-worker .* -9")
        proc.wait_for_line(f" {tmp_path}/")
    assert len(list(tmp_path.iterdir())) == 1


def test_an_interrupted_demo_leaves_nothing_behind(tmp_path: Path):
    with demo(tmp_path) as proc:
        proc.wait_for_line("20 [+] 20 [+] 20", timeout_seconds=LIMIT_SECONDS)
        workers = [pid for parent in children(proc.pid) for pid in (parent, *children(parent))]
        proc.send(signal.SIGINT)
        assert proc.wait(LIMIT_SECONDS) == 130
        wait_until(lambda: not any(map(alive, workers)), "all workers have ended")
    assert list(tmp_path.iterdir()) == []


def test_demo_rejects_fewer_messages_than_queues():
    with Proc.python("-c", PROGRAM, "demo", "--queues", "9", "--messages", "3") as proc:
        assert proc.wait() == 2
        proc.wait_for_line("--messages")
