"""A transaction of another program holds the lock of a queue: only calls for that queue wait."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import psycopg
import pytest

from qdo.broker_errors import PostgresqlBusyError
from qdo.brokers.base import Broker, Outgoing, SendOptions
from qdo.brokers.dead_letters import DeadLetterRecord
from qdo.brokers.postgresql import listener as listener_module
from qdo.brokers.postgresql import writer
from qdo.brokers.postgresql.listener import NotificationListener
from qdo.brokers.registry import open_broker
from qdo.brokers.streams import first_shards, key_hash, split
from qdo.positions import position_now
from tests.support.brokers import rows
from tests.support.postgresql.pgbouncer import PgBouncer
from tests.support.postgresql.server import PostgresqlDatabase
from tests.support.processes import wait_until

Session = psycopg.Connection[Any]
SHORT_SECONDS = 1.2


@pytest.fixture
def broker(postgresql: PostgresqlDatabase) -> Iterator[Broker]:
    found = open_broker(postgresql.url(), "app")
    for queue in ("blocked", "free"):
        found.send(Outgoing(queue, b"first"))
    yield found
    found.close()


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls for a locked queue fail soon."""
    monkeypatch.setattr(writer, "LOCK_SECONDS", SHORT_SECONDS)


@pytest.fixture
def holder(postgresql: PostgresqlDatabase, broker: Broker) -> Iterator[Session]:
    """A transaction that holds the lock of a queue."""
    with psycopg.connect(postgresql.conninfo()) as connection:
        connection.execute("SELECT FROM qdo.queues WHERE name = 'blocked' FOR UPDATE")
        yield connection
        connection.rollback()


def waiting(database: PostgresqlDatabase) -> bool:
    """Return whether a session waits for a lock."""
    with database.connect() as connection:
        found = connection.execute(
            "SELECT FROM pg_stat_activity"
            " WHERE datname = current_database() AND wait_event_type = 'Lock'"
        ).fetchone()
    return found is not None


def sends_meanwhile(broker: Broker, calls: Sequence[Future[Any]]) -> list[int]:
    """Send to another queue until all calls end; return how many sends each of them outlasted."""
    sent = 0
    outlasted: list[int] = []
    for call in calls:
        call.add_done_callback(lambda _: outlasted.append(sent))
    while not all(call.done() for call in calls):
        broker.send(Outgoing("free", b"x"))
        sent += 1
    return outlasted


@pytest.mark.usefixtures("impatient")
def test_other_queues_go_on_while_one_is_locked(
    postgresql: PostgresqlDatabase, broker: Broker, holder: Session
) -> None:
    """Eight blocked calls fail together; they do not hold others back one after another."""
    with ThreadPoolExecutor(8) as pool:
        calls = [pool.submit(broker.send, Outgoing("blocked", b"no")) for _ in range(8)]
        wait_until(lambda: waiting(postgresql), "a call waits for the lock")
        outlasted = sends_meanwhile(broker, calls)
    assert [type(call.exception()) for call in calls] == [PostgresqlBusyError] * 8
    assert outlasted[0] >= 1
    assert outlasted[-1] - outlasted[0] < len(calls), "at least two sends for each, in turn"
    holder.rollback()
    assert len(rows(broker, "blocked")) == 1


def test_calls_that_waited_are_sent_once_when_the_lock_is_free(
    postgresql: PostgresqlDatabase, broker: Broker, holder: Session
) -> None:
    bodies = [b"%d" % number for number in range(20)]
    with ThreadPoolExecutor(len(bodies)) as pool:
        calls = [pool.submit(broker.send, Outgoing("blocked", body)) for body in bodies]
        wait_until(lambda: waiting(postgresql), "a call waits for the lock")
        broker.send(Outgoing("free", b"second"))
        holder.rollback()
        ids = {call.result() for call in calls}
    assert len(ids) == len(bodies)
    assert sorted(row.body for row in rows(broker, "blocked")) == sorted([*bodies, b"first"])


def letter(queue: str) -> DeadLetterRecord:
    return DeadLetterRecord(queue, 1, b"bad", None, None, "error", "", 1, "worker", 1, 1.0)


