"""The parent process with real children."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from tests.support.forks.processes import Popen
from tests.support.paths import ROOT
from tests.support.processes import PATIENCE_SECONDS, Proc, alive, children, wait_until


def parent(
    mode: str, *arguments: str, env: Mapping[str, str] | None = None, **settings: object
) -> Proc:
    """Start a parent with fake children."""
    settings_text = json.dumps(
        {"app": "test", "coordinator": "sqlite:/nowhere/coordination.db", **settings}
    )
    return Proc.python("-m", "tests.support.fakes.parent", settings_text, mode, *arguments, env=env)


def up(proc: Proc, count: int) -> list[int]:
    """Return the pids of the first `count` children, once they are up."""
    return [int(match[1]) for match in proc.wait_for_line(r"child up pid=(\d+)", count=count)]


def test_sigterm_drains_every_child_and_the_parent_ends_well():
    """Each child leads a group and a session: Ctrl-C in a terminal must reach the parent only."""
    with parent("serve", processes=3) as proc:
        pids = up(proc, 3)
        assert sorted(children(proc.pid)) == sorted(pids)
        for pid in pids:
            assert os.getpgid(pid) == pid
            assert os.getsid(pid) == pid
        proc.send(signal.SIGTERM)
        assert proc.wait() == 0
        drained = proc.wait_for_line(r"child drained pid=(\d+)", count=3)
        assert sorted(int(match[1]) for match in drained) == sorted(pids)


def test_sigint_and_sighup_drain_too():
    for number in (signal.SIGINT, signal.SIGHUP):
        with parent("serve") as proc:
            up(proc, 1)
            proc.send(number)
            assert proc.wait() == 0


def test_late_stop_signals_do_not_replace_the_exit_code():
    """An impatient service manager repeats SIGTERM until the process has ended."""
    for _ in range(3):
        with parent("serve") as proc:
            up(proc, 1)
            while alive(proc.pid):
                proc.send(signal.SIGTERM)
                time.sleep(0.002)
            assert proc.wait() in (0, 1)


def test_killed_child_restarts_and_the_others_keep_running():
    with parent("serve", processes=2) as proc:
        first, second = up(proc, 2)
        os.kill(first, signal.SIGKILL)
        _, _, third = up(proc, 3)
        assert sorted(children(proc.pid)) == sorted([second, third])
        proc.wait_for_line(r"died of SIGKILL")
        proc.wait_for_line(r"restarting in 0\.1 s")
        proc.send(signal.SIGTERM)
        assert proc.wait() == 0


def test_child_that_died_of_a_nameless_signal_restarts():
    """Most real-time signals have no name."""
    with parent("serve") as proc:
        (first,) = up(proc, 1)
        os.kill(first, signal.SIGRTMIN + 6)
        up(proc, 2)
        proc.wait_for_line(rf"died of signal {signal.SIGRTMIN + 6}")
        proc.send(signal.SIGTERM)
        assert proc.wait() == 0


def test_second_sigterm_reaches_children_and_third_kills_them():
    with parent("stubborn", processes=2) as proc:
        pids = up(proc, 2)
        proc.send(signal.SIGTERM)
        proc.wait_for_line("child asked count=1", count=2)
        proc.send(signal.SIGTERM)
        proc.wait_for_line("child asked count=2", count=2)
        proc.send(signal.SIGTERM)
        assert proc.wait() == 1
        assert not any(map(alive, pids))


def test_child_that_outlasts_the_drain_is_killed():
    """It has the time that its broker takes to close, such as an open long poll of SQS."""
    env = {"TESTS_MARGIN_SECONDS": "0.5"}
    broker = "sqs://eu-west-1/t-?wait_seconds=2"
    with parent("stubborn", env=env, drain_seconds=0.5, broker=broker) as proc:
        (pid,) = up(proc, 1)
        began = time.monotonic()
        proc.send(signal.SIGTERM)
        assert proc.wait() == 1
        assert time.monotonic() - began >= 2.5
        proc.wait_for_line(rf"killing process 1 \(pid {pid}\)")


def test_children_of_a_killed_parent_notice_and_drain():
    with parent("serve", processes=2) as proc:
        pids = up(proc, 2)
        proc.send(signal.SIGKILL)
        assert proc.wait() == -signal.SIGKILL
        wait_until(lambda: not any(map(alive, pids)), "both children have drained")
        assert len(proc.wait_for_line("child drained", count=2)) == 2


def test_invalid_reports_are_logged_and_ignored():
    with parent("babble") as proc:
        proc.wait_for_line("WARNING .* ignoring", count=5)
        up(proc, 1)
        proc.send(signal.SIGTERM)
        assert proc.wait() == 0


def test_a_sleeping_parent_uses_no_time():
    """It waits for signals, reports and due times. It never polls."""
    with parent("serve", processes=2) as proc:
        up(proc, 2)
        before = _switches(proc.pid)
        # This waits on purpose: nothing may happen in this second.
        with_deadline = time.monotonic() + 1.0
        wait_until(lambda: time.monotonic() > with_deadline, "a second is over")
        assert _switches(proc.pid) - before <= 2


def _switches(pid: int) -> int:
    """Return how often a process yielded the processor, which is how often it woke up."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("voluntary_ctxt_switches"):
            return int(line.split()[1])
    raise AssertionError("no such line")


