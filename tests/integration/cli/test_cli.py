"""The command line inside this process: its output and its exit codes."""

from __future__ import annotations

import io
import itertools
import json
import platform
import re
import sqlite3
import sys
import time
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

import qdo
from qdo import App
from qdo.brokers.base import Broker
from qdo.brokers.embedded.broker import EmbeddedBroker
from qdo.cli.commands import send as lines
from qdo.cli.framework import EXIT_CODES, run
from qdo.cli.worker import worker
from qdo.coordination.client import Client
from qdo.coordination.znodes.layout import Layout
from qdo.coordination.znodes.queue_node import QueueNode
from qdo.coordination.znodes.values import encode
from qdo.coordination.znodes.worker_node import WorkerNode, encode_queues
from qdo.errors import DatabaseFullError, QueueNameError
from qdo.testing.contracts.fixtures import dead_letter
from tests.support.cli import Ended, Run
from tests.support.commands import COMMANDS
from tests.support.coordinator_process import connected

pytestmark = pytest.mark.usefixtures("own_folder")


@pytest.fixture
def stdin(monkeypatch: pytest.MonkeyPatch) -> Callable[[bytes], None]:
    """Returns a function that sets the data on standard input."""

    def give(data: bytes) -> None:
        buffer = io.BufferedReader(io.BytesIO(data))  # type: ignore[arg-type]
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(buffer))

    return give


def stored(app: str, queue: str) -> list[tuple[Any, str | None]]:
    """Return bodies and keys of a queue in the default broker."""
    with App(app) as opened:
        reader = opened.broker.reader(queue, 0)
        rows = reader.fetch(10_000)
    return [(json.loads(row[1]), row[2]) for row in rows]


# --- send ---


def test_disk_full(cli: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of messages sent before is reported, and they are stored."""
    monkeypatch.setattr(lines, "BATCH_MESSAGES", 10)
    whole, calls = EmbeddedBroker.send_many, itertools.count()

    def send_many(self: Any, messages: Any) -> list[str]:
        if next(calls) == 3:
            raise DatabaseFullError(path="x.db", reason="database or disk is full")
        return whole(self, messages)

    monkeypatch.setattr(EmbeddedBroker, "send_many", send_many)
    Path("in.jsonl").write_text("1\n" * 50)
    ended = cli("send", "q", "--file", "in.jsonl")
    assert ended.code == 3
    assert ended.err.startswith("sent 30 messages, up to line 30 of in.jsonl\n")
    assert len(stored("a", "q")) == 30


def test_send_one(cli: Run) -> None:
    """The id of the message is the data."""
    ended = cli("send", "q", '{"n": 1}', "--key", "k", "--header", "h=x=y")
    assert ended.code == 0
    assert len(ended.out.strip()) == 36
    assert stored("a", "q") == [({"n": 1}, "k")]
    assert cli("send", "q", "2").err == ""


def test_an_app_must_be_named(cli: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """By option, variable or file."""
    monkeypatch.delenv("QDO_APP")
    ended = cli("send", "q", "1")
    assert ended.code == 2
    assert ended.err.count("\n") == 1
    assert all(way in ended.err for way in ("--app MODULE:APP", "QDO_APP=", 'app = "MODULE:APP"'))
    monkeypatch.setenv("QDO_APP", "a")
    assert cli("send", "q", "1").code == 0
    monkeypatch.delenv("QDO_APP")
    Path("qdo.toml").write_text('app = "a"')
    assert cli("send", "q", "1", "-c", "qdo.toml").code == 0
    assert len(stored("a", "q")) == 2


def test_send_file(cli: Run) -> None:
    """Queue and key come from fields of each line; the count is reported."""
    Path("in.jsonl").write_text('{"q": "a", "k": 1}\n\n{"q": "b", "k": "x"}\n{"q": "a", "k": 2}')
    ended = cli("send", "-f", "in.jsonl", "--queue-field", "q", "--key-field", "k")
    assert (ended.code, ended.out, ended.err.splitlines()[0]) == (0, "", "sent 3 messages")
    assert [key for _, key in stored("a", "a")] == ["1", "2"]
    assert stored("a", "b") == [({"q": "b", "k": "x"}, "x")]


def test_send_standard_input(cli: Run, stdin: Callable[[bytes], None]) -> None:
    """All lines can go to one queue; then they need not be objects."""
    with App("a") as app:
        app.send("another queue", 0)
    stdin(b'1\n"two"\n')
    assert cli("send", "q", "--file", "-") == Ended(0, "", "sent 2 messages\n")
    assert stored("a", "q") == [(1, None), ("two", None)]
    stdin(b"")
    assert cli("send", "q", "--file", "-") == Ended(0, "", "sent 0 messages\n")


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{broken", "line 3 of standard input"),
        ('{"x": 1}', "'q'"),
        ('{"q": "a/b"}', "'a/b'"),
    ],
)
def test_a_bad_line_ends_it(
    cli: Run, stdin: Callable[[bytes], None], line: str, reason: str
) -> None:
    """Everything before it is sent; the one line on stderr has the count."""
    good = '{"q": "a"}\n'
    stdin(f"{good}{good}{line}\n{good}".encode())
    ended = cli("send", "--file", "-", "--queue-field", "q")
    assert (ended.code, ended.out) == (2, "")
    assert ended.err.count("\n") == 1
    assert "line 3 of standard input" in ended.err
    assert reason in ended.err
    assert "2 messages" in ended.err
    assert len(stored("a", "a")) == 2


def test_interrupted(cli: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C reports the progress; exit code 130."""

    def interrupt(stream: Any, longest: int) -> Iterator[list[bytes]]:
        yield [b"1\n", b"2\n"]
        raise KeyboardInterrupt

    monkeypatch.setattr("qdo.cli.commands.send.chunks_of_lines", interrupt)
    Path("in.jsonl").write_text("")
    ended = cli("send", "q", "--file", "in.jsonl")
    assert ended.code == 130
    assert ended.err == "sent 2 messages, up to line 2 of in.jsonl\nqdo: interrupted\n"


# --- bad databases ---


def corrupt(path: str) -> None:
    Path(path).write_bytes(b"no database at all, but long enough to be looked at" * 20)


def foreign(path: str) -> None:
    database = sqlite3.connect(path)
    database.execute("CREATE TABLE theirs (x)")
    database.commit()
    database.close()


def newer(path: str) -> None:
    App("a", broker=f"sqlite:{path}").send("q", 1)
    database = sqlite3.connect(path)
    database.execute("PRAGMA user_version = 99")
    database.commit()
    database.close()


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [(corrupt, "damaged"), (foreign, "another program"), (newer, "format 99")],
)
@pytest.mark.parametrize(
    "arguments", [("send", "q", "1"), ("queues",), ("dead-letters",)], ids=lambda each: each[0]
)
def test_bad_database(
    cli: Run, spoil: Callable[[str], None], reason: str, arguments: tuple[str, ...]
) -> None:
    """One line, exit code 3, and the file is left as it is."""
    spoil("x.db")
    before = Path("x.db").read_bytes()
    ended = cli(*arguments, "--broker", "sqlite:x.db")
    assert (ended.code, ended.out) == (3, "")
    words = [line for line in ended.err.splitlines() if not line.startswith("hint: ")]
    assert len(words) == 1
    assert words[0].startswith("qdo: database x.db ")
    assert reason in words[0]
    assert Path("x.db").read_bytes() == before


