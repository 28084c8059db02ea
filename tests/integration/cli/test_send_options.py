"""`qdo send` with delays, keys and bytes: stored messages, and rejected options."""

from __future__ import annotations

import csv
import io
import json
import re
import sys
from pathlib import Path

import pytest

from qdo import App
from qdo.cli.framework import run
from qdo.cli.main import qdo
from tests.support.cli import Run

pytestmark = pytest.mark.usefixtures("own_folder")
COMMAND = ("send",)


def stored(queue: str) -> list[tuple[bytes, str | None, dict[str, str]]]:
    with App("a") as app:
        rows = app.broker.reader(queue, 0).fetch(1000)
    return [(body, key, json.loads(headers or "{}")) for _, body, key, headers in rows]


def delayed(queue: str) -> int:
    with App("a") as app:
        return app.broker.catalog.backlog(queue, 0).delayed


def test_priorities(cli: Run, capsys: pytest.CaptureFixture[str]) -> None:
    """For one message or for each line; `qdo peek` shows them."""
    assert cli("q", "1", "--priority", "0").code == 0
    Path("lines").write_text("2\n3\n")
    assert cli("q", "--file", "lines", "--priority", "9").code == 0
    assert cli("q", "4").code == 0
    assert cli("q", "5", "--priority", "10").code == 2
    assert [headers for _, _, headers in stored("q")] == [
        {"qdo-priority": "0"},
        {"qdo-priority": "9"},
        {"qdo-priority": "9"},
        {},
    ]
    assert run(qdo, "qdo", ("peek", "q", "-o", "csv")) == 0
    header, *rows = csv.reader(capsys.readouterr().out.splitlines())
    assert [row[header.index("priority")] for row in rows] == ["0", "9", "9", "5"]


def test_delays(cli: Run) -> None:
    """For one message or for each line; a time that is over sends at once."""
    assert cli("q", "1", "--delay", "15m").code == 0
    assert cli("q", "2", "--at", "2999-01-01T00:00:00Z").code == 0
    assert cli("q", "3", "--at", "2012-01-29").code == 0
    Path("lines").write_text("4\n5\n")
    assert cli("q", "--file", "lines", "--delay", "1h").code == 0
    assert delayed("q") == 4
    assert stored("q") == [(b"3", None, {})]


def test_a_deduplication_key(cli: Run) -> None:
    """The second prints the id of the first."""
    first = cli("q", "1", "--dedup-key", "k").out
    assert cli("q", "2", "--dedup-key", "k", "--dedup-seconds", "1h").out == first
    assert cli("q", "3", "--dedup-key", "other").out != first
    assert [body for body, _, _ in stored("q")] == [b"1", b"3"]


def test_bytes(cli: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the command line, a file, or standard input, with key and headers."""
    assert cli("q", "--raw", "no json ", "--key", "k").code == 0
    Path("photo").write_bytes(b"\xff\xd8\n\n")
    arguments = ("q", "--raw", "--file", "photo", "--header", "content-type=image/jpeg")
    assert cli(*arguments, "--dedup-key", "photo").code == 0
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BufferedReader(io.BytesIO(b"\x00"))))  # type: ignore[arg-type]
    assert cli("q", "--raw", "--file", "-").code == 0
    octets = {"content-type": "application/octet-stream"}
    assert stored("q") == [
        (b"no json ", "k", octets),
        (b"\xff\xd8\n\n", None, {"content-type": "image/jpeg"}),
        (b"\x00", None, octets),
    ]


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("q", "1", "--delay", "1", "--at", "1"), "--at"),
        (("q", "1", "--delay", "soon"), "'soon'"),
        (("q", "1", "--delay", "-5"), "'-5'"),
        (("q", "1", "--at", "soon"), "'soon'"),
        (("q", "1", "--dedup-seconds", "5"), "--dedup-key"),
        (("q", "1", "--header", "qdo-id=1"), "'qdo-id'"),
        (("q", "1", "--header", "content-type=text/x"), "'text/x'"),
        (("q", "text"), "--raw"),
        (("q", "--raw"), "QUEUE"),
        (("q", "b", "--raw", "--file", "f"), "QUEUE"),
        (("--raw", "--file", "f", "--queue-field", "q"), "QUEUE"),
        (("q", "--raw", "--file", "nowhere"), "--file nowhere"),
        (("q", "--file", "f", "--dedup-key", "k"), "--dedup-key"),
        (("a/b", "--raw", "b"), "'a/b'"),
    ],
)
def test_rejects_invalid_options(cli: Run, arguments: tuple[str, ...], reason: str) -> None:
    """With the remedy; no file is created."""
    ended = cli(*arguments)
    assert (ended.code, ended.out) == (2, "")
    assert reason in ended.err
    assert list(Path().iterdir()) == []


def test_queues_show_delayed_messages(cli: Run, capsys: pytest.CaptureFixture[str]) -> None:
    """In a column of their own, where there are any."""
    cli("q", "1")
    assert run(qdo, "qdo", ("queues",)) == 0
    assert "DELAYED" not in capsys.readouterr().out
    cli("q", "2", "--delay", "1h")
    assert run(qdo, "qdo", ("queues",)) == 0
    heading, row = capsys.readouterr().out.splitlines()
    cells = dict(zip(re.split(" {2,}", heading), re.split(" {2,}", row), strict=True))
    shown = [cells[name] for name in ("BACKLOG", "DELAYED", "DEAD LETTERS")]
    assert shown == ["1", "1", "0"]
    assert run(qdo, "qdo", ("queues", "-o", "jsonl")) == 0
    assert json.loads(capsys.readouterr().out)["delayed"] == 1
