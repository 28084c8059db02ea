"""Requests in PostgreSQL: transactions of apps, locks, groups, formats and listeners."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psycopg
import pytest
import sqlalchemy
from psycopg.rows import dict_row

from qdo.brokers.base import Broker, Outgoing, SendOptions
from qdo.brokers.postgresql import listener as listener_module
from qdo.brokers.postgresql import requests as requests_module
from qdo.brokers.registry import open_broker
from qdo.brokers.request_store import RequestStore
from qdo.brokers.requests import NewRequest, Take
from qdo.encoding import LEFT_ON_SERVER
from qdo.errors import RequestExistsError, UsageError
from tests.support.postgresql.pgbouncer import PgBouncer
from tests.support.postgresql.schema import prepared
from tests.support.postgresql.server import PostgresqlDatabase
from tests.support.processes import wait_until

MESSAGE = Outgoing("told", b"over")


@pytest.fixture
def broker(postgresql: PostgresqlDatabase) -> Iterator[Broker]:
    with contextlib.closing(open_broker(postgresql.url(), "app")) as found:
        yield found


def new(id: str, body: bytes = b"1", **options: Any) -> NewRequest:
    return NewRequest("p", id, (body, None), body[:9], **options)


def ids(store: RequestStore) -> list[str]:
    return [each.id for each in store.records()]


def take(store: RequestStore, id: str = "a") -> Take:
    assert store.ask([new(id)]) == [True]
    (taken,) = store.take(f"worker of {id}", "p", 1, []).requests
    return taken.take


def bodies(broker: Broker, queue: str = "told") -> list[bytes]:
    return [row[1] for row in broker.reader(queue, 0).fetch(100)]


def test_a_request_without_a_body_is_taken(broker: Broker, postgresql: PostgresqlDatabase) -> None:
    """A sender may store it by SQL; the others of its pool would wait behind it forever."""
    store = broker.requests
    assert store.ask([new("a"), new("b")]) == [True, True]
    with postgresql.connect() as connection:
        connection.execute("UPDATE qdo.requests SET body = NULL WHERE id = 'a'")
    found = store.take("worker", "p", 2, []).requests
    assert [(each.take.id, each.content[0]) for each in found] == [("a", b""), ("b", b"1")]


# --- transactions of apps -------------------------------------------------------------


def _psycopg(database: PostgresqlDatabase) -> Any:
    return psycopg.connect(database.url(), row_factory=dict_row)


def _sqlalchemy(database: PostgresqlDatabase) -> Any:
    url = database.url().replace("postgresql://", "postgresql+psycopg://")
    return sqlalchemy.create_engine(url, poolclass=sqlalchemy.NullPool).connect()


@pytest.mark.parametrize("connect", [_psycopg, _sqlalchemy])
def test_a_request_is_asked_with_the_transaction(
    broker: Broker, postgresql: PostgresqlDatabase, connect: Callable[..., Any]
) -> None:
    """It is stored if, and only if, the transaction commits; the answer tells what is new."""
    store = broker.requests
    with connect(postgresql) as connection:
        assert store.ask([new("gone")], connection=connection) == [True]
        connection.rollback()
        assert store.ask([new("a"), new("b"), new("a")], connection=connection) == [
            True,
            True,
            False,
        ]
        assert store.ask([new("c")]) == [True]  # the open transaction holds nobody back
        assert store.ask([new("c")], connection=connection) == [False]
        assert ids(store) == ["c"]
        connection.commit()
        assert ids(store) == ["a", "b", "c"]
        with pytest.raises(RequestExistsError) as error:
            store.ask([new("d"), new("b", b"2")], connection=connection)
        assert error.value.details == {"id": "b"}
        connection.rollback()
    assert ids(store) == ["a", "b", "c"]


def test_another_database_is_refused(broker: Broker, postgresql: PostgresqlDatabase) -> None:
    other = postgresql.server.create_database()
    prepared(postgresql.server.url(other))
    try:
        with _psycopg(PostgresqlDatabase(postgresql.server, other)) as connection:
            refused(broker, connection)
    finally:
        postgresql.server.drop_database(other)
    refused(broker, object())


def refused(broker: Broker, connection: Any) -> None:
    with pytest.raises(UsageError):
        broker.requests.ask([new("a")], connection=connection)


def test_workers_hear_of_the_commit(
    broker: Broker, postgresql: PostgresqlDatabase, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of one that commits beside one that notifies."""
    monkeypatch.setattr(listener_module, "LOOK_SECONDS", 600.0)
    monkeypatch.setattr(listener_module, "AGAIN_SECONDS", (1.0,))
    found: set[str] = set()
    stop = broker.requests.listen(lambda: found.update(ids(broker.requests)))
    with _psycopg(postgresql) as first, _psycopg(postgresql) as second:
        assert broker.requests.ask([new("a")], connection=first) == [True]
        first.execute("SET CONSTRAINTS ALL IMMEDIATE")  # it is about to notify
        assert broker.requests.ask([new("b")], connection=second) == [True]
        first.commit()
        wait_until(lambda: found == {"a"}, "the first is known")
        second.commit()
        wait_until(lambda: found == {"a", "b"}, "the second is known")
        assert broker.requests.ask([new("c")], connection=first) == [True]
    stop()


