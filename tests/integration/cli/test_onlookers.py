"""Operators who may read the embedded files, but not write to them."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from qdo import App
from qdo.brokers.dead_letters import DeadLetterRecord
from qdo.coordination.client import Client
from qdo.coordination.znodes.layout import Layout
from qdo.coordination.znodes.queue_node import QueueNode
from qdo.coordination.znodes.worker_node import WorkerNode
from qdo.fleet.pause_machine import Pause, PauseNode
from tests.support.cli import Ended, clean_environment
from tests.support.coordinator_process import connected
from tests.support.forks.processes import run

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs to become another user")

LAYOUT = Layout.of("a")
_RUN = """
import io, json, os, sys
from contextlib import redirect_stderr, redirect_stdout
import qdo.cli.changing, qdo.brokers.registry
import qdo.brokers.embedded.broker, qdo.coordination.sql.connection, logging.config
import kazoo.handlers.threading, encodings.idna
from importlib import import_module
from pkgutil import iter_modules
import qdo.cli.commands
for each in iter_modules(qdo.cli.commands.__path__):
    import_module(f"qdo.cli.commands.{each.name}")
from qdo.cli.framework import run
from qdo.cli.main import qdo
os.setgroups([])
os.setgid(65534)
os.setuid(65534)
for words in json.loads(sys.argv[1]):
    with redirect_stdout(io.StringIO()) as out, redirect_stderr(io.StringIO()) as err:
        code = run(qdo, "qdo", words)
    print(json.dumps([code, out.getvalue(), err.getvalue()]))
"""


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder that others may enter; pytest's own are closed to them."""
    with tempfile.TemporaryDirectory(prefix="qdo-test-") as name:
        Path(name).chmod(0o755)
        (Path(name) / "data").mkdir()
        yield Path(name) / "data"


@pytest.fixture
def fill(folder: Path) -> Iterator[Client]:
    with connected(f"sqlite:{folder}/coordinator.db", handler="threading") as client:
        for path in LAYOUT.persistent:
            client.ensure_path(path)
        node = WorkerNode(("q",)).encode()
        client.create(f"{LAYOUT.workers}/worker-", node, ephemeral=True, sequence=True)
        client.create(LAYOUT.queue("q"), QueueNode(last=7, owner="worker-0000000000").encode())
        with App("a", broker=f"sqlite:{folder}/broker.db") as app:
            app.send_many([("q", 1), ("q", 2)])
            letter = DeadLetterRecord("q", 1, b"1", None, None, "no", "", 1, "w", 1, 0.0)
            app.broker.dead_letters.store(letter)
            lock = f"{LAYOUT.fleet.lock('export')}/x-00000000-0000000000"
            client.create(lock, b"", makepath=True)
            hold = PauseNode((Pause("a" * 8, ("held-*",), "disk full"),))
            client.set(LAYOUT.fleet.holds, hold.encode())
            document = f"{LAYOUT.fleet.document_set('plans')}/acme"
            client.create(document, b'{"value": 1}', makepath=True)
            client.create(f"{LAYOUT.components}/worker/host-1", b"{}", makepath=True)
            client.create(LAYOUT.fleet.log_entry("1000-1"), b'{"command": "seek"}')
            client.create(LAYOUT.fleet.chores, b'{"chores": {"action-log": {"at": 1.0}}}')
            client.create(LAYOUT.fleet.limit("crm"), b'{"max": 1}', makepath=True)
            for path in [folder, *folder.rglob("*")]:
                path.chmod(0o755 if path.is_dir() else 0o644)
            yield client


def qdo(folder: Path, *commands: str) -> list[Ended]:
    """Run commands as another user, who loads no program as the tests' user does."""
    done = run(
        [sys.executable, "-c", _RUN, json.dumps([each.split() for each in commands])],
        env=clean_environment(
            {
                "QDO_APP": "a",
                "QDO_BROKER": f"sqlite:{folder}/broker.db",
                "QDO_COORDINATOR": f"sqlite:{folder}/coordinator.db",
                "QDO_CONNECT_SECONDS": "3",
            }
        ),
        capture_output=True,
        timeout=60,
        cwd="/",
    )
    assert done.returncode == 0, done.stderr.decode()
    return [Ended(*json.loads(line)) for line in done.stdout.splitlines()]


def snapshot(folder: Path) -> list[tuple[str, int, int]]:
    status = [(str(each), each.lstat()) for each in sorted(folder.rglob("*"))]
    return [(name, each.st_ino, each.st_uid) for name, each in status]


READING = (
    "queues",
    "status",
    "queues --by prefix",
    "queues q --no-ask",
    "workers",
    "workers worker-0000000000",
    "admin tree",
    "dead-letters",
    "peek q",
    "pause --list",
    "documents list",
    "audit",
    "workers --all",
    "documents list plans",
    "limits list",
    "locks",
    "admin broker file",
    "move --plan",
)


def test_reading_needs_no_right_to_write(folder: Path, fill: Client) -> None:
    before = snapshot(folder)
    found = qdo(folder, *(f"{each} -o json" for each in READING))
    for command, ended in zip(READING, found, strict=True):
        hint = ended.err.replace("hint", "")[:1]
        assert (ended.code, hint) in ((0, ""), (0, ":")), (command, ended.err)
        items = ended.items()
        if command == "queues":
            assert [(each["queue"], each["backlog"], each["owner"]) for each in items] == [
                ("q", 2, "worker-0000000000")
            ]
        elif command not in ("admin broker file", "move --plan"):
            assert items, command
    assert snapshot(folder) == before


def test_writing_is_one_error(folder: Path, fill: Client) -> None:
    writing = ("send q 1", "seek q earliest --yes", "dead-letters discard q 1 --yes")
    ended = qdo(folder, *writing)
    assert [each.code for each in ended] == [3, 5, 3], ended
    assert not any("Traceback" in each.err for each in ended)


def test_files_are_readable_while_no_worker_runs(folder: Path) -> None:
    """Then there is no log beside them, and the onlooker may not create it."""
    with App("a", broker=f"sqlite:{folder}/broker.db") as app:
        app.send("q", 1)
    with connected(f"sqlite:{folder}/coordinator.db", handler="threading"):
        pass  # makes the file
    for path in folder.glob("*.db"):
        path.chmod(0o644)
    assert not list(folder.glob("*-wal"))
    (ended,) = qdo(folder, "queues -o json")
    assert [each["backlog"] for each in ended.items()] == [1]
