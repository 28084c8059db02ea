"""Retention of the PostgreSQL broker: partitions are dropped, and nothing is left to vacuum."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any
from unittest.mock import ANY

import psycopg
import pytest

from qdo.brokers.base import Broker, Outgoing, SendOptions
from qdo.brokers.postgresql.listener import NotificationListener
from qdo.brokers.postgresql.reader import Fetch
from qdo.brokers.postgresql.writer import send_work
from qdo.brokers.registry import open_broker
from qdo.coordination.znodes.layout import Layout
from qdo.errors import QueueNotEmptyError
from qdo.ops.doctor import configuration
from qdo.ops.doctor_case import Case
from qdo.positions import format_position
from tests.support.postgresql.schema import prepared
from tests.support.postgresql.server import PostgresqlDatabase, PostgresqlServer
from tests.support.processes import wait_until

Session = psycopg.Connection[tuple[object, ...]]
DROP = "SELECT qdo.drop_partitions()"
STAGE = """
SELECT qdo.stage((SELECT node FROM qdo.about), 'app', ARRAY['a'], NULL, NULL,
    ARRAY['staged'::bytea], ARRAY['id'], NULL, NULL, NULL)
"""
APPEND = "SELECT qdo.append('app', ARRAY[%s], NULL, NULL, ARRAY['late'::bytea], NULL)"
OVER = """
SELECT bool_and((number + 1) * (SELECT partition_ticks FROM qdo.about) <= qdo.clock())
FROM unnest(%s::bigint[]) AS number
"""


@pytest.fixture
def broker(bare_database: PostgresqlDatabase) -> Iterator[Broker]:
    """A broker whose partitions have one second."""
    found = open_broker(prepared(bare_database.url(), 1), "app")
    yield found
    found.close()


@pytest.fixture
def sql(bare_database: PostgresqlDatabase) -> Iterator[Session]:
    with bare_database.connect() as connection:
        yield connection


def used(sql: Session) -> list[int]:
    """Return the numbers of the partitions with messages."""
    query = "SELECT DISTINCT position / (SELECT partition_ticks FROM qdo.about) FROM qdo.messages"
    return sorted(int(str(number)) for (number,) in sql.execute(query))


def wait_over(sql: Session, numbers: list[int]) -> None:
    """Wait until the time of partitions is over."""
    wait_until(
        lambda: sql.execute(OVER, (numbers,)).fetchone() == (True,), "the partitions are over"
    )


def drop(sql: Session) -> list[int]:
    """Drop what can be dropped; return the numbers."""
    (names,) = sql.execute(DROP).fetchone() or ([],)
    return [int(name.removeprefix("messages_")) for name in names]  # type: ignore[attr-defined]


def last_of(broker: Broker, queue: str) -> int:
    return max(row[0] for row in broker.reader(queue, 0).fetch(100))


def test_dropped_when_every_queue_is_past(broker: Broker, sql: Session) -> None:
    for name in ("done", "blocked", "deleted"):
        broker.send(Outgoing(name, b"1"))
    numbers = used(sql)
    done, blocked = last_of(broker, "done"), last_of(broker, "blocked")
    reader = broker.reader("done", 0)
    reader.fetch(1)
    assert broker.trim("done", done, 0.0) == 1
    broker.delete_queue("deleted", last_of(broker, "deleted"))
    wait_over(sql, numbers)
    place = blocked // 10_000_000
    assert place not in drop(sql)
    assert [row[1] for row in broker.reader("blocked", 0).fetch(10)] == [b"1"]
    broker.trim("blocked", blocked, 0.0)
    assert place in drop(sql)
    assert used(sql) == []
    # Positions go on, and a reader in the middle finds the next message.
    broker.send_many([Outgoing(name, b"2") for name in ("done", "blocked", "deleted")])
    assert [row[1] for row in reader.fetch(10)] == [b"2"]
    assert last_of(broker, "blocked") > blocked


def test_an_open_transaction_of_an_app(
    broker: Broker, bare_database: PostgresqlDatabase, sql: Session
) -> None:
    """Neither senders, readers, trim nor drops wait for it."""
    with bare_database.connect() as app, app.transaction():
        app.execute("SELECT 1")
        app.execute(STAGE)
        broker.send(Outgoing("a", b"sent"))
        numbers = used(sql)
        reader = broker.reader("a", 0)
        assert [row[1] for row in reader.fetch(10)] == [b"sent"]
        assert broker.trim("a", last_of(broker, "a"), 0.0) == 1
        wait_over(sql, numbers)
        assert set(numbers) <= set(drop(sql))
        broker.send(Outgoing("a", b"2"))
    assert [row[1] for row in reader.fetch(10)] == [b"2", b"staged"]
    assert sql.execute("SELECT count(*) FROM qdo.outgoing").fetchone() == (0,)


def test_a_message_that_commits_while_its_partition_is_dropped(
    broker: Broker, bare_database: PostgresqlDatabase, sql: Session
) -> None:
    """The drop has seen that the partition is done, and waits for the sender's lock."""
    broker.send(Outgoing("a", b"1"))
    broker.trim("a", last_of(broker, "a"), 0.0)
    with bare_database.connect() as sender, ThreadPoolExecutor(1) as pool:
        sender.execute("BEGIN")
        sender.execute(APPEND, ("late",))
        with bare_database.connect() as dropper:
            numbers = sender.execute(
                "SELECT DISTINCT position / 10000000 FROM qdo.messages"
            ).fetchall()
            wait_over(sql, [int(str(number)) for (number,) in numbers])
            # Twenty seconds instead of 200 ms: the test decides when the sender commits.
            sql.execute("ALTER FUNCTION qdo.drop_partitions() SET lock_timeout = '20s'")
            pid = dropper.info.backend_pid
            dropped = pool.submit(drop, dropper)
            waiting = "SELECT count(*) > 0 FROM pg_locks WHERE NOT granted AND pid = %s"
            wait_until(
                lambda: dropped.done() or sql.execute(waiting, (pid,)).fetchone() == (True,),
                "the drop waits",
            )
            sender.execute("COMMIT")
            dropped.result(20)
    assert [row[1] for row in broker.reader("late", 0).fetch(10)] == [b"late"]


