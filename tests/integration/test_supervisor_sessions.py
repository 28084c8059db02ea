"""What the parent does with the coordinator sessions of its dead children."""

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

from qdo.coordination.client import Client, connect
from qdo.worker.sessions import Closer, Session, close_session
from tests.support.procs import Proc, alive, paused, stopped

TIMEOUT_SECONDS = 30.0
"""Session time-out in these tests: whatever vanishes sooner was closed, not expired."""
SOON_SECONDS = 0.5
"""What the design allows from kill -9 to free queues; some 20 ms are usual."""


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
    """Watches a node; tells when it went, and whether the process `beside` lived then."""

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
    made = connect(coordinator_url)
    made.open(10.0)
    made.create("/held")
    yield made
    made.stop()
    made.close()


def parent(url: str, processes: int = 1, gate: Path | None = None) -> Proc:
    told = {
        "app": "test",
        "coordinator": url,
        "processes": processes,
        "session_timeout_seconds": TIMEOUT_SECONDS,
    }
    env = {} if gate is None else {"QDO_TEST_GATE": str(gate)}
    return Proc.python("-m", "tests.support.fake_parent", json.dumps(told), "hold", env=env)


def holders(proc: Proc, count: int) -> list[Holder]:
    found = proc.wait_for_line(r"child holds pid=(\d+) executor=(\d+)", count=count)
    return [Holder(int(match[1]), int(match[2])) for match in found]


def test_what_a_killed_child_held_is_free_long_before_its_session_times_out(
    client: Client, coordinator_url: str, record_property: pytest.RecordProperty
):
    with parent(coordinator_url) as proc:
        (child,) = holders(proc, 1)
        vanishing = Vanishing(client, child.node, child.executor)
        killed_at = time.monotonic()
        os.kill(child.pid, signal.SIGKILL)
        assert vanishing.gone.wait(TIMEOUT_SECONDS / 2)
        took = vanishing.at - killed_at
        record_property("seconds from kill -9 to free", round(took, 4))
        assert took < SOON_SECONDS
        proc.wait_for_line(rf"process 1 \(pid {child.pid}\): closed its session 0x\w+ in \d+ ms")
        assert len(holders(proc, 2)) == 2


def test_executor_processes_are_dead_before_the_session_is_closed(
    client: Client, coordinator_url: str
):
    """Else a job could still run while the next owner of its queue begins."""
    with parent(coordinator_url) as proc:
        (child,) = holders(proc, 1)
        assert alive(child.executor)
        vanishing = Vanishing(client, child.node, child.executor)
        os.kill(child.pid, signal.SIGKILL)
        assert vanishing.gone.wait(TIMEOUT_SECONDS / 2)
        assert not vanishing.beside_lived


def test_a_session_stays_open_while_anything_of_the_process_group_lives(
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


def test_the_session_of_a_living_child_is_never_closed(client: Client, coordinator_url: str):
    """A stopped child could go on at any time; only the coordinator may give up on it."""
    with parent(coordinator_url, processes=2) as proc:
        frozen, other = holders(proc, 2)
        with paused(frozen.pid):
            vanishing = Vanishing(client, other.node, other.executor)
            os.kill(other.pid, signal.SIGKILL)
            assert vanishing.gone.wait(TIMEOUT_SECONDS / 2)
            holders(proc, 3)
            assert client.exists(frozen.node) is not None
            assert stopped(frozen.pid)
        assert not re.search(rf"pid {frozen.pid}\).*closed", proc.output)
        proc.send(signal.SIGTERM)
        assert proc.wait() == 0


def test_a_child_that_closed_its_session_itself_needs_nothing(client: Client, coordinator_url: str):
    with parent(coordinator_url, processes=2) as proc:
        held = holders(proc, 2)
        proc.send(signal.SIGTERM)
        assert proc.wait() == 0
        assert "closed its session" not in proc.output
        assert not any(client.exists(child.node) for child in held)


@pytest.mark.parametrize("presses", [1, 2, 3])
def test_a_parent_ends_only_when_the_sessions_of_its_dead_are_closed(
    client: Client, coordinator_url: str, presses: int
):
    with parent(coordinator_url, processes=2) as proc:
        frozen, _ = holders(proc, 2)
        with paused(frozen.pid):
            for words in ("workers drain", "jobs are aborted", "workers are killed")[:presses]:
                proc.send(signal.SIGTERM)
                proc.wait_for_line(words)
            if presses < 3:
                os.kill(frozen.pid, signal.SIGKILL)
            assert proc.wait() == 1
        assert client.exists(frozen.node) is None


def test_a_session_that_expired_meanwhile_is_no_error(coordinator_url: str):
    owner = connect(coordinator_url)
    owner.open(10.0)
    identity = owner.client_id
    owner.stop()
    owner.close()
    assert identity is not None
    close_session(Session(coordinator_url, *identity), 10.0, 5.0)


def test_closing_is_tried_until_the_session_would_have_ended_by_itself():
    """A coordinator out of reach costs the closer its time, and nobody else anything."""
    rung = threading.Event()
    session = Session("zookeeper://127.0.0.1:1", 0x1234, b"\0" * 16)
    closer = Closer("process 1", [session], 1.0, rung.set)
    began = time.monotonic()
    closer.start()
    assert rung.wait(10.0)
    assert 0.9 < time.monotonic() - began < 3.0
    assert closer.finished
    closer.join(5.0)


def test_a_closer_that_is_told_to_give_up_does():
    rung = threading.Event()
    session = Session("sqlite:/dev/null/no-such-folder", 0x1234, b"\0" * 16)
    closer = Closer("process 1", [session], 3600.0, rung.set)
    closer.start()
    closer.give_up()
    assert rung.wait(10.0)
    closer.join(5.0)
