"""The convention of all commands that change something, on a live app: real workers, ZooKeeper."""

from __future__ import annotations

import json
import os
import pty
import sqlite3
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import pytest
from kazoo.security import ACL, Id, Permissions
from sqlalchemy import create_engine, update

import qdo
from qdo.brokers.dead_letters import DeadLetterRecord
from qdo.brokers.requests import OVER, PAUSED, WAITING
from qdo.coordination.session_setup import BrokerNode
from qdo.coordination.znodes.layout import Layout
from qdo.fleet.audit import read_entries
from qdo.outbox import Outbox
from tests.support.app_runs import OperatorDesk
from tests.support.cli import QDO, Ended, clean_environment, command
from tests.support.commands import every_command
from tests.support.coordinator_process import connected
from tests.support.forks.processes import Popen
from tests.support.postgresql.server import PostgresqlDatabase
from tests.support.processes import wait_until
from tests.support.shared_servers import SharedZooKeeper

READ_ONLY = frozenset(
    [
        *("status", "queues", "workers", "ps", "peek", "events", "check"),
        *("locks", "audit", "config", "doctor", "dashboard", "demo"),
        *("dead-letters list", "dead-letters show", "dead-letters export"),
        *("documents list", "documents get", "limits list", "timers list"),
        *("requests list", "requests show", "streams list", "streams locate"),
        *("settings show", "settings get", "settings history", "settings diff"),
        *("history queues", "history failures", "history durations", "history actions"),
        "history owners",
        *("admin tree", "admin completion", "admin checkpoints export", "admin keys list"),
        "admin outbox list",
        *("admin broker grants", "admin acl check", "admin acl account"),
    ]
)
OTHERS = frozenset(["send", "ingest", "admin keys new"])
"""`send` and `ingest` only add; `admin keys new` replaces nothing."""
UNLOGGED = frozenset(["admin keys retire", "admin broker init"])
"""What they change belongs to no app. They have tests of their own."""


COMMANDS = {path: each for path, each in every_command() if not isinstance(each, click.Group)}
CHANGING = {
    path: each for path, each in COMMANDS.items() if path not in READ_ONLY and path not in OTHERS
}


def test_changing_commands_have_the_options() -> None:
    for path, each in CHANGING.items():
        options = {option for param in each.params for option in param.opts}
        wanted = {"--dry-run", "--yes"} | (set() if path in UNLOGGED else {"--reason"})
        assert wanted <= options, path


def test_the_lists_of_other_commands_are_current() -> None:
    assert COMMANDS.keys() >= READ_ONLY | OTHERS | UNLOGGED
    assert CHANGING.keys() - UNLOGGED == CASES.keys()


# --- a live app -----------------------------------------------------------------------


class LiveDesk(OperatorDesk):
    """An app with a live worker, and what the commands need to change something."""

    def worker(self) -> str:
        return str(self.items("workers")[0]["worker"])

    def done(self, *argv: str) -> None:
        """Run a command that prepares another one."""
        ended = self.qdo(*argv)
        assert ended.code == 0, ended.err

    def has_failed(self, queue: str) -> bool:
        return bool(self.client.exists(self.layout.queue(queue)) and self.node(queue).failures)

    def dead(self, queue: str) -> None:
        letter = DeadLetterRecord(queue, 7, b"1", None, None, "no", "", 1, "w", 1, 0.0)
        self.broker.dead_letters.store(letter)

    def znodes(self) -> dict[str, Any]:
        """Return every node with its value, versions and rights.

        Without what workers and the leader write by themselves every few seconds.
        """
        found: dict[str, Any] = {}
        paths = ["/"]
        while paths:
            path = paths.pop()
            reports = f"{self.layout.components}/worker/"
            if path == self.layout.fleet.chores or path.startswith(reports):
                continue
            data, stat = self.client.get(path)
            rights, _ = self.client.get_acls(path)
            below = sorted(self.client.get_children(path))
            versions = stat.version, stat.cversion, stat.aversion, stat.mzxid
            found[path] = data, versions, rights, below
            if path == self.layout.root:  # the leader writes the level of the fleet there
                found[path] = rights, below
            paths += [f"{path.rstrip('/')}/{name}" for name in below]
        return found

    def rows(self) -> list[str]:
        """Return the content of the broker's file."""
        path = self.folder / "messages.db"
        with sqlite3.connect(f"file:{path}?mode=ro", uri=True) as connection:
            return list(connection.iterdump())

    def changes(self, before: tuple[dict[str, Any], list[str]]) -> dict[str, Any]:
        """Return the nodes that differ from an earlier look, and the rows of the broker's file."""
        nodes, rows = before
        now = self.znodes()
        found = {path: (nodes.get(path), now.get(path)) for path in {*nodes, *now}}
        changed: dict[str, Any] = {path: each for path, each in found.items() if each[0] != each[1]}
        different = set(rows).symmetric_difference(self.rows())
        return changed | ({"rows": different} if different else {})

    def quiet(self) -> tuple[dict[str, Any], list[str]]:
        """Return what coordinator and broker have, once the workers change nothing."""
        seen = self.znodes(), self.rows()

        def same() -> bool:
            nonlocal seen
            before, seen = seen, (self.znodes(), self.rows())
            return before == seen

        time.sleep(0.3)  # longer than the interval of checkpoints
        wait_until(same, "quiet workers")
        return seen


