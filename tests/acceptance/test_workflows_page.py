"""The programs of the page about workflows on PostgreSQL, while their workers are killed."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import qdo
from qdo.brokers.requests import OVER
from tests.support.cli import WORKER, clean_environment
from tests.support.doc_pages import blocks, read
from tests.support.processes import Proc, children, wait_until

KILLS = 10
ALL = """
import qdo
app = qdo.App("all", concurrency=20, backoff_seconds=0.01)
qdo.App = lambda *args, **options: app
import album, move, refund, shop, trip
"""
# The pool, the body, how many of them, how each ends, and its steps.
WORKFLOWS = (
    ("order", {"item": "lamp", "card": "valid"}, 10, "done", 3),
    ("order", {"item": "lamp", "card": "expired"}, 10, "failed", 2),
    ("album", {"pages": 100}, 1, "done", 100),
    ("trip", "Bonn", 10, "done", 3),
    ("trip", "Rome", 10, "failed", 5),
    ("trip", "Oslo", 10, "failed", 5),
    ("refund", 30, 10, "done", 3),
    ("move", ["hall", "attic"], 10, "done", 6),
)


def start(folder: Path, broker: str) -> Proc:
    for block in blocks(read("workflows")):
        if block.options.get("caption", "").endswith(".py"):
            (folder / block.options["caption"]).write_text(block.text)
    (folder / "all_of_them.py").write_text(ALL)
    environment = {**clean_environment(), "QDO_BROKER": broker, "PYTHONPATH": str(folder)}
    return Proc.python(*WORKER, "all_of_them:app", "--processes", "2", env=environment, cwd=folder)


@pytest.mark.long("its workers are killed for ten seconds")
def test_workflows_survive_killed_workers(
    tmp_path: Path, database_url: str, record_property: Callable[[str, object], None]
) -> None:
    """Each ends once, as without a kill, with one message; and each of its steps once."""
    dice = random.Random(42)
    killed = 0
    with qdo.App("all", broker=database_url) as app, start(tmp_path, database_url) as parent:
        store = app.broker.requests
        wanted = {}
        for kind, (pool, body, count, outcome, steps) in enumerate(WORKFLOWS):
            for number in range(count):
                id = f"{pool}-{kind}-{number}"
                wanted[id] = (outcome, steps)
                app.request(pool, body, id=id, then="told")

        def is_over() -> bool:
            nonlocal killed
            pids = children(parent.pid)
            if pids and killed < KILLS:
                os.kill(dice.choice(pids), signal.SIGKILL)
                killed += 1
                time.sleep(dice.uniform(0.2, 1.0))
            for each in store.records("approval", states=(2,)):
                if dice.random() < 0.5:
                    app.handle(each.id).resume("yes")
            ended = store.records(states=(OVER,), limit=100_000)
            return killed == KILLS and len({each.id for each in ended} & wanted.keys()) == len(
                wanted
            )

        wait_until(is_over, "the end of the workflows", 300.0)
        for id, (outcome, steps) in wanted.items():
            own, *others = store.records(of=id)
            deep = [each for other in others for each in store.records(of=other.id)[1:]]
            assert (own.outcome, len(others) + len(deep)) == (outcome, steps), own
            assert {each.state for each in (*others, *deep)} == {OVER}
        assert app.broker.catalog.backlog("told", 0).count == len(wanted)
        takes = sum(each.take.number for each in store.records(limit=100_000))
        record_property("counts", f"{len(wanted)} workflows, {killed} kills, {takes} takes")
