"""The log as JSON: of the parent, its workers, and the processes of jobs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.app_runs import AppRuns
from tests.support.processes import Proc

APP = """
import logging
import qdo

app = qdo.App("logged", log_level="info")


@app.job("failing", policy=qdo.Policy(attempts=2, backoff_seconds=0.01))
def failing(message, context):
    raise ValueError("a\\x1b[31m\\nb")


@app.job("process", executor="process")
def in_process(message, context):
    logging.getLogger("mine").warning("said by %s", message.queue)
"""


@pytest.fixture
def runs(tmp_path: Path) -> Iterator[AppRuns]:
    made = AppRuns("logged", tmp_path, f"sqlite:{tmp_path / 'coordination.db'}")
    made.app.send("failing", 1)
    made.app.send("process", 1)
    yield made
    made.close()


def records(proc: Proc) -> list[dict[str, Any]]:
    """Return all records; every line is one."""
    assert proc.wait(60) == 0, proc.output
    return [json.loads(line) for line in proc.output.splitlines()]


def test_every_line_of_all_processes_is_json(runs: AppRuns) -> None:
    found = records(runs.start(APP, "--burst", "--log-format", "json"))
    assert {each["level"] for each in found} == {"info", "warning", "error"}
    assert len({each["process"] for each in found}) == 3
    (dead,) = [each for each in found if "dead letter" in each["message"]]
    failed = [each for each in found if each.get("queue") == "failing" and "fence" in each]
    assert dead in failed
    assert len(failed) == 2
    for each in failed:
        assert each["message_id"] == dead["message_id"]
        assert each["message_id"] in each["message"]
        assert each["worker"].startswith("worker-")
        assert each["fence"] > 0
        assert "\x1b[31m" in each["traceback"]
    assert [each["message"] for each in found if each["logger"] == "mine"] == ["said by process"]


def test_an_app_may_choose_json_in_code(runs: AppRuns) -> None:
    """The parent follows once its first process has imported the app."""
    app = APP.replace('log_level="info"', 'log_format="json"')
    proc = runs.start(app, "--burst")
    assert proc.wait(60) == 0, proc.output
    lines = proc.output.splitlines()
    objects = [json.loads(line) for line in lines if line.startswith("{")]
    assert proc.pid in {each["process"] for each in objects}
    assert all("supervisor" in line for line in lines if not line.startswith("{"))