def test_senders_and_drops_at_once(
    broker: Broker, bare_database: PostgresqlDatabase, sql: Session
) -> None:
    """Over some boundaries of partitions: no error, nothing lost, nothing to vacuum."""
    over = threading.Event()
    read: list[bytes] = []

    def clean() -> None:
        with bare_database.connect() as connection:
            while not over.is_set():
                drop(connection)

    def consume() -> None:
        reader = broker.reader("a", 0)
        while rows := reader.fetch(100):
            read.extend(row[1] for row in rows)
            broker.trim("a", rows[-1][0], 0.0)

    count, partitions = 0, set[int]()
    dropper = threading.Thread(target=clean)
    dropper.start()
    try:
        while len(partitions) < 3:
            broker.send_many([Outgoing("a", b"%d" % (count + each)) for each in range(10)])
            count += 10
            partitions.update(used(sql))
            consume()
    finally:
        over.set()
        dropper.join()
    assert read == [b"%d" % number for number in range(count)]
    wait_over(sql, used(sql))
    drop(sql)
    assert used(sql) == []


def test_a_dump_brings_ids_of_transactions_that_are_ahead(broker: Broker, sql: Session) -> None:
    """In a new cluster these begin anew. Nothing of that is new, and all of it is dropped."""
    broker.send_many([Outgoing(name, b"1") for name in ("a", "b")])
    for table in ("queues", "messages"):
        sql.execute(f"UPDATE qdo.{table} SET xid = xid + 1000000".encode())
    assert broker.catalog.names() == ["a", "b"]
    look = "SELECT next_xid, running, names FROM qdo.look('app', %s, %s::bigint[], 0)"
    *seen, _ = sql.execute(look, (2**62, [])).fetchone() or ()
    broker.send(Outgoing("c", b"1"))
    *_, names = sql.execute(look, seen).fetchone() or ()
    assert names == ["c"]
    assert broker.catalog.names() == ["a", "b", "c"]
    numbers = used(sql)
    for name in "abc":
        broker.trim(name, last_of(broker, name), 0.0)
    wait_over(sql, numbers)
    assert set(numbers) <= set(drop(sql))


def test_a_reader_keeps_no_partition_from_being_made(
    broker: Broker, bare_database: PostgresqlDatabase, sql: Session
) -> None:
    """It only keeps old ones from being dropped. A sender finds its partition there."""
    broker.send(Outgoing("a", b"1"))
    broker.trim("a", last_of(broker, "a"), 0.0)
    wait_over(sql, used(sql))
    with bare_database.connect() as reader, reader.transaction():
        reader.execute("SELECT count(*) FROM qdo.messages")
        (present,) = sql.execute("SELECT qdo.clock() / 10000000").fetchone() or (0,)
        assert drop(sql) == []
        newest = "SELECT max(last) / 10000000 FROM qdo.spans(0) AS last"
        assert sql.execute(newest).fetchone() >= (present + 2,)  # type: ignore[operator]
    assert drop(sql) != []


