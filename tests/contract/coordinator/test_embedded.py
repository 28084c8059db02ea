"""Faults of an embedded coordinator alone: its file, its disk, its machine."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import sqlite3
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from kazoo.exceptions import ConnectionLoss, SessionExpiredError
from kazoo.protocol.states import KazooState, WatchedEvent

from qdo.coordination.client import Client, connect
from qdo.coordination.sql import sqlite_store as embedded_store
from qdo.errors import DatabaseFullError
from tests.support.cli import command
from tests.support.coordinator_process import Remote, connected
from tests.support.processes import freeze, wait_until

TIMEOUT = 1.0


@pytest.fixture(params=["threading", "gevent"])
def client(embedded_url: str, request: pytest.FixtureRequest) -> Iterator[Client]:
    with connected(embedded_url, handler=request.param, session_timeout_seconds=TIMEOUT) as client:
        yield client


def states_of(client: Client) -> list[str]:
    states: list[str] = []
    client.add_listener(states.append)
    return states


def wait(client: Client, condition: Callable[[], bool], what: str) -> None:
    """Wait in the way of the client's handler, so that its greenlets run."""
    for _ in range(1000):
        if condition():
            return
        client.handler.sleep_func(0.01)
    raise TimeoutError(what)


def database_of(url: str) -> str:
    return url.removeprefix("sqlite:")


@pytest.mark.parametrize(
    "damage",
    [
        "UPDATE session SET timeout = 9223372036854775807",
        "UPDATE node SET version = 9223372036854775807 WHERE name = 'a'",
        "UPDATE node SET creates = 2147483647, children = 2147483647 WHERE name = 'a'",
    ],
)
def test_a_number_at_the_end_of_its_range_refuses_no_request(
    client: Client, embedded_url: str, damage: str
) -> None:
    client.create("/a", b"")
    states = states_of(client)
    with contextlib.closing(sqlite3.connect(database_of(embedded_url))) as other, other:
        other.execute(damage)
    client.set("/a", b"1")
    client.create("/a/b", sequence=True)
    client.create("/a/b", sequence=True)
    assert len(client.get_children("/a")) == 2
    assert states == []