CHANGES: dict[str, Callable[[Broker, str], object]] = {
    "delayed": lambda broker, queue: broker.send(
        Outgoing(queue, b"later", terms=SendOptions(due=time.time() + 3600))
    ),
    "trim": lambda broker, queue: broker.trim(queue, position_now(), 0.0),
    "dead-letter": lambda broker, queue: broker.dead_letters.store(letter(queue)),
    "delete": lambda broker, queue: broker.delete_queue(queue, position_now()),
}


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("name", CHANGES)
def test_a_change_of_a_locked_queue_holds_no_other_back(
    name: str, broker: Broker, holder: Session, postgresql: PostgresqlDatabase
) -> None:
    _check_change(CHANGES[name], broker, postgresql)


@pytest.mark.usefixtures("impatient")
def test_a_locked_queue_behind_a_pooler_holds_no_other_back(
    broker: Broker, holder: Session, postgresql: PostgresqlDatabase
) -> None:
    """The time-out belongs to the transaction: it does not stay with the server's connection."""
    with PgBouncer(postgresql.server, settings={"default_pool_size": "1"}) as pooler:
        url = pooler.address.url(postgresql.name, pooler="transaction")
        with contextlib.closing(open_broker(url, "app")) as pooled:
            _check_change(CHANGES["trim"], pooled, postgresql)
        with psycopg.connect(pooler.address.url(postgresql.name)) as connection:
            assert connection.execute("SHOW lock_timeout").fetchone() == ("0",)


def _check_change(
    change: Callable[[Broker, str], object], broker: Broker, database: PostgresqlDatabase
) -> None:
    with ThreadPoolExecutor(2) as pool:
        blocked: Future[object] = pool.submit(change, broker, "blocked")
        wait_until(lambda: waiting(database), "the change waits for the lock")
        assert sends_meanwhile(broker, [blocked])[0] >= 1
        assert isinstance(blocked.exception(), PostgresqlBusyError)
        change(broker, "free")


def test_due_messages_of_a_locked_queue_stop_no_wake_up(
    postgresql: PostgresqlDatabase, broker: Broker, holder: Session
) -> None:
    """The listener gives the lock up and looks for messages of other queues."""
    woken: list[str] = []
    news = threading.Event()

    def wake(queues: object) -> None:
        woken.extend(queues)  # type: ignore[call-overload]
        news.set()

    holder.rollback()
    broker.send(Outgoing("blocked", b"later", terms=SendOptions(due=time.time() + 0.3)))
    broker.listen(wake)
    holder.execute("SELECT FROM qdo.queues WHERE name = 'blocked' FOR UPDATE")
    for _ in range(2):
        wait_until(lambda: waiting(postgresql), "the due message waits for the lock")
        news.clear()
        broker.send(Outgoing("free", b"x"))
        wait_until(news.is_set, "the listener hears of the other queue")
    assert "blocked" not in woken
    holder.rollback()
    wait_until(lambda: "blocked" in woken, "the due message has arrived")


def later(queue: str, seconds: float) -> Outgoing:
    return Outgoing(queue, b"later", terms=SendOptions(due=time.time() + seconds))


