"""PostgreSQL is killed, shut down or frozen: nothing is lost, and all resumes."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import psycopg
import pytest

import qdo
from qdo.broker_errors import PostgresqlUnansweredError, PostgresqlUnreachableError
from qdo.brokers.base import Broker, Outgoing
from qdo.brokers.postgresql import listener as listener_module
from qdo.brokers.registry import open_broker
from qdo.coordination.sql.postgresql_store import PostgresqlStore
from qdo.errors import UnreachableError
from qdo.postgresql import session
from qdo.postgresql.url import postgresql_address
from tests.support.postgresql.pgbouncer import PgBouncer
from tests.support.postgresql.proxy import cutting
from tests.support.postgresql.schema import prepared
from tests.support.postgresql.server import PostgresqlDatabase, PostgresqlServer
from tests.support.postgresql.standby import catch_up, promote, standby_of, url_of
from tests.support.processes import Proc, wait_until

QUEUES = [f"q{number}" for number in range(4)]
DAY_SECONDS = 24 * 3600
LOST = (PostgresqlUnansweredError, PostgresqlUnreachableError)


@pytest.fixture
def broker(database: PostgresqlDatabase) -> Iterator[Broker]:
    with contextlib.closing(open_broker(database.url(), "app")) as found:
        yield found


class Traffic:
    """Senders of one queue each, and a reader that reads only queues it was woken for."""

    def __init__(self, broker: Broker) -> None:
        self.sent: dict[str, list[int]] = {queue: [] for queue in QUEUES}
        self.read: dict[str, list[int]] = {queue: [] for queue in QUEUES}
        self.errors: list[Exception] = []
        self._broker = broker
        self._over = threading.Event()
        self._woken: set[str] = set()
        self._news = threading.Condition()
        self._readers = {queue: broker.reader(queue, 0) for queue in QUEUES}
        broker.listen(self._wake)
        self._threads = [threading.Thread(target=self._send, args=(queue,)) for queue in QUEUES]
        self._consumer = threading.Thread(target=self._consume)
        for thread in (*self._threads, self._consumer):
            thread.start()

    def wait(self, count: int) -> None:
        """Wait until each sender has sent `count` further messages."""
        goals = {queue: len(sent) + count for queue, sent in self.sent.items()}
        wait_until(
            lambda: all(len(self.sent[queue]) >= goal for queue, goal in goals.items()),
            "the senders go on",
        )

    def end(self) -> None:
        """Stop sending; wait until everything that was sent has been read, in order."""
        self._over.set()
        for thread in self._threads:
            thread.join()
        wait_until(
            lambda: all(set(self.sent[queue]) <= set(self.read[queue]) for queue in QUEUES),
            "everything has been read",
        )
        with self._news:
            self._news.notify()
        self._consumer.join()
        for queue in QUEUES:
            assert self.read[queue] == sorted(set(self.read[queue]))
            assert self.sent[queue] == sorted(self.sent[queue])

    def _send(self, queue: str) -> None:
        number = 0
        while not self._over.is_set():
            number += 1
            try:
                self._broker.send(Outgoing(queue, b"%d" % number))
            except UnreachableError as error:
                self.errors.append(error)
                self._over.wait(0.02)
            else:
                self.sent[queue].append(number)

    def _wake(self, queues: Iterable[str]) -> None:
        with self._news:
            self._woken.update(queues)
            self._news.notify()

    def _consume(self) -> None:
        while True:
            with self._news:
                self._news.wait_for(lambda: self._woken or self._over.is_set(), 0.05)
                woken, self._woken = self._woken, set()
            if not woken and self._over.is_set() and self._complete():
                return
            for queue in woken:
                try:
                    found = self._readers[queue].fetch(1000)
                except UnreachableError:
                    self._wake([queue])
                    continue
                self.read[queue] += [int(body) for _, body, *_ in found]

    def _complete(self) -> bool:
        alive = any(thread.is_alive() for thread in self._threads)
        return not alive and all(set(self.sent[q]) <= set(self.read[q]) for q in QUEUES)


def _terminate(server: PostgresqlServer) -> None:
    with server.address.connect() as connection:
        connection.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
            " WHERE backend_type = 'client backend' AND pid <> pg_backend_pid()"
        )


def _kill(server: PostgresqlServer) -> None:
    server.kill()
    server.start()


INCIDENTS: dict[str, Callable[[PostgresqlServer], None]] = {
    "kill": _kill,
    "immediate": lambda server: server.restart("immediate"),
    "fast": lambda server: server.restart("fast"),
    "terminate": _terminate,
}


@pytest.mark.parametrize("name", INCIDENTS)
def test_what_was_sent_survives_and_is_read(
    name: str, postgresql_server: PostgresqlServer, broker: Broker
) -> None:
    """Twice: senders get errors, and everything whose id they got is read in order."""
    traffic = Traffic(broker)
    for _ in range(2):
        traffic.wait(10)
        INCIDENTS[name](postgresql_server)
    traffic.wait(10)
    traffic.end()
    assert all(isinstance(error, LOST) for error in traffic.errors)
    if name == "terminate":  # each sender has at most one call on the connection, or none
        assert len(traffic.errors) <= 2 * len(QUEUES)
    else:
        assert traffic.errors


@pytest.fixture
def lazy_server(postgresql_server: PostgresqlServer) -> Iterator[PostgresqlServer]:
    """That server, which writes to disk only what a commit waits for."""
    postgresql_server.configure({"wal_writer_delay": "10s"})
    postgresql_server.reload()
    yield postgresql_server
    postgresql_server.configure({"wal_writer_delay": "200ms"})
    postgresql_server.reload()


def let_look(database: PostgresqlDatabase, payload: str = "") -> None:
    """Let the only listener look, and wait until it has done so."""
    looked = (
        "SELECT FROM pg_stat_activity WHERE query LIKE '%%look(%%' AND state = 'idle'"
        " AND query_start > %s"
    )
    with database.connect() as connection:
        now = connection.execute("SELECT clock_timestamp()").fetchone() or ()
        connection.execute("SELECT pg_notify(qdo.channel('app'), %s)", (payload,))
        wait_until(
            lambda: connection.execute(looked, now).fetchone() is not None, "the listener looks"
        )


ATTEMPTS = 5


def burn_ids(database: PostgresqlDatabase) -> int:
    """Use ids of transactions that write nothing, and let the listener look; return the last id.

    The server may write its log at any of them, also before a page is full. So this goes on until a
    crash would lose many that the listener has seen.
    """
    query = "SELECT pg_current_xact_id()::text, pg_current_wal_insert_lsn() - pg_current_wal_lsn()"
    with database.connect() as connection:

        def burn() -> tuple[int, int]:
            id, unwritten = connection.execute(query).fetchone() or (0, 0)
            return int(id), int(unwritten)

        while True:
            while burn()[1] < 4000:  # bytes; a transaction has 34
                pass
            let_look(database)
            id, unwritten = burn()
            if unwritten >= 4000:
                return id - 2  # the listener has not seen the last, and notified with another


def test_a_message_with_the_id_of_a_lost_transaction_is_noticed(
    lazy_server: PostgresqlServer, database: PostgresqlDatabase
) -> None:
    """A crash loses transactions that wrote nothing, and a look has seen their ids already."""
    woken: set[str] = set()
    with (
        cutting(lazy_server.port) as proxy,
        contextlib.closing(open_broker(database.url(), "app")) as sender,
    ):
        url = database.url().replace(f":{lazy_server.port}/", f":{proxy.port}/")
        with contextlib.closing(open_broker(url, "app")) as listener:
            listener.listen(woken.update)
            sender.send(Outgoing("a", b""))
            wait_until(lambda: "a" in woken, "the listener hears of a message")
            for number in range(ATTEMPTS):
                lost = burn_ids(database)
                proxy.refusing = True
                lazy_server.kill()
                lazy_server.start()
                with contextlib.suppress(PostgresqlUnansweredError):
                    sender.send(Outgoing("a", b""))
                sender.send(Outgoing(f"next-{number}", b""))
                with database.connect() as connection:
                    (found,) = connection.execute("SELECT max(xid) FROM qdo.messages").fetchone()
                proxy.refusing = False
                heard = partial(woken.__contains__, f"next-{number}")
                wait_until(heard, "the listener hears of the next")
                if found < lost:  # else the server has written its log just before
                    break
            assert found < lost


def test_a_crash_behind_a_pooler_is_noticed(
    database: PostgresqlDatabase, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The listener's connection to the pooler stays, and the server gives ids again."""
    monkeypatch.setattr(listener_module, "POLL_SECONDS", 1.0)
    woken: set[str] = set()
    with PgBouncer(database.server) as pooler:
        url = pooler.address.url(database.name, pooler="transaction")
        with contextlib.closing(open_broker(url, "app")) as broker:
            broker.send(Outgoing("a", b""))
            broker.listen(woken.update)
            broker.send(Outgoing("b", b""))
            wait_until(lambda: "b" in woken, "the listener looks")
            assert "a" not in woken
            with database.connect() as connection:
                os.kill(connection.info.backend_pid, signal.SIGKILL)
            wait_until(lambda: "a" in woken, "the listener wakes all queues")


