"""Metrics and health of real worker processes, over both coordinators."""

from __future__ import annotations

import http.client
import json
import os
import shutil
import signal
import socket
import subprocess
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.support.app_runs import AppRuns
from tests.support.processes import Proc, children, freeze, wait_until

pytestmark = pytest.mark.slow

APP = "from tests.apps.metered import app\n"
HTTP = ("--http", "127.0.0.1:0", "--session-timeout-seconds", "6")


class Metered:
    """`qdo-worker` with an HTTP server.

    :ivar proc: the parent process.
    """

    def __init__(self, runs: AppRuns, *options: str, app: str = APP) -> None:
        self.runs = runs
        self.proc: Proc = runs.start(app, *HTTP, *options)
        (found,) = self.proc.wait_for_line(r"at http://(\S+):(\d+)$")
        self.address = found[1].strip("[]"), int(found[2])

    def get(self, path: str) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection(*self.address, timeout=10)
        try:
            connection.request("GET", path)
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()

    def health(self, path: str) -> tuple[int, str]:
        """Return the status and the reasons."""
        status, body = self.get(path)
        return status, "\n".join(json.loads(body)["reasons"])

    def wait_ready(self) -> None:
        wait_until(lambda: self.get("/readyz")[0] == 200, "every process is ready")

    def samples(self) -> dict[str, float]:
        """Return the samples as in the text, such as ``qdo_queues{state="idle"}``."""
        return self._samples(self.get("/metrics")[1].decode())

    @staticmethod
    def _samples(text: str) -> dict[str, float]:
        families = list(text_string_to_metric_families(text))
        assert len(families) > 20
        found = {}
        for family in families:
            for each in family.samples:
                labels = ",".join(f'{k}="{v}"' for k, v in sorted(each.labels.items()))
                found[f"{each.name}{{{labels}}}" if labels else each.name] = each.value
        return found

    def wait_for(self, expected: dict[str, float]) -> dict[str, float]:
        """Wait until samples have these values; return all samples."""
        found: dict[str, float] = {}

        def reached() -> bool:
            found.clear()
            found.update(self.samples())
            return all(found.get(name) == value for name, value in expected.items())

        try:
            wait_until(reached, "the samples")
        except AssertionError:
            seen = {name: found.get(name) for name in expected}
            raise AssertionError(f"expected {expected}, got {seen}") from None
        return found

    def workers(self) -> list[int]:
        return children(self.proc.pid)


def attempts(glob: str, outcome: str = "done") -> str:
    return f'qdo_attempts_total{{outcome="{outcome}",queues="{glob}"}}'


def send(runs: AppRuns, queue: str, count: int, body: Any = 1, keys: int = 0) -> None:
    for number in range(count):
        runs.app.send(queue, body, key=str(number % keys) if keys else None)


def test_attempts_of_all_kinds_add_up(runs: AppRuns) -> None:
    """Over two processes; each message counts once for its outcome."""
    for number in range(4):
        send(runs, f"plain-{number}", 25)
        send(runs, f"keyed-{number}", 25, keys=5)
        send(runs, f"batch-{number}", 25)
        send(runs, f"thread-{number}", 5)
        for body in ("ok", "skip", "wait", "fail", "ok"):
            runs.app.send(f"failing-{number}", body)
        runs.app.send(f"blocked-{number}", 1)
    metered = Metered(runs, "--processes", "2")
    found = metered.wait_for(
        {
            attempts("plain-*"): 100,
            attempts("keyed-*"): 100,
            attempts("batch-*"): 100,
            attempts("thread-*"): 20,
            attempts("failing-*"): 12,
            attempts("failing-*", "skip"): 4,
            attempts("failing-*", "wait"): 1,
            attempts("failing-*", "retry"): 4,
            attempts("failing-*", "dead-letter"): 4,
            attempts("blocked-*", "block"): 4,
            'qdo_queues{state="blocked"}': 4,
            'qdo_queues{state="idle"}': 20,
            "qdo_processes_registered": 2,
            "qdo_oldest_message_age_seconds": 0,
            "qdo_ready": 1,
        }
    )
    ended = {"plain-*": 100, "keyed-*": 100, "batch-*": 100, "thread-*": 20, "failing-*": 25}
    for glob, count in ended.items():
        assert found[f'qdo_job_duration_seconds_count{{queues="{glob}"}}'] == count
        assert found[f'qdo_dwell_seconds_count{{queues="{glob}"}}'] > 0
    assert found["qdo_checkpoint_queues_total"] >= 20
    assert found['qdo_ownership_changes_total{change="claimed"}'] >= 24
    if shutil.which("promtool") is not None:
        argv = ("promtool", "check", "metrics")
        text = metered.get("/metrics")[1]
        done = subprocess.run(argv, input=text, capture_output=True, timeout=60, check=False)
        assert (done.returncode, done.stdout + done.stderr) == (0, b"")


def test_the_oldest_message_has_an_age(runs: AppRuns) -> None:
    """Until it is done, whoever of the worker and the broker knows it."""
    send(runs, "waiting-1", 1000)
    metered = Metered(runs)

    def age() -> float:
        return metered.samples().get("qdo_oldest_message_age_seconds", 0.0)

    wait_until(lambda: age() >= 2.0, "it is two seconds old")
    assert metered.samples()["qdo_jobs_running"] == 1
    (runs.folder / "go-on").touch()
    wait_until(lambda: age() == 0.0, "nothing waits")
    metered.wait_for({attempts("waiting-*"): 1000})


