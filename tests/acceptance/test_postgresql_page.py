"""The example of the page on PostgreSQL, with killed workers; and a pooler."""

from __future__ import annotations

import json
import queue
from pathlib import Path

import psycopg
import pytest

from qdo.app import App
from tests.support.cli import QDO, WORKER, Ended, command
from tests.support.paths import ROOT
from tests.support.postgresql.pgbouncer import PgBouncer
from tests.support.postgresql.schema import prepared
from tests.support.shared_servers import SharedPostgresql

TRANSFERS = 40
CRASHES = (7, 23)
"""Transfers after whose commit the worker is killed, once each."""
CRASHING = """
import os
import pathlib
import signal

from bank import app


@app.middleware
def crash(call_next, message, context):
    with open("runs", "a") as runs:
        runs.write(f"{message.id}\\n")
    call_next(message, context)
    killed = pathlib.Path(f"killed-{message.position}")
    if message.body.get("crash") and not killed.exists():
        killed.touch()
        os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the example and an app that kills its worker after a commit."""
    example = ROOT / "docs" / "examples" / "bank_postgresql.py"
    (tmp_path / "bank.py").write_text(example.read_text())
    (tmp_path / "crashing.py").write_text(CRASHING)
    return tmp_path


def test_every_transfer_is_booked_once(folder: Path, postgresql_url: str) -> None:
    """Although messages run again after each of two crashes: nothing is recorded before."""
    environment = {
        "DATABASE": postgresql_url,
        "QDO_APP": "crashing:app",
        "QDO_CHECKPOINT_SECONDS": "3600",
        "QDO_SESSION_TIMEOUT_SECONDS": "2.5",
    }

    def run(*arguments: str) -> Ended:
        ended = command(*arguments, cwd=folder, env=environment)
        assert ended.code == 0, ended.err
        return ended

    lines = folder / "lines"
    bodies = [{"amount": -n, "to": "bob", "crash": n in CRASHES} for n in range(TRANSFERS)]
    lines.write_text("".join(json.dumps(body) + "\n" for body in bodies))
    run(*QDO, "send", "ada", "--file", str(lines))
    run(*WORKER, "--burst")
    runs = (folder / "runs").read_text().split()
    assert len(set(runs)) == 2 * TRANSFERS
    assert len(runs) > 2 * TRANSFERS
    total = sum(range(TRANSFERS))
    with psycopg.connect(postgresql_url) as connection:
        found = connection.execute("SELECT * FROM balances ORDER BY account").fetchall()
    assert found == [("ada", -total), ("bob", total)]


def test_a_pooler_in_transaction_mode(shared_postgresql: SharedPostgresql) -> None:
    """No notifications and no prepared statements, and the same promises."""
    address = shared_postgresql.address
    database = address.create_database()
    prepared(address.url(database))
    pooler = PgBouncer(address)
    pooler.start()
    with App("pooled", broker=pooler.address.url(database, pooler="transaction")) as app:
        heard: queue.Queue[list[str]] = queue.Queue()
        stop = app.broker.listen(lambda names: heard.put(list(names)))
        app.send("q", 1)
        assert heard.get(timeout=4) == ["q"]  # before the next look of those without a pooler
        app.send("q", 2, delay_seconds=0.2)
        assert heard.get(timeout=4) == ["q"]
        app.send_many([("q", number) for number in range(3, 50)])
        reader = app.broker.reader("q", 0)
        rows = [row for _ in range(10) for row in reader.fetch(10)]
        assert [row[1] for row in rows] == [b"%d" % number for number in range(1, 50)]
        assert app.broker.trim("q", rows[9][0], older_than=-60) == 10
        stop()
    pooler.close()
    address.drop_database(database)
