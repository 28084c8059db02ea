"""How the machines' requests are performed on a real coordinator, in whatever order kazoo's
own threads get their turns."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
from kazoo.protocol.states import WatchedEvent

from qdo.coordination.client import Client
from qdo.coordination.kazoo_driver import KazooDriver
from qdo.coordination.protocol.machine import (
    Children,
    ChildrenRead,
    Commit,
    Committed,
    Create,
    Created,
    CreateOp,
    Get,
    NodeMissing,
    NodeRead,
    Rejected,
    Response,
    SetOp,
)
from tests.support.coordinator_process import connected

WAIT_SECONDS = 20.0


class DriverSetup:
    """A performer whose deliveries are made by the test, one at a time."""

    def __init__(self, client: Client) -> None:
        self._deliveries: queue.Queue[Callable[[], object]] = queue.Queue()
        self.refused: list[Exception] = []
        self.performer = KazooDriver(client, self._deliveries.put, self.refused.append)
        self.heard: list[Any] = []

    def next(self) -> Any:
        """Return the content of the next delivery: an answer, or the path of a fired watch."""
        count = len(self.heard)
        while len(self.heard) == count:
            self._deliveries.get(timeout=WAIT_SECONDS)()
        return self.heard[-1]

    def read(self, request: Get | Children | Create) -> None:
        self.performer.read(request, self.heard.append, self.fired)

    def fired(self, event: WatchedEvent) -> None:
        self._deliveries.put(partial(self.heard.append, event.path))


@pytest.fixture
def client(coordinator_url: str) -> Iterator[Client]:
    with connected(coordinator_url) as client:
        client.ensure_path("/a")
        yield client


@pytest.fixture
def bench(client: Client) -> DriverSetup:
    return DriverSetup(client)


def test_a_watch_never_fires_before_the_answer_that_armed_it(
    client: Client, bench: DriverSetup
) -> None:
    """kazoo delivers results and watches through two queues, each with its own thread.

    This test holds up the result queue, as a busy machine might. A client that waits for a node
    to change would get the change first and the armed watch afterwards. It would wait forever.
    """
    held = threading.Event()
    client.handler.completion_queue.put(partial(held.wait, WAIT_SECONDS))
    try:
        bench.read(Get("/a", watch=True))
        bench.performer.commit(Commit((SetOp("/a", b"1", 0),)), bench.heard.append)
        heard = [bench.next() for _ in range(3)]
        assert not held.is_set()
    finally:
        held.set()
    armed, written = heard[0], heard.index("/a")
    assert isinstance(armed, NodeRead)
    assert armed.data == b""
    assert written > 0


def test_a_missing_node_is_watched_until_it_appears(client: Client, bench: DriverSetup) -> None:
    """`NoNode` is the answer, and the creation fires the watch."""
    bench.read(Get("/a/b", watch=True))
    assert bench.next() == NodeMissing()
    client.create("/a/b", b"2")
    assert bench.next() == "/a/b"
    bench.read(Get("/a/b"))
    found = bench.next()
    assert isinstance(found, NodeRead)
    assert (found.data, found.version) == (b"2", 0)


def test_reads_side_by_side_answer_each_for_itself(client: Client, bench: DriverSetup) -> None:
    """More than fit in one request; missing nodes get their own error."""
    client.create("/a/b", b"2")
    answers: list[Response] = []
    paths = ["/a/b" if at % 7 else "/a/none" for at in range(600)]
    bench.performer.read_many([(Get(path), answers.append) for path in paths])
    bench.read(Children("/a"))
    assert bench.next() == ChildrenRead(("b",))
    found = [answer.data if isinstance(answer, NodeRead) else None for answer in answers]
    assert found == [b"2" if path == "/a/b" else None for path in paths]


def test_an_ephemeral_node_gets_its_number_below_the_root(
    client: Client, bench: DriverSetup
) -> None:
    """The answer has the path as it was asked for, without the client's root."""
    bench.read(Create("/a/n-", b"mine"))
    created = bench.next()
    assert created == Created("/a/n-0000000000")
    assert client.get("/a/n-0000000000")[1].ephemeralOwner == client.client_id[0]


def test_a_transaction_says_where_it_stands_or_what_refused_it(bench: DriverSetup) -> None:
    """Its place in the order and the versions left behind, or the first bad operation."""
    ops = (SetOp("/a", b"1", 0), CreateOp("/a/b", b""))
    bench.performer.commit(Commit(ops), bench.heard.append)
    done = bench.next()
    assert isinstance(done, Committed)
    assert done.zxid > 0
    assert done.versions == (1, 0)
    bench.performer.commit(Commit(ops[::-1]), bench.heard.append)
    refused = bench.next()
    assert isinstance(refused, Rejected)
    assert refused.index == 0
