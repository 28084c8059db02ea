"""`qdo send` with delays, keys and bytes: stored messages, and rejected arguments."""

from __future__ import annotations

import csv
import io
import json
import re
import sys
from pathlib import Path

import pytest

from qdo import App
from tests.support.cli import Run

pytestmark = pytest.mark.usefixtures("own_folder")


def stored(queue: str) -> list[tuple[bytes, str | None, dict[str, str]]]:
    with App("a") as app:
        rows = app.broker.reader(queue, 0).fetch(1000)
    return [(body, key, json.loads(headers or "{}")) for _, body, key, headers in rows]


def delayed(queue: str) -> int:
    with App("a") as app:
        return app.broker.catalog.backlog(queue, 0).delayed


def test_priorities(cli: Run) -> None:
    """For one message or for each line; `qdo peek` shows them."""
    assert cli("send", "q", "1", "--priority", "0").code == 0
    Path("lines").write_text("2\n3\n")
    assert cli("send", "q", "--file", "lines", "--priority", "9").code == 0
    assert cli("send", "q", "4").code == 0
    assert cli("send", "q", "5", "--priority", "10").code == 2
    assert [headers for _, _, headers in stored("q")] == [
        {"qdo-priority": "0"},
        {"qdo-priority": "9"},
        {"qdo-priority": "9"},
        {},
    ]
    header, *rows = csv.reader(cli("peek", "q", "-o", "csv").out.splitlines())
    assert [row[header.index("priority")] for row in rows] == ["0", "9", "9", "5"]


def test_kinds(cli: Run) -> None:
    """For one message or for each line, which a job's type checks if the command knows the app."""
    Path("placing.py").write_text(
        "import dataclasses\nimport qdo\n\napp = qdo.App('a')\n\n\n@dataclasses.dataclass\n"
        "class Placed:\n    order: int\n\n\n@app.job('q', body=Placed)\n"
        "def placed(message, context): ...\n"
    )
    Path("lines").write_text('{"order": 2}\n{"order": "x"}\n')
    assert cli("send", "q", '{"order": 1}', "--kind", "Placed", "--app", "placing:app").code == 0
    assert cli("send", "q", "1", "--kind", "Placed", "--app", "placing:app").code == 2
    wrong = cli("send", "q", '{"order": 1}', "--kind", "Plcaed", "--app", "placing:app")
    assert wrong.code == 2
    assert "(did you mean 'Placed'?)" in wrong.err
    assert cli("send", "q", "-f", "lines", "--kind", "Placed", "--app", "placing:app").code == 2
    assert cli("send", "q", '{"order": "y"}', "--kind", "Placed").code == 0
    assert [(body, headers) for body, _, headers in stored("q")] == [
        (b'{"order": 1}', {"qdo-kind": "Placed"}),
        (b'{"order": 2}', {"qdo-kind": "Placed"}),
        (b'{"order": "y"}', {"qdo-kind": "Placed"}),
    ]


def test_delays(cli: Run) -> None:
    """For one message or for each line; a time that is over sends at once."""
    assert cli("send", "q", "1", "--delay", "15m").code == 0
    assert cli("send", "q", "2", "--at", "2999-01-01T00:00:00Z").code == 0
    assert cli("send", "q", "3", "--at", "2012-01-29").code == 0
    Path("lines").write_text("4\n5\n")
    assert cli("send", "q", "--file", "lines", "--delay", "1h").code == 0
    assert delayed("q") == 4
    assert stored("q") == [(b"3", None, {})]


def test_a_deduplication_key(cli: Run) -> None:
    """The second prints the id of the first."""
    first = cli("send", "q", "1", "--dedup-key", "k").out
    assert cli("send", "q", "2", "--dedup-key", "k", "--dedup-seconds", "1h").out == first
    assert cli("send", "q", "3", "--dedup-key", "other").out != first
    assert [body for body, _, _ in stored("q")] == [b"1", b"3"]


def test_bytes(cli: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the command line, a file, or standard input, with key and headers."""
    assert cli("send", "q", "--raw", "no json ", "--key", "k").code == 0
    Path("photo").write_bytes(b"\xff\xd8\n\n")
    arguments = ("q", "--raw", "--file", "photo", "--header", "content-type=image/jpeg")
    assert cli("send", *arguments, "--dedup-key", "photo").code == 0
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BufferedReader(io.BytesIO(b"\x00"))))  # type: ignore[arg-type]
    assert cli("send", "q", "--raw", "--file", "-").code == 0
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
        (("q", "--raw"), "QUEUE"),
        (("q", "b", "--raw", "--file", "f"), "QUEUE"),
        (("--raw", "--file", "f", "--queue-field", "q"), "QUEUE"),
        (("q", "--raw", "--file", "nowhere"), "--file nowhere"),
        (("q", "--file", "f", "--dedup-key", "k"), "--dedup-key"),
        (("a/b", "--raw", "b"), "'a/b'"),
        (("q", "hello"), "column 1"),
        (("q", "hello"), "--raw"),
        (("q", "[1e400]"), "1e400"),
        (("q", '{"a": "\\ud800"}'), "surrogate"),
        (("q", '{"a": 1, "a": 2}'), "'a'"),
        (("a/b", "1"), "'a/b'"),
        (("q", "1", "--header", "x"), "NAME=TEXT"),
        (("q",), "--queue-field FIELD"),
        ((), "--queue-field FIELD"),
        (("q", "1", "--file", "x"), "--header or --dedup-key"),
        (("--file", "x"), "--header or --dedup-key"),
        (("q", "--file", "none.jsonl"), "--file none.jsonl: "),
        (("q", "1", "--ap", "x"), "No such option '--ap'"),
        (("q", "1", "2"), "Got unexpected extra argument (2); see `qdo send --help`"),
        (("q", "1", "--broker", "redis:x"), "setting broker: "),
    ],
)
def test_rejects_invalid_options(cli: Run, arguments: tuple[str, ...], reason: str) -> None:
    """One line with the remedy; no file is created."""
    assert reason in cli("send", *arguments).refusal(2)
    assert list(Path().iterdir()) == []


def test_queues_show_delayed_messages(cli: Run) -> None:
    """In a column of their own, where there are any."""
    cli("send", "q", "1")
    assert "DELAYED" not in cli("queues").out
    cli("send", "q", "2", "--delay", "1h")
    heading, row = cli("queues").out.splitlines()
    cells = dict(zip(re.split(" {2,}", heading), re.split(" {2,}", row), strict=True))
    shown = [cells[name] for name in ("BACKLOG", "DELAYED", "DEAD LETTERS")]
    assert shown == ["1", "1", "0"]
    (item,) = cli("queues", "-o", "json").items()
    assert item["delayed"] == 1
