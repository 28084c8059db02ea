"""`qdo history` on real databases."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from qdo.cli.commands import history as commands
from qdo.fleet.audit_entries import AuditEntry
from qdo.history.address import open_engine
from qdo.history.recorder import Recorder
from qdo.history.reports import usual_seconds
from qdo.history.tables import MINUTES, create, write_minutes
from qdo.history.writer import HistoryWriter
from qdo.message import Message
from qdo.worker.duties.leading import keep_action
from tests.support.cli import Ended, run_here


class History:
    """The commands on a history in which two processes recorded attempts."""

    def __init__(self, url: str, capsys: pytest.CaptureFixture[str]) -> None:
        self._url = url
        self._capsys = capsys

    def __call__(self, *arguments: str, app: str = "a") -> Ended:
        places = ("--app", app, "--history", self._url)
        return run_here(self._capsys, "history", *arguments, *places)

    def items(self, *arguments: str) -> list[dict[str, Any]]:
        ended = self(*arguments, "-o", "json")
        assert (ended.code, ended.err) == (0, ""), ended.err
        found: list[dict[str, Any]] = json.loads(ended.out)["items"]
        return found

    def record(
        self,
        *durations: float,
        failing: int = 0,
        app: str = "a",
        actions: Sequence[AuditEntry] = (),
    ) -> None:
        """Record attempts of the queue eu-1 with these durations, and others that failed."""
        times = iter([each for seconds in durations for each in (0.0, seconds)])
        recorder = Recorder(clock=lambda: next(times))
        call = recorder.bind(lambda message, context: None)
        for position, _ in enumerate(durations):
            call(Message("eu-1", position, None), None)
        for position in range(failing):
            outcome: Any = "dead-letter" if position % 2 else "retry"
            message = Message("us-1", position, None, id=f"m{position}")
            recorder.ended(message, outcome, "TimeoutError: after 3 s")
        for entry in actions:
            assert keep_action(recorder, entry)
        writer = HistoryWriter(self._url, app, recorder)
        writer.start()
        writer.close(20.0)


@pytest.fixture
def history(url: str, capsys: pytest.CaptureFixture[str]) -> History:
    return History(url, capsys)


def test_queues_are_summed_over_processes(history: History) -> None:
    history.record(*[0.0002] * 95, *[1.0] * 5)
    history.record(*[0.0002] * 100, failing=5)
    history.record(0.5, app="another")
    assert history.items("queues") == [
        {
            "queue": "eu-1",
            "done": 200,
            "failed": 0,
            "retried": 0,
            "dead_letters": 0,
            "mean_seconds": pytest.approx((195 * 0.0002 + 5) / 200),
            "p95_seconds": pytest.approx(0.0003),
        },
        {
            "queue": "us-1",
            "done": 0,
            "failed": 5,
            "retried": 3,
            "dead_letters": 2,
            "mean_seconds": None,
            "p95_seconds": None,
        },
    ]
    assert [each["queue"] for each in history.items("queues", "us-*", "--since", "2h")] == ["us-1"]


def test_failures_are_listed_newest_first(history: History) -> None:
    history.record(12.0, failing=5)
    found = history.items("failures", "--since", "2h")
    assert [each["id"] for each in found] == ["m4", "m3", "m2", "m1", "m0"]
    assert {each["error"] for each in found} == {"TimeoutError: after 3 s"}
    assert {each["seconds"] for each in found} == {None}
    (slow,) = history.items("failures", "--slow")
    assert (slow["queue"], slow["outcome"], slow["seconds"]) == ("eu-1", "done", 12.0)
    ended = history("failures", "--limit", "2")
    assert "only the newest 2 attempts" in ended.err
    assert len(ended.out.splitlines()) == 3


def test_durations_are_listed_by_minute(history: History) -> None:
    history.record(*[0.0002] * 50, *[0.5] * 46, *[2.0] * 4)
    (found,) = history.items("durations", "eu-1")
    assert found.pop("minute").endswith("Z")
    assert found == {
        "done": 100,
        "failed": 0,
        "mean_seconds": pytest.approx((50 * 0.0002 + 46 * 0.5 + 4 * 2.0) / 100),
        "p50_seconds": pytest.approx(0.0003),
        "p95_seconds": pytest.approx(0.0001 * 3**8),
        "max_seconds": pytest.approx(0.0001 * 3**10),
    }
    assert history("durations", "us-1").err.startswith("hint: no")


def test_minutes_are_newest_first(
    url: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The usual duration is that of the newest ones with ten attempts together."""
    now = int(time.time()) // 60 * 60
    engine = open_engine(url, writes=True)
    with engine.begin() as connection:
        create(connection)
        rows = [(0, "w1", 4, 4.0), (60, "w1", 3, 6.0), (60, "w2", 3, 6.0), (120, "w1", 9, 900.0)]
        write_minutes(
            connection,
            [
                dict.fromkeys([each.name for each in MINUTES.columns], 0)
                | {"app": "a", "queue": "eu-1", "minute": now - age, "worker": worker}
                | {"attempts": done, "done": done, "busy_seconds": busy, "d8": done}
                for age, worker, done, busy in rows
            ],
        )
    engine.dispose()
    assert usual_seconds(url, "a", ["eu-1", "us-1"]) == {"eu-1": pytest.approx(1.6)}
    history = History(url, capsys)
    found = history.items("durations", "eu-1")
    assert [each["done"] for each in found] == [4, 6, 9]
    ended = history("durations", "eu-1", "--limit", "2")
    assert "only the newest 2 minutes" in ended.err
    monkeypatch.setattr(commands, "time", SimpleNamespace(time=lambda: now + 30.0))
    assert len(history.items("durations", "eu-1", "--since", "61s")) == 2