@pytest.fixture(scope="module")
def desk(
    tmp_path_factory: pytest.TempPathFactory, shared_zookeeper: SharedZooKeeper
) -> Iterator[LiveDesk]:
    desk = LiveDesk(
        "desk",
        tmp_path_factory.mktemp("desk"),
        shared_zookeeper.url(f"/test-{uuid.uuid4().hex[:12]}"),
    )
    desk.client.ensure_path(desk.layout.fleet.chores)  # which the leader would create
    desk.work(policy=qdo.Policy(attempts=9, backoff_seconds=3600, backoff_max_seconds=3600))
    for queue in ("seeks", "drops", "purges", "moves", "cancels", "imports", "letters"):
        desk.send(1, queue=queue)
    for queue in ("seeks", "drops", "purges", "moves", "cancels", "imports", "letters"):
        desk.wait_for(1, queue=queue)
        desk.wait_done(queue)
    (desk.folder / "live.toml").write_text("fetch = 9\n")
    editor = desk.folder / "editor.sh"
    editor.write_text('#!/bin/sh\necho "turn_seconds = 0.3" > "$1"\n')
    editor.chmod(0o755)
    os.environ["EDITOR"] = str(editor)
    yield desk
    del os.environ["EDITOR"]
    desk.close()


@dataclass(frozen=True)
class ChangeCase:
    """A change: the arguments of its command, and what must be there before.

    :ivar asks: whether it needs a confirmation.
    """

    argv: Callable[[LiveDesk], tuple[str, ...]] = lambda desk: ()
    prepare: Callable[[LiveDesk], object] = lambda desk: None
    asks: bool = False


def given(*argv: str) -> Callable[[LiveDesk], tuple[str, ...]]:
    return lambda desk: argv


def close_a_node(desk: LiveDesk) -> None:
    """Take a right on a node away from everybody."""
    some = Permissions.ALL & ~Permissions.DELETE
    path = desk.layout.fleet.holds
    desk.client.ensure_path(path)
    desk.client.set_acls(path, [ACL(some, Id("world", "anyone"))])


def failing(*bodies: int, queue: str) -> Callable[[LiveDesk], None]:
    """Let messages of a queue wait for their second attempt; it has no other message."""

    def prepare(desk: LiveDesk) -> None:
        for body in bodies:
            (desk.folder / f"fail-{body}").touch()
        desk.send(*bodies, queue=queue)
        wait_until(lambda: desk.has_failed(queue), "the failure")

    return prepare


def first_failing(queue: str) -> Callable[[LiveDesk], tuple[str, ...]]:
    return lambda desk: (queue, str(desk.node(queue).failures[0].position))


def forget_workers(desk: LiveDesk) -> None:
    """Let an app without workers have a broker file."""
    path = desk.layout.broker.replace("/desk/", "/other/")
    if not desk.client.exists(path):
        desk.client.create(path, BrokerNode("ab12", "sqlite:x", "vm").encode(), makepath=True)


