"""`qdo dead-letters` inside this process: its output, its effects and its exit codes."""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from qdo import App
from qdo.brokers.base import Broker, Outgoing
from qdo.brokers.dead_letters import DeadLetterRecord, DeadLetterStore
from qdo.brokers.request_store import RequestStore
from qdo.brokers.requests import WAITING, NewRequest
from qdo.cli.commands import dead_letters as command
from qdo.cli.framework import run
from qdo.cli.main import qdo
from qdo.errors import DatabaseFullError
from qdo.ops import dead_letters as ops
from qdo.positions import message_id
from qdo.testing.contracts.fixtures import dead_letter
from tests.support.cli import Ended, Run
from tests.support.fakes.hostile_content import BODIES, HEADERS

FIRST = 135471512647131000
HOUR = 3600.0


pytestmark = pytest.mark.usefixtures("own_folder")
COMMAND = ("dead-letters",)


def letter(queue: str, number: int, **changed: Any) -> DeadLetterRecord:
    own: dict[str, Any] = {
        "body": b'{"n":%d}' % number,
        "headers": None,
        "error": "ValueError: no\n such thing",
        "traceback": 'Traceback (most recent call last):\n  File "job.py"\nValueError: no',
        "dead_at": time.time() - number * HOUR,
    }
    return dead_letter(queue, FIRST + number, **{**own, **changed})


@pytest.fixture
def broker(own_folder: None) -> Iterator[Broker]:
    """Two queues with three dead letters each, of 0 to 5 hours ago."""
    with App("a") as app:
        for number in range(6):
            error = "TimeoutError: Größe" if number % 2 else "ValueError: no\n such thing"
            app.broker.dead_letters.store(letter(f"q{number % 2}", number, error=error))
        yield app.broker


def left(broker: Broker) -> list[int]:
    return sorted(each.position - FIRST for each in broker.dead_letters.records())


def waiting(broker: Broker, queue: str) -> list[tuple[Any, dict[str, str]]]:
    """Return body and headers of the waiting messages of a queue."""
    rows = broker.reader(queue, 0).fetch(1000)
    return [(json.loads(row[1]), json.loads(row[3] or "{}")) for row in rows]


def id_of(broker: Broker, number: int) -> str:
    return message_id(FIRST + number, broker.id_node)


# --- list, show, export ---


TIMES = (float("inf"), -1e308, 1e18, 253402300800.0)


