"""The parent closes the sessions of its dead children, and keeps those of blocked ones."""

from __future__ import annotations

import json
import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from kazoo.security import ACL, Id, Permissions

from qdo.coordination.client import Client, connect
from qdo.coordination.znodes.layout import Layout
from qdo.worker.supervisor.sessions import Session, SessionCloser, SessionKeeper, close_session
from tests.support.coordinator_process import connected
from tests.support.processes import Proc, alive, paused, stopped

TIMEOUT_SECONDS = 30.0
"""Session timeout in these tests: a node that vanishes sooner was closed, not expired."""


@dataclass
class Holder:
    """A child that holds an ephemeral node, and its executor process."""

    pid: int
    executor: int

    @property
    def node(self) -> str:
        return f"/held/{self.pid}"


@dataclass
class Vanishing:
    """Watches a node; records when it vanished, and whether the process `beside` was alive then."""

    client: Client
    node: str
    beside: int
    at: float = 0.0
    beside_lived: bool = False
    gone: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        assert self.client.exists(self.node, watch=self._seen) is not None

    def _seen(self, event: object) -> None:
        self.at = time.monotonic()
        self.beside_lived = alive(self.beside)
        self.gone.set()


@pytest.fixture
def client(coordinator_url: str) -> Iterator[Client]:
    with connected(coordinator_url) as made:
        made.create("/held")
        yield made


def parent(url: str, processes: int = 1, gate: Path | None = None) -> Proc:
    settings = {
        "app": "test",
        "coordinator": url,
        "processes": processes,
        "session_timeout_seconds": TIMEOUT_SECONDS,
    }
    env = {} if gate is None else {"TESTS_GATE": str(gate)}
    return Proc.python("-m", "tests.support.fakes.parent", json.dumps(settings), "hold", env=env)


def holders(proc: Proc, count: int) -> list[Holder]:
    found = proc.wait_for_line(r"child holds pid=(\d+) executor=(\d+)", count=count)
    return [Holder(int(match[1]), int(match[2])) for match in found]


def test_nodes_of_a_killed_child_vanish_before_its_timeout(
    client: Client, coordinator_url: str, record_property: pytest.RecordProperty
):
    """And after those of its executor have ended, whose job could still run otherwise."""
    with parent(coordinator_url) as proc:
        (child,) = holders(proc, 1)
        assert alive(child.executor)
        vanishing = Vanishing(client, child.node, child.executor)
        killed_at = time.monotonic()
        os.kill(child.pid, signal.SIGKILL)
        assert vanishing.gone.wait(TIMEOUT_SECONDS / 2)
        assert not vanishing.beside_lived
        record_property("seconds from kill -9 to free", round(vanishing.at - killed_at, 4))
        proc.wait_for_line(rf"process 1 \(pid {child.pid}\): closed its session 0x\w+ in \d+ ms")
        assert len(holders(proc, 2)) == 2


def test_session_stays_open_while_the_process_group_lives(
    client: Client, coordinator_url: str, tmp_path: Path
):
    gate = tmp_path / "gate"
    with parent(coordinator_url, gate=gate) as proc:
        (child,) = holders(proc, 1)
        vanishing = Vanishing(client, child.node, child.executor)
        os.kill(child.pid, signal.SIGKILL)
        holders(proc, 2)  # the parent has done everything else by now
        assert not vanishing.gone.is_set()
        gate.touch()
        proc.send(signal.SIGCHLD)  # as if the last member had ended
        assert vanishing.gone.wait(TIMEOUT_SECONDS / 2)


def test_session_of_a_living_child_is_never_closed(client: Client, coordinator_url: str):
    """A stopped child could resume at any time. Only the coordinator may expire its session."""
    with parent(coordinator_url, processes=2) as proc:
        frozen, other = holders(proc, 2)
        with paused(frozen.pid, coordinator_url):
            vanishing = Vanishing(client, other.node, other.executor)
            os.kill(other.pid, signal.SIGKILL)
            assert vanishing.gone.wait(TIMEOUT_SECONDS / 2)
            holders(proc, 3)
            assert client.exists(frozen.node) is not None
            assert stopped(frozen.pid)
        assert not re.search(rf"pid {frozen.pid}\).*closed", proc.output)
        proc.send(signal.SIGTERM)
        assert proc.wait() == 0


def test_session_closed_by_the_child_itself_is_left_alone(client: Client, coordinator_url: str):
    with parent(coordinator_url, processes=2) as proc:
        held = holders(proc, 2)
        proc.send(signal.SIGTERM)
        assert proc.wait() == 0
        assert "closed its session" not in proc.output
        assert not any(client.exists(child.node) for child in held)


@pytest.mark.parametrize("signals", [1, 3])
def test_parent_ends_after_the_sessions_of_the_dead_are_closed(
    client: Client, coordinator_url: str, signals: int
):
    with parent(coordinator_url, processes=2) as proc:
        frozen, _ = holders(proc, 2)
        with paused(frozen.pid, coordinator_url):
            for line in ("signal: draining", "signal: aborting", "signal: killing")[:signals]:
                proc.send(signal.SIGTERM)
                proc.wait_for_line(line)
            if signals < 3:
                os.kill(frozen.pid, signal.SIGKILL)
            assert proc.wait() == 1
        assert client.exists(frozen.node) is None


def test_closing_an_expired_session_is_not_an_error(coordinator_url: str):
    with connected(coordinator_url) as owner:
        identity = owner.client_id
    assert identity is not None
    close_session(Session(coordinator_url, *identity), 10.0, 5.0)


def test_closing_is_retried_until_the_session_timeout():
    """An unreachable coordinator blocks only the closer."""
    ended = threading.Event()
    session = Session("zookeeper://127.0.0.1:1", 0x1234, b"\0" * 16)
    closer = SessionCloser("process 1", [session], 1.0, ended.set)
    began = time.monotonic()
    closer.start()
    assert ended.wait(10.0)
    assert time.monotonic() - began > 0.9
    assert closer.finished
    closer.join(5.0)


def test_protected_nodes_do_not_end_the_keeper(coordinator_url: str, outsider: Client) -> None:
    """It cannot describe the session in its component node, and attaches to it all the same."""
    layout = Layout.of("app")
    nobody = [ACL(Permissions.ADMIN, Id("ip", "127.0.0.1"))]
    outsider.ensure_path(f"{layout.components}/worker")
    outsider.set_acls(f"{layout.components}/worker", nobody)
    owner = connect(coordinator_url)
    owner.open()
    identity, password = owner.client_id
    owner.detach()
    looks = 0

    def is_blocked() -> bool:
        nonlocal looks
        looks += 1
        return looks < 4

    session = Session(coordinator_url, identity, password, layout.root, 2.0)
    keeper = SessionKeeper("process 1", session, {"blocked": True}, is_blocked)
    keeper.start()
    keeper.join(20.0)
    assert not keeper.is_alive()
    assert looks == 4
    assert keeper.kept_at > 0
