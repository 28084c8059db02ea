"""A coordinator in PostgreSQL: stopped and dead clients, its server, its clock, its disk."""

from __future__ import annotations

import contextlib
import logging
import random
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from kazoo.exceptions import ConnectionDropped, ConnectionLoss, SessionExpiredError
from kazoo.protocol.serialization import Create, GetData, SetData
from kazoo.protocol.states import KazooState
from kazoo.security import OPEN_ACL_UNSAFE

from qdo.broker_errors import (
    PostgresqlFullError,
    PostgresqlRefusedError,
    PostgresqlRightsError,
    PostgresqlUnsuitableError,
    SchemaMissingError,
)
from qdo.coordination.client import Client, connect
from qdo.coordination.sql import postgresql_store
from qdo.coordination.sql.postgresql_store import EPOCH, IDLE_SECONDS, PostgresqlStore
from qdo.coordination.sql.session import StoreSession
from qdo.coordination.sql.tree import EPHEMERAL, MAX_OPERATION_BYTES
from qdo.errors import CoordinatorDatabaseError, OnlookerError
from qdo.postgresql.schema import grants
from qdo.postgresql.url import postgresql_address
from tests.support.coordinator_process import CommandError, Remote, clients
from tests.support.postgresql.pgbouncer import PgBouncer
from tests.support.postgresql.proxy import CuttingProxy
from tests.support.postgresql.server import PostgresqlDatabase, PostgresqlServer
from tests.support.postgresql.standby import catch_up, promote, standby_of, stop_replication, url_of
from tests.support.processes import wait_until

TIMEOUT = 2.0
STOPS = 25
LARGE = 20
"""Nodes whose data is more than the buffers of a connection take."""

Opened = Callable[..., Client]


@pytest.fixture
def opened() -> Iterator[Opened]:
    """Open clients; they are stopped after the test."""
    with clients(timeout_seconds=TIMEOUT) as opened:
        yield opened


def session_on(url: str, seconds: float = TIMEOUT) -> StoreSession:
    """Return an entered session without a client."""
    session = StoreSession(PostgresqlStore(postgresql_address(url), TIMEOUT), time.sleep)
    session.enter(0, b"", seconds, None)
    return session


# --- clients --------------------------------------------------------------------------


def test_a_client_that_stops_within_a_write_is_ended(database_url: str, opened: Opened) -> None:
    """The server ends its transaction, which had taken the lock; it notices on its next step."""
    with contextlib.closing(session_on(database_url)) as stopped:
        store, row = stopped.store, stopped.row
        store.begin(row, write=True, since=-1)
        client = opened(database_url)
        client.create("/a", b"1")
        with pytest.raises(ConnectionDropped):
            store.commit()
        assert IDLE_SECONDS < TIMEOUT / 1.5  # so others keep their sessions meanwhile