KEYS = """
INSERT INTO qdo.dedup (queue, key, id, until)
SELECT 1, sha256(number::text::bytea), 'x', %s + number / 2 FROM generate_series(1, 12000) AS number
"""
TIDY = "SELECT upto, is_rest FROM qdo.tidy(%s)"
COMPARED = "SELECT pg_stat_get_xact_tuples_returned('qdo.dedup_pkey'::regclass)"
READ = "SELECT pg_stat_get_xact_tuples_returned('qdo.dedup_by_until'::regclass)"


def test_workers_delete_deduplication_keys(broker: Broker, sql: Session) -> None:
    """In parts, from where the last one has ended; a sender looks for none."""
    for since in (1, 100_000):
        sql.execute(KEYS, (since,))
        sql.execute("ANALYZE qdo.dedup")
        with sql.transaction():
            upto, is_rest = sql.execute(TIDY, (since,)).fetchone() or (0, False)
            assert is_rest
            assert sql.execute(COMPARED).fetchone() == (0,)
        assert sql.execute("SELECT count(*) FROM qdo.dedup").fetchone() == (2000,)
        assert sql.execute(TIDY, (upto,)).fetchone() == (ANY, False)
    count = "SELECT count(*) FROM qdo.dedup"
    assert sql.execute(count).fetchone() == (0,)
    sql.execute(KEYS, (1,))
    broker.listen(lambda names: None)
    wait_until(lambda: sql.execute(count).fetchone() == (0,), "a listener deletes all")
    with sql.transaction():
        before = sql.execute(READ).fetchone()  # of transactions that the server has not counted yet
        send_work("qdo", "app", [Outgoing("a", b"1", terms=SendOptions(dedup_key="k"))], None)(sql)  # type: ignore[arg-type]
        assert sql.execute(READ).fetchone() == before


OPENED = """
SELECT count(*) FROM pg_locks JOIN pg_class ON pg_class.oid = relation
WHERE pid = pg_backend_pid() AND relkind = 'r' AND relname LIKE 'messages_%'
"""


