"""Documents while writers are killed, and while the coordinator is away."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from qdo import App
from qdo.coordination import transactions
from qdo.coordination.znodes.layout import Layout
from qdo.errors import CoordinatorUnreachableError, StaleCopyError
from tests.support.processes import Proc, paused, wait_until, whole_lines
from tests.support.zookeeper import Ensemble
from tests.support.zookeeper_txn_log import read_log

WRITER = """
import sys
from qdo import App

plans = App("shop", coordinator=sys.argv[1]).documents("plans")
with open(sys.argv[2], "a", buffering=1) as said:
    while True:
        plans.change("count", lambda value: (value or 0) + 1)
        said.write("counted\\n")
"""


def writer(url: str, said: Path) -> Proc:
    return Proc.python("-c", WRITER, url, str(said))


@pytest.fixture
def app(coordinator_url: str) -> Iterator[App]:
    with App("shop", coordinator=coordinator_url) as app:
        yield app


def test_killed_writers_neither_lose_nor_repeat_a_change(
    app: App, coordinator_url: str, tmp_path: Path
) -> None:
    """Every acknowledged change counts once; a killed writer may have made one more."""
    plans = app.documents("plans")
    chance = random.Random(3)
    files = [tmp_path / f"said-{number}" for number in range(3)]
    for file in files:
        file.touch()
    kills = 0

    def acknowledged() -> int:
        return sum(len(whole_lines(file)) for file in files)

    with contextlib.ExitStack() as stack:

        def start(file: Path) -> Proc:
            return stack.enter_context(writer(coordinator_url, file))

        running = [start(file) for file in files]
        for _ in range(4):
            before = acknowledged()
            wait_until(lambda before=before: acknowledged() >= before + 20, "20 changes")  # type: ignore[misc]
            number = chance.randrange(3)
            os.kill(running[number].pid, signal.SIGKILL)
            kills += 1
            running[number] = start(files[number])
    plans.fresh()
    assert acknowledged() <= plans["count"] <= acknowledged() + kills + len(running)


def test_copies_stay_readable_while_the_coordinator_is_away(
    zookeeper_server: Ensemble, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Writing says so; nothing is half done, and everything goes on by itself."""
    monkeypatch.setattr(transactions, "ANSWER_SECONDS", 0.5)
    url = zookeeper_server.url("/documents-away")
    app = App("shop", coordinator=url, session_timeout_seconds=2)
    with app, App("shop", coordinator=url, session_timeout_seconds=2) as other:
        plans, copy = app.documents("plans"), other.documents("plans")
        copy.fresh(plans.put("acme", 1))
        pid = zookeeper_server.servers[0].pid
        with paused(pid):
            with pytest.raises(CoordinatorUnreachableError):
                plans.put("acme", 2)
            with pytest.raises(StaleCopyError):
                copy.fresh(timeout_seconds=0.2)
            assert copy["acme"] == 1
        monkeypatch.undo()
        copy.fresh(plans.put("acme", 3), timeout_seconds=30)
        assert copy["acme"] == 3


def test_each_write_replaces_exactly_the_one_before_it(
    zookeeper_server: Ensemble, tmp_path: Path
) -> None:
    """From the server's transaction log: no change was made on an older value."""
    url = zookeeper_server.url("/documents-log")
    files = [tmp_path / f"said-{number}" for number in range(3)]
    for file in files:
        file.touch()
    with contextlib.ExitStack() as stack:
        for file in files:
            stack.enter_context(writer(url, file))
        wait_until(lambda: all(len(whole_lines(file)) >= 30 for file in files), "30 changes each")
    path = f"/documents-log{Layout.of('shop').fleet.document_set('plans')}/count"
    values = [
        json.loads(change.data)["value"]
        for txn in read_log(zookeeper_server.servers[0].folder)
        for change in txn.changes
        if change.path == path and change.data
    ]
    assert len(values) >= 90
    assert values == list(range(1, len(values) + 1))
