"""Messages as senders meant them, seen by jobs: bytes, delays, letters sent again, own sends."""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from qdo import App, Message
from qdo.brokers.base import Outgoing
from qdo.ops import dead_letters
from qdo.positions import position_of_time
from qdo.settings.sources import load
from tests.support.cli import WORKER, command
from tests.support.engine import EngineSetup, until


def test_bytes_reach_the_job_as_bytes(engine: EngineSetup) -> None:
    """Whatever is in them; JSON stays JSON, with headers or without."""
    seen = engine.collect()
    engine.app.send("q", b"\x00\xff")
    engine.app.send("q", b'{"a": 1}', headers={"content-type": "text/x"})
    engine.app.send("q", b'{"a": 1}', headers={"content-type": "application/json"})
    engine.app.send("q", {"a": 1}, headers={"h": "v"})
    engine.app.send("q", "text")
    engine.app.send("q", b"")
    engine.start("q")
    until(lambda: len(seen) == 6)
    assert seen == [b"\x00\xff", b'{"a": 1}', {"a": 1}, {"a": 1}, "text", b""]
    assert engine.broker.dead_letters.records() == []


def test_bodies_that_do_not_decode_are_dead_letters(make: Callable[..., EngineSetup]) -> None:
    """Even if the headers declare JSON; the bytes are kept unchanged."""
    engine = make(attempts=1)
    seen = engine.collect()
    engine.broker.send(Outgoing("q", b"\x00"))
    engine.app.send("q", b"\x01", headers={"content-type": "application/json"})
    engine.app.send("q", 3)
    engine.start("q")
    until(lambda: seen == [3])
    assert [letter.body for letter in engine.broker.dead_letters.records()] == [b"\x00", b"\x01"]


def test_a_delayed_message_wakes_its_worker(engine: EngineSetup) -> None:
    """It arrives when it is due, not at the next check; its id is that returned by sending."""
    seen: list[tuple[str, float]] = []

    @engine.app.job()
    def job(message: Message, context: Any) -> None:
        seen.append((message.id, time.time()))

    engine.start("q")
    due = time.time() + 0.5
    sent = engine.app.send("q", 1, at=due)
    until(lambda: seen)
    ((found, at),) = seen
    assert found == sent
    assert due <= at < due + 2.0


def test_a_delayed_message_has_both_its_times(make: Callable[..., EngineSetup]) -> None:
    """When it was sent and when it was due; after its retry as a dead letter, that of the retry."""
    engine = make(attempts=1)
    seen: list[tuple[float, float | None]] = []

    @engine.app.job()
    def job(message: Message, context: Any) -> None:
        seen.append((message.time, message.due))
        if message.body == "delayed" and len(seen) == 2:
            raise ValueError("no")

    engine.start("q")
    engine.app.send("q", "plain")
    until(lambda: len(seen) == 1)
    began, due = time.time(), time.time() + 0.5
    engine.app.send("q", "delayed", at=due)
    until(lambda: len(engine.broker.dead_letters.records()) == 1)
    (letter,) = dead_letters.find(engine.broker, dead_letters.Filter(), time.time())
    shown = dead_letters.exported(letter, dead_letters.read(engine.broker, letter))
    retried = time.time()
    list(dead_letters.retry(engine.broker, [letter]))
    until(lambda: len(seen) == 3)
    (_, none), (sent, found), (again, gone) = seen
    assert (none, found, gone) == (None, pytest.approx(due, abs=1e-5), None)
    assert began - 0.001 <= sent < due - 0.2
    assert again >= retried - 0.001
    assert position_of_time(sent) // 10 == position_of(shown["time"])
    assert position_of_time(due) // 10 == pytest.approx(position_of(shown["due_time"]), abs=2)


def position_of(text: str) -> int:
    """Return the microseconds of an ISO 8601 time, as those of a position."""
    moment = datetime.datetime.fromisoformat(text.replace("Z", "+00:00"))
    return position_of_time(moment.timestamp()) // 10


def test_jobs_may_send(engine: EngineSetup) -> None:
    """To other queues and their own, also delayed, and passing on the headers they got."""
    seen: list[tuple[str, Any, dict[str, str]]] = []

    @engine.app.job()
    def job(message: Message, context: Any) -> None:
        seen.append((message.queue, message.body, dict(message.headers)))
        if message.queue == "first":
            engine.app.send("second", message.body, headers=message.headers)
        elif message.queue == "second" and message.body < 3:
            engine.app.send("second", message.body + 1, delay_seconds=0.02, headers={"h": "v"})

    engine.app.send("first", 1, delay_seconds=0.02)
    engine.start("first", "second")
    until(lambda: len(seen) == 4)
    assert [(queue, body) for queue, body, _ in seen] == [
        ("first", 1),
        ("second", 1),
        ("second", 2),
        ("second", 3),
    ]
    # A message that was due before it was written has never waited, and no id from then.
    assert set(seen[0][2]) - {"qdo-id"} == {"qdo-sent", "qdo-due"}
    assert seen[1][2] == {}
    assert set(seen[2][2]) - {"qdo-id"} == {"qdo-sent", "qdo-due", "h"}


def test_a_retried_dead_letter_is_run_again(make: Callable[..., EngineSetup]) -> None:
    """By a worker that runs, at once, from attempt 1, under its first id; and may die again."""
    engine = make(attempts=1)
    mended = False
    seen: list[tuple[str, int, str | None]] = []

    @engine.app.job()
    def job(message: Message, context: Any) -> None:
        seen.append((message.id, message.attempt, message.headers.get("qdo-retried")))
        if not mended:
            raise ValueError("no")

    sent = engine.app.send("q", 1)
    engine.start("q")
    for number in range(3):
        until(lambda: engine.broker.dead_letters.records())
        (letter,) = engine.broker.dead_letters.find()
        mended = number == 2
        engine.broker.dead_letters.retry([(letter.queue, letter.position)])
        until(lambda n=number: len(seen) == n + 2)  # type: ignore[misc]
    assert seen == [(sent, 1, None), (sent, 1, "1"), (sent, 1, "2"), (sent, 1, "3")]
    assert engine.broker.dead_letters.records() == []


def test_a_burst_processes_what_is_due_at_its_start(tmp_path: Path) -> None:
    """No worker ran when it became due. The burst does not wait for messages not yet due."""
    with App("a", broker=f"sqlite:{tmp_path}/qdo-data/messages.db") as app:
        app.use(load(environ={}))
        app.send("q", "due", delay_seconds=0.1)
        app.send("q", "later", delay_seconds=3600)
        due = time.time() + 0.1
        until(lambda: time.time() > due, "the time has come")
        job = ("--app", "a", "--job", "qdo.programs.echo:job")
        ended = command(*WORKER, "--burst", *job, cwd=tmp_path)
        assert ended.code == 0, ended.err
        assert "due" in ended.out
        assert "later" not in ended.out
        assert app.broker.catalog.backlog("q", 0).delayed == 1
