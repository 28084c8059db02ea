"""Conditional writes: repetitions and late writes change nothing, in any kind of session."""

from __future__ import annotations

import contextlib
import math
import sqlite3
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy
from sqlalchemy.dialects import mysql, postgresql
from sqlalchemy.orm import Session

from qdo import Message
from qdo.brokers.kinesis.positions import POSITIONS
from qdo.brokers.sqs.codec import SQS_POSITIONS
from qdo.errors import UnsupportedError, UsageError
from qdo.idempotency import FencedWrites, ProcessedMessages, Write
from qdo.state import KeyedState

Transaction = Callable[[], contextlib.AbstractContextManager[Any]]
WRITES = FencedWrites()
DONE = ProcessedMessages()


def message(position: int, fence: int = 1, queue: str = "q", **more: Any) -> Message:
    return Message(queue, position, None, fence=fence, **more)


@contextlib.contextmanager
def plain(path: Path) -> Iterator[sqlite3.Connection]:
    """A transaction of the standard library."""
    with contextlib.closing(sqlite3.connect(path)) as connection, connection:
        yield connection


@contextlib.contextmanager
def core(path: Path) -> Iterator[sqlalchemy.Connection]:
    """A transaction of SQLAlchemy without its mapper."""
    engine = sqlalchemy.create_engine(f"sqlite:///{path}")
    with engine.begin() as connection:
        yield connection
    engine.dispose()


@contextlib.contextmanager
def orm(path: Path) -> Iterator[Session]:
    """A transaction of a SQLAlchemy session."""
    engine = sqlalchemy.create_engine(f"sqlite:///{path}")
    with Session(engine) as session, session.begin():
        yield session
    engine.dispose()


@pytest.fixture(params=[plain, core, orm], ids=lambda each: each.__name__)
def transaction(request: pytest.FixtureRequest, tmp_path: Path) -> Transaction:
    """Begins a transaction on a file with both tables."""
    path = tmp_path / "app.db"
    with request.param(path) as session:
        WRITES.create(session)
        DONE.create(session)
    return lambda: request.param(path)


def admit(transaction: Transaction, each: Message, part: str = "") -> Write:
    with transaction() as session:
        return WRITES.admit(session, each, part)


# --- fences -----------------------------------------------------------------------


def test_messages_in_order_are_new(transaction: Transaction) -> None:
    """Under the same fence and under a greater one; queues do not meddle with each other."""
    assert admit(transaction, message(1)) is Write.NEW
    assert admit(transaction, message(2)) is Write.NEW
    assert admit(transaction, message(7, fence=9)) is Write.NEW
    assert admit(transaction, message(1, queue="p")) is Write.NEW


def test_a_repetition_is_told(transaction: Transaction) -> None:
    """After a crash the next owner begins behind the last checkpoint."""
    admit(transaction, message(5))
    assert admit(transaction, message(4, fence=2)) is Write.REPEATED
    assert admit(transaction, message(5, fence=2)) is Write.REPEATED
    assert admit(transaction, message(5, fence=2)) is Write.REPEATED
    assert admit(transaction, message(6, fence=2)) is Write.NEW


def test_positions_of_any_width_compare_as_numbers(transaction: Transaction) -> None:
    """Those of Kinesis have 280 bits; a longer number is greater, whatever it begins with."""
    for position in (9, 10, 2**63, 10**40, 5 * 10**40, 2**280, 2**320):
        assert admit(transaction, message(position)) is Write.NEW
    for position in (2**320, 2**280 + 5, 9 * 10**40, 99):
        assert admit(transaction, message(position)) is Write.REPEATED


def test_positions_that_do_not_last_prove_nothing(transaction: Transaction) -> None:
    """A message of SQS has another one each time it is received; its id stays."""
    received = [
        message(time << 256 | 7, id=SQS_POSITIONS)
        for time in (140_000_000_000_000_000, 140_000_000_000_000_001)
    ]
    with pytest.raises(UnsupportedError, match=r"qdo\.idempotency\.ProcessedMessages"):
        admit(transaction, received[0])
    assert message(5, id=POSITIONS).stable
    with transaction() as session:
        assert [DONE.record(session, each) for each in received] == [True, False]


