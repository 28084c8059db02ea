"""The history of real worker processes: several, and killed ones."""

from __future__ import annotations

import os
import signal
import sqlite3
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tests.support.app_runs import OperatorDesk, jobs
from tests.support.processes import Proc, children, wait_until

SLOW_APP = """
import os

import gevent
import qdo

app = qdo.App("desk")


@app.job()
def job(message, context):
    gevent.sleep(0.02)
    while message.body >= 40 and not os.path.exists("go"):
        gevent.sleep(0.05)
"""
ENV = {"QDO_HISTORY": "sqlite:history.db"}


class HistoryDesk(OperatorDesk):
    """Workers that keep a history, and an operator."""

    def keep(self, source: str, *options: str) -> Proc:
        return self.start(source, *options, **ENV)

    def fill(self, first: int, last: int) -> None:
        self.app.send_many([(f"q{number % 4}", number) for number in range(first, last)])

    def done(self) -> int:
        """Return how many messages are done according to the history."""
        if not (self.folder / "history.db").exists():
            return 0
        with closing(sqlite3.connect(self.folder / "history.db", timeout=10)) as connection:
            try:
                (found,) = connection.execute("SELECT sum(done) FROM qdo_minutes").fetchone()
            except sqlite3.OperationalError:
                found = 0  # no table yet
        return int(found or 0)

    def mean_seconds(self, queue: str) -> float:
        query = "SELECT sum(busy_seconds) / sum(attempts) FROM qdo_minutes WHERE queue = ?"
        with closing(sqlite3.connect(self.folder / "history.db")) as connection:
            (found,) = connection.execute(query, (queue,)).fetchone()
        return float(found)

    def wait_runs(self, count: int) -> None:
        wait_until(lambda: len(self.pids()) >= count, f"{count} messages ran")

    def queues(self, history: str = ENV["QDO_HISTORY"]) -> tuple[dict[str, Any], str]:
        """Return the first queue of `qdo queues`, and what it says on stderr."""
        ended = self.qdo("queues", "--history", history, "-o", "json")
        return ended.items()[0], ended.err


@pytest.fixture
def desk(tmp_path: Path, embedded_url: str) -> Iterator[HistoryDesk]:
    with closing(HistoryDesk("desk", tmp_path, embedded_url)) as made:
        yield made


@pytest.mark.parametrize("options", [{}, {"batch": 3}])
def test_two_processes_write_what_they_did(desk: HistoryDesk, options: dict[str, int]) -> None:
    desk.fill(0, 200)
    proc = desk.keep(jobs(**options), "--processes", "2", "--burst")
    assert proc.wait(60) == 0, proc.output
    assert len(desk.pids()) == desk.done() == 200


def test_a_killed_process_doubles_nothing(desk: HistoryDesk) -> None:
    desk.fill(0, 100)
    worker = desk.keep(jobs())
    wait_until(lambda: desk.done() == 100, "the first messages are in the history")
    desk.fill(100, 150)
    desk.wait_runs(120)
    os.kill(children(worker.pid)[0], signal.SIGKILL)
    desk.wait_runs(150)
    desk.fill(150, 250)
    desk.wait_runs(250)
    worker.send(signal.SIGTERM)
    assert worker.wait() == 0
    assert 200 <= desk.done() <= len(desk.pids())


def test_backlogs_have_an_eta(desk: HistoryDesk) -> None:
    """As long as ten jobs have taken on average; unknown without a history, or an owner."""
    desk.fill(0, 80)  # twenty for each queue
    worker = desk.keep(SLOW_APP)
    wait_until(lambda: desk.done() == 40, "half of the messages are in the history")
    item, said = desk.queues()
    assert item["backlog"] == 10
    assert item["eta_seconds"] == pytest.approx(10 * desk.mean_seconds(item["queue"]), abs=0.001)
    assert said == ""
    assert desk.queues("sqlite:none.db")[0]["eta_seconds"] is None
    item, said = desk.queues("postgresql://ann@127.0.0.1:1/db")
    assert item["eta_seconds"] is None
    assert "ETAs are unknown" in said
    ended = desk.qdo("queues", **ENV)
    assert "ETA" in ended.out.splitlines()[0]
    assert "~0s" in ended.out or "~1s" in ended.out
    (desk.folder / "go").touch()
    wait_until(lambda: desk.queues()[0]["eta_seconds"] is None, "the end of the backlog")
    wait_until(lambda: desk.done() == 80, "all messages are in the history")
    worker.send(signal.SIGTERM)
    assert worker.wait() == 0


def test_a_missing_library_is_named(desk: HistoryDesk) -> None:
    (desk.folder / "sqlalchemy.py").write_text("raise ImportError('it is not installed')\n")
    path = f"{desk.folder}:{':'.join(sys.path)}"
    proc = desk.start(jobs(), "--burst", PYTHONPATH=path, **ENV)
    assert (proc.wait(), "'qdo-queues[sql]'" in proc.output) == (2, True), proc.output
