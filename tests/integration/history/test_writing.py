"""The history in real databases that are slow, locked, full, read-only and killed."""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import event, func, select
from sqlalchemy.exc import SQLAlchemyError

from qdo.history import writer as writer_module
from qdo.history.address import open_engine
from qdo.history.recorder import Recorder
from qdo.history.tables import MINUTES, RUNS, create
from qdo.history.writer import HistoryWriter
from qdo.message import Message
from tests.support.cli import command
from tests.support.engine import EngineSetup, until
from tests.support.postgresql.server import PostgresqlDatabase, PostgresqlServer

HOSTILE = [
    "a'b; DROP TABLE qdo_runs;--",
    "%s {x} \\",
    "日本\u202e",
    "q" * 200,
    'x"y',
    "a\0b",
    "\ud800",
]


def attempts(recorder: Recorder, queue: str, count: int) -> None:
    call = recorder.bind(lambda message, context: None)
    for position in range(count):
        call(Message(queue, position, None), None)


def one_row(url: str, *columns: Any) -> tuple[Any, ...]:
    engine = open_engine(url, writes=False)
    with engine.connect() as connection:
        return tuple(connection.execute(select(*columns)).one())


def done(url: str) -> int:
    return int(one_row(url, func.coalesce(func.sum(MINUTES.c.done), 0))[0])


def runs(url: str) -> int:
    return int(one_row(url, func.count(RUNS.c.number))[0])


@pytest.fixture
def writers() -> Iterator[Callable[..., tuple[Recorder, HistoryWriter]]]:
    """Make recorders with writers, whose connections end with the test."""
    made: list[HistoryWriter] = []

    def make(url: str, **options: Any) -> tuple[Recorder, HistoryWriter]:
        recorder = Recorder()
        made.append(HistoryWriter(url, "test", recorder, **options))
        return recorder, made[-1]

    yield make
    for each in made:
        each._disconnect()


Writers = Callable[..., tuple[Recorder, HistoryWriter]]


