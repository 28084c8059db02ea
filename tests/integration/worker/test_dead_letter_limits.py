"""A worker whose queues keep a limited number of dead letters."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest

from qdo.message import Message
from qdo.worker.duties import retention
from tests.support.engine import EngineSetup, until


@pytest.mark.parametrize("limits", [{"dead_letter_limit": 3}, {}])
def test_a_worker_deletes_the_oldest_dead_letters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limits: dict[str, int]
) -> None:
    """The newest remain; without a limit, all do."""
    monkeypatch.setattr(retention, "DEAD_LETTERS_SECONDS", 0.05)
    monkeypatch.setattr(retention, "PERIOD_MIN_SECONDS", 0.05)
    with contextlib.closing(EngineSetup(tmp_path, attempts=1, **limits)) as engine:

        @engine.app.job()
        def job(message: Message, context: Any) -> None:
            raise ValueError(message.body)

        engine.app.send_many([("q", number) for number in range(10)])
        engine.start("q")
        expected = 10 if not limits else 3
        last = engine.broker.catalog.backlog("q", 0).head
        until(lambda: [*engine.broker.dead_letters.counts().values()] == [expected])
        positions = [letter.position for letter in engine.broker.dead_letters.records("q")]
        assert positions[-1] == last