def cancelled(desk: LiveDesk) -> tuple[str, ...]:
    (delayed, *_) = desk.items("peek", "cancels", "--kind", "delayed")
    return "cancels", str(delayed["id"])


def declare_timer(desk: LiveDesk) -> None:
    lines = ("import qdo", "app = qdo.App('desk')", "app.timer('nightly', '0 2 * * *', queue='n')")
    (desk.folder / "timed.py").write_text("\n".join(lines))


def refuse_row(desk: LiveDesk) -> None:
    """Let an outbox of the app have a row that was refused."""
    (desk.folder / "boxed.py").write_text(
        "import qdo\nfrom qdo.outbox import Outbox\nfrom sqlalchemy import create_engine\n"
        f"app = qdo.App('desk')\nengine = create_engine('sqlite:///{desk.folder}/boxed.db')\n"
        "outbox = Outbox(app, engine)\n"
    )
    engine = create_engine(f"sqlite:///{desk.folder}/boxed.db")
    outbox = Outbox(qdo.App("desk"), engine)
    with engine.begin() as connection:
        outbox.create(connection)
        outbox.send(connection, "boxes", 1)
        connection.execute(update(outbox.table).values(refused="no"))
    engine.dispose()


BOXED = given("--all", "--app", "boxed:app")


def asked(id: str, state: int = WAITING) -> Callable[[LiveDesk], None]:
    """Ask for a request of a pool without a job, and bring it into a state."""

    def prepare(desk: LiveDesk) -> None:
        desk.app.request(id, 1, id=id)
        if state != WAITING:
            (taken,) = desk.broker.requests.take("desk", id, 1, ()).requests
            if state == PAUSED:
                desk.broker.requests.note(taken.take, PAUSED, None)
            else:
                desk.broker.requests.end(taken.take, "failed")

    return prepare


def divisible(name: str) -> Callable[[LiveDesk], None]:
    """Make a stream of two shards that have nodes."""

    def prepare(desk: LiveDesk) -> None:
        desk.app.stream(name, shards=2).send_many([("a", 1), ("b", 1)])
        paths = [desk.layout.queue(f"{name}.{part}") for part in ("-80", "80-")]
        wait_until(lambda: all(map(desk.client.exists, paths)), "the shards have nodes")

    return prepare


CASES = {
    "seek": ChangeCase(given("seeks", "earliest"), asks=True),
    "delete": ChangeCase(given("drops"), asks=True),
    "purge": ChangeCase(
        given("purges", "--delayed"),
        lambda desk: desk.send(2, queue="purges", delay_seconds=900),
        asks=True,
    ),
    "cancel": ChangeCase(
        cancelled, lambda desk: desk.send(2, queue="cancels", delay_seconds=900), asks=True
    ),
    "retry-now": ChangeCase(given("retried"), failing(81, queue="retried")),
    "skip": ChangeCase(first_failing("skipped"), failing(82, queue="skipped"), asks=True),
    "dead-letters add": ChangeCase(first_failing("added"), failing(83, queue="added")),
    "move": ChangeCase(lambda desk: ("moves", desk.worker(), "--timeout", "0s")),
    "pause": ChangeCase(given("calm-*", "--allow-none"), asks=True),
    "resume": ChangeCase(
        given("still-*"),
        lambda desk: desk.done("pause", "still-*", "--allow-none", "--yes"),
        asks=True,
    ),
    "admin checkpoints import": ChangeCase(
        given("saved"),
        lambda desk: desk.done("admin", "checkpoints", "export", "imports", "-f", "saved"),
    ),
    "dead-letters retry": ChangeCase(
        given("letters", "--all"),
        lambda desk: desk.dead("letters"),
        asks=True,
    ),
    "dead-letters discard": ChangeCase(
        given("imports", "--all"), lambda desk: desk.dead("imports"), True
    ),
    "documents put": ChangeCase(given("plans", "acme", "1")),
    "documents delete": ChangeCase(
        given("plans", "umbrella"),
        lambda desk: desk.done("documents", "put", "plans", "umbrella", "1"),
        asks=True,
    ),
    "limits set": ChangeCase(given("crm", "--max", "3")),
    "limits delete": ChangeCase(
        given("mail"), lambda desk: desk.done("limits", "set", "mail", "--max", "1")
    ),
    "requests cancel": ChangeCase(given("twice"), asked("twice"), asks=True),
    "requests resume": ChangeCase(given("rests", "1"), asked("rests", PAUSED)),
    "requests retry": ChangeCase(given("fails"), asked("fails", OVER)),
    "streams split": ChangeCase(given("hot.-80"), divisible("hot")),
    "streams merge": ChangeCase(given("cold.-80", "cold.80-"), divisible("cold")),
    "timers run": ChangeCase(given("nightly", "--app", "timed:app"), declare_timer),
    "admin outbox retry": ChangeCase(BOXED, refuse_row),
    "admin outbox drop": ChangeCase(BOXED, refuse_row, asks=True),
    "settings set": ChangeCase(given("attempts", "7")),
    "settings unset": ChangeCase(
        given("fetch"), lambda desk: desk.done("settings", "set", "fetch", "4")
    ),
    "settings edit": ChangeCase(),
    "settings apply": ChangeCase(given("live.toml")),
    "settings rollback": ChangeCase(
        given("1"),
        lambda desk: [desk.qdo("settings", "set", "fetch", each) for each in ("20", "30")],
    ),
    "admin acl apply": ChangeCase(prepare=close_a_node),
    "admin broker file": ChangeCase(given("--reset", "--app", "other"), forget_workers, asks=True),
    # Last, because the worker restarts after the command has ended.
    "action": ChangeCase(given("worker-*", "restart"), asks=True),
}