# --- statements, locks and groups -----------------------------------------------------


def test_a_take_that_finds_nothing_writes_nothing(
    broker: Broker, postgresql: PostgresqlDatabase
) -> None:
    """No row is changed or locked, and no listener is woken."""
    woken: list[int] = []
    with postgresql.connect() as connection:

        def versions() -> list[Any]:
            query = "SELECT ctid, xmin, xmax FROM qdo.requests ORDER BY id"
            return connection.execute(query).fetchall()

        broker.requests.ask([new("a"), new("later", due=4e9)])
        broker.requests.take("w", "p", 1, [])
        broker.requests.mark("a", '{"cancel": ""}')
        stop = broker.listen(lambda names: woken.append(1))
        before = versions()
        for _ in range(20):
            assert broker.requests.take("w", "p", 9, ["a"]).marks == {"a": '{"cancel": ""}'}
            assert broker.requests.take("x", "p", 9, []).requests == ()
        assert broker.requests.expire() == 0
        assert versions() == before
        stop()
    assert woken == []


def test_a_take_passes_locked_requests(broker: Broker, postgresql: PostgresqlDatabase) -> None:
    """Another worker may be taking them."""
    broker.requests.ask([new("a"), new("b")])
    with postgresql.connect() as other, other.transaction():
        other.execute("SELECT FROM qdo.requests WHERE id = 'a' FOR UPDATE")
        assert [each.take.id for each in broker.requests.take("w", "p", 1, []).requests] == ["b"]
    assert [each.take.id for each in broker.requests.take("w", "p", 1, ["b"]).requests] == ["a"]


@pytest.fixture
def dead_rows(broker: Broker, postgresql: PostgresqlDatabase) -> Iterator[None]:
    """An open transaction keeps what remains of 3,000 requests."""
    with postgresql.connect() as sql, postgresql.connect() as other, other.transaction():
        sql.execute("ALTER TABLE qdo.requests SET (autovacuum_enabled = false)")
        other.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        other.execute("SELECT txid_current()")
        broker.requests.ask([new(str(number)) for number in range(3000)])
        for _ in range(2):
            sql.execute("UPDATE qdo.requests SET state = state + 1, owner = 'w'")
        sql.execute("DELETE FROM qdo.requests")
        yield


@pytest.mark.usefixtures("dead_rows")
def test_takes_do_not_read_dead_rows_again(postgresql: PostgresqlDatabase) -> None:
    """One that looks at everything does, and says how long it took."""

    look = "SELECT * FROM qdo.take_requests('app', 'w', 'p', 9, '{}', 999, %s, %s::bigint[], %s, 0)"

    def read(*given: Any) -> int:
        """Return the pages that a take has read."""
        explained = f"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) {look}"
        (plans,) = sql.execute(explained, given).fetchone() or ()
        return int(plans[0]["Plan"]["Shared Hit Blocks"])

    with postgresql.connect() as sql:
        *_, since, passed, spent = sql.execute(look, (0, [0] * 10, True)).fetchone() or ()
        assert passed == [3000] * 10
        assert spent > 0
        whole = read(since, passed, True)
        for oldest in (0, 1):
            assert 5 * read(since, [*passed, oldest], False) < whole


