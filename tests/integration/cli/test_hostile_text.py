"""Text of other parties in the output of every command."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from kazoo.security import ACL, OPEN_ACL_UNSAFE, Id, Permissions

from qdo import App
from qdo.brokers.dead_letters import DeadLetterRecord
from qdo.brokers.requests import RUNNING
from qdo.coordination.client import Client
from qdo.coordination.session_setup import BrokerNode
from qdo.coordination.znodes.layout import Layout
from qdo.coordination.znodes.queue_node import FailureRecord, QueueNode
from qdo.coordination.znodes.values import encode
from qdo.coordination.znodes.worker_node import WorkerNode
from qdo.fleet.live_settings import version_path
from qdo.fleet.pause_machine import Pause, PauseNode
from qdo.fleet.settings_machine import SettingsNode, SettingsVersion
from qdo.history.recorder import Recorder
from qdo.history.writer import HistoryWriter
from qdo.message import Message
from qdo.queues import QueueFilter
from qdo.testing.contracts.fixtures import dead_letter
from tests.support.cli import Run
from tests.support.commands import COMMANDS
from tests.support.coordinator_process import connected
from tests.support.fakes.hostile_text import HOSTILE, HOSTILE_NAME, TEXT, unsafe

POSITION = 135471512647131000
LAYOUT = Layout.of("a")
CALLS = {
    "send": [("send", HOSTILE_NAME, "1"), ("send", "q", "--file", f"{TEXT[2:]}")],
    "queues": [
        ("queues",),
        ("queues", "-o", "csv"),
        ("queues", "-o", "name"),
        ("queues", HOSTILE_NAME),
        ("queues", HOSTILE),
        ("queues", f"{HOSTILE}*"),
        ("queues", "--by", "owner"),
        ("queues", f"{HOSTILE}*", "--by", "prefix", "-o", "csv"),
    ],
    "ps": [("ps",), ("ps", HOSTILE, "--timeout", "0.1s"), ("ps", "--worker", HOSTILE)],
    "workers": [("workers",), ("workers", HOSTILE), ("workers", "--all")],
    "status": [("status",), ("status", HOSTILE), ("status", "--watch", HOSTILE)],
    "check": [("check",), ("check", HOSTILE, "--max-age", HOSTILE)],
    "events": [("events", HOSTILE, "--follow", "--for", "0s"), ("events", "--every", HOSTILE)],
    "dashboard": [("dashboard", "--listen", HOSTILE), ("dashboard", "--token-file", TEXT[2:])],
    "ingest": [("ingest", "--listen", HOSTILE), ("ingest", "--app", HOSTILE)],
    "dead-letters": [
        ("dead-letters",),
        ("dead-letters", "show", HOSTILE_NAME, str(POSITION)),
        ("dead-letters", "show", TEXT, HOSTILE),
        ("dead-letters", "retry", HOSTILE_NAME, str(POSITION), HOSTILE),
        ("dead-letters", "export"),
    ],
    "peek": [
        ("peek", HOSTILE_NAME, "--body"),
        ("peek", HOSTILE_NAME, "--kind", "blocking"),
        ("peek", HOSTILE_NAME, "--id", HOSTILE),
        ("peek", HOSTILE, "-n", HOSTILE),
    ],
    "cancel": [
        ("cancel", HOSTILE_NAME, HOSTILE),
        ("cancel", HOSTILE_NAME, str(POSITION), "--reason", HOSTILE[:100]),
        ("cancel", HOSTILE, "1"),
    ],
    "purge": [
        ("purge", HOSTILE_NAME, "--dry-run"),
        ("purge", HOSTILE),
        ("purge", "*", "--yes", "--delayed", "--reason", HOSTILE[:100]),
    ],
    "seek": [("seek", HOSTILE_NAME, "earliest"), ("seek", "q", HOSTILE)],
    "doctor": [("doctor",), ("doctor", "--app", HOSTILE), ("doctor", "-o", "csv")],
    "move": [
        ("move", HOSTILE_NAME, "worker-0000000000"),
        ("move", HOSTILE, HOSTILE),
        ("move", HOSTILE_NAME, HOSTILE_NAME),
        ("move", HOSTILE_NAME, "worker-0000000000", "--timeout", HOSTILE),
        ("move", "--plan"),
        ("move", "--plan", "--app", HOSTILE),
    ],
    "skip": [
        ("skip", HOSTILE_NAME, HOSTILE, "--yes"),
        ("skip", HOSTILE_NAME, str(POSITION), "--dry-run"),
    ],
    "retry-now": [
        ("retry-now", HOSTILE_NAME, HOSTILE),
        ("retry-now", HOSTILE_NAME, "--reason", HOSTILE[:100]),
    ],
    "delete": [("delete", HOSTILE_NAME), ("delete", HOSTILE_NAME, TEXT, "--yes")],
    "pause": [
        ("pause", HOSTILE_NAME, "--allow-none", "--no-wait", "--reason", HOSTILE[:100]),
        ("pause", HOSTILE),
        ("pause", HOSTILE, "--", "true"),
        ("pause", "plain", "--", HOSTILE),
        ("pause", "--list"),
    ],
    "resume": [("resume", HOSTILE), ("resume", "--id", HOSTILE)],
    "documents": [
        ("documents", "list"),
        ("documents", "list", HOSTILE_NAME),
        ("documents", "get", HOSTILE_NAME, HOSTILE_NAME),
        ("documents", "put", HOSTILE_NAME, HOSTILE_NAME, HOSTILE),
        ("documents", "put", HOSTILE_NAME, HOSTILE_NAME, "1", "--if-version", "7"),
        ("documents", "delete", HOSTILE, HOSTILE_NAME),
    ],
    "locks": [("locks",), ("locks", "--app", HOSTILE)],
    "action": [
        ("action", HOSTILE, "ping"),
        ("action", "*", HOSTILE),
        ("action", "*", "log-level", HOSTILE),
        ("action", "*", "ping", "--timeout", "0.01s", "--reason", HOSTILE[:100]),
    ],
    "audit": [("audit",), ("audit", HOSTILE), ("audit", "--since", HOSTILE)],
    "history": [
        ("history", "queues"),
        ("history", "queues", "--history", "sqlite:history.db", HOSTILE),
        ("history", "queues", "--history", f"sqlite:{HOSTILE_NAME}"),
        ("history", "failures", "--history", HOSTILE),
        ("history", "failures", "--history", "sqlite:history.db", "--since", HOSTILE),
        ("history", "failures", "--history", "sqlite:history.db"),
        ("history", "durations", "--history", "sqlite:history.db", HOSTILE),
        ("history", "actions", "--history", "sqlite:history.db", HOSTILE),
        ("queues", "--history", f"sqlite:{HOSTILE_NAME}"),
    ],
    "streams": [
        ("streams", "list"),
        ("streams", "list", HOSTILE, "--all"),
        ("streams", "locate", "s", HOSTILE[:100]),
        ("streams", "locate", HOSTILE_NAME, HOSTILE),
        ("streams", "split", HOSTILE_NAME, "--at", HOSTILE),
        ("streams", "merge", HOSTILE_NAME, HOSTILE),
    ],
    "requests": [
        ("requests", "list"),
        ("requests", "list", HOSTILE_NAME),
        ("requests", "list", HOSTILE, "--state", "over", "-o", "csv"),
        ("requests", "show", HOSTILE_NAME, "--body"),
        ("requests", "show", HOSTILE),
        ("requests", "resume", HOSTILE_NAME, HOSTILE),
        ("requests", "retry", HOSTILE_NAME),
        ("requests", "cancel", HOSTILE_NAME, "--dry-run"),
        ("requests", "cancel", HOSTILE_NAME, "--yes", "--reason", HOSTILE[:100]),
        ("requests", "cancel", HOSTILE_NAME, "--yes"),
    ],
    "timers": [
        ("timers", "list"),
        ("timers", "run", HOSTILE),
        ("timers", "run", HOSTILE, "--app", HOSTILE),
    ],
    "limits": [
        ("limits", "list"),
        ("limits", "set", HOSTILE_NAME, "--max", HOSTILE),
        ("limits", "set", HOSTILE_NAME, "--rate", HOSTILE),
        ("limits", "set", HOSTILE, "--max", "1", "--reason", HOSTILE),
        ("limits", "delete", HOSTILE),
        ("limits", "delete", HOSTILE_NAME),
    ],
    "settings": [
        ("settings", "show"),
        ("settings", "history"),
        ("settings", "diff", "1", "2"),
        ("settings", "set", HOSTILE_NAME, HOSTILE),
        ("settings", "set", "attempts", HOSTILE),
        ("settings", "set", "attempts", "5", "--reason", HOSTILE),
        ("settings", "unset", HOSTILE_NAME),
        ("settings", "apply", HOSTILE_NAME),
        ("settings", "rollback", HOSTILE),
    ],
    "admin": [
        ("admin", "broker", "file"),
        ("admin", "keys", "list", "--keys", TEXT),
        ("admin", "keys", "retire", "--keys", TEXT, HOSTILE),
        ("admin", "acl", "check"),
        ("admin", "acl", "check", "--app", HOSTILE),
        ("admin", "acl", "apply"),
        ("admin", "tree"),
        ("admin", "tree", "--app", HOSTILE),
        ("admin", "checkpoints", "export", "--file", "saved.jsonl"),
        ("admin", "checkpoints", "import", "saved.jsonl", "--dry-run"),
        ("admin", "checkpoints", "export", HOSTILE, "--file", HOSTILE),
        ("admin", "checkpoints", "import", HOSTILE_NAME),
        ("admin", "outbox", "list"),
        ("admin", "outbox", "retry", HOSTILE),
        ("admin", "outbox", "drop", "--all"),
        ("admin", "completion", "bash"),
        ("admin", "completion", HOSTILE),
    ],
    "config": [("config", "--broker", f"sqlite:{HOSTILE_NAME}"), ("config", "--broker", HOSTILE)],
}


@pytest.fixture
def client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Client]:
    """A coordinator and a broker that other parties filled."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("QDO_APP", "a")
    with connected("sqlite:qdo-data/coordination.db", handler="threading") as client:
        for path in LAYOUT.persistent:
            client.ensure_path(path)
        hold = PauseNode((Pause("a" * 8, (HOSTILE,), HOSTILE, HOSTILE),))
        client.set(LAYOUT.fleet.holds, hold.encode())
        worker = WorkerNode((HOSTILE,), (), False, QueueFilter((HOSTILE,), (HOSTILE,), (HOSTILE,)))
        client.create(f"{LAYOUT.workers}/worker-", worker.encode(), ephemeral=True, sequence=True)
        client.create(
            f"{LAYOUT.components}/worker/host-",
            encode(dict.fromkeys(("host", "pid", "state", "started", "version"), HOSTILE)),
            ephemeral=True,
            sequence=True,
            makepath=True,
        )
        failure = FailureRecord(POSITION, 3, HOSTILE, blocked_since=1.0)
        node = QueueNode(last=7, owner=HOSTILE_NAME, failure=failure)
        client.create(LAYOUT.queue(HOSTILE_NAME), node.encode())
        client.create(LAYOUT.queue("garbage"), encode({"last": HOSTILE}))
        name = f"{TEXT.replace(':', '')}:hash"
        acl = [*OPEN_ACL_UNSAFE, ACL(Permissions.READ, Id("digest", name))]
        client.set_acls(LAYOUT.queue("garbage"), acl)
        lock = f"{LAYOUT.fleet.lock(HOSTILE_NAME)}/x-00000000-"
        about = {"who": TEXT, "why": TEXT, "at": 1.0}
        client.create(lock, encode(about), ephemeral=True, sequence=True, makepath=True)
        client.create(lock, HOSTILE.encode(errors="surrogatepass"), sequence=True)
        folder = LAYOUT.fleet.document_set(HOSTILE_NAME)
        hostile = {"value": TEXT, "by": TEXT, "at": 1.0}
        client.create(f"{folder}/{HOSTILE_NAME}", encode(hostile), makepath=True)
        client.create(f"{folder}/bytes", HOSTILE.encode(errors="surrogatepass"))
        texts = ("by", "account", "command", "target", "reason")
        hostile = {**dict.fromkeys(texts, TEXT), "from": {TEXT: HOSTILE}, "to": {"a": [TEXT]}}
        client.create(LAYOUT.fleet.log_entry(f"1000-{HOSTILE_NAME}"), encode(hostile))
        limit = {"max": 1, "reason": TEXT, "permits": [[TEXT, 1, 1]]}
        client.create(LAYOUT.fleet.limit(HOSTILE_NAME), encode(limit), makepath=True)
        client.create(LAYOUT.fleet.limit("bytes"), HOSTILE.encode(errors="surrogatepass"))
        timer = {"last": "2026-01-01T00:00:00Z", "when": TEXT, "queue": TEXT, "by": TEXT}
        client.create(f"{LAYOUT.fleet.timers}/{HOSTILE_NAME}", encode(timer), makepath=True)
        client.create(f"{LAYOUT.fleet.timers}/text", encode({"last": HOSTILE, "next": HOSTILE}))
        client.create(f"{LAYOUT.fleet.timers}/bytes", HOSTILE.encode(errors="surrogatepass"))
        client.create(LAYOUT.queue("bytes"), HOSTILE.encode(errors="surrogatepass"))
        for number in (1, 2):
            version = SettingsVersion("a" * 8, number, TEXT * number, TEXT, 1.0, TEXT)
            client.create(version_path(LAYOUT, number), version.encode())
        client.set(LAYOUT.fleet.settings, SettingsNode(version).encode())
        client.create(LAYOUT.broker, BrokerNode(HOSTILE, HOSTILE, HOSTILE).encode())
        recorder = Recorder()
        recorder.bind(lambda message, context: None)(Message(HOSTILE_NAME, 1, None), None)
        recorder.ended(Message(HOSTILE_NAME, 2, None, id=HOSTILE), "block", HOSTILE)
        writer = HistoryWriter("sqlite:history.db", "a", recorder)
        writer.start()
        writer.close()
        with App("a") as app:
            app.send_many([(HOSTILE_NAME, 1), ("q", 2)])
            app.broker.dead_letters.store(letter())
            asked = {"body": TEXT, "tag": {TEXT: TEXT}, "then": HOSTILE_NAME}
            app.request_many([{"pool": HOSTILE_NAME, "id": HOSTILE_NAME, **asked}])
            (taken,) = app.broker.requests.take(TEXT[1:], HOSTILE_NAME, 1, ()).requests
            app.broker.requests.note(taken.take, RUNNING, TEXT)
            yield client