def test_a_client_that_reads_no_answer_is_ended(
    database_url: str, opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one that stops while it receives a large answer, with the lock taken."""
    client = opened(database_url, session_timeout_seconds=4 * TIMEOUT)
    for number in range(LARGE):
        client.create(f"/{number}", bytes(900_000))
    with contextlib.closing(session_on(database_url)) as stopped:
        store = stopped.store

        def send(*parts: str) -> None:
            store._connection.pgconn.send_query("; ".join(parts).encode())
            raise InterruptedError

        monkeypatch.setattr(store, "_run", send)
        requests = [GetData(f"/{number}", None) for number in range(LARGE)]
        with pytest.raises(InterruptedError):
            store.begin(stopped.row, write=True, since=-1, operations=requests)
        client.create("/a")
        monkeypatch.undo()
        with pytest.raises(ConnectionDropped):
            store.sessions()


@pytest.mark.parametrize("handler", ["threading", "gevent"])
def test_a_client_stopped_anywhere_holds_no_lock(
    database_url: str, opened: Opened, handler: str
) -> None:
    """No statement that locks waits for another message of its client."""
    rng = random.Random(7)
    client = opened(database_url)
    client.create("/n", b"0")
    with Remote(database_url, handler, TIMEOUT) as other:
        for number in range(STOPS):
            other.tell("increment", "/n", 3)
            threading.Event().wait(rng.uniform(0.0, 0.02))
            other.signal(signal.SIGSTOP)
            try:
                client.create(f"/{number}")
            finally:
                other.signal(signal.SIGCONT)
            with contextlib.suppress(CommandError):  # the server ended its transaction
                other.answer()
        assert int(client.get("/n")[0]) <= 3 * STOPS


def test_a_killed_backend_costs_no_session(
    postgresql: PostgresqlDatabase, database_url: str, opened: Opened
) -> None:
    client = opened(database_url)
    client.create("/mine", b"", ephemeral=True)
    seen = threading.Event()
    client.exists("/later", lambda event: seen.set())
    session = client.client_id
    with postgresql.connect() as operator:
        for number in range(5):
            operator.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = %s"
                " AND pid <> pg_backend_pid()",
                (postgresql.name,),
            )
            client.retry(client.set, "/mine", b"%d" % number)
    assert client.client_id == session
    opened(database_url).create("/later")
    assert seen.wait(20) or client.retry(client.exists, "/later")


def test_lost_notifications_cost_a_second_and_no_event(
    database_url: str, opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PostgresqlStore, "drain", lambda store: not store._connection.notifies)
    client, other = opened(database_url), opened(database_url)
    fired: list[str] = []
    for number in range(3):
        client.exists(f"/{number}", lambda event: fired.append(event.path))
        other.create(f"/{number}")
    wait_until(lambda: len(fired) == 3, "the events")


def test_a_client_that_missed_the_log_reads_again(
    database_url: str, opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is connected again, as after an outage; its session stays."""
    monkeypatch.setattr(postgresql_store, "KEPT_CHANGES", 10)
    monkeypatch.setattr(postgresql_store, "_TRIM_EVERY", 1)
    with Remote(database_url, "threading", 20.0) as slow:
        slow.ask("create", "/slow", True)
        slow.ask("watch", "/n")
        slow.signal(signal.SIGSTOP)
        client = opened(database_url)
        for number in range(30):
            client.create(f"/x{number}")
        client.create("/n")
        slow.signal(signal.SIGCONT)
        for state in (KazooState.SUSPENDED, KazooState.CONNECTED):
            wait_until(lambda state=state: slow.state() == state, "it is connected again")
        assert slow.ask("watch", "/n")
        assert client.exists("/slow")


# --- time -----------------------------------------------------------------------------


@pytest.mark.parametrize("step", ["1 day", "-1 day"])
def test_a_stepped_clock_of_the_server_ends_no_session(
    postgresql: PostgresqlDatabase, database_url: str, opened: Opened, step: str
) -> None:
    """Processes measure the silence; what people look at is right again at the next heartbeat."""
    client, other = opened(database_url), opened(database_url)
    states: list[str] = []
    client.add_listener(states.append)
    client.create("/mine", b"", ephemeral=True)
    shown = opened(database_url, may_look_on=True)
    with postgresql.connect() as operator:
        operator.execute("UPDATE qdo.sessions SET heard = heard - %s::interval", (step,))
    assert other.exists("/mine") is not None
    wait_until(lambda: shown.exists("/mine") is not None, "the next heartbeat")
    assert states == []


def test_a_command_does_not_show_who_died_with_the_last_process(database_url: str) -> None:
    """It is too short to watch the session, and no other process does."""
    with Remote(database_url, "threading", TIMEOUT) as dead:
        dead.ask("create", "/dead", True)

    def is_shown() -> bool:
        client = connect(database_url, may_look_on=True)
        client.open(20)
        try:
            return client.exists("/dead") is not None or client.get_children("/") != []
        finally:
            client.stop()
            client.close()

    assert is_shown()
    wait_until(lambda: not is_shown(), "it is no longer shown")


# --- the server -----------------------------------------------------------------------


@pytest.mark.parametrize("how", ["restart", "kill", "freeze"])
def test_sessions_survive_the_server(
    database: PostgresqlDatabase, postgresql_server: PostgresqlServer, opened: Opened, how: str
) -> None:
    """Nothing that was answered is lost, and the epoch stays."""
    client, other = (opened(database.url(), session_timeout_seconds=8.0) for _ in "ab")
    client.create("/mine", b"", ephemeral=True)
    session, states = client.client_id, list[str]()
    client.add_listener(states.append)
    if how == "freeze":
        postgresql_server.freeze()
        wait_until(lambda: KazooState.SUSPENDED in states, "the silence is noticed", 30.0)
        postgresql_server.thaw()
    else:
        postgresql_server.restart("immediate") if how == "restart" else postgresql_server.kill()
        postgresql_server.stop()
        postgresql_server.start()
    client.retry(client.create, "/more")
    assert client.client_id == session
    assert other.retry(other.exists, "/mine").ephemeralOwner == session[0]
    assert other.exists("/more").czxid < EPOCH


def test_fences_grow_when_a_late_standby_takes_over(
    database: PostgresqlDatabase,
    postgresql_server: PostgresqlServer,
    opened: Opened,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """No session begins there until no client may still rely on one of the earlier server."""
    caplog.set_level(logging.WARNING)
    with standby_of(postgresql_server) as standby, contextlib.ExitStack() as stack:
        url = url_of(database.url(), postgresql_server, postgresql_server, standby)
        client = opened(url)
        session, states = client.client_id, list[str]()
        client.add_listener(states.append)
        client.create("/mine", b"", ephemeral=True)
        client.create("/kept", b"1")
        catch_up(postgresql_server, standby)
        stop_replication(postgresql_server, standby)
        lost = client.set("/kept", b"2").mzxid
        late = session_on(url)  # the standby knows nothing of it
        stack.callback(late.close)
        late.perform([Create("/claim", b"", OPEN_ACL_UNSAFE, EPHEMERAL)], (), watching=False)
        confirmed_at = time.monotonic()
        postgresql_server.stop("immediate")
        promote(standby)
        other = opened(standby.address.url(database.name))
        other.create("/claim")
        assert time.monotonic() - confirmed_at > TIMEOUT
        assert other.exists("/mine") is None
        wait_until(lambda: KazooState.LOST in states, "the session is over")
        assert client.retry(client.get, "/kept")[0] == b"1"
        assert client.set("/kept", b"3").mzxid > max(lost, EPOCH)
        assert client.client_id != session
        assert caplog.text.count("is on another server or timeline") == 1
        again = StoreSession(PostgresqlStore(postgresql_address(url), TIMEOUT), time.sleep)
        stack.callback(again.close)
        with pytest.raises(SessionExpiredError):
            again.enter(*session, TIMEOUT, None)


def test_the_wait_after_a_takeover_is_counted_in_the_table(
    postgresql: PostgresqlDatabase, database_url: str
) -> None:
    """Across processes and connections, for workers only, and beside the time to connect."""
    session_seconds, other_seconds, stop = 6.0, 60.0, threading.Event()
    for owner, seconds in (("/app/workers", session_seconds), ("/app/locks", other_seconds)):
        with contextlib.closing(session_on(database_url, seconds)) as earlier:
            for path, flags in ((owner[:4], 0), (owner, 0), (f"{owner}/1", EPHEMERAL)):
                creation = Create(path, b"", OPEN_ACL_UNSAFE, flags)
                earlier.perform([creation], (), watching=False)
    with postgresql.connect() as operator, ThreadPoolExecutor() as pool:
        operator.execute("UPDATE qdo.tree SET server = 'before'")
        operator.execute("UPDATE qdo.sessions SET age = 'before'")
        began_at = time.monotonic()
        store = PostgresqlStore(postgresql_address(database_url), TIMEOUT)
        ended = StoreSession(store, time.sleep, stop.is_set)
        entering = pool.submit(ended.enter, 0, b"", TIMEOUT, None)
        counted = "SELECT beats FROM qdo.sessions WHERE id = -1 AND beats > 3000"
        wait_until(lambda: operator.execute(counted).fetchone() is not None, "half of the wait")
        operator.execute("SELECT pg_terminate_backend(%s)", (store._connection.info.backend_pid,))
        with pytest.raises(ConnectionDropped):
            entering.result()
        store.close()
        with contextlib.closing(
            PostgresqlStore(postgresql_address(database_url), TIMEOUT)
        ) as other:
            other.begin(None, write=True, since=0)
            left, _ = other.outlast()
            other.rollback()
        assert left < session_seconds - 3.0
        later = connect(database_url, session_timeout_seconds=TIMEOUT)
        later.open(1.0)
        assert time.monotonic() - began_at > session_seconds
        assert later.exists("/app/workers/1") is None
        assert later.exists("/app/locks/1") is not None
        later.stop()
        later.close()


@pytest.mark.parametrize(
    "damage",
    [
        "INSERT INTO qdo.sessions (id, password, timeout, generation, age)"
        " SELECT 7, '', 2147483647, 1, server FROM qdo.tree",
        "UPDATE qdo.znodes SET version = 9223372036854775807 WHERE name = 'n'",
        "UPDATE qdo.znodes SET creates = 9223372036854775807, children = 2147483647"
        " WHERE name = 'n'",
        "INSERT INTO qdo.changes VALUES (9223372036854775807, '[]')",
    ],
)
def test_a_number_at_the_end_of_its_range_refuses_no_request(
    postgresql: PostgresqlDatabase, database_url: str, opened: Opened, damage: str
) -> None:
    client, shown = opened(database_url), opened(database_url, may_look_on=True)
    states: list[str] = []
    client.add_listener(states.append)
    client.create("/n")
    with postgresql.connect() as operator:
        for table in ("sessions", "znodes", "changes"):  # rows of format 4 may be out of bounds
            operator.execute(f"ALTER TABLE qdo.{table} DROP CONSTRAINT bounds".encode())
        operator.execute(damage.encode())
    for number in range(2):
        client.set("/n", b"%d" % number)
        client.create("/n/a", sequence=True)
        assert shown.get("/n")[0] == b"%d" % number
    assert len(client.get_children("/n")) == 2
    assert states == []


def test_a_refused_request_fails_alone(
    postgresql: PostgresqlDatabase, database_url: str, opened: Opened
) -> None:
    """Requests at the same time are one transaction; the connection stays."""
    client = opened(database_url)
    states: list[str] = []
    client.add_listener(states.append)
    with postgresql.connect() as operator:
        operator.execute("ALTER TABLE qdo.znodes ADD CHECK (name <> '2')")
    answers = [client.create_async(f"/{number}") for number in range(4)]
    with pytest.raises(PostgresqlRefusedError):
        answers.pop(2).get(20)
    assert [answer.get(20) for answer in answers] == ["/0", "/1", "/3"]
    assert states == []


def test_no_write_succeeds_without_its_synchronous_standby(
    database: PostgresqlDatabase, postgresql_server: PostgresqlServer
) -> None:
    """The server commits and reports a success when an operator ends its wait for the standby."""
    waits = "FROM pg_stat_activity WHERE wait_event = 'SyncRep'"
    with (
        contextlib.closing(session_on(database.url())) as session,
        database.connect() as operator,
        ThreadPoolExecutor() as pool,
    ):
        session.store._connection.answer_seconds = 20.0
        operator.execute("ALTER SYSTEM SET synchronous_standby_names = 'absent'")
        operator.execute("SELECT pg_reload_conf()")
        try:
            wait_until(
                lambda: (
                    operator.execute("SHOW synchronous_standby_names").fetchone() == ("absent",)
                ),
                "the setting",
            )
            written = pool.submit(session.perform, [SetData("/", b"", -1)], (), watching=False)
            wait_until(lambda: operator.execute(f"SELECT {waits}").rowcount == 1, "it waits")
            operator.execute(f"SELECT pg_cancel_backend(pid) {waits}")
            with pytest.raises(ConnectionDropped):
                written.result()
        finally:
            operator.execute("ALTER SYSTEM RESET synchronous_standby_names")
            operator.execute("SELECT pg_reload_conf()")


def test_a_restored_dump_begins_another_epoch(
    postgresql: PostgresqlDatabase, database_url: str, opened: Opened
) -> None:
    """It may lack commits; its tables are others."""
    opened(database_url).create("/a")
    with postgresql.connect() as owner:
        owner.execute("CREATE TABLE qdo.restored AS TABLE qdo.tree")
        owner.execute("DROP TABLE qdo.tree")
        owner.execute("ALTER TABLE qdo.restored RENAME TO tree")
    client = opened(database_url)
    client.create("/b")
    assert client.exists("/a").czxid < EPOCH < client.exists("/b").czxid


def test_recoveries_to_one_point_begin_epochs_of_their_own(
    postgresql: PostgresqlDatabase, database_url: str, opened: Opened
) -> None:
    """Both have the same tables, but other timelines."""
    with postgresql.connect() as owner:
        owner.execute("UPDATE qdo.tree SET server = 'before'")
    with contextlib.closing(PostgresqlStore(postgresql_address(database_url), TIMEOUT)) as store:
        system, _, table = store.age.split(":")
        store.age = f"{system}:0000000B:{table}"
        store.begin(None, write=True, since=-1)
        store.commit()
    began_at = time.monotonic()
    assert opened(database_url).set("/", b"").mzxid > 11 * EPOCH
    assert time.monotonic() - began_at > TIMEOUT  # sessions may be among the lost commits


def test_a_full_disk_refuses_writes_and_keeps_sessions(
    database_url: str, opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error is the server's own, raised by a function in place of the disk."""
    client = opened(database_url)
    session = client.client_id
    monkeypatch.setattr(
        postgresql_store, "_CHANGE", "DO $$ BEGIN RAISE disk_full; END $$ -- {schema} %s %s"
    )
    with pytest.raises(PostgresqlFullError):
        client.create("/a")
    assert client.exists("/a") is None
    monkeypatch.undo()
    client.create("/a")
    assert client.client_id == session


def test_a_connection_that_is_cut_is_opened_again(
    postgresql: PostgresqlDatabase, database_url: str, opened: Opened
) -> None:
    """Also in the middle of a write; each is made once."""
    with contextlib.closing(CuttingProxy(postgresql.server.port)) as proxy:
        client = opened(
            database_url.replace(f":{postgresql.server.port}", f":{proxy.port}"),
            session_timeout_seconds=8.0,
        )
        session = client.client_id
        client.create("/n", b"0")
        for number in range(10):
            proxy.cut_all()
            client.retry(client.set, "/n", b"%d" % number, version=-1)
        assert client.client_id == session
        assert client.get("/n")[0] == b"9"


def test_an_unexpected_error_ends_no_client(
    database_url: str, opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as one of a node that no client wrote."""
    client = opened(database_url)
    session, errors = client.client_id, iter([ValueError("spoiled")])
    begin = PostgresqlStore.begin

    def fails_once(*arguments: Any, **options: Any) -> Any:
        for error in errors:
            raise error
        return begin(*arguments, **options)

    monkeypatch.setattr(PostgresqlStore, "begin", fails_once)
    with pytest.raises(ConnectionLoss):
        client.create("/a")
    client.retry(client.create, "/b")
    assert client.client_id == session


def test_a_large_batch_is_written_in_parts(
    postgresql: PostgresqlDatabase, database_url: str, opened: Opened
) -> None:
    """All of it at once would take longer than the server waits between two messages."""
    client = opened(database_url)
    answers = [client.create_async(f"/{number}", bytes(900_000)) for number in range(LARGE)]
    for answer in answers:
        with contextlib.suppress(ConnectionLoss):  # the machine was busy for longer than that
            answer.get(20)
    with postgresql.connect() as connection:
        rows = connection.execute(
            "SELECT sum(length(data)) FROM qdo.znodes GROUP BY xmin::text"
        ).fetchall()
    sizes = [size for (size,) in rows if size]
    assert len(sizes) > 1
    assert max(sizes) <= MAX_OPERATION_BYTES


# --- who may, and through what --------------------------------------------------------


def test_defaults_of_a_role_change_no_node(
    postgresql: PostgresqlDatabase, database_url: str, opened: Opened
) -> None:
    """Nor do functions that others have put in the way."""
    data = b"\\\0\x01'"
    with postgresql.role("worker") as role, postgresql.connect() as owner:
        for statement in grants("qdo", role, "worker"):
            owner.execute(statement.encode())
        for setting in ("array_nulls", "standard_conforming_strings"):
            owner.execute(f"ALTER ROLE {role} SET {setting} = off")
        owner.execute(
            "CREATE FUNCTION public.unnest(text[]) RETURNS SETOF text LANGUAGE plpgsql"
            " AS $$ BEGIN RAISE 'hostile'; END $$"
        )
        odd = opened(postgresql.url(role))
        odd.create("/n", data)
        odd.create("/null", None)
        assert opened(database_url).get("/n")[0] == data
        assert owner.execute("SELECT DISTINCT acl FROM qdo.znodes").fetchall() == [(None,)]
        odd.stop()


def test_a_host_that_is_silent_takes_only_its_share(
    postgresql: PostgresqlDatabase, database_url: str
) -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=0) as silent:
        port = postgresql.server.port
        hosts = f"127.0.0.1:{silent.getsockname()[1]},127.0.0.1:{port}"
        address = postgresql_address(database_url.replace(f"127.0.0.1:{port}", hosts))
        with contextlib.closing(PostgresqlStore(address, 20 * TIMEOUT)) as store:
            assert not store.read_only


def test_roles_do_what_they_are_for(
    postgresql: PostgresqlDatabase, database_url: str, opened: Opened
) -> None:
    with (
        postgresql.role("worker") as worker,
        postgresql.role("onlooker") as onlooker,
        postgresql.role("sender") as sender,
        postgresql.connect() as owner,
    ):
        for role in (worker, onlooker, sender):
            for statement in grants("qdo", role, role.partition("_")[0]):
                owner.execute(statement.encode())
        client = opened(postgresql.url(worker))
        client.create("/n", b"1", ephemeral=True)
        looking = opened(postgresql.url(onlooker), may_look_on=True)
        assert looking.get("/n")[0] == b"1"
        with pytest.raises(OnlookerError):
            looking.create("/m")
        with postgresql.role("other") as other, pytest.raises(PostgresqlRightsError):
            opened(postgresql.url(other))
        for role, options in ((onlooker, {}), (sender, {"may_look_on": True})):
            with pytest.raises(PostgresqlRightsError):
                opened(postgresql.url(role), **options)
        for each in (client, looking):
            each.stop()


def test_a_pooler_in_transaction_mode_is_refused(
    postgresql: PostgresqlDatabase, database_url: str, opened: Opened
) -> None:
    with contextlib.ExitStack() as stack:
        for mode in ("session", "transaction"):
            pooler = PgBouncer(postgresql.server, settings={"pool_mode": mode})
            url = stack.enter_context(pooler).address.url(postgresql.name)
            if mode == "session":
                opened(url).create("/n")
                continue
            for each in (url, f"{url}?pooler=transaction"):
                with pytest.raises(PostgresqlUnsuitableError):
                    opened(each)


def test_a_missing_schema_is_told_at_once(bare_database_url: str, opened: Opened) -> None:
    with pytest.raises(SchemaMissingError):
        opened(bare_database_url)
    with pytest.raises(CoordinatorDatabaseError):
        connect(bare_database_url.replace("127.0.0.1", "127.0.0.2")).open(1)