def test_a_group_is_gone_only_when_its_last_member_is():
    """The parent adopts orphans, so it sees each of them exit. Until then no session is closed."""
    program = """
import os, signal, sys
from qdo.settings import Settings
from qdo.system.processes import adopt_orphans
from qdo.worker.supervisor.child import ChildProcess

class Spared(ChildProcess):
    def kill(self):
        pass  # so that the orphan lives on

assert adopt_orphans()
script = "import subprocess, sys; print(subprocess.Popen(['sleep', '600']).pid, flush=True)"
reading, writing = os.pipe()
os.dup2(writing, 1)
child = Spared("test", [sys.executable, "-c", script], Settings(), None)
orphan = int(os.read(reading, 100))
assert child.reap() == 0
assert os.getpgid(orphan) == child.pid
assert not child.group_gone()
os.kill(orphan, signal.SIGKILL)
os.waitid(os.P_PID, orphan, os.WEXITED | os.WNOWAIT)
assert not child.group_gone()
assert os.waitpid(orphan, 0) == (orphan, signal.SIGKILL)
assert child.group_gone()
"""
    with Proc.python("-c", program) as proc:
        assert proc.wait() == 0, proc.output


def test_orphans_of_a_living_child_are_reaped():
    """A parent that adopts orphans must reap them, or zombies would pile up."""
    with parent("orphan") as proc:
        (found,) = proc.wait_for_line(r"orphan pid=(\d+)")
        orphan = int(found[1])
        up(proc, 1)
        wait_until(lambda: not Path(f"/proc/{orphan}").exists(), "the orphan is reaped")
        proc.send(signal.SIGTERM)
        assert proc.wait() == 0


def test_a_log_that_is_not_read_delays_neither_restart_nor_stop():
    """The parent blocked in its first line after the reader had stopped, and ignored SIGTERM."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(writer, bytes(4096))
    os.set_blocking(writer, True)
    settings = json.dumps({"app": "test", "coordinator": "sqlite:/nowhere/coordination.db"})
    argv = [sys.executable, "-m", "tests.support.fakes.parent", settings, "serve"]
    pipes = {"stdout": subprocess.PIPE, "stderr": writer}
    with Popen(argv, **pipes, start_new_session=True, cwd=ROOT) as process:
        try:
            first = int(process.stdout.readline().rpartition(b"=")[2])
            os.kill(first, signal.SIGKILL)
            assert process.stdout.readline().startswith(b"child up")
            process.terminate()
            assert process.wait(PATIENCE_SECONDS) == 0
        finally:
            os.close(reader)
            os.close(writer)
            process.kill()