def test_a_killed_process_shows_and_its_counts_stay(runs: AppRuns) -> None:
    """While no other one has taken its place, the parent is not healthy."""
    send(runs, "plain-1", 50)
    metered = Metered(runs)
    metered.wait_ready()
    metered.wait_for({attempts("plain-*"): 50})
    (runs.folder / "broken").touch()
    os.kill(metered.workers()[0], signal.SIGKILL)
    wait_until(lambda: metered.get("/healthz")[0] == 503, "it is not healthy")
    assert metered.get("/readyz")[0] == 503
    assert metered.samples()[attempts("plain-*")] == 50
    (runs.folder / "broken").unlink()
    metered.wait_ready()
    assert metered.get("/healthz")[0] == 200
    send(runs, "plain-1", 7)
    found = metered.wait_for({attempts("plain-*"): 57})
    assert found["qdo_process_restarts_total"] >= 1


def test_a_frozen_process_shows(runs: AppRuns) -> None:
    """Only its own place is named; it is well again when it runs again."""
    metered = Metered(runs, "--processes", "2")
    metered.wait_ready()
    frozen = metered.workers()[1]
    freeze(frozen, runs.coordinator)
    try:
        status, reason = metered.health("/healthz")
        assert status == 503
        assert f"(pid {frozen})" in reason
        assert reason.count("\n") == 0
        assert metered.get("/readyz")[0] == 503
        assert metered.samples()["qdo_healthy"] == 0
    finally:
        os.kill(frozen, signal.SIGCONT)
    metered.wait_ready()


def test_a_blocked_event_loop_silences_nothing(runs: AppRuns) -> None:
    """The parent serves, and shows how long the loop has not run."""
    metered = Metered(runs)
    metered.wait_ready()
    runs.app.send("busy-1", 4.0)
    wait_until(
        lambda: metered.samples()["qdo_event_loop_blocked_seconds"] > 2.0, "the loop is blocked"
    )
    assert metered.get("/healthz")[0] == 200
    metered.wait_for({attempts("busy-*"): 1, "qdo_event_loop_blocked_seconds": 0})


def test_draining_processes_are_not_ready(runs: AppRuns) -> None:
    """They are healthy, though; the server answers until the last one has ended."""
    metered = Metered(runs, "--processes", "2")
    metered.wait_ready()
    send(runs, "waiting-1", 1)
    metered.wait_for({"qdo_jobs_running": 1})
    metered.proc.send(signal.SIGTERM)
    wait_until(lambda: metered.get("/readyz")[0] == 503, "it is not ready")
    assert metered.get("/healthz") == (
        200,
        b'{"schema": "qdo.health/1", "ok": true, "reasons": []}\n',
    )
    (runs.folder / "go-on").touch()
    assert metered.proc.wait() == 0


def test_a_worker_without_a_session_is_not_ready(runs: AppRuns) -> None:
    """It has slept for too long, and has to register again."""
    metered = Metered(runs, "--session-timeout-seconds", "2")
    metered.wait_ready()
    (worker,) = metered.workers()
    freeze(worker, runs.coordinator)
    wait_until(lambda: not runs.client.get_children(runs.layout.workers), "its session has ended")
    os.kill(worker, signal.SIGCONT)
    found = metered.wait_for({"qdo_sessions_lost_total": 1, "qdo_processes_registered": 1})
    assert found["qdo_process_restarts_total"] == 0
    metered.wait_ready()


@pytest.mark.parametrize("coordinator_url", ["embedded"], indirect=True)
def test_a_used_port_stops_the_start(runs: AppRuns) -> None:
    """Before any worker process starts."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        proc = runs.start(APP, "--http", f"127.0.0.1:{port}")
        assert proc.wait() == 2
    assert f"127.0.0.1:{port}" in proc.output
    assert "started" not in proc.output


@pytest.mark.parametrize("coordinator_url", ["embedded"], indirect=True)
def test_an_app_may_set_the_address_in_code(runs: AppRuns) -> None:
    """The parent knows it once its first process has imported the app."""
    app = 'import qdo\napp = qdo.App("desk", http="{}")\napp.job()(print)\n'
    proc = runs.start(app.format("127.0.0.1:0"))
    proc.wait_for_line(r"at http://127.0.0.1:\d+$")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        other = runs.start(app.format(f"127.0.0.1:{taken.getsockname()[1]}"))
        assert other.wait() == 2, other.output


@pytest.mark.parametrize("coordinator_url", ["embedded"], indirect=True)
def test_slow_clients_hold_up_no_supervision(runs: AppRuns) -> None:
    """The parent replaces a killed process while hundreds of connections hang; also of IPv6."""
    metered = Metered(runs, "--http", "[::1]:0")
    assert metered.address[0] == "::1"
    metered.wait_ready()
    (worker,) = metered.workers()
    hanging = []
    try:
        for number in range(200):
            hanging.append(socket.create_connection(metered.address, timeout=10))
            hanging[-1].sendall(b"GET /metrics HTTP/1.1\r\n" if number % 2 else b"")
        os.kill(worker, signal.SIGKILL)
        metered.wait_for({"qdo_process_restarts_total": 1})
        metered.wait_ready()
    finally:
        for each in hanging:
            each.close()
