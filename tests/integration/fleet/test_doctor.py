"""`qdo doctor` with real workers on both coordinators, and with services that are broken."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from typing import Any

import pytest

from qdo.brokers.dead_letters import DeadLetterRecord
from qdo.coordination.znodes.values import encode
from qdo.ops import doctor as checks
from qdo.ops.doctor import notices
from qdo.ops.doctor_case import BACKLOGS, Case
from qdo.ops.worker_status import deaths, lost_workers
from tests.support.app_runs import AppRuns, jobs
from tests.support.processes import children, freeze, wait_until

JOBS = jobs("good-*")


def doctor(
    runs: AppRuns, code: int, app: str = "jobs:app", coordinator: str = ""
) -> dict[str, dict[str, Any]]:
    places = ("--app", app, "--coordinator", coordinator or runs.coordinator)
    ended = runs.qdo("doctor", "-o", "json", *places)
    assert ended.code == code, ended.out + ended.err
    found = json.loads(ended.out)
    assert found["schema"] == "qdo.doctor/1"
    items = {each["check"]: each for each in found["items"]}
    assert all(each["remedy"] for each in items.values() if each["status"] in ("failed", "warning"))
    return items


def statuses(found: dict[str, dict[str, Any]], *wanted: str) -> dict[str, str]:
    return {name: each["status"] for name, each in found.items() if each["status"] in wanted}


def test_a_healthy_fleet_is_healthy(runs: AppRuns) -> None:
    """Each check has an answer, whatever the number of queues; with a name instead of the app,
    those of its jobs have none."""
    runs.app.send_many([(f"good-{number}", 1) for number in range(BACKLOGS + 5)])
    runs.start(JOBS, "--processes", "2")
    wait_until(lambda: runs.runs("good-1") == [("1", 1)], "the message")
    wait_until(lambda: statuses(doctor(runs, 0), "warning", "failed") == {}, "the second worker")
    found = doctor(runs, 0)
    assert statuses(found, "unknown") == {}
    if runs.coordinator.startswith("zookeeper"):
        assert "standalone" in found["coordinator-servers"]["reason"]
    named = doctor(runs, 0, app="desk")
    assert statuses(named, "unknown") == {"jobs-without-queues": "unknown", "limits": "unknown"}


def test_each_fault_is_found(runs: AppRuns) -> None:
    """A queue without a job, a job without a queue and with a limit that does not exist, a dead
    letter, a newer format, and a process whose clock is ahead."""
    runs.app.send("other", 1)
    letter = DeadLetterRecord("other", 1, b"1", None, None, "no", "", 1, "w", 1, time.time())
    runs.broker.dead_letters.store(letter)
    runs.start(jobs("good-*", limits=["crm"]))
    wait_until(lambda: runs.client.exists(runs.layout.queue("other")), "the queue")
    client, layout = runs.client, runs.layout
    client.set(layout.root, encode({"level": 9000}))
    ahead = encode({"host": "late", "started": time.time() + 3600, "version": "0.0.1"})
    client.create(f"{layout.components}/client/late-", ahead, ephemeral=True, makepath=True)
    found = statuses(doctor(runs, 1), "failed", "warning")
    assert found == {
        "versions": "failed",
        "clocks": "warning",
        "dead-letters": "warning",
        "limits": "failed",
        "queues": "failed",
        "queues-without-jobs": "failed",
        "jobs-without-queues": "warning",
    }


def test_a_fleet_without_workers_fails(runs: AppRuns) -> None:
    """Also while the node still names the last leader. Its workers will make a declared limit."""
    runs.client.create(
        runs.layout.rebalancer, encode({"worker": "worker-0000000007"}), makepath=True
    )
    worker = f"{runs.layout.workers}/worker-"
    limited = jobs("good-*", limits=["crm"])
    (runs.folder / "jobs.py").write_text(f'{limited}\napp.limit("crm", max=5)\n')
    found = doctor(runs, 1)
    assert statuses(found, "failed") == {"leader": "failed", "workers": "failed"}
    runs.client.create(worker, b"{}", ephemeral=True, sequence=True, makepath=True)
    assert statuses(doctor(runs, 1), "failed") == {"leader": "failed"}


def test_a_silent_worker_is_found(runs: AppRuns, monkeypatch: pytest.MonkeyPatch) -> None:
    """A component that nobody writes any more, as of a frozen process with a long session."""
    monkeypatch.setattr("qdo.ops.items.SILENT_SECONDS", 6.0)
    proc = runs.start(JOBS, "--session-timeout-seconds", "12")  # reports every 4 s
    case = Case(runs.client, runs.broker, runs.layout, {}, "", "")
    wait_until(lambda: checks.workers(fresh(case)).status == "ok", "the worker")
    freeze(children(proc.pid)[0], runs.coordinator)
    wait_until(lambda: checks.workers(fresh(case)).status == "warning", "its silence")


def test_a_process_that_was_killed_and_replaced_is_named(runs: AppRuns) -> None:
    """In `status`, `events` and `doctor`: an endless series of crashes must not look healthy."""
    proc = runs.start(JOBS)
    case = Case(runs.client, runs.broker, runs.layout, {}, "", "")
    killed: list[int] = []

    def pids() -> set[int | None]:
        return {each.report.pid for each in fresh(case).workers()}

    for _ in range(2):
        wait_until(lambda: pids() - {None, *killed}, "a worker registers", 60.0)
        (pid,) = children(proc.pid)
        os.kill(pid, signal.SIGKILL)
        killed.append(pid)
    wait_until(
        lambda: [each.pid for _, each in deaths(fresh(case).workers(), 0.0)] == killed, "both", 60.0
    )
    wait_until(lambda: checks.leader(fresh(case)).status == "ok", "the last one leads", 60.0)
    found = doctor(runs, 0)["dead-processes"]
    assert found["status"] == "warning"
    assert "2 workers died" in found["reason"]
    assert f"process {killed[1]} " in found["reason"]
    assert "died of SIGKILL" in found["reason"]
    assert [each["check"] for each in notices(fresh(case))] == ["dead-processes"]
    events = runs.qdo("events").out.splitlines()
    assert [f"process {pid} " in line for line in events for pid in killed].count(True) == 2
    assert sum("died of SIGKILL" in line for line in events) == 2


def test_a_frozen_process_is_named_after_its_session(runs: AppRuns) -> None:
    """Until it registers again: its nodes are gone, and the leader remembers it. Its sibling, which
    has the same parent, is not taken for its successor."""
    for number in range(4):
        runs.app.send(f"good-{number}", 1)
    case = Case(runs.client, runs.broker, runs.layout, {}, "", "")
    runs.start(JOBS, "--session-timeout-seconds", "2", "--processes", "2")
    wait_until(lambda: [each.queues for each in fresh(case).workers()] == [2, 2], "the queues")
    frozen = fresh(case).workers()[1]
    assert frozen.report.pid is not None
    freeze(frozen.report.pid, runs.coordinator)
    try:
        wait_until(lambda: checks.lost(fresh(case)).status == "warning", "the leader notices", 60.0)
        (lost,) = lost_workers(fresh(case).workers(), 0.0)
        assert (lost.name, lost.process) == (frozen.worker, frozen.process)
        assert lost.process.endswith(f" of parent process {frozen.report.parent}")
        (notice,) = [each for each in notices(fresh(case)) if each["check"] == "lost-workers"]
        assert lost.name in str(notice["reason"])
    finally:
        os.kill(frozen.report.pid, signal.SIGCONT)
    wait_until(lambda: checks.lost(fresh(case)).status == "ok", "it registers again")


def fresh(case: Any) -> Any:
    """Return the case without what was read."""
    case._read.clear()
    return case


def test_services_that_do_not_answer_fail_in_time(runs: AppRuns) -> None:
    """A port that refuses, and one that accepts and says nothing."""
    (runs.folder / "jobs.py").write_text(JOBS)
    with socket.create_server(("127.0.0.1", 0)) as mute:
        for port in (1, mute.getsockname()[1]):
            found = doctor(runs, 1, coordinator=f"zookeeper://127.0.0.1:{port}")
            assert found["coordinator"]["status"] == "failed"
            assert found["leader"]["status"] == "unknown"
            assert found["broker"]["status"] == found["disk"]["status"] == "ok"
