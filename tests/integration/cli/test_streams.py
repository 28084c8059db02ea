"""`qdo streams`: its output, its effects on a fleet, and its exit codes."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from qdo import App
from qdo.brokers.streams import StreamStore, find_shard, split
from qdo.errors import UnreachableError
from qdo.ops.streams import reshard
from tests.support.cli import WORKER, Run, command

JOBS = """
import os

import qdo

app = qdo.App("a")


@app.job("user.*", order="key")
def visit(message, context):
    with open("runs", "a") as file:
        file.write(f"{message.queue} {message.key} {message.body}\\n")
"""


@pytest.fixture(autouse=True)
def jobs(own_folder: None) -> None:
    Path("jobs.py").write_text(JOBS)


@pytest.fixture
def app() -> Iterator[App]:
    """An app whose stream has four shards, and a message for "ada" in ``user.c0-``."""
    with App("a") as app:
        app.stream("user").send("ada", 1)
        yield app


def items(cli: Run, *arguments: str) -> list[dict[str, Any]]:
    return cli(*arguments, "-o", "json").items()


def states(cli: Run) -> dict[str, str]:
    return {each["shard"]: each["state"] for each in items(cli, "streams", "list", "--all")}


def work() -> None:
    assert command(*WORKER, "jobs:app", "--burst", cwd=Path()).code == 0


def test_a_split_and_a_merge_under_a_fleet(app: App, cli: Run) -> None:
    """From command to command: what is sealed, hidden, open and done."""
    assert set(states(cli).values()) == {"open"}
    first, second = items(cli, "streams", "split", "user.c0-", "--reason", "hot")
    assert first == {
        "shard": "user.c0-e0", "low": "c0", "high": "e0", "parents": ["user.c0-"], "executed": True
    }  # fmt: skip
    assert (second["shard"], second["high"]) == ("user.e0-", "")
    app.stream("user").send("ada", 2)
    assert states(cli) == {
        **dict.fromkeys(("user.-40", "user.40-80", "user.80-c0"), "open"),
        "user.c0-": "sealed", "user.c0-e0": "hidden", "user.e0-": "hidden",
    }  # fmt: skip
    (hidden,) = (each for each in items(cli, "queues") if each["queue"] == "user.e0-")
    assert (hidden["waits_for"], hidden["backlog"]) == (["user.c0-"], 1)
    for options in (("--yes",), ("--dry-run",), ("--with-messages", "--yes")):
        for shard in ("user.-40", "user.c0-", "user.e0-"):
            assert cli("delete", shard, *options).code == 5
    work()
    assert states(cli)["user.c0-"] == "done"
    assert states(cli)["user.e0-"] == "open"
    head, *rows = cli("streams", "list", "user").out.splitlines()
    assert head.split() == ["SHARD", "STATE", "BACKLOG", "FROM"]
    assert [row.split()[0] for row in rows] == [
        *("user.-40", "user.40-80", "user.80-c0", "user.c0-e0", "user.e0-")
    ]
    (child,) = items(cli, "streams", "merge", "user.e0-", "user.c0-e0")
    assert (child["shard"], child["parents"]) == ("user.c0-.2", ["user.e0-", "user.c0-e0"])
    app.stream("user").send("ada", 3)
    work()
    assert Path("runs").read_text().splitlines() == [
        *("user.c0- ada 1", "user.e0- ada 2", "user.c0-.2 ada 3")
    ]
    ended = cli("seek", "user.c0-", "earliest", "--yes")
    assert (ended.code, "newer ones" in ended.err) == (0, True)
    assert "newer ones" not in cli("seek", "user.c0-.2", "earliest", "--dry-run").err
    assert cli("seek", "user.c0-", "latest", "--yes").code == 0
    (found,) = items(cli, "streams", "locate", "user", "ada")
    assert (found["shard"], found["state"], found["worker"]) == ("user.c0-.2", "open", None)
    assert cli("delete", "user.c0-", "user.e0-", "--yes").code == 0
    assert states(cli)["user.c0-"] == "done", "although it is deleted"
    assert "user.c0-" not in {each["queue"] for each in items(cli, "queues")}
    commands = [each["command"] for each in items(cli, "audit")]
    assert commands.count("streams merge") == 1


@pytest.mark.parametrize(
    "arguments",
    [("locate", "user", "ada"), ("split", "user.c0-"), ("merge", "user.-40", "user.40-80")],
)
def test_a_wrong_range_is_named(app: App, cli: Run, arguments: tuple[str, ...]) -> None:
    with closing(sqlite3.connect("qdo-data/messages.db")) as database, database:
        database.execute("UPDATE streams SET low = 'zz' WHERE queue = 'user.80-c0'")
    ended = cli("streams", *arguments)
    assert (ended.code, "user.80-c0" in ended.err) == (5, True), ended.err


def test_a_dry_run_changes_nothing(app: App, cli: Run) -> None:
    ended = cli("streams", "split", "user.c0-", "--at", "d", "--dry-run")
    assert ended.code == 0
    assert [row.split() for row in ended.out.splitlines()[1:]] == [
        ["user.c0-d0", "c0", "d0", "user.c0-"], ["user.d0-", "d0", "-", "user.c0-"],
    ]  # fmt: skip
    assert set(states(cli).values()) == {"open"}


REFUSED = (
    (2, ("split", "user.40-80", "--at", "80")),
    (2, ("split", "user.40-80", "--at", "zz")),
    (2, ("split", "user.40-80", "--at", "")),
    (2, ("split", "user.40-80", "--at", "90")),
    (2, ("merge", "user.40-80")),
    (2, ("merge", "user.40-80", "user.c0-")),
    (2, ("merge",)),
    (2, ("locate", "user", "")),
    (5, ("split", "user.-40")),
    (5, ("merge", "user.-40", "user.40-80")),
    (6, ("split", "user.00-40")),
    (6, ("split", "other.-40")),
    (6, ("split", "mail")),
    (6, ("list", "other")),
    (6, ("locate", "other", "ada")),
)


def test_what_cannot_be_changed_stays(app: App, cli: Run) -> None:
    """One shard is sealed already."""
    assert cli("streams", "split", "user.-40").code == 0
    before = states(cli)
    for code, arguments in REFUSED:
        ended = cli("streams", *arguments)
        assert ended.code == code, (arguments, ended.err)
        assert len(ended.err.splitlines()) in (1, 2, 3)
    assert states(cli) == before


def test_an_app_without_streams_has_none(cli: Run) -> None:
    ended = cli("streams", "list")
    assert (ended.code, ended.out) == (0, "")
    assert "no streams yet" in ended.err


class LostAnswers(StreamStore):
    """A store whose next answer to a change gets lost, after the change or before it."""

    def __init__(self, store: StreamStore, changes: bool) -> None:
        self._store, self._changes = store, changes

    def add(self, shards: Any) -> None:
        if self._changes:
            self._store.add(shards)
        raise UnreachableError(what="the broker", reason="the answer was lost")

    def shards(self, stream: str | None = None) -> Any:
        return self._store.shards(stream)

    def resharded(self) -> Any:
        return self._store.resharded()

    def open(self, queues: Any) -> None:
        self._store.open(queues)


def test_a_lost_answer_is_looked_up(app: App) -> None:
    """The command succeeds if the split was made, and fails if it was not."""
    store = app.broker.streams
    children = split(store.shards("user"), "user.c0-")
    for changes in (False, True):
        app.broker.streams = LostAnswers(store, changes)
        act = partial(reshard, app.broker, children)
        if changes:
            act()
        else:
            with pytest.raises(UnreachableError):
                act()
    assert find_shard(store.shards("user"), "user.c0-").state == "sealed"
