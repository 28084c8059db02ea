"""The testing kit with jobs that write to PostgreSQL, and send in their transactions."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest
import sqlalchemy
from sqlalchemy.orm import Session
from sqlalchemy.pool import NullPool

import qdo
from qdo.errors import UsageError
from qdo.idempotency import FencedWrites, ProcessedMessages
from qdo.loading import load_app
from qdo.testing import TestKit
from tests.support.paths import ROOT


@pytest.fixture
def bank(bare_database_url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[qdo.App]:
    """The example of the documentation; its database has no schema of qdo."""
    monkeypatch.setenv("DATABASE", bare_database_url)
    monkeypatch.syspath_prepend(str(ROOT / "docs" / "examples"))
    monkeypatch.delitem(sys.modules, "bank_postgresql", raising=False)
    with load_app("bank_postgresql:app") as app:
        yield app


def _balances(bare_database_url: str) -> dict[str, int]:
    with psycopg.connect(bare_database_url) as connection:
        return dict(connection.execute("SELECT account, amount FROM balances").fetchall())


def test_the_example_moves_money(bank: qdo.App, bare_database_url: str) -> None:
    """Wherever the worker is killed, both halves of a transfer are booked once."""
    with TestKit(bank) as kit:
        kit.crash_at("after-job", queue="ada")
        kit.send("ada", {"amount": -10, "to": "bob"})
        kit.run_until_settled()
        assert not kit.dead_letters()
        assert kit.done("bob") == [{"amount": 10}]
        assert not kit.faults_left
    assert _balances(bare_database_url) == {"ada": -10, "bob": 10}


def test_the_writes_of_an_earlier_test_end_the_run(bank: qdo.App) -> None:
    """The job would take the first message of each test for a repetition, silently."""
    for last in (False, True):
        with TestKit(bank) as kit:
            kit.send("ada", {"amount": -10})
            if not last:
                kit.run_until_settled()
                continue
            with pytest.raises(UsageError, match="earlier test"):
                kit.run_until_settled()


def _psycopg(url: str) -> Any:
    return psycopg.connect(url)


def _session(url: str) -> Any:
    url = url.replace("postgresql://", "postgresql+psycopg://")
    return Session(sqlalchemy.create_engine(url, poolclass=NullPool))


@pytest.mark.parametrize("connect", [_psycopg, _session])
def test_messages_follow_the_transaction(
    bare_database_url: str, connect: Callable[[str], Any]
) -> None:
    """A rollback sends nothing, nor one to a savepoint; a delayed message keeps its id."""
    app = qdo.App("shop")
    app.job()(lambda message, context: None)
    with TestKit(app) as kit, connect(bare_database_url) as connection:
        app.send("q", "rolled back", connection=connection)
        connection.rollback()
        app.send("q", 1, key="k", headers={"a": "b"}, connection=connection)
        _execute(connection, "SAVEPOINT s")
        app.send("q", "to a savepoint", connection=connection)
        _execute(connection, "ROLLBACK TO s")
        late = app.send("q", 3, delay_seconds=60, connection=connection)
        for number in (2, 4):
            app.send("q", number, dedup_key="k", connection=connection)
        kit.run_until_settled()
        assert kit.waiting("q") == kit.done() == []
        connection.commit()
        assert kit.waiting("q") == [1, 2]
        assert kit.run_until_settled() == pytest.approx(60)
        assert kit.done() == [1, 2, 3]
        assert kit.attempts()[-1].id == late
        with pytest.raises(UsageError, match="psycopg"):
            app.send("q", 1, connection=object())


def _execute(connection: Any, statement: str) -> None:
    connection.execute(sqlalchemy.text(statement) if isinstance(connection, Session) else statement)


def test_own_repetitions_are_no_writes_of_another_test(bare_database_url: str) -> None:
    """After crashes, a frozen worker and a second delivery of a dead letter."""
    app, fenced, done = qdo.App("shop"), FencedWrites(), ProcessedMessages()
    with psycopg.connect(bare_database_url, autocommit=True) as connection:
        fenced.create(connection)
        done.create(connection)

        @app.job(policy=qdo.Policy(attempts=1))
        def job(message: qdo.Message, context: Any) -> None:
            with connection.transaction():
                written.append((bool(fenced.admit(connection, message)), message.body))
                done.record(connection, message)
            if message.body == "bad" and len(kit.dead_letters()) == 0:
                raise ValueError

        written: list[Any] = []
        with TestKit(app) as kit:
            kit.crash_at("before-checkpoint", host=True)
            kit.lose_lease_at("after-job", nth=2)
            for body in (1, 2, "bad"):
                kit.send("q", body)
            kit.run_until_settled()
            (letter,) = kit.dead_letters()
            kit.broker.dead_letters.retry([("q", letter.position)])
            kit.run_until_settled()
            assert not kit.faults_left
    assert {body for new, body in written if new} == {1, 2, "bad"}
    assert any(not new for new, _ in written)