def test_a_former_owner_is_refused(transaction: Transaction) -> None:
    """Whatever position it has: the new owner's row stays as it is."""
    admit(transaction, message(1, fence=1))
    admit(transaction, message(2, fence=2))
    for position in (1, 2, 3):
        assert admit(transaction, message(position, fence=1)) is Write.STALE
    assert admit(transaction, message(3, fence=2)) is Write.NEW


def test_a_repetition_shuts_the_former_owner_out(transaction: Transaction) -> None:
    """The new owner is known from its first message on, even where that changed nothing."""
    admit(transaction, message(1, fence=1))
    assert admit(transaction, message(1, fence=2)) is Write.REPEATED
    assert admit(transaction, message(2, fence=1)) is Write.STALE


def test_several_messages_share_a_transaction(transaction: Transaction) -> None:
    """Each is decided by itself, also where some of them were written before."""
    admit(transaction, message(1))
    with transaction() as session:
        found = [WRITES.admit(session, message(position, fence=2)) for position in (1, 2, 3)]
    assert found == [Write.REPEATED, Write.NEW, Write.NEW]
    assert admit(transaction, message(3, fence=2)) is Write.REPEATED


def test_parts_are_apart(transaction: Transaction) -> None:
    """Keys that run in parallel do not come in the order of the queue."""
    assert admit(transaction, message(2), part="ada") is Write.NEW
    assert admit(transaction, message(1), part="grace") is Write.NEW
    assert admit(transaction, message(1), part="ada") is Write.REPEATED


def test_only_a_new_write_is_true() -> None:
    """`if writes.admit(...)` is the whole test."""
    assert [bool(each) for each in (Write.NEW, Write.REPEATED, Write.STALE)] == [True, False, False]


def test_what_is_rolled_back_did_not_happen(transaction: Transaction) -> None:
    """The proof goes with the write that it stands for."""

    def fail() -> None:
        with transaction() as session:
            assert WRITES.admit(session, message(1))
            assert DONE.record(session, message(1))
            raise RuntimeError("the app fails")

    with pytest.raises(RuntimeError):
        fail()
    with transaction() as session:
        assert WRITES.admit(session, message(1))
        assert DONE.record(session, message(1))


def test_fences_can_be_reset(transaction: Transaction) -> None:
    """A new coordinator counts from the start; positions continue."""
    admit(transaction, message(5, fence=1000))
    assert admit(transaction, message(6, fence=3)) is Write.STALE
    with transaction() as session:
        assert WRITES.reset_fences(session) == 1
    assert admit(transaction, message(5, fence=3)) is Write.REPEATED
    assert admit(transaction, message(6, fence=3)) is Write.NEW


def test_two_owners_decide_one_after_the_other(tmp_path: Path) -> None:
    """While one has not committed the other waits, and then sees its writes."""
    path = tmp_path / "app.db"
    with orm(path) as session:
        WRITES.create(session)
    found: list[Write] = []

    def late() -> None:
        with orm(path) as session:
            started.set()
            found.append(WRITES.admit(session, message(2, fence=1)))

    started = threading.Event()
    thread = threading.Thread(target=late)
    with orm(path) as session:
        assert WRITES.admit(session, message(1, fence=2))
        thread.start()
        assert started.wait(10)
        assert found == []
    thread.join(20)
    assert found == [Write.STALE]


# --- ids --------------------------------------------------------------------------


def test_an_id_is_recorded_once(transaction: Transaction) -> None:
    """Also where it comes back at another position, as a dead letter does."""
    with transaction() as session:
        assert DONE.record(session, message(1, id="a"))
        assert DONE.record(session, message(2, id="b"))
        assert DONE.record(session, message(2, id="a", queue="p"))
    with transaction() as session:
        assert not DONE.record(session, message(9, id="a", fence=3))