@pytest.mark.parametrize("path", CASES)
def test_only_a_confirmed_change_is_made_and_logged(desk: LiveDesk, path: str) -> None:
    """First as a dry run, then without a terminal and without --yes, then really."""
    case = CASES[path]
    case.prepare(desk)
    argv = (*path.split(), *case.argv(desk), "-o", "json")
    before = desk.quiet()
    dry = desk.qdo(*argv, "--dry-run")
    assert dry.code == 0, dry.err
    assert dry.err.splitlines()[-1].startswith("nothing was changed; ")
    if case.asks:
        rejected = desk.qdo(*argv)
        assert rejected.code == 5, rejected.err
        assert json.loads(rejected.out)["schema"] == json.loads(dry.out)["schema"]
        assert "add --yes" in rejected.err
    assert desk.changes(before) == {}
    real = desk.qdo(*argv, "--yes", "--reason", f"test of {path}")
    assert real.code == 0, real.err
    shown, made = (json.loads(each.out) for each in (dry, real))
    assert shown["schema"] == made["schema"]
    assert [each.keys() for each in shown["items"]] == [each.keys() for each in made["items"]]
    assert [each["executed"] for each in shown["items"]] == [False] * len(made["items"])
    assert all(each["executed"] for each in made["items"])
    layout = Layout.of("other") if "other" in argv else desk.layout
    entries = read_entries(desk.client, layout, limit=20)
    found = [each for each in entries if each.reason == f"test of {path}"]
    assert found
    assert all(each.command.startswith(path) for each in found)


def test_a_dry_run_creates_no_schema(bare_database_url: str, tmp_path: Path) -> None:
    """A second dry run would have found it."""
    argv = ("admin", "broker", "init", "--broker", bare_database_url, "-o", "json")
    for expected in ("create", "create"):
        ended = command(*QDO, *argv, "--dry-run", cwd=tmp_path)
        (item,) = ended.items()
        assert (item["schema"], item["executed"]) == (expected, False)
    (item,) = command(*QDO, *argv, cwd=tmp_path).items()
    assert (item["schema"], item["executed"]) == ("create", True)
    (item,) = command(*QDO, *argv, "--dry-run", cwd=tmp_path).items()
    assert (item["schema"], item["executed"]) == ("current", False)