def test_changes_of_operators_are_listed(history: History) -> None:
    """Each once, however often a leader passes it on; without limit or loss of their values."""
    now = time.time()
    entries = [
        AuditEntry(
            "1", now - 90, "ann@office", "", "seek", "orders", {"last": 7}, {"last": 9}, "x"
        ),
        AuditEntry("2", now - 60, "b\0b\ud800", "sasl:b", "pause", "import-*", None, {"a": None}),
        AuditEntry("3", now - 99 * 86400, "ann@office", "", "delete", "orders"),
        AuditEntry("4", now - 400 * 86400, "ann@office", "", "delete", "ancient"),
    ]
    for _ in range(2):
        history.record(actions=entries)
    second, first = history.items("actions")
    assert first.pop("time").endswith("Z")
    assert first == {
        "id": "1",
        "by": "ann@office",
        "account": "",
        "command": "seek",
        "target": "orders",
        "from": {"last": 7},
        "to": {"last": 9},
        "reason": "x",
    }
    assert (second["from"], second["to"], second["account"]) == (None, {"a": None}, "sasl:b")
    assert "\0" not in second["by"]
    found = history.items("actions", "orders", "--since", "1000d")
    assert [each["id"] for each in found] == ["1", "3"]
    assert "last=7" in history("actions", "seek").out
    assert "only the newest 1 changes" in history("actions", "--limit", "1").err


COMMANDS = ("queues", "failures", "durations eu-1", "actions")


def test_an_empty_history_gives_a_hint(history: History) -> None:
    history.record(0.1, app="another")
    for command in COMMANDS:
        ended = history(*command.split())
        assert (ended.code, ended.out) == (0, "")
        assert ended.err.startswith("hint: no")


@pytest.mark.parametrize(
    ("url", "code", "words"),
    [
        ("sqlite:missing.db", 3, "missing.db: there is no such file"),
        ("sqlite:text", 3, "text"),
        ("", 2, "setting history: it must name a database"),
        ("postgresql://ann@127.0.0.1:1/db", 3, "history at postgresql://***@127.0.0.1:1/db"),
    ],
)
def test_what_is_no_history_is_an_error(
    url: str,
    code: int,
    words: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Reading creates no file: the path is wrong, or no worker has used it."""
    monkeypatch.chdir(tmp_path)
    Path("text").write_text("no database " * 1000)
    for command in COMMANDS:
        ended = History(url, capsys)(*command.split())
        assert (ended.code, ended.out) == (code, "")
        assert words in ended.err
    assert [each.name for each in tmp_path.iterdir()] == ["text"]
