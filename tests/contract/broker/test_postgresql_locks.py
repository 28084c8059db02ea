"""Senders of the PostgreSQL broker that need the same locks, and statements that are cancelled."""

from __future__ import annotations

import itertools
import random
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import psycopg
import pytest
from psycopg import errors

from qdo.brokers.base import Broker, Outgoing
from qdo.brokers.registry import open_broker
from tests.support.postgresql.schema import prepared
from tests.support.postgresql.server import PostgresqlDatabase
from tests.support.processes import wait_until

Session = psycopg.Connection[tuple[object, ...]]
THREADS = 8
ROUNDS = 40
STAGE = """
SELECT qdo.stage((SELECT node FROM qdo.about), %s, ARRAY[%s], NULL, NULL,
    ARRAY[%s::bytea], ARRAY['id'], NULL, NULL, NULL)
"""
APPEND = "SELECT qdo.append('app', ARRAY['a'], NULL, NULL, ARRAY['x'::bytea], NULL)"
LOCKS = """
SELECT count(*) FROM pg_locks WHERE relation = 'qdo.position_lock'::regclass
    OR locktype = 'advisory' AND pid = ANY (%s)
"""


@pytest.fixture
def url(bare_database: PostgresqlDatabase) -> str:
    return prepared(bare_database.url(), 1)  # a partition a second: more to wait for


@pytest.fixture
def sql(url: str, bare_database: PostgresqlDatabase) -> Iterator[Session]:
    with bare_database.connect() as connection:
        yield connection


def names_of(dice: random.Random, place: int) -> list[str]:
    """Return some queues in any order: those of this round are new, those before exist."""
    rounds = [max(0, place - back) for back in (0, 0, 0, 1, 2)]
    return list({f"{each}-{dice.randrange(4)}": None for each in rounds})


def at_once(works: list[Callable[[random.Random, int], None]]) -> None:
    """Let each function do all rounds, together with the others in each."""
    barrier = threading.Barrier(len(works))

    def run(number: int) -> None:
        dice = random.Random(number)
        try:
            for place in range(ROUNDS):
                barrier.wait(60)
                works[number](dice, place)
        except BaseException:
            barrier.abort()
            raise

    with ThreadPoolExecutor(len(works)) as pool:
        running = [pool.submit(run, number) for number in range(len(works))]
    errors_found = [each.exception() for each in running]
    assert [each for each in errors_found if each is not None] == []


def deadlocks(sql: Session) -> object:
    query = "SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()"
    (count,) = sql.execute(query).fetchone() or (None,)
    return count


def test_queues_in_any_order(url: str, bare_database: PostgresqlDatabase, sql: Session) -> None:
    """Transactions of apps, and groups and batches of brokers: none meets a deadlock."""
    connections = [bare_database.connect() for _ in range(THREADS // 2)]
    brokers = [open_broker(url, "app") for _ in range(THREADS // 2)]

    def staging(connection: Session) -> Callable[..., None]:
        def work(dice: random.Random, place: int) -> None:
            with connection.transaction():
                for name in names_of(dice, place):
                    connection.execute(STAGE, (dice.choice(("app", "other")), name, b"x"))

        return work

    def sending(broker: Broker) -> Callable[..., None]:
        def work(dice: random.Random, place: int) -> None:
            broker.send_many([Outgoing(name, b"x") for name in names_of(dice, place)])

        return work

    try:
        at_once([*map(staging, connections), *map(sending, brokers)])
    finally:
        for closing in (*connections, *brokers):
            closing.close()
    wait_until(lambda: sessions(sql) == 1, "the sessions have ended, and told their statistics")
    assert deadlocks(sql) == 0


def sessions(sql: Session) -> object:
    query = (
        "SELECT count(*) FROM pg_stat_activity"
        " WHERE datname = current_database() AND backend_type = 'client backend'"
    )
    (count,) = sql.execute(query).fetchone() or (None,)
    return count


def test_many_staged_messages(sql: Session) -> None:
    """The trigger runs for each message; only its first run has work to do."""
    query = """
        SELECT qdo.stage((SELECT node FROM qdo.about), 'app', array_agg('a'::text), NULL, NULL,
            array_agg(''::bytea), array_agg('id'::text), NULL, NULL, NULL)
        FROM generate_series(1, 10000)
    """
    sql.execute("SET statement_timeout = '10s'")
    sql.execute(query)
    assert sql.execute("SELECT count(*) FROM qdo.messages").fetchone() == (10_000,)


def test_the_order_of_one_transaction(sql: Session) -> None:
    with sql.transaction():
        for number in range(5):
            sql.execute(STAGE, ("app", "a", b"%d" % number))
    read = "SELECT array_agg(convert_from(body, 'UTF8') ORDER BY position) FROM qdo.messages"
    assert sql.execute(read).fetchone() == (list("01234"),)


def test_cancelled_statements_leave_no_lock(
    bare_database: PostgresqlDatabase, sql: Session
) -> None:
    """The lock of the positions would stop every sender for as long as its session lives."""
    senders = [bare_database.connect() for _ in range(4)]
    pids = [each.info.backend_pid for each in senders]
    over = threading.Event()

    def send(connection: Session) -> int:
        cancelled = 0
        while not over.is_set():
            try:
                connection.execute(APPEND)
            except errors.QueryCanceled:
                cancelled += 1
        return cancelled

    with ThreadPoolExecutor(len(senders)) as pool:
        running = [pool.submit(send, each) for each in senders]
        try:
            for pid in itertools.islice(itertools.cycle(pids), 3000):
                sql.execute("SELECT pg_cancel_backend(%s)", (pid,))
        finally:
            over.set()
    try:
        assert sum(each.result() for each in running) > 100
        assert sql.execute(LOCKS, (pids,)).fetchone() == (0,)
    finally:
        for each in senders:
            each.close()