def test_broker_and_coordinator_may_have_two_databases(
    bare_database: PostgresqlDatabase, tmp_path: Path
) -> None:
    """Both get the schema, and a role its rights in both."""
    other = PostgresqlDatabase(bare_database.server, bare_database.server.create_database())
    broker, coordinator = bare_database.url(), other.url()
    places = ("--broker", broker, "--coordinator", f"{coordinator}?chroot=/a")
    try:
        done = command(*QDO, "admin", "broker", "init", *places, "-o", "json", cwd=tmp_path)
        found = [each["database"].rpartition("/")[2] for each in json.loads(done.out)["items"]]
        assert found == [bare_database.name, other.name]
        for url in (broker, coordinator):
            with connected(url):
                pass  # makes the schema
        argv = "admin", "broker", "grants", "guest", "--for", "worker"
        one = command(*QDO, *argv, "--broker", broker, cwd=tmp_path)
        both = command(*QDO, *argv, *places, cwd=tmp_path)
        assert (one.code, both.code) == (0, 0)
        assert len(both.out.splitlines()) == 2 * len(one.out.splitlines()) + 2
    finally:
        bare_database.server.drop_database(other.name)


def test_a_dry_run_keeps_the_key_file(tmp_path: Path) -> None:
    """To delete a key needs a confirmation, to retire one does not."""
    keys, file = (*QDO, "admin", "keys"), ("--keys", "keys")
    first, _ = (command(*keys, "new", *file, cwd=tmp_path).out.strip() for _ in range(2))
    before = (tmp_path / "keys").read_bytes()
    for options, code in ((("--dry-run",), 0), (("--delete", "--dry-run"), 0), (("--delete",), 5)):
        assert command(*keys, "retire", first, *options, *file, cwd=tmp_path).code == code
        assert (tmp_path / "keys").read_bytes() == before
    assert command(*keys, "retire", first, "--delete", "--yes", *file, cwd=tmp_path).code == 0
    assert first not in (tmp_path / "keys").read_text()


def at_terminal(desk: OperatorDesk, answer: bytes, *argv: str) -> Ended:
    """Run a command at a terminal, which shows its messages; its stdout is a pipe."""
    ours, theirs = pty.openpty()
    process = Popen(
        [sys.executable, *QDO, *argv],
        cwd=desk.folder,
        env=clean_environment(desk.environment),
        stdin=theirs,
        stderr=theirs,
        stdout=subprocess.PIPE,
    )
    os.close(theirs)
    os.write(ours, answer)
    shown = b""
    try:
        while chunk := os.read(ours, 4096):
            shown += chunk
    except OSError:  # the end of a terminal
        pass
    out, _ = process.communicate(timeout=60)
    os.close(ours)
    return Ended(process.returncode, out.decode(), shown.decode())


@pytest.mark.parametrize(
    ("answer", "code", "left"), [(b"y\n", 0, 0), (b"n\n", 5, 1), (b"\x04", 5, 1)]
)
def test_a_terminal_shows_the_effect_and_asks(
    tmp_path: Path, answer: bytes, code: int, left: int
) -> None:
    """Only y continues; the end of the input does not. The result alone is on stdout."""
    desk = LiveDesk("desk", tmp_path, f"sqlite:{tmp_path / 'coordination.db'}")
    try:
        desk.dead("letters")
        ended = at_terminal(
            desk, answer, "dead-letters", "discard", "letters", "--all", "-o", "jsonl"
        )
        assert ended.code == code, ended.err
        assert "QUEUE" in ended.err
        assert "discard 1 dead letter?" in ended.err
        assert [json.loads(line)["executed"] for line in ended.out.splitlines()] == [True] * (
            1 - left
        )
        assert len(list(desk.broker.dead_letters.find("letters"))) == left
    finally:
        desk.close()


@pytest.mark.parametrize(
    "argv",
    [
        ("pause", "q", "--allow-none"),
        ("documents", "put", "plans", "acme", "1"),
        ("limits", "set", "crm", "--max", "1"),
        ("settings", "set", "attempts", "3"),
    ],
    ids=" ".join,
)
def test_a_dry_run_creates_no_coordinator_file(tmp_path: Path, argv: tuple[str, ...]) -> None:
    desk = LiveDesk("desk", tmp_path, f"sqlite:{tmp_path / 'coordination.db'}")
    try:
        ended = desk.qdo(*argv, "--dry-run")
        assert ended.code == 0, ended.err
        assert not (tmp_path / "coordination.db").exists()
        assert desk.qdo(*argv).code == 0
        assert (tmp_path / "coordination.db").exists()
    finally:
        desk.close()
