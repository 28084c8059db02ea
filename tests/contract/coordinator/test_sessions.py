"""Sessions, on an embedded coordinator and on ZooKeeper: begun, resumed, closed, expired."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator

import pytest
from kazoo.exceptions import ConnectionLoss
from kazoo.protocol.connection import _CONNECTION_DROP
from kazoo.protocol.states import EventType, KazooState, WatchedEvent

from qdo.coordination.client import Client, connect
from tests.support.coordinator_process import Remote, clients
from tests.support.processes import freeze, wait_until

TIMEOUT = 1.5
LATEST = 3 * TIMEOUT + 2


Opened = Callable[..., Client]


@pytest.fixture
def opened(coordinator_url: str) -> Iterator[Opened]:
    """Open clients of the coordinator; they are stopped after the test."""
    with clients(coordinator_url, timeout_seconds=8.0) as opened:
        yield opened


@pytest.fixture
def client(opened: Opened) -> Client:
    """A client whose session outlasts the test."""
    return opened()


def when_deleted(client: Client, path: str) -> threading.Event:
    """Return an event that is set when the node is deleted."""
    deleted = threading.Event()

    def notice(event: WatchedEvent) -> None:
        if event.type == EventType.DELETED:  # not the loss of the client's own connection
            deleted.set()

    assert client.exists(path, notice) is not None
    return deleted


def states_of(client: Client) -> tuple[list[str], threading.Event]:
    """Return the states that a client will have, and an event that is set when it is connected."""
    states: list[str] = []
    back = threading.Event()

    def listen(state: str) -> None:
        states.append(state)
        if state == KazooState.CONNECTED:
            back.set()

    client.add_listener(listen)
    return states, back


def test_granted_timeout_is_known(coordinator_url: str) -> None:
    """The granted timeout is available before a listener is called."""
    seen: list[float | None] = []
    client = connect(coordinator_url, session_timeout_seconds=TIMEOUT)
    client.add_listener(lambda state: seen.append(client.negotiated_timeout_seconds))
    assert client.negotiated_timeout_seconds is None
    client.open(20)
    assert seen == [TIMEOUT]
    client.stop()
    client.close()


def test_session_of_a_dead_process_is_resumed(
    coordinator_url: str, client: Client, opened: Opened
) -> None:
    """A client that knows the id and password resumes the session, with its ephemeral nodes."""
    with Remote(coordinator_url, timeout_seconds=4) as remote:
        remote.ask("create", "/worker", True)
        remote.kill()
        heir = opened(client_id=remote.client_id, session_timeout_seconds=4)
        found = client.exists("/worker")
        assert heir.client_id == remote.client_id
        assert found is not None
        assert found.ephemeralOwner == heir.client_id[0]
        heir.stop()
    assert client.exists("/worker") is None


def test_wrong_password_gets_another_session(
    coordinator_url: str, client: Client, opened: Opened
) -> None:
    """A session cannot be taken up without its password, and is not harmed by the attempt."""
    client.create("/mine", ephemeral=True)
    session, password = client.client_id
    wrong = bytes([password[0] ^ 1]) + password[1:]
    thief = opened(client_id=(session, wrong), session_timeout_seconds=4)
    assert thief.client_id[0] != session
    assert client.exists("/mine") is not None


@pytest.mark.parametrize("handler", ["threading", "gevent"])
def test_closing_the_session_of_another(
    coordinator_url: str, client: Client, handler: str, opened: Opened
) -> None:
    """A dead process' session closed by id and password: its nodes go at once, watches fire."""
    with (
        Remote(coordinator_url, handler, timeout_seconds=20) as dead,
        Remote(coordinator_url, handler, timeout_seconds=20) as watcher,
    ):
        dead.ask("create", "/worker", True)
        assert watcher.ask("watch", "/worker") is True
        dead.kill()
        deleted = when_deleted(client, "/worker")
        undertaker = opened(client_id=dead.client_id)
        undertaker.stop()
        assert deleted.wait(10), "half the timeout of the session"
        assert watcher.event() == ["DELETED", "/worker"]


