"""Tasks and greenlets that jobs leave in the background, and that exit: no message is charged."""

from __future__ import annotations

import pytest

from tests.support.app_runs import AppRuns

APP = "from tests.apps.left_behind import app\n"


@pytest.mark.parametrize(
    "queues",
    [
        ["async-task", "async-interrupt", "async-callback", "async-stop"],
        ["thread"],
        ["a", "b", "c"],
    ],
    ids=["async", "thread", "greenlet"],
)
def test_what_a_job_left_behind_ends_no_loop(local_runs: AppRuns, queues: list[str]) -> None:
    """The loop of all jobs, or the worker, ended: messages in flight failed, or hung."""
    local_runs.app.send_many([(queue, body) for queue in queues for body in range(2)])
    assert local_runs.start(APP, "--burst").wait(60.0) == 0
    for queue in queues:
        assert local_runs.runs(queue) == [("0", 1), ("1", 1)]