def test_a_notification_during_a_look_is_not_lost(
    postgresql: PostgresqlDatabase, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server sends it with the result of the look, which does not show its message."""
    monkeypatch.setattr(listener_module, "LOOK_SECONDS", 600.0)
    woken: set[str] = set()
    with contextlib.closing(open_broker(postgresql.url(), "app")) as broker:
        broker.listen(woken.update)
        with postgresql.connect() as connection:
            connection.execute("ALTER FUNCTION qdo.look RENAME TO quick_look")
            connection.execute(
                "CREATE FUNCTION qdo.look(text, bigint, bigint[], bigint, OUT bigint, OUT bigint[],"
                " OUT text[], OUT bigint, OUT bigint, OUT bigint) STABLE LANGUAGE sql AS"
                " 'SELECT found.* FROM qdo.quick_look($1, $2, $3, $4) AS found, pg_sleep(0.5)'"
            )
            broker.send(Outgoing("a", b""))
            sleeping = (
                "SELECT FROM pg_stat_activity"
                " WHERE datname = current_database() AND wait_event = 'PgSleep'"
            )
            wait_until(
                lambda: connection.execute(sleeping).fetchone() is not None, "the listener looks"
            )
            broker.send(Outgoing("b", b""))
        wait_until(lambda: "b" in woken, "the listener looks again")


def test_a_notification_names_the_queues_that_listeners_know(
    postgresql: PostgresqlDatabase, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The listener does not ask the server for them; and it believes no other names."""
    monkeypatch.setattr(listener_module, "LOOK_SECONDS", 600.0)
    many = [f"queue-{number:0100d}" for number in range(200)]  # too many to be named
    woken: set[str] = set()
    with contextlib.closing(open_broker(postgresql.url(), "app")) as broker:
        broker.send_many([Outgoing(queue, b"") for queue in ("known", *many)])
        broker.listen(woken.update)
        broker.send_many([Outgoing(queue, b"") for queue in many])
        wait_until(lambda: woken == set(many), "the listener looks")
        with postgresql.connect() as connection:
            connection.execute("ALTER FUNCTION qdo.look RENAME TO hidden_look")
            broker.send(Outgoing("known", b""))
            wait_until(lambda: "known" in woken, "the notification wakes the queue")
            connection.execute("ALTER FUNCTION qdo.hidden_look RENAME TO look")
            connection.execute("SELECT pg_notify(qdo.channel('app'), '/forged')")
        broker.send(Outgoing("new", b""))
        wait_until(lambda: "new" in woken, "the listener looks for names that it does not know")
    assert woken == {"known", "new", *many}


def test_a_commit_beside_one_that_notifies_is_noticed(
    bare_database: PostgresqlDatabase, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of transactions that commit at the same time, only one notifies."""
    monkeypatch.setattr(listener_module, "LOOK_SECONDS", 600.0)
    monkeypatch.setattr(listener_module, "AGAIN_SECONDS", (2.0,))
    woken: set[str] = set()
    url = prepared(bare_database.url(), DAY_SECONDS)
    # Others wait for a transaction that creates queues, or the partition. Its notification, which
    # may follow `send_many`, has been sent when the app is closed.
    with qdo.App("app", broker=url) as app:
        app.send_many([(queue, 0) for queue in "abcd"])
    with (
        qdo.App("app", broker=url) as app,
        psycopg.connect(bare_database.conninfo()) as first,
        psycopg.connect(bare_database.conninfo()) as second,
    ):
        app.broker.listen(woken.update)
        app.send("a", 1, connection=first)
        first.execute("SET CONSTRAINTS ALL IMMEDIATE")
        app.send("b", 2, connection=second)
        second.commit()
        first.commit()
        wait_until(lambda: woken == {"a", "b"}, "one notification wakes both queues")
        app.send("c", 3, connection=first)
        first.execute("SET CONSTRAINTS ALL IMMEDIATE")
        let_look(bare_database, "again")
        app.send("d", 4, connection=second)
        second.commit()
        wait_until(lambda: "d" in woken, "the listener looks again")
        first.rollback()


# --- a frozen server ----------------------------------------------------------------


def test_another_server_of_the_coordinator_outdates_connections(
    database: PostgresqlDatabase,
) -> None:
    """The address leads there as before, for instance to a host that has moved."""
    address = postgresql_address(database.url())

    def process(connection: session.PostgresqlConnection) -> int:
        return connection.info.backend_pid

    with contextlib.closing(session.PostgresqlSession(address)) as idle:
        PostgresqlStore(address, 2.0).close()
        first = idle.run(process)
        PostgresqlStore(address, 2.0).close()
        assert idle.run(process) == first
        with database.connect() as owner:
            owner.execute("CREATE TABLE qdo.restored AS TABLE qdo.tree")
            owner.execute("DROP TABLE qdo.tree")
            owner.execute("ALTER TABLE qdo.restored RENAME TO tree")
        PostgresqlStore(address, 2.0).close()
        assert idle.run(process) != first


def test_a_process_leaves_a_silent_server_with_all_connections(
    database: PostgresqlDatabase,
    postgresql_server: PostgresqlServer,
    frozen: Callable[[], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Once one of them has met the next primary; a statement may wait for 30 s otherwise."""

    def ask(connection: session.PostgresqlConnection) -> int:
        connection.execute("SELECT 1")
        return connection.info.port

    monkeypatch.setattr(session, "CONNECT_SECONDS", 4.0)
    with standby_of(postgresql_server) as standby, ThreadPoolExecutor() as pool:
        url = url_of(database.url(), postgresql_server, postgresql_server, standby)
        address = postgresql_address(url)
        catch_up(postgresql_server, standby)
        waiting, idle, quick = (session.PostgresqlSession(address) for _ in range(3))
        assert {each.run(ask) for each in (waiting, idle, quick)} == {postgresql_server.port}
        assert quick.connection is not None
        quick.connection.answer_seconds = 0.5
        frozen()
        waited = pool.submit(waiting.run, ask)
        with pytest.raises(PostgresqlUnreachableError):
            quick.run(ask)
        promote(standby)
        assert quick.run(ask) == standby.port
        with pytest.raises(PostgresqlUnreachableError):
            waited.result(session.ANSWER_SECONDS / 2)
        assert idle.run(ask) == waiting.run(ask) == standby.port
        for each in (waiting, idle, quick):
            each.close()


@pytest.fixture
def frozen(postgresql_server: PostgresqlServer) -> Iterator[Callable[[], None]]:
    """Freezes the server; in the end it thaws."""
    yield postgresql_server.freeze
    postgresql_server.thaw()


def test_a_frozen_server_is_an_error_in_time(
    postgresql_server: PostgresqlServer,
    broker: Broker,
    frozen: Callable[[], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(session, "ANSWER_SECONDS", 0.5)
    monkeypatch.setattr(session, "CONNECT_SECONDS", 0.5)
    woken: set[str] = set()
    broker.listen(woken.update)
    broker.send(Outgoing("a", b"1"))
    reader = broker.reader("a", 0)
    frozen()
    with pytest.raises(LOST):
        broker.send(Outgoing("a", b"2"))
    for _ in range(2):  # the answer is late, then that to a new connection
        with pytest.raises(PostgresqlUnreachableError):
            reader.fetch(10)
    with pytest.raises(PostgresqlUnreachableError):
        broker.send(Outgoing("a", b"3"))
    postgresql_server.thaw()
    monkeypatch.undo()
    broker.send(Outgoing("b", b"4"))
    wait_until(lambda: "b" in woken, "the listener continues")
    assert [body for _, body, *_ in reader.fetch(10)] in ([b"1"], [b"1", b"2"])


GREENLETS = """
from gevent import monkey
monkey.patch_all()
import sys, time, gevent
from qdo.brokers.base import Outgoing
from qdo.brokers.postgresql import listener as listener_module
from qdo.postgresql import session
from qdo.brokers.registry import open_broker
from qdo.errors import UnreachableError

session.ANSWER_SECONDS = session.CONNECT_SECONDS = float(sys.argv[2])
broker = open_broker(sys.argv[1], "app")
broker.listen(lambda queues: None)
broker.send(Outgoing("a", b"1"))
longest = 0.0

def tick():
    global longest
    while True:
        began = time.monotonic()
        gevent.sleep(0.01)
        longest = max(longest, time.monotonic() - began)

gevent.spawn(tick)
print("ready", flush=True)
while True:
    try:
        broker.send(Outgoing("a", b"2"))
    except UnreachableError as error:
        print(type(error).__name__, flush=True)
        break
while True:
    try:
        broker.send(Outgoing("a", b"3"))
    except UnreachableError:
        print("again", flush=True)
    else:
        break
print(f"longest {longest:.3f}", flush=True)
broker.close()
"""


def test_greenlets_run_while_the_server_is_frozen(
    postgresql_server: PostgresqlServer, database: PostgresqlDatabase, frozen: Callable[[], None]
) -> None:
    """Neither a send nor the listener stops the event loop: it would stand as long as they wait."""
    answer_seconds = 2.0
    with Proc.python("-c", GREENLETS, database.url(), f"{answer_seconds}") as process:
        process.wait_for_line("ready")
        frozen()
        # The freeze may come amid the notification that follows a send.
        process.wait_for_line("Postgresql(Unanswered|Unreachable)Error")
        process.wait_for_line("again")
        postgresql_server.thaw()
        (found,) = process.wait_for_line(r"longest ([0-9.]+)")
        assert process.wait() == 0
    assert float(found[1]) < answer_seconds