def test_session_of_a_killed_process_expires(coordinator_url: str, client: Client) -> None:
    """kill -9: ephemeral nodes stay for the session timeout, and are deleted soon after."""
    with Remote(coordinator_url, timeout_seconds=TIMEOUT) as remote:
        remote.ask("create", "/worker", True)
        deleted = when_deleted(client, "/worker")
        begun = time.monotonic()
        remote.kill()
        assert deleted.wait(LATEST)
    assert time.monotonic() - begun > TIMEOUT / 2


@pytest.mark.parametrize("handler", ["threading", "gevent"])
def test_stopped_process_loses_its_session(
    coordinator_url: str, client: Client, handler: str
) -> None:
    """A process stopped for longer than its timeout gets LOST, and writes nothing late."""
    client.create("/target")
    with Remote(coordinator_url, handler, timeout_seconds=TIMEOUT) as remote:
        assert remote.state() == KazooState.CONNECTED
        remote.ask("create", "/worker", True)
        deleted = when_deleted(client, "/worker")
        remote.tell("flood", "/target")
        wait_until(lambda: client.get("/target")[1].version > 50, "the process writes")
        freeze(remote.process.pid, coordinator_url)
        assert deleted.wait(LATEST)
        version = client.get("/target")[1].version
        remote.signal(signal.SIGCONT)
        error, last, late, _ = remote.answer()
        assert error in ("ConnectionLoss", "SessionExpiredError")
        assert late == 0
        assert last <= version
        assert [remote.state(), remote.state()] == [KazooState.SUSPENDED, KazooState.LOST]
        assert remote.state() == KazooState.CONNECTED
        assert client.get("/target")[1].version == version
        assert remote.ask("get", "/target")
        assert client.exists("/worker") is None


def test_shortly_stopped_process_keeps_its_session(coordinator_url: str, client: Client) -> None:
    """A pause well below the timeout has no effect."""
    with Remote(coordinator_url, timeout_seconds=6) as remote:
        remote.ask("create", "/worker", True)
        remote.signal(signal.SIGSTOP)
        threading.Event().wait(1.0)
        remote.signal(signal.SIGCONT)
        assert remote.ask("set", "/worker", "still here") == 1
    stat = client.exists("/worker")
    assert stat is not None
    assert stat.ephemeralOwner == remote.client_id[0]


def test_dropped_connection_fails_requests_for_good(coordinator_url: str, opened: Opened) -> None:
    """A request that fails with ConnectionLoss takes no effect after the reconnection."""
    client = opened()
    client.create("/drop")
    session = client.client_id
    states, back = states_of(client)
    answers = {}
    for number in range(400):
        if number == 200:
            client._call(_CONNECTION_DROP, client.handler.async_result())
        answers[f"{number:03}"] = client.create_async(f"/drop/{number:03}")
    assert back.wait(10)
    done = set()
    for name, answer in answers.items():
        try:
            answer.get(timeout=10)
            done.add(name)
        except ConnectionLoss:
            continue
    client.sync("/drop")
    found = set(client.get_children("/drop"))
    assert done <= found
    assert client.client_id == session
    assert states == [KazooState.SUSPENDED, KazooState.CONNECTED]
    client.create("/drop/barrier")
    assert set(client.get_children("/drop")) == found | {"barrier"}


def test_lost_session_is_followed_by_a_new_one(
    coordinator_url: str, client: Client, opened: Opened
) -> None:
    """A client whose session another process closed is notified, and starts a new session."""
    victim = opened()
    victim.create("/victim", ephemeral=True)
    session = victim.client_id
    deleted = when_deleted(client, "/victim")
    states, back = states_of(victim)
    closer = connect(coordinator_url, client_id=session)
    closer.add_listener(
        lambda state: closer.handler.spawn(closer.stop) if state == KazooState.CONNECTED else None
    )
    closer.start_async()
    assert deleted.wait(10)
    assert back.wait(10)
    wait_until(lambda: victim.connected and victim.client_id != session, "a new session", 10)
    assert states[0] == KazooState.SUSPENDED
    assert KazooState.LOST in states
    closer.stop()
    closer.close()
