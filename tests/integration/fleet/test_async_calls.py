"""Coroutines use locks, permits, sections, documents and the calls of operators."""

from __future__ import annotations

from tests.support.app_runs import AppRuns
from tests.support.processes import Proc, wait_until

APP = "from tests.apps.executors.async_calls import app\n"


def test_coroutines_of_workers_and_programs_use_the_fleet(local_runs: AppRuns) -> None:
    """Both at once. A warning about a blocked loop would fail the job and the program."""
    local_runs.app.send("q", 0)
    local_runs.start(APP)
    places = {"QDO_BROKER": local_runs.broker_url, "QDO_COORDINATOR": local_runs.coordinator}
    program = Proc.python(
        "-m", "tests.apps.executors.async_calls", env=places, cwd=local_runs.folder
    )
    local_runs.procs.append(program)
    assert program.wait(60.0) == 0, program.output
    wait_until(lambda: bool(local_runs.runs("q")), "the job")
