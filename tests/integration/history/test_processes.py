"""The history of real worker processes: several, and killed ones."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.cli import QDO, WORKER, clean_environment, command
from tests.support.processes import Proc, children, wait_until, whole_lines

APP = """
import qdo

app = qdo.App("shop")


@app.job(batch=3 if __import__("os").environ.get("BATCH") else None)
def job(message, context):
    with open("runs", "a") as runs:
        runs.write("run\\n" * (len(message) if isinstance(message, list) else 1))
"""
SLOW_APP = """
import os

import gevent
import qdo

app = qdo.App("shop")


@app.job()
def job(message, context):
    gevent.sleep(0.02)
    while message.body["number"] >= 40 and not os.path.exists("go"):
        gevent.sleep(0.05)
"""
ENV = {"QDO_APP": "shop:app", "QDO_HISTORY": "sqlite:history.db"}


def send(folder: Path, first: int, last: int) -> None:
    lines = "".join(
        f'{{"queue": "q{number % 4}", "number": {number}}}\n' for number in range(first, last)
    )
    (folder / "lines").write_text(lines)
    ended = command(*QDO, "send", "--queue-field", "queue", "--file", "lines", cwd=folder, env=ENV)
    assert ended.code == 0, ended.err


def done(folder: Path) -> int:
    if not (folder / "history.db").exists():
        return 0
    connection = sqlite3.connect(folder / "history.db", timeout=10)
    try:
        (found,) = connection.execute("SELECT sum(done) FROM qdo_minutes").fetchone()
    except sqlite3.OperationalError:
        found = 0  # no table yet
    finally:
        connection.close()
    return int(found or 0)


@pytest.mark.parametrize("batch", ["", "1"])
def test_two_processes_write_what_they_did(tmp_path: Path, batch: str) -> None:
    (tmp_path / "shop.py").write_text(APP)
    send(tmp_path, 0, 200)
    options = ("--processes", "2", "--burst", "--history", ENV["QDO_HISTORY"])
    env = {"QDO_APP": ENV["QDO_APP"], "BATCH": batch}
    ended = command(*WORKER, *options, cwd=tmp_path, env=env)
    assert ended.code == 0, ended.err
    assert len(whole_lines(tmp_path / "runs")) == done(tmp_path) == 200


def test_a_killed_process_doubles_nothing(tmp_path: Path) -> None:
    (tmp_path / "shop.py").write_text(APP)
    env = clean_environment(ENV)
    send(tmp_path, 0, 100)
    with Proc.python(*WORKER, env=env, cwd=tmp_path) as worker:
        wait_until(lambda: done(tmp_path) == 100, what="the first messages are in the history")
        send(tmp_path, 100, 150)
        wait_until(lambda: len(whole_lines(tmp_path / "runs")) >= 120, what="more messages ran")
        process = children(worker.pid)[0]
        os.kill(process, signal.SIGKILL)
        wait_until(lambda: len(whole_lines(tmp_path / "runs")) >= 150, what="the rest ran")
        send(tmp_path, 150, 250)
        wait_until(lambda: len(whole_lines(tmp_path / "runs")) >= 250, what="the last ran")
        worker.send(signal.SIGTERM)
        assert worker.wait() == 0
    assert 200 <= done(tmp_path) <= len(whole_lines(tmp_path / "runs"))


def queues(folder: Path, history: str) -> tuple[dict[str, Any], str]:
    """Return the first queue of `qdo queues`, and what it says on stderr."""
    words = ("queues", "--history", history, "-o", "json")
    ended = command(*QDO, *words, cwd=folder, env={"QDO_APP": ENV["QDO_APP"]})
    assert ended.code == 0, ended.err
    return json.loads(ended.out)["items"][0], ended.err


def test_backlogs_have_an_eta(tmp_path: Path) -> None:
    """As long as ten jobs have taken on average; unknown without a history, or an owner."""
    (tmp_path / "shop.py").write_text(SLOW_APP)
    send(tmp_path, 0, 80)  # twenty for each queue
    with Proc.python(*WORKER, env=clean_environment(ENV), cwd=tmp_path) as worker:
        wait_until(lambda: done(tmp_path) == 40, what="half of the messages are in the history")
        item, said = queues(tmp_path, ENV["QDO_HISTORY"])
        assert item["backlog"] == 10
        assert 10 * 0.02 <= item["eta_seconds"] < 10 * 0.2
        assert said == ""
        item, said = queues(tmp_path, "sqlite:none.db")
        assert item["eta_seconds"] is None
        item, said = queues(tmp_path, "postgresql://ann@127.0.0.1:1/db")
        assert item["eta_seconds"] is None
        assert "ETAs are unknown" in said
        ended = command(*QDO, "queues", cwd=tmp_path, env=ENV)
        assert "ETA" in ended.out.splitlines()[0]
        assert "~0s" in ended.out or "~1s" in ended.out
        (tmp_path / "go").touch()
        wait_until(
            lambda: queues(tmp_path, ENV["QDO_HISTORY"])[0]["eta_seconds"] is None,
            what="the end of the backlog",
        )
        wait_until(lambda: done(tmp_path) == 80, what="all messages are in the history")
        worker.send(signal.SIGTERM)
        assert worker.wait() == 0


def test_a_missing_library_is_named(tmp_path: Path) -> None:
    (tmp_path / "shop.py").write_text(APP)
    (tmp_path / "sqlalchemy.py").write_text("raise ImportError('it is not installed')\n")
    env = {**ENV, "PYTHONPATH": f"{tmp_path}:{':'.join(sys.path)}"}
    ended = command(*WORKER, "--burst", cwd=tmp_path, env=env)
    assert (ended.code, "pip install -e '.[sql]'" in ended.err) == (2, True), ended.err
