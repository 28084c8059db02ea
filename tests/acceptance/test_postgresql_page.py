"""The example of the page on PostgreSQL, with killed workers; and a fleet that uses a pooler."""

from __future__ import annotations

import json
from pathlib import Path

import psycopg
import pytest

from tests.support.cli import QDO, WORKER, Ended, command
from tests.support.paths import ROOT
from tests.support.postgresql.schema import prepared

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
        "DATABASE": prepared(postgresql_url),
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
