"""A message that runs for much longer than usual is named without anybody asking."""

from __future__ import annotations

import re
from typing import Any

import pytest

from qdo.worker.engine.durations import ENOUGH
from tests.support.app_runs import AppRuns
from tests.support.processes import wait_until

APP = "from tests.apps.hanging import app\n"
QUEUES = ("greenlet", "lanes", "thread", "process", "async")
SHOWN = ("greenlet", "lanes", "thread")
"""The executors of these tell where their code stands."""
MOST_SECONDS = 110.0
"""The first message of a process takes as long as its start, and is the usual duration."""


@pytest.mark.timeout(180)
def test_messages_that_hang_are_named(runs: AppRuns) -> None:
    """In the log, once, and in the verdicts; a queue without a history is not judged."""
    for queue in QUEUES:
        runs.app.send_many([(queue, "quick")] * ENOUGH)
    worker = runs.start(APP)
    wait_until(lambda: all(each["backlog"] == 0 for each in _queues(runs)), "a history")
    ids = {queue: runs.app.send(queue, "hang") for queue in QUEUES}
    first = runs.app.send("greenlet-new", "hang")

    def named() -> dict[str, str]:
        """Return the lines that name messages, by queue."""
        lines = [line for line in worker.output.splitlines() if "has run for" in line]
        found = {line.partition(", queue ")[2].partition(",")[0]: line for line in lines}
        assert len(found) == len(lines)
        return found

    wait_until(lambda: named().keys() == ids.keys(), "all are named", MOST_SECONDS)
    for queue, line in named().items():
        assert ids[queue] in line
        assert f"`qdo ps {queue} --stacks`" in line
        assert (re.search(r"hanging\.py:\d+ wait\b", line) is not None) == (queue in SHOWN), line
    wait_until(lambda: _reasons(runs).keys() >= ids.keys(), "their workers report them")
    for queue, item in _reasons(runs).items():
        assert ids[queue] in item["reason"]
        assert item["remedy"] == f"qdo ps {queue} --stacks"
        assert item["running"]["usual_seconds"] < item["running"]["seconds"] / 10
    assert first not in worker.output

    (runs.folder / "go").touch()
    wait_until(lambda: _reasons(runs) == {}, "they have ended")


def _reasons(runs: AppRuns) -> dict[str, dict[str, Any]]:
    """Return the queues whose message is named."""
    return {each["queue"]: each for each in _queues(runs) if "usually" in (each["reason"] or "")}


def _queues(runs: AppRuns) -> list[dict[str, Any]]:
    return runs.qdo("queues", "-o", "json").items()
