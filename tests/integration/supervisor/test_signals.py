"""SIGTERM drains a worker, whatever its app and the process's place have done to the signal."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.app_runs import AppRuns
from tests.support.containers.engine import require
from tests.support.processes import PATIENCE_SECONDS, wait_until

OWN_HANDLER = """
import contextlib, signal
import qdo
from tests.apps.notes import job

app = qdo.App("own")

def take_over():
    signal.signal(signal.SIGTERM, lambda number, frame: None)

@app.context
@contextlib.contextmanager
def context():
    {in_context}
    yield None

@app.job()
def run(message, context):
    {in_job}
    job(message, context)
"""


@pytest.mark.parametrize(
    "places",
    [
        {"in_context": "take_over()", "in_job": "pass"},
        {"in_context": "pass", "in_job": "take_over()"},
    ],
    ids=["in the context", "in a job"],
)
def test_a_handler_of_a_library_prevents_no_drain(
    places: dict[str, str], tmp_path: Path, embedded_url: str
) -> None:
    with contextlib.closing(AppRuns("own", tmp_path, embedded_url)) as runs:
        runs.app.send("a", "1")
        parent = runs.start(OWN_HANDLER.format(**places))
        wait_until(lambda: runs.runs("a") == [("1", 1)], "the job has run")
        parent.send(signal.SIGTERM)
        assert parent.wait() == 0, parent.output
        assert "killing" not in parent.output
        assert runs.node("a").owner == ""


def test_process_1_obeys_before_it_has_started(tmp_path: Path) -> None:
    """The kernel keeps from process 1 each signal for which it has no handler."""
    require(tmp_path)
    program = (
        "import signal\n"
        "from qdo.__main__ import _end_at_interrupt\n"
        "_end_at_interrupt()\n"
        "print('begun', flush=True)\n"
        "signal.pause()\n"
    )
    words = ("unshare", "--fork", "--pid", "--kill-child")
    argv = [*words, sys.executable, "-c", program]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, cwd=tmp_path) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"begun\n"
        (child,) = map(
            int, Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        )
        os.kill(child, signal.SIGTERM)
        assert process.wait(PATIENCE_SECONDS) == 128 + signal.SIGTERM