@pytest.mark.usefixtures("dead_rows")
def test_what_comes_back_is_found_soon(
    broker: Broker, postgresql: PostgresqlDatabase, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Although takes pass the dead rows, and it has a smaller number than they looked at."""
    now = [time.monotonic()]
    monkeypatch.setattr(requests_module, "clock", lambda: now[0])
    store = broker.requests
    taken = take(store)
    store.take("w", "p", 9, [])
    with contextlib.closing(open_broker(postgresql.url(), "app")) as other:
        assert other.requests.put_back(taken, 1, 0.0, None)
    found = store.take("w", "p", 9, [])
    assert found.requests == ()
    assert found.next_due is not None
    assert found.next_due < time.time() + 60
    now[0] += requests_module.LONGEST_SECONDS
    assert [each.take.id for each in store.take("w", "p", 9, []).requests] == [taken.id]


def test_each_call_of_a_group_has_its_own_outcome(
    broker: Broker, postgresql: PostgresqlDatabase
) -> None:
    """One whose queue is locked waits; one that is refused stops no other."""
    store = broker.requests
    held, other = take(store), take(store, "b")
    broker.send_many([Outgoing("locked", b"1"), Outgoing("told", b"1")])
    with ThreadPoolExecutor(9) as threads, postgresql.connect() as connection:
        with connection.transaction():
            connection.execute("SELECT FROM qdo.queues WHERE name = 'locked' FOR UPDATE")
            busy = threads.submit(broker.send, Outgoing("locked", b"2"))
            late = threads.submit(store.end, held, "done", messages=[Outgoing("locked", b"3")])
            twice = [threads.submit(store.end, other, "done", messages=[MESSAGE]) for _ in range(2)]
            never = [Outgoing("told", b"never")]
            stale = threads.submit(store.end, held._replace(id="none"), "done", messages=never)
            asks = [
                threads.submit(store.ask, [new("c")]),
                threads.submit(store.ask, [new("d"), new("a", b"2")]),
                threads.submit(store.ask, [new("e"), new("f")]),
            ]
            assert [each.result(30) for each in twice] == [True, True]
            assert not stale.result(30)
            assert asks[0].result(30) == [True]
            assert isinstance(asks[1].exception(30), RequestExistsError)
            assert asks[2].result(30) == [True, True]
            assert not busy.done()
            assert not late.done()
        assert late.result(30)
        busy.result(30)
    assert bodies(broker) == [b"1", b"over"]
    assert sorted(bodies(broker, "locked")) == [b"1", b"2", b"3"]
    assert ids(store) == ["a", "b", "c", "e", "f"]


def test_an_end_sends_messages_with_terms(broker: Broker) -> None:
    """They are delayed, and stored once, as those that an app sends."""
    keyed = Outgoing("told", b"once", terms=SendOptions(dedup_key="k"))
    later = Outgoing("told", b"later", terms=SendOptions(due=4e9))
    for id in ("a", "b"):
        held = take(broker.requests, id)
        assert broker.requests.end(held, "done", messages=[keyed, later, MESSAGE])
    assert bodies(broker) == [b"once", b"over", b"over"]
    assert broker.catalog.backlog("told", 0).delayed == 2


def test_a_larger_body_than_a_worker_reads_stays(broker: Broker) -> None:
    """Its worker learns the reason, and may end it."""
    broker.max_read_bytes = 1000
    broker.requests.ask([new("a", bytes(1001)), new("b", bytes(1000))])
    large, small = broker.requests.take("w", "p", 9, []).requests
    assert large.content == (b"", LEFT_ON_SERVER)
    assert small.content == (bytes(1000), None)
    assert broker.requests.end(large.take, "failed", error="E")
    found = broker.requests.find("a")
    assert found is not None
    assert found.content == (bytes(1001), None)


@pytest.mark.parametrize("off", [-600, 600])
def test_delays_count_by_the_clock_of_the_server(
    broker: Broker, postgresql: PostgresqlDatabase, off: int
) -> None:
    """Whatever the clock of the worker and of the asker says."""
    with postgresql.connect() as connection:
        connection.execute(_CLOCK.format(off).encode())
    store = broker.requests
    store.ask([new("a", due=-0.3)])
    for failed in range(2):
        waiting = store.take("w", "p", 1, [])
        assert waiting.requests == ()
        assert waiting.next_due == pytest.approx(time.time(), abs=1.0)
        found: list[Any] = []
        wait_until(lambda: found.extend(store.take("w", "p", 1, []).requests) or found, "a take")  # noqa: B023
        assert store.put_back(found[0].take, failed + 1, 0.3, "E")


_CLOCK = """
CREATE OR REPLACE FUNCTION qdo.unix_time() RETURNS float8 LANGUAGE sql AS
    'SELECT extract(epoch FROM clock_timestamp())::float8 + {}'
"""


# --- listeners ------------------------------------------------------------------------


LISTENING = """
SELECT pid FROM pg_stat_activity WHERE query ~ 'qdo.look|LIMIT' AND pid <> pg_backend_pid()
    AND datname = current_database()
"""


def test_listeners_share_a_connection(broker: Broker, postgresql: PostgresqlDatabase) -> None:
    """Whichever stops first; each is called until it stops itself."""
    heard: list[str] = []

    def hear(name: str) -> Callable[[], None]:
        return broker.requests.listen(lambda: heard.append(name))

    stops = {"a": hear("a"), "b": hear("b"), "q": broker.listen(heard.extend), "d": hear("d")}
    with postgresql.connect() as connection:
        for name in "aqbd":
            broker.send(Outgoing("q", b"1"))
            broker.requests.ask([new(f"before {name}")])
            wait_until(lambda: set(heard) == set(stops), "they hear")
            stops.pop(name)()
            heard.clear()
        broker.requests.ask([new("last")])
        wait_until(lambda: not connection.execute(LISTENING).fetchall(), "none is left")
    assert heard == []


def test_requests_share_the_connection_of_messages(
    broker: Broker, postgresql: PostgresqlDatabase
) -> None:
    """It stays for them when messages are no longer listened for."""
    woken: list[int] = []
    stop_messages = broker.listen(lambda names: None)
    stop = broker.requests.listen(lambda: woken.append(1))
    with postgresql.connect() as connection:
        assert len(connection.execute(LISTENING).fetchall()) == 1
        stop_messages()
        broker.requests.ask([new("a")])
        wait_until(lambda: woken, "it hears")
        stop()
        wait_until(lambda: not connection.execute(LISTENING).fetchall(), "none is left")
        broker.requests.listen(lambda: woken.append(2))
        broker.requests.ask([new("b")])
        wait_until(lambda: 2 in woken, "a new one hears")


def test_a_new_connection_wakes(
    broker: Broker, postgresql: PostgresqlDatabase, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A notification may be lost with the old one."""
    monkeypatch.setattr(listener_module, "LOOK_SECONDS", 600.0)
    woken: list[int] = []
    broker.requests.listen(lambda: woken.append(1))
    with postgresql.connect() as connection:
        ((pid,),) = connection.execute(LISTENING).fetchall()
        connection.execute("SELECT pg_terminate_backend(%s)", (pid,))
    wait_until(lambda: woken, "it hears")


def test_behind_a_pooler_listeners_are_woken_often(postgresql: PostgresqlDatabase) -> None:
    """It delivers no notifications."""
    found: set[str] = set()
    with PgBouncer(postgresql.server) as pooler:
        url = pooler.address.url(postgresql.name, pooler="transaction")
        with contextlib.closing(open_broker(url, "app")) as broker:
            broker.requests.listen(lambda: found.update(ids(broker.requests)))
            held = take(broker.requests)
            assert broker.requests.end(held, "done", messages=[MESSAGE])
            wait_until(lambda: found, "it hears")
            assert bodies(broker) == [b"over"]


def test_dead_rows_are_counted(broker: Broker) -> None:
    """As the statistics of the server have them."""
    take(broker.requests)  # an update, which leaves a dead row
    wait_until(lambda: broker.catalog.request_rows() == (1, 1), "the statistics are written")