def test_due_messages_of_other_queues_pass_a_locked_one(
    broker: Broker, holder: Session, caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    """Also those that become due while the listener waits; it warns once of what stays late."""
    monkeypatch.setattr(listener_module, "LATE_SECONDS", 0.1)
    holder.rollback()
    woken: list[str] = []
    broker.send_many([later("blocked", 0.2), later("free", 0.3), later("free", 1.0)])
    holder.execute("SELECT FROM qdo.queues WHERE name = 'blocked' FOR UPDATE")
    broker.listen(woken.extend)
    wait_until(lambda: woken.count("free") == 2, "both messages have arrived")
    assert "blocked" not in woken
    warnings = [record for record in caplog.records if record.levelname == "WARNING"]
    assert len(warnings) == 1
    holder.rollback()
    wait_until(lambda: "blocked" in woken, "the due message has arrived")


STRANGERS = {
    "a new queue": "append('app', ARRAY['strange'], NULL, NULL, ARRAY[''::bytea], NULL)",
    "a new app": "append('strange', ARRAY['a'], NULL, NULL, ARRAY[''::bytea], NULL)",
    "a stream": "create_stream('app', 'strange', 4)",
    "a child": "append('app', ARRAY['s.40-80'], ARRAY['{}'], NULL, ARRAY[''::bytea], NULL)",
}


@pytest.mark.parametrize("what", STRANGERS)
def test_an_open_transaction_delays_no_other(
    broker: Broker, holder: Session, postgresql: PostgresqlDatabase, what: str,
    monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    """New queues and streams, and delayed messages of others; the doctor names it."""
    holder.rollback()
    broker.streams.add(first_shards("s", 2))
    key = next(key for key in map(str, range(99)) if "40" <= key_hash(key) < "80")
    broker.send(Outgoing("s.-80", b"sealed", key, terms=SendOptions(due=time.time() + 0.1)))
    broker.streams.add(split(broker.streams.shards("s"), "s.-80"))
    holder.execute(f"SELECT qdo.{STRANGERS[what].format(key)}".encode())
    with contextlib.closing(open_broker(postgresql.url(), "strange")) as other:
        for act in (
            lambda: broker.send_many([Outgoing("new", b"x"), later("free", 0.1)]),
            lambda: broker.streams.add(first_shards("other", 2)),
            lambda: other.send(Outgoing("b", b"x")),
        ):
            act()  # or it fails, because the transaction stays open
    woken: list[str] = []
    broker.listen(woken.extend)
    wait_until(lambda: "free" in woken, "the delayed message has arrived")
    monkeypatch.setattr("qdo.brokers.postgresql.broker.OPEN_SECONDS", 0.0)
    found = broker.catalog.config_warnings({})
    assert [each for each in found if f"process {holder.info.backend_pid} " in each]


def test_one_listener_moves_and_the_others_look_again(
    postgresql: PostgresqlDatabase, broker: Broker, caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """They neither wait nor warn, and look at their usual pace."""
    monkeypatch.setattr(listener_module, "LOOK_SECONDS", 0.3)
    looks: list[float] = []
    look = NotificationListener._look

    def counted(listener: NotificationListener, connection: Any) -> int | None:
        looks.append(time.monotonic())
        return look(listener, connection)

    monkeypatch.setattr(NotificationListener, "_look", counted)
    woken: list[str] = []
    broker.send_many([later("free", 0.1), later("blocked", 0.1)])
    with psycopg.connect(postgresql.conninfo()) as mover:
        wait_until(
            lambda: mover.execute("SELECT qdo.move_due('app', 1, 1)").fetchone() == (1,),
            "another moves the first",
        )
        broker.listen(woken.extend)
        began = len(looks)
        wait_until(lambda: len(looks) >= began + 3, "the listener looks")
        assert not waiting(postgresql)
    assert looks[began + 2] - looks[began] > 0.3
    assert caplog.records == []
    wait_until(lambda: set(woken) >= {"blocked"}, "the second has arrived")
    assert sorted(row.body for row in rows(broker, "free")) == [b"first", b"later"]


@pytest.mark.usefixtures("impatient")
def test_closing_a_broker_ends_calls_that_wait(
    postgresql: PostgresqlDatabase, broker: Broker, holder: Session
) -> None:
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(broker.send, Outgoing("blocked", b"no"))
        wait_until(lambda: waiting(postgresql), "the call waits for the lock")
        broker.close()
        assert isinstance(call.exception(), PostgresqlBusyError)


def test_a_canceled_statement_is_tried_again(
    postgresql: PostgresqlDatabase, broker: Broker, holder: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An administrator cancels what waits. It has stored nothing, and is stored once."""
    monkeypatch.setattr(writer, "GROUP_LOCK_SECONDS", 30.0)
    cancel = (
        "SELECT pg_cancel_backend(pid) FROM pg_stat_activity"
        " WHERE datname = current_database() AND wait_event_type = 'Lock'"
    )
    with ThreadPoolExecutor(1) as pool, postgresql.connect() as administrator:
        call = pool.submit(broker.send, Outgoing("blocked", b"second"))
        wait_until(
            lambda: administrator.execute(cancel).fetchone() == (True,), "the call is canceled"
        )
        holder.rollback()
        call.result(20)
    assert [row.body for row in rows(broker, "blocked")] == [b"first", b"second"]