def test_old_ids_are_forgotten(transaction: Transaction) -> None:
    """Those that are older than asked for, and no others."""
    now = [1000.0]
    done = ProcessedMessages(clock=lambda: now[0])
    with transaction() as session:
        done.record(session, message(1, id="old"))
        now[0] = 1100.0
        done.record(session, message(2, id="young"))
        assert done.forget(session, 50) == 1
        assert done.record(session, message(1, id="old"))
        assert not done.record(session, message(2, id="young"))
        with pytest.raises(UsageError, match="older_than_seconds"):
            done.forget(session, -1)
        for endless in (math.inf, math.nan):
            with pytest.raises(UsageError):
                done.forget(session, endless)


# --- bad use ----------------------------------------------------------------------


@pytest.mark.parametrize("name", ["", "a b", "x; DROP TABLE y", "1st", "a" * 64, "naïve"])
@pytest.mark.parametrize("kind", [FencedWrites, ProcessedMessages, KeyedState])
def test_names_that_are_no_tables(kind: Callable[[str], Any], name: str) -> None:
    """They would become part of a statement."""
    with pytest.raises(UsageError, match="name of a table"):
        kind(name)


def test_tables_of_ones_own(tmp_path: Path) -> None:
    """Two guards in one database know nothing of each other."""
    one, other = FencedWrites("one"), FencedWrites("other")
    with plain(tmp_path / "app.db") as session:
        for each in (one, other):
            each.create(session)
            assert each.admit(session, message(1))
        assert not one.admit(session, message(1))


def test_a_part_that_is_too_long(tmp_path: Path) -> None:
    """It is rejected before the database truncates it."""
    with plain(tmp_path / "app.db") as session, pytest.raises(UsageError, match="200"):
        WRITES.admit(session, message(1), part="k" * 201)


def test_a_database_that_is_not_known(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A database with different SQL is named, with the alternative."""
    with core(tmp_path / "app.db") as session:
        monkeypatch.setattr(session, "dialect", mysql.dialect())
        with pytest.raises(UnsupportedError, match=r"mysql.* sqlite, postgresql"):
            WRITES.admit(session, message(1))


def test_a_session_outside_of_a_transaction(tmp_path: Path) -> None:
    """The proof would be committed before the write: a crash between them would lose it."""
    path = tmp_path / "app.db"
    with plain(path) as session:
        WRITES.create(session)
        DONE.create(session)
    engine = sqlalchemy.create_engine(f"sqlite:///{path}", isolation_level="AUTOCOMMIT")
    alone = sqlite3.connect(path, isolation_level=None)
    with contextlib.closing(alone), engine.connect() as core_alone, Session(engine) as orm_alone:
        for each in (alone, core_alone, orm_alone):
            with pytest.raises(UsageError, match="transaction"):
                WRITES.admit(each, message(1))
            with pytest.raises(UsageError, match="transaction"):
                DONE.record(each, message(1))
        alone.execute("BEGIN")
        assert WRITES.admit(alone, message(1))
        assert DONE.record(alone, message(1))
    engine.dispose()


def test_what_is_no_session() -> None:
    """An asynchronous session, or a factory of sessions, is a mistake that is named."""
    for wrong in (object(), Session):
        with pytest.raises(UsageError, match="SQLAlchemy"):
            WRITES.admit(wrong, message(1))


def test_statements_are_the_same_for_postgresql() -> None:
    """Parameters are the only thing that a dialect changes: no colon is taken for one."""
    names = {"app", "queue", "part", "fence", "position"}
    compiled = sqlalchemy.text(WRITES._advance).compile(dialect=postgresql.dialect())
    assert set(compiled.params) == names
    assert "ON CONFLICT (app, queue, part) DO UPDATE" in str(compiled)
