"""Jobs that write to what their worker process shares with its parent, and then kill it."""

from __future__ import annotations

import signal
from pathlib import Path

from qdo.app import App
from tests.support.paths import ROOT
from tests.support.processes import Proc

JOBS = "from tests.apps.hostile import app\n"


ATTACKS = ("names", "huge", "uneven", "deep", "endless", "values")


def test_a_parent_survives_what_a_job_writes(tmp_path: Path) -> None:
    """The process is replaced, its message runs again, and the parent obeys its signals."""
    (tmp_path / "hostile.py").write_text(JOBS)
    files = tmp_path / "messages.db", tmp_path / "coordination.db"
    with App("hostile", broker=f"sqlite:{files[0]}") as app:
        app.send_many([("q", attack) for attack in ATTACKS])
    argv = ("-m", "qdo.cli.worker", "hostile:app", "--session-timeout-seconds", "2")
    places = ("--broker", f"sqlite:{files[0]}", "--coordinator", f"sqlite:{files[1]}")
    env = {"PYTHONPATH": str(ROOT)}
    with Proc.python(*argv, *places, cwd=tmp_path, env=env) as parent:
        for attack in ATTACKS:
            parent.wait_for_line(f"done {attack}", timeout_seconds=60)
        parent.send(signal.SIGTERM)
        assert parent.wait() == 0
        assert "Traceback" not in parent.output
