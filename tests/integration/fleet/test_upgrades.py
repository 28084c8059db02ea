"""Workers beside another version of the schema, or beside a fleet at another coordinator."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

from tests.support.app_runs import AppRuns, jobs
from tests.support.postgresql.server import PostgresqlDatabase
from tests.support.processes import wait_until

REFUSE = """
UPDATE qdo.about SET format = 99, oldest = 99;
SELECT pg_terminate_backend(pid) FROM pg_stat_activity
WHERE datname = current_database() AND pid <> pg_backend_pid();
"""


def test_a_worker_leaves_if_a_newer_schema_refuses_it(
    tmp_path: Path, postgresql: PostgresqlDatabase
) -> None:
    """It ends with the reason; the next one starts once its version is accepted."""
    coordinator = f"sqlite:{tmp_path / 'coordination.db'}"
    with closing(AppRuns("desk", tmp_path, coordinator, postgresql.url())) as runs:
        runs.app.send("q", "1")
        worker = runs.work("--processes", "1")
        wait_until(lambda: runs.runs("q") == [("1", 1)], "the first message")
        with postgresql.connect() as connection:
            connection.execute(REFUSE, prepare=False)
            worker.wait_for_line("has format 99.* releases its queues and ends")
            wait_until(lambda: not runs.workers(), "it has left")
            connection.execute("UPDATE qdo.about SET format = 1, oldest = 1")
        runs.app.send("q", "2")
        wait_until(lambda: runs.runs("q") == [("1", 1), ("2", 1)], "the second message, once")


def test_a_worker_of_another_coordinator_does_not_start(
    tmp_path: Path, postgresql: PostgresqlDatabase
) -> None:
    """It would run all messages again. The error names the fleet; a move is told to the broker."""
    coordinators = [f"sqlite:{tmp_path / name}.db" for name in ("first", "second")]
    with closing(AppRuns("desk", tmp_path, coordinators[0], postgresql.url())) as runs:
        runs.app.send("q", "1")
        burst = ("--burst", "--processes", "1")
        assert runs.work(*burst).wait() == 0
        other = runs.start(jobs("*"), *burst, QDO_COORDINATOR=coordinators[1])
        assert other.wait() == 2
        assert coordinators[0] in other.output
        assert runs.runs("q") == [("1", 1)]
        with postgresql.connect() as connection:
            connection.execute("UPDATE qdo.apps SET fleet = NULL WHERE name = 'desk'")
        moved = runs.start(jobs("*"), *burst, QDO_COORDINATOR=coordinators[1])
        assert moved.wait() == 0
        assert runs.runs("q") == [("1", 1)] * 2