@pytest.mark.parametrize("spoil", [corrupt, foreign])
def test_bad_coordinator_file(cli: Run, spoil: Callable[[str], None]) -> None:
    """The same holds for the coordinator's file."""
    spoil("c.db")
    before = Path("c.db").read_bytes()
    ended = cli("queues", "--coordinator", "sqlite:c.db")
    assert (ended.code, ended.out) == (3, "")
    assert "qdo: database c.db " in ended.err
    assert Path("c.db").read_bytes() == before


# --- looking ---


def test_nothing_there_yet(cli: Run) -> None:
    """Read-only commands create no files; a hint explains the empty output."""
    for name, version in (("queues", 1), ("workers", 1), ("admin tree", 1), ("dead-letters", 2)):
        ended = cli(*name.split())
        assert (ended.code, ended.out) == (0, ""), name
        assert ended.err, name
        ended = cli(*name.split(), "-o", "json")
        schema = f"qdo.{name.removeprefix('admin ')}/{version}"
        assert json.loads(ended.out) == {"schema": schema, "items": []}
    assert list(Path().iterdir()) == []


@pytest.fixture
def coordinator(coordinator_url: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """Each of the kinds, which all commands use."""
    monkeypatch.setenv("QDO_COORDINATOR", coordinator_url)
    return coordinator_url


@pytest.fixture
def client(coordinator: str) -> Iterator[Client]:
    """A coordinator with one app as a fleet leaves it: two workers' worth of nodes."""
    with connected(coordinator) as client:
        layout = Layout.of("a")
        for path in layout.persistent:
            client.ensure_path(path)
        client.create(
            f"{layout.workers}/worker-", WorkerNode(("q1",)).encode(), ephemeral=True, sequence=True
        )
        client.create(
            f"{layout.components}/worker/host-",
            encode({"host": "h1", "pid": 7, "state": "running", "started": 1.0}),
            ephemeral=True,
            sequence=True,
            makepath=True,
        )
        client.create(layout.assignment("worker-0000000000"), encode_queues(["q1", "q2"]))
        for name, data in (
            ("q1", QueueNode(last=135471512647131000, owner="worker-0000000000").encode()),
            ("q2", QueueNode(owner="worker-0000000099").encode()),
            ("q3", b"garbage"),
            ("q4", QueueNode(deleted=True).encode()),
        ):
            client.create(layout.queue(name), data)
        yield client


@pytest.fixture
def broker() -> Iterator[Broker]:
    """Messages in the default broker, and a dead letter."""
    with App("a") as app:
        app.send_many([("q1", 1), ("q1", 2), ("q5", 3)])
        app.broker.dead_letters.store(dead_letter("q5"))
        yield app.broker


def test_queues(cli: Run, client: Client, broker: Broker) -> None:
    """Queues that have a node or a message, with their faults."""
    ended = cli("queues", "-o", "json")
    assert (ended.code, ended.err) == (0, "")
    told = json.loads(ended.out)
    assert told["schema"] == "qdo.queues/1"
    items = {item["queue"]: item for item in told["items"]}
    assert list(items) == ["q1", "q2", "q3", "q5"]
    assert items["q1"]["last"] == "135471512647131000"
    assert items["q1"]["last_time"] == "2012-01-29T17:34:24.713100Z"
    assert (items["q1"]["owner"], items["q1"]["owner_gone"]) == ("worker-0000000000", False)
    assert (items["q1"]["backlog"], items["q5"]["backlog"]) == (2, 1)
    assert (items["q2"]["owner_gone"], items["q2"]["backlog"]) == (True, None)
    assert items["q3"]["fault"]
    assert (items["q5"]["owner"], items["q5"]["last"], items["q5"]["dead_letters"]) == (None, "", 1)


def test_several_states_are_given_one_by_one(cli: Run) -> None:
    ended = cli("queues", "--state", "failing,lagging")
    assert ended.code == 2
    assert "--state failing --state lagging" in ended.err


def test_queues_as_a_table(cli: Run, client: Client, broker: Broker) -> None:
    """A glob chooses; an owner that is gone is marked."""
    ended = cli("queues", "q[12]")
    heading, q1, q2 = (re.split(" {2,}", line) for line in ended.out.splitlines())
    columns = ["QUEUE", "STATE", "OWNER", "LAST", "BACKLOG", "AGE"]
    assert heading == [*columns, "DEAD LETTERS"]
    assert q1[:5] == ["q1", "ok", "worker-0000000000", "2012-01-29T17:34:24.713100Z", "2"]
    assert q2 == ["q2", "idle", "worker-0000000099 (gone)", "-", "-", "-", "0"]
    ended = cli("queues", "x*")
    assert (ended.code, ended.out) == (0, "")
    assert ended.err == "hint: app 'a' has no queue that matches 'x*'\n"


def test_workers(cli: Run, client: Client) -> None:
    """A worker and its component node are matched by their session."""
    ended = cli("workers", "-o", "jsonl")
    [item] = map(json.loads, ended.out.splitlines())
    assert 0 < item.pop("reported") <= time.time() + 1
    assert item == {
        "worker": "worker-0000000000",
        "queues": 1,
        "assigned": 2,
        "host": "h1",
        "pid": 7,
        "state": "running",
        "started": 1.0,
        "filter": {"queues": ["*"], "exclude": [], "jobs": ["*"], "pools": []},
        "fault": None,
        "behind": {},
        "paces": {},
        "faults": {},
        "live": {},
        "jobs": [],
        "waits": {},
        "unusable": {},
        "rests": {},
        "paused_jobs": {},
        "deaths": [],
        "long_runs": [],
    }
    table = cli("workers").out
    assert "1970-01-01T00:00:01Z" in table
    ended = cli("workers", "--app", "other")
    assert (ended.code, ended.out) == (0, "")
    assert ended.err.splitlines()[-1] == "hint: no worker of app 'other' is registered"


def test_a_limit_shows_its_terms_and_what_zero_means(cli: Run, coordinator: str) -> None:
    words = ("limits", "set", "crm")
    assert cli(*words, "--max", "3").out.splitlines()[1].split() == ["crm", "max=3"]
    ended = cli(*words, "--max", "0")
    assert "`qdo limits set crm --max 3`" in ended.err
    assert "hint" not in cli(*words, "--max", "3").err


def test_tree(cli: Run, client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every znode of the app with its value; those that end with their session are marked."""
    ended = cli("admin", "tree")
    shown = ended.out.splitlines()
    assert shown[0] == "/mozilla/services/qdo/a"
    assert "├─ queues" in shown
    assert '│  ├─ q1  {"last":"135471512647131000","owner":"worker-0000000000"}' in shown
    assert "│  ├─ q3  garbage" in shown
    assert '   └─ worker-0000000000*  {"queues":["q1"]}' in shown
    nodes = {item["path"]: item for item in cli("admin", "tree", "-o", "json").items()}
    assert len(nodes) == len(shown)
    assert nodes["/mozilla/services/qdo/a/workers/worker-0000000000"]["ephemeral"] is True
    assert nodes["/mozilla/services/qdo/a/queues/q3"] == {
        "path": "/mozilla/services/qdo/a/queues/q3",
        "value": "garbage",
        "version": 0,
        "ephemeral": False,
    }
    monkeypatch.delenv("QDO_APP")
    everything = cli("admin", "tree").out.splitlines()
    assert everything[:2] == ["/mozilla/services/qdo", "└─ a"]


def test_ten_thousand_queues_take_few_requests(
    cli: Run, zookeeper_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A large app is listed in seconds, not minutes: no request waits for each of its queues."""
    with connected(zookeeper_url) as client:
        layout = Layout.of("a")
        client.ensure_path(layout.queues)
        for start in range(0, 10_000, 500):
            transaction = client.transaction()
            for number in range(start, start + 500):
                transaction.create(layout.queue(f"q{number:05}"), QueueNode(last=number).encode())
            transaction.commit()
    requests: list[object] = []
    call = Client._call

    def counted(client: Client, request: Any, answer: Any) -> Any:
        requests.append(request)
        return call(client, request, answer)

    monkeypatch.setattr(Client, "_call", counted)
    ended = cli("queues", "--coordinator", zookeeper_url)
    assert len(ended.out.splitlines()) == 10_001
    assert 0 < len(requests) < 200


# --- config, help, errors ---


def test_unknown_setting_has_a_suggestion(cli: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same error for every command."""
    monkeypatch.setenv("QDO_BROKR", "x")
    ended = cli("queues")
    assert ended.code == 2
    assert ended.err == (
        "qdo: unknown setting 'QDO_BROKR' in the environment (did you mean 'QDO_BROKER'?); "
        "`qdo config` lists every setting\n"
    )


def test_unknown_command(cli: Run) -> None:
    """The closest command is named."""
    ended = cli("queus")
    assert (ended.code, ended.out) == (2, "")
    assert ended.err == (
        "qdo: there is no command 'queus' (did you mean 'queues'?); see `qdo --help`\n"
    )
    assert "'admin tree'" in cli("tree").err
    assert cli("xyzzy").err == "qdo: there is no command 'xyzzy'; see `qdo --help`\n"


def test_help_tells_commands_and_exit_codes(cli: Run) -> None:
    """Help is data: it goes to stdout; without any argument it goes to stderr, as an error."""
    ended = cli("--help")
    assert (ended.code, ended.err) == (0, "")
    missing = [name for name in COMMANDS if name not in ended.out]
    assert missing == []
    assert EXIT_CODES.splitlines()[-1] in ended.out
    bare = cli()
    assert (bare.code, bare.out) == (2, "")
    assert "Send and look:" in bare.err
    program, python, *libraries = cli("--version").out.splitlines()
    assert program == f"qdo {qdo.__version__}"
    assert python.startswith(f"Python {platform.python_version()} on Linux")
    named = [line.split(" ")[0] for line in libraries]
    assert named == ["gevent", "kazoo", "psycopg", "boto3"]
    assert f"kazoo {metadata.version('kazoo')}" in libraries


def test_debug_shows_where_an_error_came_from(cli: Run) -> None:
    """--debug lets the error through with its traceback."""
    with pytest.raises(QueueNameError):
        cli("send", "--debug", "a/b", "1")


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ((), "MODULE:APP"),
        (("--app", "a"), "MODULE:APP"),
        (("m:app", "--job", "m:f"), "(from --job)"),
        (("nocolon",), "'nocolon'"),
        (("--app", "a", "--job", "m:f", "--processes", "0"), "setting processes: "),
        (("m:app", "--proceses", "2"), "No such option '--proceses'. Did you mean '--processes'?"),
    ],
)
def test_worker_usage(
    capsys: pytest.CaptureFixture[str],
    arguments: tuple[str, ...],
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """qdo-worker rejects invalid arguments before it starts any process."""
    monkeypatch.delenv("QDO_APP")
    assert run(worker, "qdo-worker", arguments) == 2
    told = capsys.readouterr().err
    assert told.startswith("qdo-worker: ")
    assert reason in told
    assert told.count("\n") == 1