def test_full_disk(embedded_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests that need space fail with a clear error and change nothing; all others work."""
    open_database = embedded_store.open_database

    def small(*arguments: Any, **options: Any) -> sqlite3.Connection:
        database = open_database(*arguments, **options)
        database.execute("PRAGMA max_page_count = 40")
        return database

    monkeypatch.setattr(embedded_store, "open_database", small)
    with connected(embedded_url, session_timeout_seconds=TIMEOUT) as client:
        states = states_of(client)
        client.create("/a", b"small")
        transaction = client.transaction()
        transaction.set_data("/a", b"changed")
        transaction.create("/b", b"x" * 500_000)
        with pytest.raises(DatabaseFullError):
            transaction.commit()
        assert client.get("/a")[0] == b"small"
        assert client.exists("/b") is None
        client.set("/a", b"still")
        assert client.get("/a")[1].version == 1
        assert states == []


def test_file_replaced_by_another(client: Client, embedded_url: str) -> None:
    """The session of the lost file is lost; a new one begins in a new file."""
    states = states_of(client)
    client.create("/a", ephemeral=True)
    for path in Path(database_of(embedded_url)).parent.glob("coordination.db*"):
        if path.is_file():
            path.unlink()
    wait(client, lambda: len(states) >= 3, "the client begins a new session")
    assert states == [KazooState.SUSPENDED, KazooState.LOST, KazooState.CONNECTED]
    assert client.exists("/a") is None


@pytest.mark.parametrize("suffixes", [("-wal",), ("-shm",), ("-wal", "-shm")])
def test_log_removed(client: Client, embedded_url: str, suffixes: tuple[str, ...]) -> None:
    """Who went on with the deleted log would see, and own, something else than all others."""
    client.create("/a", b"")
    for suffix in suffixes:
        Path(f"{database_of(embedded_url)}{suffix}").unlink()
    with pytest.raises(ConnectionLoss):
        client.create("/b", b"")
    wait(client, lambda: client.connected, "the client is connected to the file as it stands")
    client.create("/c", b"")


@pytest.mark.slow
def test_locked_for_longer_than_the_timeout(client: Client, embedded_url: str) -> None:
    """While no process can write, no session expires: requests fail, and the session survives."""
    session = client.client_id
    client.create("/mine", ephemeral=True)
    with connected(embedded_url, session_timeout_seconds=TIMEOUT) as other:
        other.create("/theirs", ephemeral=True)
        states = states_of(client)
        lock = sqlite3.connect(database_of(embedded_url), isolation_level=None)
        lock.execute("BEGIN IMMEDIATE")
        with pytest.raises(ConnectionLoss):
            client.set("/mine", b"refused")
        client.handler.sleep_func(2 * TIMEOUT)
        assert states == [KazooState.SUSPENDED]
        lock.execute("ROLLBACK")
        lock.close()
        wait(client, lambda: client.connected, "the client is connected again")
        client.handler.sleep_func(TIMEOUT / 2)
        assert states == [KazooState.SUSPENDED, KazooState.CONNECTED]
        assert client.client_id == session
        assert client.get("/mine")[1].version == 0
        assert client.exists("/theirs") is not None


def test_lone_process_that_was_stopped(embedded_url: str) -> None:
    """No other process could expire it: its session lives on, as with servers without a quorum."""
    with Remote(embedded_url, timeout_seconds=TIMEOUT) as remote:
        remote.ask("create", "/mine", True)
        remote.signal(signal.SIGSTOP)
        threading.Event().wait(2 * TIMEOUT)
        remote.signal(signal.SIGCONT)
        assert remote.ask("set", "/mine", "still here") == 1
        threading.Event().wait(TIMEOUT)
        assert remote.ask("set", "/mine", "still here") == 2


def test_session_from_before_a_reboot(embedded_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A session from before a reboot is over, whatever the clock shows."""
    with Remote(embedded_url, timeout_seconds=600) as remote:
        remote.ask("create", "/worker", True)
        remote.kill()
        database = sqlite3.connect(database_of(embedded_url), isolation_level=None)
        database.execute("UPDATE session SET boot = 'another'")
        database.close()
        client = connect(embedded_url, session_timeout_seconds=TIMEOUT)
        client.open(20)
        wait_until(lambda: client.exists("/worker") is None, "the old session is expired", 5)
        heir = connect(embedded_url, client_id=remote.client_id)
        heir.open(20)
        assert heir.client_id[0] != remote.client_id[0]
        for each in (client, heir):
            each.stop()
            each.close()


def test_watcher_that_fell_behind(embedded_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that missed more changes than are stored is suspended: recipes read all again."""
    monkeypatch.setattr(embedded_store, "_KEPT_CHANGES", 10)
    monkeypatch.setattr(embedded_store, "_TRIM_EVERY", 1)
    with connected(embedded_url, session_timeout_seconds=8) as client:
        client.create("/a")
        with Remote(embedded_url, timeout_seconds=20) as remote:
            assert remote.state() == KazooState.CONNECTED
            remote.ask("watch", "/b")
            freeze(remote.process.pid, embedded_url)
            for _ in range(50):
                client.set("/a", b"")
            client.create("/b")
            for _ in range(50):
                client.set("/a", b"")
            remote.signal(signal.SIGCONT)
            assert [remote.state(), remote.state()] == [KazooState.SUSPENDED, KazooState.CONNECTED]
            assert remote.event() == ["NONE", None]
            assert remote.ask("watch", "/b") is True


def test_requests_of_an_ended_session(client: Client, embedded_url: str) -> None:
    """Requests that are queued when the session ends are rejected, including reads."""
    client.create("/target")
    lock = sqlite3.connect(database_of(embedded_url), isolation_level=None)
    lock.execute("BEGIN IMMEDIATE")
    lock.execute("DELETE FROM session")
    late = client.set_async("/target", b"late")
    client.handler.sleep_func(0.05)
    lock.execute("COMMIT")
    with pytest.raises((ConnectionLoss, SessionExpiredError)):
        late.get(timeout=10)
    wait(client, lambda: client.connected, "a new session")
    assert client.get("/target")[1].version == 0
    lock.close()


def test_a_client_that_stops_waits_for_the_lock(client: Client, embedded_url: str) -> None:
    """Otherwise its session would stay for its timeout."""
    other = connect(embedded_url)
    other.open(20)
    other.create("/theirs", ephemeral=True)
    lock = sqlite3.connect(database_of(embedded_url), isolation_level=None, check_same_thread=False)
    lock.execute("BEGIN IMMEDIATE")
    threading.Timer(0.3, lock.execute, ("ROLLBACK",)).start()
    other.stop()
    assert client.exists("/theirs") is None
    other.close()
    lock.close()


def test_idle_client_costs_next_to_nothing(client: Client) -> None:
    """No busy waiting: a session alone uses well below 1 % of a core."""
    before = os.times()
    client.handler.sleep_func(2.0)
    after = os.times()
    used = after.user + after.system - before.user - before.system
    assert used < 0.06, "0.02 would be 1 %; other threads of the tests run here too"


def test_log_is_merged(client: Client, embedded_url: str) -> None:
    """The write-ahead log does not grow with the number of changes."""
    client.create("/a")
    for _ in range(30):
        for answer in [client.set_async("/a", b"x" * 3000) for _ in range(100)]:
            answer.get(timeout=10)
    assert Path(f"{database_of(embedded_url)}-wal").stat().st_size < 16 << 20


def test_log_is_merged_beside_readers(
    client: Client, embedded_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reader of old pages delays a merge; the next commits try again, and the log begins anew."""
    monkeypatch.setattr(embedded_store, "_MERGE_PAGES", 60)
    client.create("/a")
    path = database_of(embedded_url)
    reader = sqlite3.connect(path, isolation_level=None)
    sizes = []
    for _ in range(8):
        reader.execute("BEGIN")
        reader.execute("SELECT count(*) FROM node").fetchone()
        for _ in range(30):
            client.set("/a", b"")
        reader.execute("ROLLBACK")
        for _ in range(3):
            client.set("/a", b"")
        sizes.append(Path(f"{path}-wal").stat().st_size)
    reader.close()
    assert sizes[-1] < 2 * sizes[0]


@pytest.mark.slow
def test_an_answered_request_keeps_nothing_alive(embedded_url: str) -> None:
    """A watcher that was taken away is free at once, not when the next request comes."""

    class Watcher:
        def __call__(self, event: WatchedEvent) -> None:
            """Do nothing."""

    with connected(embedded_url) as client:
        client.create("/a", b"")
        watcher = Watcher()
        alive = weakref.ref(watcher)
        client.get("/a", watch=watcher)
        client._data_watchers.clear()
        del watcher
        wait_until(lambda: gc.collect() >= 0 and alive() is None, "the watcher is free", 1.0)


FORK = """
import os, sys, threading
from qdo.coordination.sql.sqlite_store import SqliteStore

store = SqliteStore(sys.argv[1])
store.begin(None, write=True, since=0)
children = []

def fork():
    pid = os.fork()
    if pid:
        children.append(pid)
        return
    try:
        SqliteStore(sys.argv[1]).begin(None, write=True, since=0)
        os._exit(0)
    finally:
        os._exit(1)

thread = threading.Thread(target=fork)
thread.start()
thread.join(0.1)
waits = thread.is_alive()
store.commit()
thread.join()
sys.exit((os.waitpid(children[0], 0)[1] != 0) + 2 * (not waits))
"""


def test_a_fork_waits_for_transactions(tmp_path: Path) -> None:
    """The child would inherit a lock of SQLite that no thread of its own ever releases."""
    ended = command("-c", FORK, str(tmp_path / "coordination.db"), cwd=tmp_path)
    assert ended.code == 0, ended.err