def test_a_write_after_a_lost_answer_changes_nothing(
    url: str, writers: Writers, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder, writer = writers(url)
    real = writer._write

    def lost(*arguments: Any) -> None:
        real(*arguments)
        raise ConnectionError("the answer is lost")

    attempts(recorder, "q", 7)
    recorder.ended(Message("q", 99, None), "dead-letter", "E")
    monkeypatch.setattr(writer, "_write", lost)
    writer.step()
    assert (writer.failing, done(url), runs(url)) == (True, 7, 1)
    monkeypatch.undo()
    attempts(recorder, "q", 2)
    writer.step()
    assert (writer.failing, done(url), runs(url)) == (False, 9, 1)


def test_an_older_write_that_comes_late_changes_nothing(url: str, writers: Writers) -> None:
    recorder, writer = writers(url)
    attempts(recorder, "q", 3)
    writer._minutes.collect(recorder.counts, time.time())
    late = writer._minutes.unstored()
    attempts(recorder, "q", 4)
    writer.step()
    writer._write(late, [], [], 0.0)
    assert done(url) == 7


def test_hostile_names_are_stored_and_never_block_others(url: str, writers: Writers) -> None:
    recorder, writer = writers(url)
    for each in HOSTILE:
        attempts(recorder, each, 1)
        recorder.ended(Message(each, 5, None, id=each), "block", f"{each}: text")
    writer.step()
    assert (writer.failing, done(url), runs(url)) == (False, len(HOSTILE), len(HOSTILE))


def test_processes_create_the_tables_at_the_same_time(url: str, writers: Writers) -> None:
    made = [writers(url) for _ in range(8)]
    for recorder, _ in made:
        attempts(recorder, "q", 5)
    threads = [threading.Thread(target=writer.step) for _, writer in made]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    for _, writer in made:
        writer.step()
    assert done(url) == 40


def test_tables_are_created_once_by_those_who_meet(bare_database_url: str) -> None:
    together = threading.Barrier(6)
    errors: list[SQLAlchemyError] = []

    def make() -> None:
        with open_engine(bare_database_url, writes=True).connect() as connection:
            together.wait(20.0)
            try:
                create(connection)
                connection.commit()
            except SQLAlchemyError as error:
                errors.append(error)

    threads = [threading.Thread(target=make) for _ in range(6)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert errors == []


def test_no_lock_of_another_role_delays_the_tables(
    bare_database: PostgresqlDatabase, writers: Writers
) -> None:
    """Any role may take each advisory lock, and keep it."""
    recorder, writer = writers(bare_database.url())
    attempts(recorder, "q", 1)
    locks: list[bool] = []

    def look(conn: Any, cursor: Any, statement: str, *rest: Any) -> None:
        locks.append("advisory" in statement)

    event.listen(writer._engine, "before_cursor_execute", look)
    writer.step()
    assert done(bare_database.url()) == 1
    assert set(locks) == {False}


FORK = """
import os, sys, threading
from qdo.history.recorder import Recorder
from qdo.history.writer import HistoryWriter
from qdo.message import Message

recorder = Recorder()
recorder.bind(lambda message, context: None)(Message("q", 1, None), None)
writer = HistoryWriter(sys.argv[1], "test", recorder)
tables, write = writer._tables, writer._tables.write_minutes
forked, waits = [], []

def fork():
    pid = os.fork()
    if not pid:
        os._exit(0)
    forked.append(pid)

def slow(connection, rows):
    thread.start()
    thread.join(0.2)
    waits.append(thread.is_alive())
    write(connection, rows)

thread = threading.Thread(target=fork)
tables.write_minutes = slow
writer.step()
thread.join()
sys.exit((os.waitpid(forked[0], 0)[1] != 0) + 2 * (waits != [True]) + 4 * writer.failing)
"""


def test_a_fork_waits_for_a_write_to_a_file(tmp_path: Path) -> None:
    """The child would inherit locks of SQLite that no thread of its own ever releases."""
    ended = command("-c", FORK, f"sqlite:{tmp_path / 'history.db'}", cwd=tmp_path)
    assert ended.code == 0, ended.err


def test_ten_thousand_queues_fit_into_one_write(url: str, writers: Writers) -> None:
    recorder, writer = writers(url)
    for number in range(10_500):
        attempts(recorder, f"q{number}", 1)
    writer.step()
    assert (done(url), writer.dropped) == (10_500, 0)


def test_old_rows_are_deleted(url: str, writers: Writers) -> None:
    now = [time.time()]
    recorder, writer = writers(url, now=lambda: now[0])
    attempts(recorder, "q", 5)
    recorder.ended(Message("q", 9, None), "block", "E")
    writer.step()
    now[0] += writer_module.RETENTION_SECONDS + 120
    writer.step()
    assert (done(url), runs(url)) == (0, 0)


def test_a_locked_file_delays_the_rows_only(
    tmp_path: Path, writers: Writers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("qdo.history.address.BUSY_SECONDS", 0.05)
    url = f"sqlite:{tmp_path / 'history.db'}"
    recorder, writer = writers(url)
    attempts(recorder, "q", 1)
    writer.step()
    holder = sqlite3.connect(tmp_path / "history.db", isolation_level=None)
    holder.execute("BEGIN IMMEDIATE")
    attempts(recorder, "q", 2)
    writer.step()
    assert writer.failing
    holder.execute("ROLLBACK")
    holder.close()
    writer.step()
    assert (writer.failing, done(url)) == (False, 3)


@pytest.mark.parametrize("replaced", [False, True])
def test_a_removed_file_is_written_again(
    tmp_path: Path, writers: Writers, caplog: pytest.LogCaptureFixture, replaced: bool
) -> None:
    path = tmp_path / "history.db"
    url = f"sqlite:{path}"
    recorder, writer = writers(url)
    attempts(recorder, "q", 1)
    writer.step()
    for suffix in ("", "-wal", "-shm"):
        path.with_name(f"history.db{suffix}").rename(tmp_path / f"old.db{suffix}")
    if replaced:
        other, other_writer = writers(url)
        attempts(other, "q", 10)
        other_writer.step()
    attempts(recorder, "r", 2)
    writer.step()
    assert (writer.failing, done(url)) == (False, 12 if replaced else 2)
    assert [each.levelname for each in caplog.records] == ["WARNING"]
    writer.step()
    assert len(caplog.records) == 1


def test_a_full_file_drops_rows_with_one_warning(
    tmp_path: Path, writers: Writers, caplog: pytest.LogCaptureFixture
) -> None:
    url = f"sqlite:{tmp_path / 'history.db'}"
    recorder, writer = writers(url)
    attempts(recorder, "q", 1)
    writer.step()
    writer._connection.exec_driver_sql("PRAGMA max_page_count = 1").all()  # type: ignore[union-attr]
    writer._connection.rollback()  # type: ignore[union-attr]
    pages = ["PRAGMA max_page_count = 1"]
    listen(writer, pages)
    for _ in range(2):
        for number in range(10_010):
            attempts(recorder, f"queue-with-a-long-name-{number}", 1)
        writer.step()
    assert writer.failing
    assert writer.dropped == 2 * 10
    pages.clear()
    writer.step()
    assert (writer.failing, done(url)) == (False, 1 + 2 * 10_010 - writer.dropped)
    texts = [each.getMessage() for each in caplog.records]
    assert sum("cannot write" in each for each in texts) == 1
    assert sum("limit on kept rows" in each for each in texts) == 1


def listen(writer: HistoryWriter, statements: list[str]) -> None:
    def connected(connection: Any, record: Any) -> None:
        for each in statements:
            connection.execute(each)

    event.listen(writer._engine, "connect", connected)


def test_a_read_only_server_delays_the_rows_only(
    bare_database: PostgresqlDatabase, writers: Writers
) -> None:
    url = bare_database.url()
    recorder, writer = writers(url)
    attempts(recorder, "q", 1)
    writer.step()
    read_only(bare_database, "on")
    writer._disconnect()
    attempts(recorder, "q", 2)
    writer.step()
    assert writer.failing
    read_only(bare_database, "off")
    writer.step()
    assert (writer.failing, done(url)) == (False, 3)


def read_only(database: PostgresqlDatabase, value: str) -> None:
    with database.connect() as connection:
        connection.execute("SET default_transaction_read_only = off")
        connection.commit()
        connection.execute(
            f'ALTER DATABASE "{database.name}" SET default_transaction_read_only = {value}'  # type: ignore[arg-type]
        )
        connection.commit()


def test_messages_go_on_while_the_server_is_dead(
    tmp_path: Path,
    postgresql_server: PostgresqlServer,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(writer_module, "WRITE_SECONDS", 0.05)
    name = postgresql_server.address.create_database()
    url = PostgresqlDatabase(postgresql_server.address, name).url()
    setup = EngineSetup(tmp_path, history=url)
    count = {"runs": 0}

    @setup.app.job()
    def job(message: Message, context: Any) -> None:
        count["runs"] += 1
        if message.body % 50 == 0:
            raise ValueError(message.body)

    try:
        setup.start("a", "b")
        for start in range(0, 600, 200):
            if start == 200:
                postgresql_server.kill()
            for number in range(start, start + 200):
                setup.send("ab"[number % 2], number + 1)
            until(lambda sent=start + 200: setup.pipeline.counters.processed >= sent - 12,  # type: ignore[misc]
                  "the messages are done")  # fmt: skip
            if start == 200:
                until(lambda: "history: cannot write" in caplog.text, "a write failed")
                postgresql_server.start()
        setup.stop()
        setup.join()
    finally:
        setup.close()
    counters = setup.pipeline.counters
    failed, retried = one_row(url, func.sum(MINUTES.c.failed), func.sum(MINUTES.c.retried))
    assert (done(url), retried) == (counters.processed, counters.retried)
    assert failed == counters.unsuccessful
    assert done(url) + failed == count["runs"]
    assert runs(url) == failed


def test_a_frozen_server_delays_no_message_and_no_end(
    tmp_path: Path,
    postgresql_server: PostgresqlServer,
    writers: Writers,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(writer_module, "WRITE_SECONDS", 0.05)
    name = postgresql_server.address.create_database()
    url = PostgresqlDatabase(postgresql_server.address, name).url()
    setup = EngineSetup(tmp_path, history=url)
    setup.app.job()(lambda message, context: None)
    writers(url)[1].step()  # creates the tables
    try:
        setup.start("q")
        setup.send("q", *range(10))
        until(lambda: done(url) == 10, "the history has the first messages")
        postgresql_server.freeze()
        setup.send("q", *range(90))
        until(lambda: setup.pipeline.counters.processed == 100, "all messages are done")
        assert setup.end() == 0
    finally:
        postgresql_server.thaw()
        setup.close()
