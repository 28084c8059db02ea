"""The testing kit and a worker report the same about the same messages.

The worker has the embedded broker and the real clock, with pauses of some milliseconds.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import qdo
from qdo.jobs.retry import Then
from qdo.testing import TestKit
from tests.support.engine import EngineSetup, until

ENDS = ("done", "retry once", "retry twice", "Retry", "fails", "refused", "Skip", "DeadLetter")
PAUSE_SECONDS = 0.004


class OddRuleError(Exception):
    """Has a rule of its own."""


def make(then: Then, events: list[qdo.Event]) -> qdo.App:
    """Return an app whose messages contain their outcomes."""
    app = qdo.App("test")
    rule = qdo.Rule(OddRuleError, attempts=1, then="skip")
    policy = qdo.Policy(2, PAUSE_SECONDS, PAUSE_SECONDS, rules=(rule,), then=then)
    app.observer(events.append)

    @app.job(policy=policy)
    def job(message: qdo.Message, context: Any) -> None:
        end = message.body
        if end == "fails" or (end == "retry once" and message.attempt == 1):
            raise ValueError(end)
        if end == "retry twice" and message.attempt <= 2:
            raise ValueError(end)
        if end == "refused":
            raise OddRuleError
        if end == "Retry" and message.attempt == 1:
            raise qdo.Retry(after=PAUSE_SECONDS)
        if end == "Skip":
            raise qdo.Skip("so")
        if end == "DeadLetter":
            raise qdo.DeadLetter("so")

    return app


def told(events: list[qdo.Event], queue: str) -> list[tuple[Any, ...]]:
    """Return the events of a queue that observers got, with messages by their number."""
    mine = [event for event in events if event.queue == queue]
    numbers = sorted({event.position for event in mine})
    return [(numbers.index(each.position), each.attempt, each.outcome, each.error) for each in mine]


def in_kit(then: Then, sent: list[tuple[str, str]]) -> list[qdo.Event]:
    events: list[qdo.Event] = []
    with TestKit(make(then, events)) as kit:
        kit.app.send_many(sent)
        kit.run_until_settled()
    return events


def in_worker(folder: Path, then: Then, sent: list[tuple[str, str]]) -> list[qdo.Event]:
    events: list[qdo.Event] = []
    engine = EngineSetup(folder, make(then, events))
    try:
        engine.app.send_many(sent)
        engine.start(*{queue for queue, _ in sent})
        until(lambda: engine.dispatcher.all_idle(), "the end of every queue")
    finally:
        engine.close()
    return events


@settings(max_examples=25)
@given(
    then=st.sampled_from(["dead-letter", "skip", "block"]),
    sent=st.lists(st.tuples(st.sampled_from("ab"), st.sampled_from(ENDS)), max_size=12),
)
def test_kit_and_worker_agree(
    tmp_path_factory: pytest.TempPathFactory, then: Then, sent: list[tuple[str, str]]
) -> None:
    """On every attempt of every message, in order: number, outcome, error."""
    real = in_worker(tmp_path_factory.mktemp("worker"), then, sent)
    played = in_kit(then, sent)
    for queue in "ab":
        assert told(played, queue) == told(real, queue)
