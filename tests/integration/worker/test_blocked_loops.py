"""Jobs that block the event loop of their process: it costs their own queue, and no other."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from tests.support.app_runs import AppRuns
from tests.support.processes import Proc, alive, paused, wait_until, whole_lines

T = 2.0
"""Session timeout in seconds."""
APP = "from tests.apps.blocking import app, job\n"


@pytest.fixture(params=["embedded_url", "zookeeper_url", "database_url"])
def runs(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[AppRuns]:
    setup = AppRuns("blocked", tmp_path, request.getfixturevalue(request.param))
    yield setup
    setup.close()


def send(runs: AppRuns, queue: str, *bodies: str) -> None:
    runs.app.send_many([(queue, body) for body in bodies])


def ends(runs: AppRuns, queue: str) -> list[str]:
    return [body.removesuffix("-end") for body, _ in runs.runs(queue) if body.endswith("-end")]


def begins(runs: AppRuns, queue: str) -> list[tuple[str, int]]:
    return [run for run in runs.runs(queue) if not run[0].endswith("-end")]


def letters(runs: AppRuns, queue: str) -> list[tuple[bytes, int]]:
    return [(each.body, each.attempts) for each in runs.broker.dead_letters.records(queue)]


def test_a_job_longer_than_the_session_runs_once(runs: AppRuns) -> None:
    """1.5 T of computing: nothing is repeated, no queue moves, and what follows it runs."""
    send(runs, "q", "short", "long", "after")
    send(runs, "other", "one")
    worker = runs.start(APP, "--processes", "2")
    wait_until(lambda: "after" in ends(runs, "q"), "the message behind it")
    send(runs, "other", "two")
    wait_until(lambda: ends(runs, "other") == ["one", "two"], "the other queue")
    assert begins(runs, "q") == [("short", 1), ("long", 1), ("after", 1)]
    assert "session expired" not in worker.output
    worker.wait_for_line("keeping its session")
    worker.wait_for_line(r"blocked for .* by queue q, message .*, job tests.apps.blocking:job")
    worker.send(signal.SIGTERM)
    assert worker.wait() == 0, worker.output


def test_short_blocks_in_a_row_lose_no_session(runs: AppRuns) -> None:
    """Each is shorter than half of T; between them the loop hardly runs."""
    for queue in ("a", "b", "c", "d"):
        send(runs, queue, *["often"] * 3)
    worker = runs.start(APP)
    wait_until(lambda: sum(len(ends(runs, queue)) for queue in "abcd") == 12, "all messages", 40.0)
    assert all(begins(runs, queue) == [("often", 1)] * 3 for queue in "abcd")
    assert "session expired" not in worker.output


@pytest.mark.parametrize("queue", ["q", "limited"])
def test_an_endless_job_is_ended_by_its_policy(runs: AppRuns, queue: str) -> None:
    """After its limit its process is killed, and one attempt counted: of this message only."""
    send(runs, "waiting", "wait")
    worker = runs.start(APP)
    wait_until(lambda: bool(begins(runs, "waiting")), "a job beside it")
    send(runs, queue, "endless", "after")
    wait_until(lambda: "after" in ends(runs, queue), "the message behind it", 60.0)
    assert begins(runs, queue) == [("endless", 1), ("endless", 2), ("after", 1)]
    assert letters(runs, queue) == [(b'"endless"', 2)]
    limit = T if queue == "limited" else 3 * T
    found = worker.wait_for_line(rf"killing process 1 .*blocked by queue {queue}.* for ([\d.]+) s")
    assert limit <= float(found[0][1])
    wait_until(lambda: len(begins(runs, "waiting")) > 1, "it again, which is not guilty")
    assert {attempt for _, attempt in begins(runs, "waiting")} == {1}


def test_code_that_lets_no_thread_run_is_ended_too(runs: AppRuns) -> None:
    """A regular expression that backtracks for ever holds the interpreter lock."""
    send(runs, "limited", "lock", "after")
    runs.start(APP)
    wait_until(lambda: "after" in ends(runs, "limited"), "the message behind it", 60.0)
    assert begins(runs, "limited") == [("lock", 1), ("lock", 2), ("after", 1)]
    assert letters(runs, "limited") == [(b'"lock"', 2)]


def test_a_blocked_process_ends_without_its_parent(runs: AppRuns) -> None:
    """No other process would end it."""
    send(runs, "limited", "endless")
    worker = runs.start(APP)
    wait_until(lambda: bool(begins(runs, "limited")), "the job")
    pid = runs.pids()[0]
    os.kill(worker.pid, signal.SIGKILL)
    wait_until(lambda: not alive(pid), "its end", 60.0)


def test_the_state_of_a_blocked_worker_is_shown(runs: AppRuns) -> None:
    """By `qdo workers`, while the job blocks; later the worker is running again."""
    send(runs, "patient", "held")
    runs.start(APP + 'app.job("patient", timeout_seconds=120)(job)\n')  # so long it may block

    def state() -> tuple[str, str]:
        command = Proc.python(
            *("-m", "qdo", "workers", "--app", "blocked", "-o", "json"),
            env={"QDO_COORDINATOR": runs.coordinator},
            cwd=runs.folder,
        )
        with command:
            command.wait()
            found = json.loads(command.output[command.output.index("{") :])["items"]
        first = found[0] if found else {}
        return first.get("state", ""), first.get("blocked_by", "")

    found: list[tuple[str, str]] = []

    def is_blocked() -> bool:
        found.append(state())
        return found[-1][0] == "blocked"

    wait_until(is_blocked, "the blocked worker")
    assert re.fullmatch(r"queue patient, message \S+, job tests.apps.blocking:job", found[-1][1])
    (runs.folder / "go").touch()
    wait_until(lambda: state() == ("running", ""), "the worker runs again")


def test_a_session_lost_in_flight_counts_an_attempt(runs: AppRuns) -> None:
    """Each process that runs the message is stopped until its session is lost.

    The next owner begins the message before the former one is back, and the one after it counts.
    """
    send(runs, "q", "freeze", "after")
    worker = runs.start(APP, "--processes", "3")

    def holders() -> list[int]:
        lines = [line.split() for line in whole_lines(runs.folder / "out")]
        return [int(line[3]) for line in lines if line[1] == "freeze"]

    def has_run(times: int) -> bool:
        return len(holders()) >= times or bool(letters(runs, "q"))

    for number in (1, 2, 3):
        wait_until(partial(has_run, number), f"run {number}")
        pid = holders()[-1]
        with paused(pid, runs.coordinator, runs.broker_url):
            (runs.folder / f"thawed-{pid}").touch()
            wait_until(partial(has_run, number + 1), "another run")
    wait_until(lambda: "after" in ends(runs, "q"), "the message behind it")
    assert letters(runs, "q") == [(b'"freeze"', 2)]
    assert [run for run in begins(runs, "q") if run[0] == "freeze"] == [("freeze", 1)] * 2
    worker.wait_for_line("dead letter after 2 attempts: its owners died or lost their sessions")
