"""A job that changes the folder of its process: nothing goes to other files."""

from __future__ import annotations

import sqlite3
from pathlib import Path

from tests.support.cli import QDO, WORKER, command
from tests.support.paths import ROOT
from tests.support.processes import whole_lines

JOBS = "from tests.apps.folders import app\n"


def test_a_job_that_leaves_its_folder_costs_nothing(tmp_path: Path) -> None:
    """With the default settings, whose paths are relative."""
    (tmp_path / "jobs.py").write_text(JOBS)
    said = tmp_path / "said"
    env = {"QDO_APP": "jobs:app", "QDO_HISTORY": "sqlite:history.db", "SAID": str(said)}
    env["PYTHONPATH"] = str(ROOT)
    for body in range(3):
        assert command(*QDO, "send", "moves", str(body), cwd=tmp_path, env=env).code == 0
    ended = command(*WORKER, "--burst", cwd=tmp_path, env=env)
    assert ended.code == 0, ended.err
    expected = [f"{queue} {body}" for queue in ("moves", "process", "thread") for body in range(3)]
    assert sorted(whole_lines(said)) == expected
    assert [*tmp_path.rglob("*.db")] == [*tmp_path.glob("*.db"), *tmp_path.glob("qdo-data/*.db")]
    listed = command(*QDO, "queues", "-o", "json", cwd=tmp_path, env=env).items()
    assert {item["queue"]: item["backlog"] for item in listed} == dict.fromkeys(
        ("moves", "process", "thread"), 0
    )
    with sqlite3.connect(tmp_path / "history.db") as history:
        assert history.execute("SELECT sum(done) FROM qdo_minutes").fetchone() == (9,)
