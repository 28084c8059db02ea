"""`qdo requests` inside this process: its output, its effects and its exit codes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from qdo import App
from qdo.brokers.request_store import RequestStore
from qdo.brokers.requests import (
    OUTCOMES,
    OVER,
    PAUSED,
    RUNNING,
    STATES,
    WAITING,
    RequestRecord,
    Take,
)
from qdo.cli.connections import from_coordinator
from qdo.errors import RequestNotFoundError, RequestStateError
from qdo.fleet.audit import read_entries
from qdo.ops import requests as ops
from qdo.requests.replies import sealed
from tests.support.cli import Run
from tests.support.fakes.key_files import key, write_keys

pytestmark = pytest.mark.usefixtures("own_folder")
COMMAND = ("requests",)


def items(cli: Run, *arguments: str) -> list[dict[str, Any]]:
    return cli(*arguments, "-o", "json").items()


@pytest.fixture
def app(own_folder: None) -> Iterator[App]:
    """An app with a request in each state, and a waiting one in another pool."""
    with App("a") as app:
        ids = ("run", "rest", "done", "bad", "wait", "late")
        for id in ids:
            due = 3600 if id == "late" else None
            terms: dict[str, Any] = {"then": "orders", "tag": {"for": id}, "delay_seconds": due}
            app.request("invoice", {"secret": id}, id=id, **terms)
        app.request("other", 1, id="o")
        takes = {each.take.id: each.take for each in store(app).take(*TAKE).requests}
        store(app).note(takes["run"], RUNNING, "50%")
        store(app).note(takes["rest"], PAUSED, "approval?")
        store(app).end(takes["done"], "done", sealed(app, "invoice", {"url": "secret"}))
        store(app).end(takes["bad"], "failed", None, "ValueError: no")
        yield app


TAKE = ("worker-1", "invoice", 4, ())


def store(app: App) -> RequestStore:
    return app.broker.requests


def record(app: App, id: str) -> RequestRecord:
    found = store(app).find(id)
    assert found is not None
    return found


# --- reading ---


def test_pools_are_listed_with_their_numbers(app: App, cli: Run) -> None:
    """As a table for people; what is over counts only if it failed."""
    invoice, other = items(cli, "list")
    assert invoice["oldest_seconds"] >= 0
    numbers = {"waiting": 2, "running": 1, "paused": 1, "failed": 1}
    assert {key: invoice[key] for key in ("pool", *numbers)} == {"pool": "invoice", **numbers}
    assert (other["pool"], other["waiting"]) == ("other", 1)
    head, first, _ = cli("list").out.splitlines()
    assert head.split() == ["POOL", "WAITING", "RUNNING", "PAUSED", "FAILED", "OLDEST"]
    assert first.split()[:5] == ["invoice", "2", "1", "1", "1"]


def test_requests_of_a_pool_are_listed_newest_first(app: App, cli: Run) -> None:
    """Those that are not over, or those of a state."""
    found = {each["id"]: each for each in items(cli, "list", "invoice")}
    assert [*found] == ["late", "wait", "rest", "run"]
    assert [each["state"] for each in found.values()] == ["waiting", "waiting", "paused", "running"]
    found |= {each["id"]: each for each in items(cli, "list", "invoice", "--state", "over")}
    assert [*found][4:] == ["bad", "done"]
    assert {found[id]["state"] for id in ("bad", "done")} == {"over"}
    assert (found["run"]["owner"], found["run"]["note"]) == ("worker-1", "50%")
    assert (found["bad"]["outcome"], found["bad"]["error"]) == ("failed", "ValueError: no")
    assert (found["wait"]["then"], found["wait"]["take"]) == ("orders", 0)
    assert "secret" not in json.dumps(found)
    shown = cli("list", "invoice", "--state", "over").out.splitlines()
    rows = [line.split() for line in shown]
    assert rows[0] == ["ID", "STATE", "AGE", "OWNER", "FAILED", "NOTE"]
    assert rows[1][:2] == ["bad", "failed"]
    assert cli("list", "--state", "over").out.split()[1] == "POOL"
    assert rows[1][-2:] == ["ValueError:", "no"]


@pytest.mark.parametrize("state", [*STATES, *OUTCOMES])
def test_requests_are_selected_by_state(app: App, cli: Run, state: str) -> None:
    """Of one pool, or of all."""
    wanted = {
        "waiting": ["o", "late", "wait"],
        "running": ["run"],
        "paused": ["rest"],
        "over": ["bad", "done"],
        "done": ["done"],
        "failed": ["bad"],
    }.get(state, [])
    assert [each["id"] for each in items(cli, "list", "--state", state)] == wanted
    of_pool = [each["id"] for each in items(cli, "list", "invoice", "--state", state)]
    assert of_pool == [each for each in wanted if each != "o"]


def test_a_long_list_says_that_it_is_cut(app: App, cli: Run) -> None:
    ended = cli("list", "invoice", "--limit", "2", "-o", "name")
    assert ended.out.split() == ["late", "wait"]
    assert "newest 2" in ended.err
    assert "newest" not in cli("list", "invoice", "--limit", "6").err
    assert cli("list", "invoice", "--limit", "1001").code == 2


def test_nothing_to_list_is_no_error(cli: Run, tmp_path: Path) -> None:
    """And a look creates no file."""
    for arguments in (("list",), ("list", "x"), ("list", "--state", "over")):
        ended = cli(*arguments)
        assert (ended.code, ended.out) == (0, "")
        assert ended.err
    assert [*tmp_path.iterdir()] == []


def test_one_request_is_shown(app: App, cli: Run) -> None:
    """With sizes; its content only if asked for."""
    (item,) = items(cli, "show", "done")
    assert (item["body_bytes"], item["result_bytes"]) == (0, 16)
    assert "secret" not in json.dumps(item)
    assert "secret" not in cli("show", "wait").out
    assert "17 bytes" in cli("show", "wait").out
    (item,) = items(cli, "show", "wait", "--body")
    assert (item["body"], item["tag"], item["result_bytes"]) == (
        {"secret": "wait"},
        {"for": "wait"},
        None,
    )
    assert '{"secret": "wait"}' in cli("show", "wait", "--body").out
    assert '{"url": "secret"}' in cli("show", "done", "--body").out
    assert cli("show", "bad").out.splitlines()[:2] == ["bad: failed", "  ValueError: no"]


def test_bytes_are_shown_in_base64(app: App, cli: Run) -> None:
    app.request("invoice", b"\xff\x00", id="raw")
    (item,) = items(cli, "show", "raw", "--body")
    assert item["body_base64"] == "/wA="
    assert "2 bytes: /wA=" in cli("show", "raw", "--body").out


def test_encrypted_content_needs_the_key(app: App, cli: Run, tmp_path: Path) -> None:
    """Without it, only the reason is shown."""
    keys = write_keys(tmp_path / "keys", key("k1"))
    app.use(app.settings.merged({"keys": keys, "encrypt": ("bodies",)}, "the test"))
    app.request("vault", {"secret": 1}, id="e")
    assert "secret" not in cli("show", "e", "--body").out
    (item,) = items(cli, "show", "e", "--body")
    assert "k1" in item["body_error"]
    (item,) = items(cli, "show", "e", "--body", "--keys", keys)
    assert item["body"] == {"secret": 1}


# --- changing ---


@pytest.fixture
def coordinator(app: App) -> None:
    """A coordinator: a command creates none."""
    app.documents("plans").put("acme", 1)


def entries(app: App) -> list[tuple[Any, ...]]:
    """Return the entries of the action log, the newest first."""
    read = partial(read_entries, limit=10)
    found = from_coordinator(app.settings, read, [])
    return [(each.command, each.target, each.before, each.after, each.reason) for each in found]


@pytest.mark.usefixtures("coordinator")
def test_a_waiting_request_is_cancelled(app: App, cli: Run) -> None:
    """After a confirmation; its message tells the reason, and so does the action log."""
    refused = cli("cancel", "wait")
    assert refused.code == 5
    assert record(app, "wait").state == WAITING
    (item,) = items(cli, "cancel", "wait", "--yes", "--reason", "twice")
    wanted = {"id": "wait", "pool": "invoice", "was": "waiting", "state": "cancelled"}
    assert item == {**wanted, "executed": True}
    assert (record(app, "wait").state, record(app, "wait").error) == (OVER, "twice")
    ((_, body, *_),) = app.broker.reader("orders", 0).fetch(10)
    assert json.loads(body)["for"] == "wait"
    assert json.loads(body)["error"] == "twice"
    after = {"pool": "invoice", "state": "cancelled"}
    assert entries(app) == [("requests cancel", "wait", {"state": "waiting"}, after, "twice")]


def test_a_running_request_is_told(app: App, cli: Run) -> None:
    """Repeatedly, if an operator wants; the list shows it."""
    for was in ("running", "being cancelled"):
        (item,) = items(cli, "cancel", "run", "--yes")
        assert (item["was"], item["state"]) == (was, "being cancelled")
    (row,) = [line for line in cli("list", "invoice").out.splitlines() if line[:4] == "run "]
    assert "being cancelled" in row
    assert items(cli, "list", "invoice", "--state", "running")[0]["cancelling"]


def test_a_paused_request_gets_a_value(app: App, cli: Run) -> None:
    """JSON, by default null; without a confirmation; each question gets one."""
    given: dict[tuple[str, ...], Any] = {(): None, ('{"ok": true}',): {"ok": True}, ('"x"',): "x"}
    for texts, value in given.items():
        (item,) = items(cli, "resume", "rest", *texts)
        assert item["executed"]
        found = record(app, "rest")
        assert json.loads(found.mark or "") == {"resume": value}
        assert cli("resume", "rest").code == 5
        assert record(app, "rest") == found
        for state in (RUNNING, PAUSED):
            assert store(app).note(found.take, state, "another?")
    before = record(app, "rest")
    for text in ("x", "", "NaN", "[" * 2000):
        assert cli("resume", "rest", text).code == 2
    assert record(app, "rest") == before


def test_a_failed_request_is_retried(app: App, cli: Run) -> None:
    """With its body and a new take; nothing is left of its end."""
    (item,) = items(cli, "retry", "bad")
    assert (item["was"], item["state"], item["executed"]) == ("failed", "waiting", True)
    found = record(app, "bad")
    assert (found.state, found.outcome, found.error, found.failed) == (WAITING, None, None, 0)
    assert json.loads(found.content[0]) == {"secret": "bad"}


@pytest.mark.usefixtures("coordinator")
def test_a_change_needs_the_right_state(app: App, cli: Run) -> None:
    """Nothing is changed, and nothing logged."""
    before = store(app).records()
    for words in (
        *("cancel done --yes", "cancel bad --dry-run", "resume run", "resume wait", "resume done"),
        *("retry wait", "retry run", "retry done"),
    ):
        ended = cli(*words.split())
        assert (ended.code, ended.out) == (5, ""), words
    assert store(app).records() == before
    assert entries(app) == []


@pytest.mark.parametrize("verb", ["show", "cancel", "resume", "retry"])
def test_an_unknown_request_is_not_found(app: App, cli: Run, verb: str) -> None:
    """Also before anything was sent."""
    assert cli(verb, "nothing").code == 6
    assert cli(verb, "nothing", "--app", "b", "--broker", "sqlite:new.db").code == 6
    assert not Path("new.db").exists()


@pytest.mark.parametrize(("verb", "id"), [("cancel", "wait"), ("resume", "rest"), ("retry", "bad")])
def test_a_dry_run_changes_nothing(app: App, cli: Run, verb: str, id: str) -> None:
    before = store(app).records()
    (item,) = items(cli, verb, id, "--dry-run")
    assert not item["executed"]
    assert store(app).records() == before


def test_an_end_meanwhile_is_told(app: App, cli: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the look and the change."""
    find = type(store(app)).find

    def late(self: RequestStore, id: str) -> RequestRecord | None:
        monkeypatch.setattr(type(store(app)), "find", find)
        found = find(self, id)
        assert store(app).end(Take("run", "worker-1", 1), "done")
        return found

    monkeypatch.setattr(type(store(app)), "find", late)
    ended = cli("cancel", "run", "--yes")
    assert ended.code == 5
    assert "done" in ended.err


def test_a_retry_meanwhile_is_told(app: App) -> None:
    """The store decides: one that waits by now, and one that is gone."""
    ops.retry(store(app), "bad")
    with pytest.raises(RequestStateError) as caught:
        ops.retry(store(app), "bad")
    assert caught.value.details["state"] == "waiting"
    with pytest.raises(RequestNotFoundError):
        ops.retry(store(app), "gone")


def test_other_brokers_have_no_requests(cli: Run, moto_url: str) -> None:
    """Each command names the remedy."""
    for arguments in (("list",), ("show", "a"), ("cancel", "a", "--yes")):
        ended = cli(*arguments, "--broker", f"sqs://eu-west-1/x-?endpoint={moto_url}")
        assert ended.code == 5
        assert "PostgreSQL" in ended.err
