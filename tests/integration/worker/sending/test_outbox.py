"""The outbox in real workers: killed between its steps, and with several of them."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest

from qdo import App
from tests.support.cli import QDO, WORKER, clean_environment, command
from tests.support.processes import Proc, alive, children, wait_until, whole_lines

APP = "from tests.apps.outbox import app, fill, outbox, put\n"
ENVIRONMENT = {"QDO_SESSION_TIMEOUT_SECONDS": "2.5", "QDO_APP": "shop"}
COUNT = 60


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "shop.py").write_text(APP)
    fill(tmp_path, 0, COUNT)
    return tmp_path


def fill(folder: Path, first: int, last: int) -> None:
    made = command("-c", f"{_AT_HOME}import shop; shop.fill({first}, {last})", cwd=folder)
    assert made.code == 0, made.err


_AT_HOME = "import sys; sys.path.insert(0, ''); "


def runs(folder: Path) -> dict[str, list[int]]:
    """Return the numbers of messages by queue, in the order of their first runs.

    After a kill a message may run again; a message sent twice would have two ids.
    """
    found: dict[str, list[int]] = {}
    path = folder / "runs"
    lines = whole_lines(path)
    for queue, number, _ in dict.fromkeys(tuple(line.split()) for line in lines):
        found.setdefault(queue, []).append(int(number))
    return found


def expected(count: int) -> dict[str, list[int]]:
    return {f"q{each}": list(range(each, count, 3)) for each in range(3)}


@pytest.mark.parametrize("step", ["read", "after", "delete"])
def test_a_relay_killed_between_its_steps(folder: Path, step: str) -> None:
    """Every message is there once, and in order; burst waits for the outbox, too."""
    worker = (*WORKER, "shop:app", "--burst")
    environment = {**ENVIRONMENT, "TESTS_KILL_AT": step}
    ended = command(*worker, cwd=folder, env=environment)
    assert ended.code == 0, ended.err
    assert (folder / "killed").exists()
    assert runs(folder) == expected(COUNT)


def test_a_locked_database_delays_no_queue(folder: Path) -> None:
    """The driver blocks its thread for up to 30 s, while another process has the lock."""
    environment = {**clean_environment(), **ENVIRONMENT, "TESTS_KILL_AT": "told"}
    with (
        closing(sqlite3.connect(folder / "app.db", isolation_level=None)) as other,
        Proc.python(*WORKER, "shop:app", cwd=folder, env=environment) as parent,
    ):
        other.execute("BEGIN EXCLUSIVE")
        wait_until((folder / "reading").exists, "the relay", 60)
        app = App("shop", broker=f"sqlite:{folder / 'qdo-data' / 'messages.db'}")
        with app:
            app.send("direct", 0)
        wait_until(lambda: "direct" in runs(folder), "its run", 60)
        assert runs(folder) == {"direct": [0]}
        assert "the event loop has been blocked" not in parent.output
        other.execute("ROLLBACK")
        wait_until(lambda: runs(folder) == expected(COUNT) | {"direct": [0]}, "the outbox", 60)
        parent.send(signal.SIGTERM)
        assert parent.wait(60) == 0, parent.output


def test_a_refused_row_is_set_aside_until_an_operator_decides(folder: Path) -> None:
    """Later rows go on, and commands show it and know what to do."""
    environment = {**clean_environment(), **ENVIRONMENT, "QDO_MAX_QUEUES": "4"}
    environment |= {"QDO_APP": "shop:app", "QDO_HTTP": "127.0.0.1:0"}

    def qdo(*argv: str, code: int = 0) -> Any:
        ended = command(*QDO, *argv, "-o", "json", cwd=folder, env=environment)
        assert ended.code == code, ended.err
        return json.loads(ended.out)["items"] if ended.out else []

    queues = ("q0", "refused", "second", "more", "q0")
    code = f"{_AT_HOME}import shop; shop.put(*{queues!r})"
    with Proc.python(*WORKER, "shop:app", cwd=folder, env=environment) as parent:
        wait_until(lambda: runs(folder) == expected(COUNT), "the first ones have run", 60)
        assert command("-c", code, cwd=folder, env=environment).code == 0
        wait_until(lambda: len(runs(folder)["q0"]) == COUNT // 3 + 2, "later rows", 60)
        refused = qdo("admin", "outbox", "list")
        assert [each["queue"] for each in refused] == ["second", "more"]
        assert {each["reason"].partition(":")[0] for each in refused} == {"QueueLimitError"}
        status = partial(qdo, "status")
        named = [{"check": "outbox", "status": "warning"}]
        wait_until(
            lambda: (
                [{key: each[key] for key in named[0]} for each in status()[0]["notices"]] == named
            ),
            "the leader reports it",
            60,
        )
        [found] = parent.wait_for_line(r"http://127.0.0.1:(\d+)")
        page = f"http://127.0.0.1:{found.group(1)}/metrics"
        metric = b'qdo_outbox_refused{table="qdo_outbox"} 2.0'
        wait_until(lambda: metric in urlopen(page).read(), "the metric", 60)
        dropped = refused[0]["id"]
        qdo("admin", "outbox", "drop", dropped, code=5)
        qdo("admin", "outbox", "drop", dropped, "--yes")
        qdo("admin", "outbox", "retry", "unknown", code=6)
        qdo("delete", "refused", "--yes")
        qdo("admin", "outbox", "retry", "--all")
        wait_until(lambda: runs(folder).get("more") == [0], "it runs", 60)
        assert qdo("admin", "outbox", "list") == []
        parent.send(signal.SIGTERM)
        assert parent.wait(60) == 0, parent.output


def test_another_worker_takes_over(folder: Path) -> None:
    """Of three workers one relays; when it is killed the next one does."""
    environment = {**clean_environment(), **ENVIRONMENT}
    options = ("shop:app", "--processes", "3", "--log-level", "debug")
    with Proc.python(*WORKER, *options, cwd=folder, env=environment) as parent:
        wait_until(lambda: runs(folder) == expected(COUNT), "the first ones have run", 60)
        [found] = parent.wait_for_line(r"outbox_relay\[(\d+)\] worker-\d+, relayed \d+ message")
        relay = int(found.group(1))
        assert relay in children(parent.pid)
        os.kill(relay, signal.SIGKILL)
        wait_until(lambda: not alive(relay), "it is dead")
        fill(folder, COUNT, 2 * COUNT)
        wait_until(lambda: runs(folder) == expected(2 * COUNT), "the others have run", 60)
        parent.send(signal.SIGTERM)
        assert parent.wait(60) in (0, 1), parent.output
    listed = command(*QDO, "queues", "-o", "jsonl", cwd=folder, env=ENVIRONMENT).out
    assert listed.count('"backlog": 0') + listed.count('"backlog":0') == 3