def letter() -> DeadLetterRecord:
    texts = dict.fromkeys(("key", "error", "worker"), TEXT) | {"traceback": f"Traceback:\n{TEXT}"}
    body, headers = json.dumps({"n": TEXT}).encode(), json.dumps({"h": TEXT})
    return dead_letter(HOSTILE_NAME, POSITION, body=body, headers=headers, **texts)


@pytest.fixture
def cli(client: Client, cli: Run) -> Run:
    """Returns a function that runs `qdo` on hostile nodes."""
    return cli


def test_every_command_is_called() -> None:
    """`qdo demo` shows only what it made up itself."""
    assert {*CALLS, "demo"} == {*COMMANDS}


@pytest.mark.parametrize("name", CALLS)
def test_no_command_prints_control_characters(cli: Run, name: str) -> None:
    """In tables, pages, hints and errors; and no line of theirs looks like one of qdo's."""
    printed = ""
    for arguments in CALLS[name]:
        ended = cli(*arguments)
        printed += ended.out + ended.err
        assert unsafe(ended.out + ended.err) == set(), arguments
        assert not any(line.startswith("qdo: forged") for line in ended.err.splitlines())
    assert "\\u202e" in printed


def test_settings_are_exact_but_on_a_terminal(cli: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file gets what another command reads, and a terminal what it can show."""
    assert cli("settings", "get").out == f"{TEXT}{TEXT}\n"
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    shown = cli("settings", "get").out
    assert unsafe(shown) == set()
    assert "\\u202e" in shown


def test_json_is_exact(cli: Run) -> None:
    """JSON has escapes of its own, so programs get each text as it was stored.

    Only halves of surrogate pairs, which are not text, are replaced where a node is read.
    """
    ended = cli("dead-letters", "-o", "json")
    assert unsafe(ended.out) == set()
    [item] = ended.items()
    assert item["queue"] == HOSTILE_NAME
    assert item["body"] == {"n": TEXT}
    assert item["error"] == TEXT
    ended = cli("queues", HOSTILE_NAME, "-o", "jsonl")
    [item] = map(json.loads, ended.out.splitlines())
    assert unsafe(ended.out) == set()
    assert item["blocked"]["error"] == re.sub("[\ud800-\udfff]", "\ufffd", HOSTILE)


def test_tracebacks_are_escaped(cli: Run, capsys: pytest.CaptureFixture[str]) -> None:
    """Also that of an error nobody expected: Python itself prints it as it is."""
    cli("workers")
    sys.excepthook(ValueError, ValueError(HOSTILE), None)
    printed = capsys.readouterr().err
    assert printed.startswith("ValueError: <\\x00")
    assert unsafe(printed) == set()