def test_messages_of_other_programs_end_no_command(
    cli: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each is shown, whatever its headers and its body, as a dead letter and as a message."""
    parts = [*((headers, b"1") for headers in HEADERS), *((None, body) for body in BODIES)]
    with App("a") as app:
        app.broker.send_many([Outgoing("q", body, "k", headers) for headers, body in parts])
        for number, (headers, body) in enumerate(parts):
            known = {"headers": headers, "body": body, "dead_at": TIMES[number % len(TIMES)]}
            app.broker.dead_letters.store(letter("q", number, **known))
    for arguments in ((), ("list", "-o", "json"), ("list", "-o", "csv"), ("export",)):
        ended = cli(*arguments)
        assert (ended.code, ended.err.count("cannot show")) == (0, 0), arguments
    assert len(cli("export").out.splitlines()) == len(parts)
    for number in range(len(parts)):
        assert cli("show", "q", str(FIRST + number)).code == 0
    for arguments in (("--body",), ("--body", "-o", "json")):
        assert run(qdo, "qdo", ("peek", "q", "-n", "1000", *arguments)) == 0
        capsys.readouterr()
    ended = cli("retry", "q", "--all", "--yes")
    assert ended.code == 0
    assert str(len(parts)) in ended.err


def test_a_row_that_cannot_be_shown_hides_no_other(
    cli: Run, broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is a line with its reason, and the exit code says that something is missing."""
    real = ops.exported

    def exported(found: ops.Letter, *rest: Any) -> dict[str, Any]:
        if found.entry.position == FIRST + 2:
            raise OverflowError("no date has this number")
        return real(found, *rest)

    monkeypatch.setattr(ops, "exported", exported)
    for arguments in (("export",), ("list", "-o", "jsonl")):
        ended = cli(*arguments)
        assert ended.code == 4
        assert len(ended.out.splitlines()) == 5
        assert f"cannot show {id_of(broker, 2)} of queue q0: OverflowError" in ended.err


def test_list_is_what_is_meant_without_a_command(cli: Run, broker: Broker) -> None:
    """A row each, oldest first, errors in one line; a glob and options choose."""
    told = cli()
    rows = told.out.splitlines()
    assert rows[0].split("  ")[0] == "QUEUE"
    assert len(rows) == 7
    assert rows[1].startswith(f"q1     {id_of(broker, 5)}")
    assert rows[6].endswith("ValueError: no such thing")
    assert cli("list").out == told.out
    assert len(cli("q1").out.splitlines()) == 4
    assert len(cli("q[01]", "--older", "90m").out.splitlines()) == 5
    assert len(cli("--newer", "90m").out.splitlines()) == 3
    assert len(cli("--error", "GRÖSSE").out.splitlines()) == 4
    assert cli("q1", "--error", "ValueError") == Ended(0, "", "no dead letters\n")
    assert cli("x*") == Ended(0, "", "no dead letters\n")
    assert cli("--limit", "2").out.splitlines()[1:] == rows[5:]
    assert cli("--limit", "6").out == told.out


@pytest.fixture
def failed(broker: Broker) -> RequestStore:
    """Three failed requests of two pools beside the messages, and one that was skipped."""
    store = broker.requests
    for id, pool, outcome in (
        ("one", "mail", "failed"),
        ("two 2", "mail", "failed"),
        ("three", "q0", "failed"),
        ("four", "mail", "skipped"),
    ):
        store.ask([NewRequest(pool, id, (b'{"to": 7}', None), id.encode())])
        (taken,) = store.take("worker-1", pool, 1, []).requests
        store.end(taken.take, outcome, error=f"NoAddress: customer {len(id)}", failed=3)
    return store


def test_failed_requests_are_dead_letters(cli: Run, failed: RequestStore) -> None:
    """Of their pools: listed, shown, filtered, exported and counted with those of queues."""
    found = {each["id"]: each for each in cli("list", "-o", "json").items()}
    assert [*found][-3:] == ["one", "two 2", "three"]
    assert [each["kind"] for each in found.values()] == ["message"] * 6 + ["request"] * 3
    one = found["one"]
    assert [one[key] for key in ("queue", "position", "attempts", "body", "worker")] == [
        *("mail", None, 3, {"to": 7}, "worker-1"),
    ]
    assert "KIND" in cli("mail").out.splitlines()[0].split()
    assert len(cli("mail", "--newer", "1h", "--error", "noaddress", "-o", "name").out.split()) == 2
    assert "mail" not in cli("--older", "1h", "-o", "name").out
    page = cli("show", "mail", "two 2").out
    assert [each in page for each in ("pool", "take", '{"to": 7}', "position")] == [1, 1, 1, 0]
    kinds = cli("--by", "error", "-o", "json")
    assert [(each["kind"], each["count"], each["error"]) for each in kinds.items()] == [
        ("message", 3, "TimeoutError: Größe"),
        ("message", 3, "ValueError: no\n such thing"),
        ("request", 3, "NoAddress: customer #"),
    ]
    assert len(cli("--by", "error", "--newer", "1s", "q*").out.splitlines()) == 3


def test_failed_requests_are_retried_and_discarded(cli: Run, failed: RequestStore) -> None:
    """By their ids, or with the messages of a queue of the same name."""
    (retried,) = cli("retry", "mail", "two 2", "-o", "json").items()
    assert (retried["was"], retried["position"], retried["executed"]) == (None, None, True)
    again = failed.find("two 2")
    assert again is not None
    assert (again.state, again.failed, again.error) == (WAITING, 0, None)
    gone = cli("discard", "q0", "--all", "--yes", "-o", "json").items()
    assert [each["id"] for each in gone][-1] == "three"
    assert [failed.find("three"), len(gone)] == [None, 4]
    assert cli("discard", "mail", "four", "--yes").code == 6
    assert failed.records(outcome="skipped") != []


def test_json_has_everything(cli: Run, broker: Broker) -> None:
    """Also the body, as JSON."""
    told = json.loads(cli("q1", "--newer", "2h", "-o", "json").out)
    assert told["schema"] == "qdo.dead-letters/2"
    [item] = told["items"]
    assert item["body"] == {"n": 1}
    assert (item["id"], item["position"]) == (id_of(broker, 1), str(FIRST + 1))
    assert (item["attempts"], item["worker"], item["fence"]) == (10, "worker-0000000001", 42)
    assert (item["key"], item["headers"]) == ("k", {})
    assert item["time"] == "2012-01-29T17:34:24.713100Z"
    assert item["traceback"].startswith("Traceback")


@pytest.mark.parametrize("by", ["id", "position", "shouted"])
def test_show(cli: Run, broker: Broker, by: str) -> None:
    """By message id or position: the message, its error and traceback, as they are."""
    name = {"id": id_of(broker, 0), "position": str(FIRST), "shouted": id_of(broker, 0).upper()}
    lines = cli("show", "q0", name[by]).out.splitlines()
    shown = [" ".join(line.split()) for line in lines]
    assert shown[0] == "queue q0"
    assert f"id {id_of(broker, 0)}" in shown
    assert 'body {"n": 0}' in shown
    assert lines[-4:] == ["", *letter("q0", 0).traceback.splitlines()]
    item = json.loads(cli("show", "q0", name[by], "-o", "jsonl").out)
    assert item["body"] == {"n": 0}


def test_show_keeps_the_terminal_safe(cli: Run, broker: Broker) -> None:
    """Control characters of a message are shown, never sent to the terminal."""
    broker.dead_letters.store(letter("evil", 0, error="\x1b[2J", traceback="\x1b]0;x\x07\nend"))
    shown = cli("show", "evil", str(FIRST)).out
    assert "\x1b" not in shown
    assert "\\x1b[2J" in shown
    assert shown.endswith("\\x07\nend\n")


def test_show_what_does_not_exist(cli: Run, broker: Broker) -> None:
    """Exit code 6. A request may have any id."""
    for queue, name in (
        *(("q0", "17"), ("q0", id_of(broker, 1))),
        *(("nowhere", str(FIRST)), ("q0", "first")),
    ):
        ended = cli("show", queue, name)
        assert (ended.code, ended.out) == (6, "")
        assert ended.err.count("\n") == 1
        assert repr(name) in ended.err


def test_export(cli: Run, broker: Broker) -> None:
    """One object per line; bodies that are not JSON are in base64."""
    raw = b"\x00\xff"
    broker.dead_letters.store(letter("r", 0, body=raw, headers='{"content-type":"image/png"}'))
    broker.dead_letters.store(letter("r", 1, body=b'{"a":'))
    broker.dead_letters.store(letter("r", 2, body=b"1e999"))
    broker.dead_letters.store(
        letter("r", 3, body=b"7", headers='{"content-type":"application/json"}')
    )
    ended = cli("export", "r")
    assert ended.err == "exported 4 dead letters\n"
    told = list(map(json.loads, ended.out.splitlines()))
    items = {int(item["position"]) - FIRST: item for item in told}
    assert base64.b64decode(items[0]["body_base64"]) == raw
    assert items[0]["headers"] == {"content-type": "image/png"}
    assert base64.b64decode(items[1]["body_base64"]) == b'{"a":'
    assert base64.b64decode(items[2]["body_base64"]) == b"1e999"
    assert items[3]["body"] == 7
    assert all(("body" in item) != ("body_base64" in item) for item in items.values())
    assert left(broker) == [0, 0, 1, 1, 2, 2, 3, 3, 4, 5]


# --- retry ---


def test_retry_by_name(cli: Run, broker: Broker) -> None:
    """It is the queue's newest message, under its first id, and no dead letter any more."""
    ended = cli("retry", "q0", id_of(broker, 2), str(FIRST + 4), "-o", "json")
    assert (ended.code, ended.err) == (0, "2 dead letters retried\n")
    items = ended.items()
    assert [item["id"] for item in items] == [id_of(broker, 2), id_of(broker, 4)]
    assert waiting(broker, "q0") == [
        ({"n": 2}, {"qdo-id": id_of(broker, 2), "qdo-retried": "1"}),
        ({"n": 4}, {"qdo-id": id_of(broker, 4), "qdo-retried": "1"}),
    ]
    assert [int(item["position"]) for item in items] == [
        row[0] for row in broker.reader("q0", 0).fetch(10)
    ]
    assert left(broker) == [0, 1, 3, 5]


def test_retry_some_that_do_not_exist(cli: Run, broker: Broker) -> None:
    """Existing ones are retried: exit code 4. If none exists: 6."""
    ended = cli("retry", "q0", str(FIRST), "17", "18")
    assert ended.code == 4
    report, line = ended.err.splitlines()
    assert report == "1 dead letter retried"
    assert "1 of 3 " in line
    assert "17, 18" in line
    assert left(broker) == [1, 2, 3, 4, 5]
    ended = cli("retry", "q0", "17", "18")
    assert (ended.code, ended.out) == (6, "")
    assert left(broker) == [1, 2, 3, 4, 5]


def test_retry_by_filter(cli: Run, broker: Broker) -> None:
    """By queue glob with error text or age, or --all; an empty match is not an error."""
    assert cli("retry", "q*", "--error", "timeout", "--older", "4h", "--yes").code == 0
    assert left(broker) == [0, 1, 2, 3, 4]
    assert cli("retry", "q1", "--all", "--yes").code == 0
    assert left(broker) == [0, 2, 4]
    assert [body for body, _ in waiting(broker, "q1")] == [{"n": 5}, {"n": 3}, {"n": 1}]
    ended = cli("retry", "q1", "--all", "--yes")
    assert (ended.code, ended.out) == (0, "")
    assert ended.err.splitlines() == ["no dead letters match", "0 dead letters retried"]


@pytest.mark.parametrize("verb", ["retry", "discard"])
@pytest.mark.parametrize(
    "arguments", [("q0",), ("q0", "17", "--all"), ("q0", "17", "--error", "x")]
)
def test_acting_on_a_queue_needs_ids_or_a_filter(
    cli: Run, broker: Broker, verb: str, arguments: tuple[str, ...]
) -> None:
    """Neither or both: rejected, and nothing changes."""
    ended = cli(verb, *arguments)
    assert ended.code == 2
    assert "QUEUE ID..." in ended.err
    assert len(left(broker)) == 6


def test_dead_letters_that_vanish_meanwhile(
    cli: Run, broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are not sent twice; exit code 4, and the error names them."""
    found = ops.find

    def find_and_lose(*arguments: Any) -> list[ops.Letter]:
        letters = found(*arguments)
        broker.dead_letters.retry([("q0", FIRST + 2)])
        return letters

    monkeypatch.setattr(command.ops, "find", find_and_lose)
    ended = cli("retry", "q0", "--all", "--yes")
    assert ended.code == 4
    assert "2 of 3 " in ended.err
    assert id_of(broker, 2) in ended.err
    assert sorted(body["n"] for body, _ in waiting(broker, "q0")) == [0, 2, 4]


def test_an_error_in_the_middle_tells_what_was_done(
    cli: Run, broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Committed chunks are printed; the rest are still dead letters."""
    monkeypatch.setattr(ops, "CHUNK_LETTERS", 2)
    real = type(broker.dead_letters).retry
    calls: list[int] = []

    def fail_later(self: DeadLetterStore, letters: Any) -> Any:
        calls.append(len(letters))
        if len(calls) == 2:
            raise DatabaseFullError(path="p", reason="r")
        return real(self, letters)

    monkeypatch.setattr(type(broker.dead_letters), "retry", fail_later)
    ended = cli("retry", "*", "--all", "--yes", "-o", "jsonl")
    assert ended.code == 3
    assert len(ended.out.splitlines()) == 2
    assert ended.err.splitlines() == [
        "2 dead letters retried",
        f"qdo: {DatabaseFullError(path='p', reason='r')}",
    ]
    assert left(broker) == [0, 1, 2, 3]


# --- discard ---


def test_discard_one(cli: Run, broker: Broker) -> None:
    """Named by its position."""
    assert cli("discard", "q0", str(FIRST), "--yes").code == 0
    assert left(broker) == [1, 2, 3, 4, 5]
    assert waiting(broker, "q0") == []


def test_discard_many_needs_yes(cli: Run, broker: Broker) -> None:
    """Without a terminal it asks nothing: rejected (5), and nothing is discarded."""
    ended = cli("discard", "q0", "--all")
    assert ended.code == 5
    assert ended.err.count("\n") == 1
    assert "3 dead letters" in ended.err
    assert "--yes" in ended.err
    assert len(left(broker)) == 6
    assert cli("discard", "q0", str(FIRST), str(FIRST + 2), "--yes").code == 0
    ended = cli("discard", "q0", "--all")
    assert (ended.code, "--yes" in ended.err) == (5, True), "a script should not fail with a second"
    assert cli("discard", "q0", "--all", "--yes").code == 0
    assert left(broker) == [1, 3, 5]
    assert cli("discard", "q0", "--all").code == 0
    ended = cli("discard", "q1", "17", str(FIRST + 1), "--yes")
    assert ended.code == 4
    assert left(broker) == [3, 5]


def test_without_a_broker_file(cli: Run) -> None:
    """Reading creates no files; named dead letters do not exist."""
    assert cli().code == 0
    assert cli("retry", "q", "--all", "--yes").code == 0
    assert cli("export").code == 0
    assert cli("retry", "q", "17").code == 6
    assert cli("show", "q", "17").code == 6
    assert list(Path().iterdir()) == []


def test_a_misspelt_command(cli: Run) -> None:
    """It is not taken for a queue."""
    ended = cli("rety", "q", "17")
    assert ended.code == 2
    assert "did you mean 'retry'?" in ended.err
