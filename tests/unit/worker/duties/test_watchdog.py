"""Findings of the watchdog."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import pytest

from qdo.system.processes import waited_seconds
from qdo.worker.duties.watchdog import BlockedLoop, Watch, block_limit


def look(beat: float) -> tuple[str, str]:
    return "queue q, message 1, job j", "stack"


def test_running_loop_gives_no_finding() -> None:
    """Beats younger than the limit."""
    watch = Watch(1.0, 100.0, 0.0)
    for step in range(1, 20):
        now = 100 + step * 0.25
        assert watch.check(now, 0.0, now - 0.3, look) is None


def test_blocked_loop_is_reported_at_its_start_and_end() -> None:
    """The start with the message in flight and the stack, the end with the whole duration."""
    watch = Watch(1.0, 100.0, 0.0)
    reports = [watch.check(100 + step * 0.25, step * 0.25, 100.0, look) for step in range(1, 13)]
    found = [report for report in reports if report is not None]
    assert found == [BlockedLoop("blocked", 1.0, "queue q, message 1, job j", "stack")]
    assert watch.check(103.25, 3.25, 103.2, look) == BlockedLoop("over", 103.2 - 100.0)
    assert watch.check(103.5, 3.5, 103.4, look) is None


def test_each_block_is_reported() -> None:
    """Two in a row."""
    watch = Watch(1.0, 100.0, 0.0)
    kinds = []
    for now, beat in (
        (100.9, 100.0),
        (101.1, 100.0),
        (101.2, 101.15),
        (102.1, 101.15),
        (103.0, 101.15),
    ):
        report = watch.check(now, now - 100, beat, look)
        kinds.append(report.kind if report else None)
    assert kinds == [None, "blocked", "over", None, "blocked"]


def test_code_that_lets_no_thread_run_is_a_block() -> None:
    """A C extension that holds the interpreter lock: time passed, and the process used it."""
    watch = Watch(1.0, 100.0, 0.0)
    report = watch.check(105.0, 5.0, 100.0, look)
    assert report is not None
    assert report.kind == "blocked"


def test_no_job_is_blamed_for_a_stop_while_it_blocks() -> None:
    """A fork takes half a second; meanwhile the process is stopped for thirty."""
    watch = Watch(0.3, 100.0, 0.0)
    blocked = watch.check(100.35, 0.3, 100.0, look)
    assert blocked is not None
    assert blocked.kind == "blocked"
    assert watch.check(130.35, 0.31, 100.0, look) == BlockedLoop("stopped", 30.0)
    over = watch.check(130.45, 0.35, 130.4, look)
    assert over is not None
    assert (over.kind, round(over.seconds, 3)) == ("over", 0.4)


def test_stopped_process_is_not_a_blocked_loop() -> None:
    """SIGSTOP: no thread ran and no processor time was used. Then the time of the loop begins."""
    watch = Watch(1.0, 100.0, 0.0)
    assert watch.check(130.0, 0.01, 100.0, look) == BlockedLoop("stopped", 30.0)
    assert watch.check(130.25, 0.02, 100.0, look) is None
    report = watch.check(131.05, 0.8, 100.0, look)
    assert report is not None
    assert (report.kind, round(report.seconds, 3)) == ("blocked", 1.05)


def test_a_loop_that_waits_for_a_processor_is_not_blocked() -> None:
    """Other programs use the machine: no job is blamed, and the time counts for none."""
    watch = Watch(1.0, 100.0, 0.0)
    assert watch.check(100.25, 0.0, 100.0, look, waited=7.0) is None
    for step in range(2, 12):
        now = 100 + step * 0.25
        report = watch.check(now, step * 0.01, 100.0, look, waited=7 + (step - 1) * 0.24)
        assert (report == BlockedLoop("stopped", pytest.approx(1.2))) == (step == 6)
    blocked = watch.check(104.0, 1.5, 100.0, look, waited=9.4)
    assert blocked == BlockedLoop("blocked", pytest.approx(1.6), *look(0.0))
    assert watch.check(104.25, 1.5, 104.1, look) == BlockedLoop("over", pytest.approx(1.7))


@pytest.mark.exec
def test_the_wait_for_a_processor_is_measured() -> None:
    """Beside a process that computes on the only processor that this thread may use."""
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(allowed)})
    try:
        before = waited_seconds(threading.get_native_id())
        with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as other:
            try:
                while waited_seconds(threading.get_native_id()) < before + 0.01:
                    pass
            finally:
                other.kill()
    finally:
        os.sched_setaffinity(0, allowed)
    assert waited_seconds(0) == 0.0


@pytest.mark.parametrize(("timeout", "limit"), [(None, 30.0), (1.0, 10.0), (600.0, 600.0)])
def test_the_job_decides_how_long_it_may_block(timeout: float | None, limit: float) -> None:
    """Session timeout 10 s: no time limit, a shorter and a longer one."""
    assert block_limit(timeout, 10.0) == limit
