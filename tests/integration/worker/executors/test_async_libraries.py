"""Libraries that ``async def`` jobs use: each cell of the table in docs/async.rst."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.app_runs import AppRuns
from tests.support.doc_pages import table
from tests.support.postgresql.server import PostgresqlDatabase
from tests.support.processes import Proc

APP = "from tests.apps.executors.async_libraries import app\n"
KIT = """
from qdo.testing import TestKit
from tests.apps.executors.async_libraries import USES, app

with TestKit(app) as kit:
    app.send_many([(name, 0) for name in USES for _ in range(2)])
    kit.run_until_settled()
    print([each.error for each in kit.dead_letters()], len(kit.done()))
"""
NAMES = [name for name, row in table("async", "async-libraries").items() if row[1] == "works"]
MESSAGES = 8


@pytest.mark.slow
def test_async_jobs_of_a_worker_use_libraries(
    local_runs: AppRuns, postgresql: PostgresqlDatabase
) -> None:
    """Threads of asgiref and anyio were greenlets on the loop: Django's ORM always failed."""
    local_runs.app.send_many([(name, 0) for name in NAMES for _ in range(MESSAGES)])
    worker = local_runs.start(APP, "--burst", DATABASE=postgresql.url())
    assert worker.wait(120.0) == 0
    counts = {name: len(local_runs.runs(name)) for name in NAMES}
    assert counts == dict.fromkeys(NAMES, MESSAGES), worker.output


@pytest.mark.slow
def test_async_jobs_in_the_kit_use_libraries(
    tmp_path: Path, postgresql: PostgresqlDatabase
) -> None:
    (tmp_path / "kit.py").write_text(KIT)
    proc = Proc.python("kit.py", env={"DATABASE": postgresql.url()}, cwd=tmp_path)
    assert proc.wait(60.0) == 0
    assert f"[] {2 * len(NAMES)}" in proc.output
