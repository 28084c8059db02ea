"""Forked copies of a worker process run none of its messages, whatever libraries do in them."""

from __future__ import annotations

import json
import signal

from tests.support.app_runs import AppRuns
from tests.support.processes import wait_until, whole_lines

APP = "from tests.apps.forks import app\n"
WAITING, MESSAGES = 20, 10


def test_a_forked_copy_runs_no_message(runs: AppRuns) -> None:
    names = [f"waiting-{number}" for number in range(WAITING)]
    names += ["process", "copies-1", "copies-2"]
    sent = [(name, body) for name in names for body in range(MESSAGES)]
    runs.app.send_many(sent)
    runs.start(APP)

    def found(name: str) -> list[tuple[str, int]]:
        lines = map(json.loads, whole_lines(runs.folder / "out"))
        return [(each["queue"], each["body"]) for each in lines if each["name"] == name]

    wait_until(lambda: len(found("ran")) >= len(sent), "all messages", 60.0)
    assert sorted(found("ran")) == sorted(sent)
    # The copy itself goes on, also when it waits.
    assert sorted(found("copy")) == [each for each in sorted(sent) if each[0].startswith("copies")]
    (worker,) = {
        each["pid"]
        for each in map(json.loads, whole_lines(runs.folder / "out"))
        if each["queue"].startswith("waiting")
    }
    assert worker


def test_what_a_job_forks_has_the_signal_handlers_of_python(runs: AppRuns) -> None:
    """It ignored SIGTERM, as its process does, and `multiprocessing.Pool` waited forever."""
    runs.app.send_many([("signals-1", 0), ("signals-process-1", 0)])
    runs.start(APP)
    out = runs.folder / "out"
    wait_until(lambda: len(whole_lines(out)) == 2, "all messages")
    ended = [json.loads(line)["body"] for line in whole_lines(out)]
    assert ended == [-signal.SIGTERM] * 2
