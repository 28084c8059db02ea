"""``once=`` on the brokers that deduplicate, and with each of its rules left out."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest

import qdo
from qdo import App, Batch, Message, NewMessage
from qdo.brokers.base import Capabilities
from qdo.errors import UnreachableError, UnsupportedError, UsageError
from qdo.jobs.timers import Occurrence
from qdo.sending import messages, sender
from qdo.sending.timers import send_occurrences
from qdo.settings.settings import Settings
from tests.simulation.mutants.edits import mutated
from tests.support.brokers import ADDRESSES, LOGS, opening, rows


@pytest.fixture
def app(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[App]:
    """An app whose default headers differ in each call, as those of tracing do."""
    app, numbers = App("app"), count()
    app.default_headers = lambda: {"traceparent": str(next(numbers))}
    kind = getattr(request, "param", "memory")
    with contextlib.ExitStack() as stack:
        connect = stack.enter_context(opening(kind, tmp_path, request))
        stack.enter_context(app.override_broker(connect(), Settings(app="app")))
        yield app


def check(app: App) -> None:
    """Play attempts of two messages; the third decides otherwise. Calls that fail use no number."""
    for last in (2, 2, 3):
        first = Message("q", 1, None, id="m")
        app.send("a", 1, once=first)
        app.send_many([("a", 1), NewMessage("b", 1, once=first)], once=first)
        app.send("a", 1, f"key-{last}", once=first, delay_seconds=0)
        asyncio.run(app.asend("a", last, once=first))
    app.send("a", 1, once=Message("q", 2, None, id="another"))
    stored = {queue: [row.body for row in rows(app.broker, queue)] for queue in "ab"}
    assert stored == {"a": [b"1", b"1", b"1", b"2", b"1", b"3", b"1"], "b": [b"1"]}
    message, send_many = Message("q", 1, None, id="m"), app.broker.send_many
    wrong = [("c", 1), ("c", object())]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(app.broker, "send_many", lambda given: lose(send_many(given)))
        with pytest.raises(UnreachableError):
            app.send_many([("c", 1), ("c", 1)], once=message)
    with pytest.raises(UsageError):
        app.send_many(wrong, once=message)
    with pytest.raises(UsageError):
        asyncio.run(app.asend_many(wrong, once=message))
    app.send_many([("c", 1), ("c", 1), ("c", 1)], once=message)
    assert len(rows(app.broker, "c")) == 3


def lose(answer: list[str]) -> list[str]:
    raise UnreachableError(what="the broker", reason=f"lost {answer}")


@pytest.mark.parametrize("app", LOGS, indirect=True)
def test_attempts_store_once_what_they_send(app: App) -> None:
    """O1 the same of several attempts, O2 equal ones each, O3 another decision."""
    check(app)


MUTANTS = {
    "O1: a key of the attempt": ("ascii((once.id, *sent))", "ascii((once.id, id(once), *sent))"),
    "O1: failed calls count": ("[digest] -= 1", "[digest] -= 0"),
    "O1: the first number of a call is released first": ("in reversed(", "in ("),
    "O2: equal messages have one number": ("= number + 1", "= number"),
    "O2: without the job's message": ("ascii((once.id, *sent))", "ascii(sent)"),
    "O3: without the body": (".encode() + body", ".encode()"),
    "O3: without queue, key and headers": ("(once.id, *sent)", "(once.id,)"),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_rule_left_out_is_found(app: App, mutant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    changed = mutated("qdo/sending/once.py", MUTANTS[mutant])
    monkeypatch.setattr(messages, "once_options", changed.once_options)
    monkeypatch.setattr(sender, "release_numbers", changed.release_numbers)
    with pytest.raises(AssertionError):
        check(app)


MESSAGE = Message("q", 1, None)


@pytest.mark.parametrize(
    "options", [{"once": "m"}, {"once": Batch([MESSAGE])}, {"once": MESSAGE, "dedup_key": "k"}]
)
def test_rejects_all_but_one_message(app: App, options: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="once"):
        app.send("q", 1, **options)


def test_a_broker_must_deduplicate_for_days(app: App, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unlike SQS, which forgets keys after five minutes."""
    able = Capabilities(True, True, True, True, True, 100, dedup=True, dedup_seconds=300.0)
    monkeypatch.setattr(type(app.broker), "capabilities", able)
    with pytest.raises(UnsupportedError) as caught:
        app.send("q", 1, once=MESSAGE)
    assert caught.value.details["remedy"] == "send without once"


STORED = {"embedded": 1, "postgresql": 1, "sqs-fifo": 1, "sqs-standard": 3}
"""Messages after three leaders have sent the same occurrence."""


@pytest.mark.parametrize("kind", STORED)
def test_an_occurrence_sent_again(
    kind: str, tmp_path: Path, aws_stream: str, request: pytest.FixtureRequest
) -> None:
    queue = "nightly.fifo" if kind == "sqs-fifo" else "nightly"
    with qdo.App("clock", broker=ADDRESSES[kind](tmp_path, aws_stream, request)) as app:
        app.timer("nightly", every_seconds=86_400, queue=queue)
        due = [(app.timers["nightly"], Occurrence(86_400))]
        ids = {send_occurrences(app, due)[0] for _ in range(3)}
        assert (len(ids) == 1) == (STORED[kind] == 1)
        assert app.broker.capabilities.lasting_dedup == (not kind.startswith("sqs"))
        send_occurrences(app, due, runs=True)
        assert app.broker.catalog.backlog(queue, 0).count == STORED[kind] + 1
