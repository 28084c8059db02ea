"""The testing kit relays the outboxes of an app on its own clock."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine, create_engine
from sqlalchemy.orm import Session

import qdo
from qdo.outbox import Outbox
from qdo.testing import Clock, TestKit


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    engine = create_engine(f"sqlite:///{tmp_path / 'app.db'}")
    yield engine
    engine.dispose()


@pytest.fixture
def app() -> qdo.App:
    app = qdo.App("shop")

    @app.job()
    def job(message: qdo.Message, context: Any) -> None:
        pass

    return app


def test_the_kit_relays_the_outbox(app: qdo.App, engine: Engine) -> None:
    """Messages of committed transactions run, those of others do not."""
    outbox = Outbox(app, engine)
    with TestKit(app) as kit, Session(engine) as session:
        outbox.create(session)
        outbox.send(session, "q", "kept")
        session.commit()
        outbox.send(session, "q", "rolled back")
        session.rollback()
        kit.run_until_idle()
        assert kit.done() == ["kept"]


def test_delayed_rows_of_the_outbox_become_due(app: qdo.App, engine: Engine) -> None:
    """By the clock of the kit; the message has the time of its sending and its due time."""
    outbox = Outbox(app, engine)
    seen: list[qdo.Message] = []
    app.middleware(lambda call_next, message, context: seen.append(message))
    with TestKit(app, clock=Clock(start=1_800_000_000.0)) as kit, Session(engine) as session:
        outbox.create(session)
        kit.advance(5)
        outbox.send(session, "q", "late", delay_seconds=60)
        session.commit()
        assert kit.run_until_settled() == 60
    assert [(each.time, each.due) for each in seen] == [(1_800_000_005.0, 1_800_000_065.0)]


def test_an_app_is_tested_without_its_database(
    app: qdo.App, engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    """The outbox has no table: the log says so once, and everything else runs."""
    Outbox(app, engine)
    with TestKit(app) as kit, caplog.at_level(logging.WARNING):
        kit.send("q", 1)
        kit.send("q", 2, delay_seconds=10)
        assert kit.run_until_settled() == 10
        assert kit.done() == [1, 2]
    assert caplog.text.count("cannot relay") == 1
