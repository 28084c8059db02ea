"""Jobs on every executor that send with ``once=``, and are killed while they do."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from qdo import App
from tests.support.cli import WORKER, command

JOBS = "from tests.apps.once import app\n"
KINDS = ["async", "greenlet", "process", "thread"]


@pytest.mark.slow
@pytest.mark.parametrize("place", ["files", "servers"])
def test_a_killed_dispatch_stores_once(
    place: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """In files, and on PostgreSQL with ZooKeeper."""
    (tmp_path / "once_jobs.py").write_text(JOBS)
    places = {"QDO_BROKER": f"sqlite:{tmp_path}/messages.db", "QDO_PROCESSES": "2"}
    if place == "servers":
        places["QDO_BROKER"] = request.getfixturevalue("postgresql_url")
        places["QDO_COORDINATOR"] = request.getfixturevalue("zookeeper_url")
    with App("shop", broker=places["QDO_BROKER"]) as app:
        app.send_many([(kind, 1) for kind in KINDS])
        ended = command(*WORKER, "once_jobs:app", "--burst", cwd=tmp_path, env=places)
        assert ended.code == 0, ended.err
        assert all((tmp_path / kind).exists() for kind in KINDS)
        for number in range(10):
            rows = app.broker.reader(f"to-{number}", 0).fetch(1000)
            assert sorted(json.loads(row[1]) for row in rows) == KINDS