def test_old_partitions_are_not_opened(
    broker: Broker, bare_database: PostgresqlDatabase, sql: Session,
    monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    """A blocked queue may keep thousands, and a server has few locks for each session."""
    monkeypatch.setattr("qdo.brokers.postgresql.listener.LOOK_SECONDS", 0.05)
    broker.send(Outgoing("a", b"1"))
    ticks = 10_000_000
    last = last_of(broker, "a")
    for number in range(2, 42):
        sql.execute("SELECT qdo.add_partition(%s)", (last - number * ticks,))
    look = NotificationListener._look
    looks: list[int] = []

    def looked(listener: NotificationListener, connection: Any) -> int | None:
        with connection.transaction():
            due = look(listener, connection)
            looks.append(connection.execute(OPENED).fetchone()[0])
        return due

    monkeypatch.setattr(NotificationListener, "_look", looked)
    broker.listen(lambda names: None)
    # A look opens all while a transaction is in progress that is older than the first mark.
    # Two partitions are made in advance.
    wait_until(lambda: looks[2:] != [] and max(looks[-2:]) <= 5, "looks open few partitions")
    fetches = broker.reader("a", last)._fetches  # type: ignore[attr-defined]

    def fetched(connection: Any, count: int) -> int:
        with connection.transaction():
            fetches._fetch_spans(connection, [Fetch("a", last, 10)] * count)
            return int(connection.execute(OPENED).fetchone()[0])

    for count in (1, 2):
        # The sixth plan of the server would be one for all positions.
        opened = [fetches.run(partial(fetched, count=count)) for _ in range(8)]
        assert opened[-1] <= 5


FEW_LOCKS = {"max_locks_per_transaction": "10", "max_connections": "20"}
PAST = 400
ADD_OLD = (
    "SELECT qdo.add_partition(%(first)s + number * 10000000) FROM generate_series(1, 20) AS number"
)
FILL = """
INSERT INTO qdo.messages (queue, position, xid, body)
SELECT id, %(first)s + number * 10000000, 3, number::text::bytea
FROM qdo.queues, generate_series(1, 20) AS number WHERE name = 'blocked'
"""


@pytest.mark.slow
def test_thousands_of_partitions_need_few_locks() -> None:
    """A server reads, counts, hides and drops more partitions than it has locks for."""
    with contextlib.ExitStack() as stack:
        server = PostgresqlServer(durable=False, settings=FEW_LOCKS)
        stack.callback(server.close)
        server.start()
        address = server.address
        name = address.create_database()
        with contextlib.closing(open_broker(prepared(address.url(name), 1), "app")) as broker:
            for queue in ("blocked", "idle", "new"):
                broker.send(Outgoing(queue, b"0"))
                last = last_of(broker, queue)
        sql = stack.enter_context(address.connect(name))
        first = last - (PAST + 10) * 10_000_000
        oldest = first + 10_000_000
        for number in range(0, PAST, 20):
            for statement in (ADD_OLD, FILL):
                sql.execute(statement, {"first": first + number * 10_000_000})
        with pytest.raises(psycopg.errors.OutOfMemory):
            sql.execute("SELECT count(*) FROM qdo.messages")
        broker = open_broker(address.url(name), "app")
        stack.callback(broker.close)
        case = Case(None, broker, Layout.of("app"), {}, "", "")
        found = configuration(case)
        assert found.status == "warning"
        assert (
            f"queue blocked of app app keeps its message of {format_position(oldest)}" in found.text
        )
        # A look opens all partitions while a transaction is in progress that may have old messages.
        with address.connect(name) as old, old.transaction():
            old.execute("SELECT pg_current_xact_id()")
            woken: list[str] = []
            broker.listen(woken.extend)
            broker.send(Outgoing("new", b"1"))
            wait_until(lambda: "new" in woken, "the listener found the message")
        backlogs = broker.catalog.backlogs({"blocked": 0, "idle": first, "new": last})
        counts = {queue: (each.count, each.oldest) for queue, each in backlogs.items()}
        assert counts["blocked"] == (PAST + 1, oldest)
        assert counts["idle"] == (1, last_of(broker, "idle"))
        assert counts["new"] == (1, backlogs["new"].head)
        reader = broker.reader("blocked", 0)
        bodies = [row[1] for rows in iter(lambda: reader.fetch(1000), []) for row in rows]
        assert bodies == [b"%d" % (1 + number % 20) for number in range(PAST)] + [b"0"]
        with pytest.raises(QueueNotEmptyError) as raised:
            broker.delete_queue("blocked", oldest)
        assert raised.value.details["waiting"] == PAST
        assert broker.trim("blocked", backlogs["blocked"].head, 0.0) == PAST + 1
        dropped: list[int] = []
        while len(dropped) < PAST:  # a call may take as long as a partition, which is new then
            numbers = drop(sql)
            assert numbers != []
            dropped += numbers
        assert configuration(case).status == "unknown"  # no app is named, and nothing to warn of


def test_nothing_to_vacuum(postgresql_server: PostgresqlServer) -> None:
    """Processed messages leave no dead rows, and rows of queues are replaced in their page.

    The server runs no other test: any transaction in progress may delay a replacement.
    """
    address = postgresql_server.address
    name = address.create_database()
    with contextlib.closing(open_broker(prepared(address.url(name), 1), "app")) as broker:
        reader = broker.reader("a", 0)
        for number in range(300):
            broker.send(Outgoing("a", b"%d" % number))
            broker.trim("a", reader.fetch(10)[-1][0], 0.0)
    with address.connect(name) as sql:  # sessions have sent their statistics when they end

        def statistics() -> tuple[object, ...] | None:
            return sql.execute(
                "SELECT sum(n_dead_tup) FILTER (WHERE relname ~ 'messages_'),"
                " sum(n_tup_ins) FILTER (WHERE relname ~ 'messages_'),"
                " sum(n_tup_upd) FILTER (WHERE relname = 'queues'),"
                " sum(n_tup_hot_upd) FILTER (WHERE relname = 'queues')"
                " FROM pg_stat_user_tables"
            ).fetchone()

        wait_until(lambda: (statistics() or ())[1] == 300, "the statistics are there")
        assert statistics() == (0, 300, 300, 300)
        pages = "SELECT pg_relation_size('qdo.queues') / current_setting('block_size')::integer"
        assert sql.execute(pages).fetchone() == (1,)
    address.drop_database(name)
