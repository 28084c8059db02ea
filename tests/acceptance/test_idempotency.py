"""The pages' bank and totals count every message once, whatever happens to their worker."""

from __future__ import annotations

import contextlib
import json
import sqlite3
from pathlib import Path

import pytest

from tests.support.cli import QDO, WORKER, Ended, command
from tests.support.doc_pages import blocks, read

MESSAGES = 40
CRASHES = (7, 23)
"""Messages after whose commit the worker is killed, once each."""
CRASHING = """
import os
import pathlib
import signal

import {module}


def job(message, context):
    with open("runs", "a") as runs:
        runs.write(f"{{message.id}}\\n")
    {module}.{function}(message, context)
    killed = pathlib.Path(f"killed-{{message.body['number']}}")
    if message.body["crash"] and not killed.exists():
        killed.touch()
        os.kill(os.getpid(), signal.SIGKILL)
"""
RESET = """
import bank
import sqlalchemy

with sqlalchemy.create_engine("sqlite:///bank.db").begin() as connection:
    bank.writes.reset_fences(connection)
"""
APPS = {"idempotency": ("bank", "book", "database"), "state": ("totals", "add", "table")}
"""The app of a page, its job and its context."""
ENVIRONMENT = {
    "QDO_JOB": "crashing:job",
    # Nothing is recorded while a worker lives: a crash repeats everything.
    "QDO_CHECKPOINT_SECONDS": "3600",
    "QDO_SESSION_TIMEOUT_SECONDS": "2.5",
}


@pytest.fixture(params=["idempotency"])
def folder(tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the example of a page and a job that kills its worker after a commit."""
    module, function, context = APPS[request.param]
    (example, *_) = [each for each in blocks(read(request.param)) if "caption" in each.options]
    (tmp_path / example.options["caption"]).write_text(example.text)
    (tmp_path / "crashing.py").write_text(CRASHING.format(module=module, function=function))
    monkeypatch.setitem(ENVIRONMENT, "QDO_APP", module)
    monkeypatch.setitem(ENVIRONMENT, "QDO_JOB_CONTEXT", f"{module}:{context}")
    return tmp_path


def run(folder: Path, *arguments: str, **environment: str) -> Ended:
    ended = command(*arguments, cwd=folder, env={**ENVIRONMENT, **environment})
    assert ended.code == 0, ended.err
    return ended


def rows(folder: Path, query: str, file: str = "bank.db") -> list[tuple[object, ...]]:
    with contextlib.closing(sqlite3.connect(folder / file)) as database:
        return database.execute(query).fetchall()


@pytest.mark.parametrize("folder", APPS, indirect=True)
def test_crashes_between_commit_and_checkpoint_change_nothing(folder: Path) -> None:
    """Messages run again after each of two crashes, and every one is booked once."""
    lines = folder / "lines"
    bodies = [{"number": n, "amount": 3**n, "crash": n in CRASHES} for n in range(MESSAGES)]
    lines.write_text("".join(json.dumps(body) + "\n" for body in bodies))
    run(folder, *QDO, "send", "customer-7", "--file", str(lines))
    run(folder, *WORKER, "--burst")
    runs = (folder / "runs").read_text().split()
    assert len(set(runs)) == MESSAGES
    assert len(runs) > MESSAGES
    # Each amount has a digit of its own in base 3: another number of bookings gives another sum.
    total = sum(3**n for n in range(MESSAGES))
    if (folder / "bank.py").exists():
        assert rows(folder, "SELECT * FROM accounts") == [("customer-7", total)]
    else:
        ((value,),) = rows(folder, "SELECT value FROM qdo_state", "totals.db")
        assert json.loads(str(value)) == {"paid": total, "payments": MESSAGES}


def test_a_new_coordinator_needs_its_fences_reset(folder: Path) -> None:
    """Smaller fences are reported as an error; after the reset the account continues."""
    run(folder, *QDO, "send", "ada", '{"number": 0, "amount": 5, "crash": false}')
    run(folder, *WORKER, "--burst")
    with contextlib.closing(sqlite3.connect(folder / "bank.db")) as database, database:
        database.execute("UPDATE qdo_writes SET fence = 1000000")
    run(folder, *QDO, "send", "ada", '{"number": 1, "amount": 5, "crash": false}')
    run(folder, *WORKER, "--burst", QDO_ATTEMPTS="1")
    assert "no longer owned" in run(folder, *QDO, "dead-letters", "list", "-o", "jsonl").out
    (folder / "reset.py").write_text(RESET)
    run(folder, "reset.py")
    run(folder, *QDO, "dead-letters", "retry", "ada", "--all", "--yes")
    run(folder, *WORKER, "--burst")
    assert rows(folder, "SELECT * FROM accounts") == [("ada", 10)]
