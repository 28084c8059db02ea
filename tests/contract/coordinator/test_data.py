"""Znodes, transactions and watches, on an embedded coordinator and on ZooKeeper."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from typing import Any

import gevent
import pytest
from kazoo.exceptions import (
    ConnectionLoss,
)
from kazoo.protocol.serialization import GetData

from qdo.coordination.client import Client, connect
from tests.support.coordinator_process import Remote, connected

PROCESSES = 4


@pytest.fixture
def client(coordinator_url: str) -> Iterator[Client]:
    with connected(coordinator_url, session_timeout_seconds=8) as client:
        yield client


def test_sequence_numbers_are_never_reused(client: Client, coordinator_url: str) -> None:
    """Not after the newest was deleted, nor after its session ended; other creations count too."""
    client.create("/workers")
    with Remote(coordinator_url, timeout_seconds=8) as remote:
        first = client.create("/workers/worker-", ephemeral=True, sequence=True)
        client.delete(first)
        second = client.create("/workers/worker-", sequence=True)
        client.create("/workers/other")
        remote.ask("create", "/workers/third", True)
        closer = connect(coordinator_url, client_id=remote.client_id)
        remote.kill()
        closer.open(20)
        closer.stop()
        closer.close()
    last = client.create("/workers/worker-", sequence=True)
    assert [path[-10:] for path in (first, second, last)] == [
        "0000000000",
        "0000000001",
        "0000000004",
    ]


def test_oversize_request_drops_the_connection(client: Client) -> None:
    """As ZooKeeper does; the connection comes back, the request was not done."""
    with pytest.raises(ConnectionLoss):
        client.create("/big", b"x" * (2 * 1024 * 1024))
    assert client.retry(client.exists, "/big") is None


@pytest.mark.parametrize("handler", ["threading", "gevent"])
def test_watches_of_another_process(client: Client, coordinator_url: str, handler: str) -> None:
    """A watch fires once, for the first change by any client."""
    with Remote(coordinator_url, handler, timeout_seconds=20) as remote:
        assert remote.ask("watch", "/a") is False
        client.create("/a")
        assert remote.event(5) == ["CREATED", "/a"]
        client.set("/a", b"nobody watches now")
        assert remote.ask("watch", "/a") is True
        assert remote.ask("watch", "/b") is False
        client.set("/a", b"1")
        client.set("/a", b"2")
        assert remote.event(5) == ["CHANGED", "/a"]
        client.delete("/a")
        client.create("/b")
        client.delete("/b")
        assert remote.event(5) == ["CREATED", "/b"]
        assert remote.ask("watch", "/b") is False
        with pytest.raises(queue.Empty):
            remote.event(0.1)


def test_event_comes_before_the_news(
    client: Client, coordinator_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client gets the event of a change before any answer that contains the change."""
    order: list[str] = []
    dispatch = client.handler.dispatch_callback

    def dispatched(callback: Any) -> None:
        order.append(callback.type)
        dispatch(callback)

    monkeypatch.setattr(client.handler, "dispatch_callback", dispatched)
    with Remote(coordinator_url, timeout_seconds=20) as remote:
        client.create("/a", b"0")
        for number in range(1, 30):
            order.clear()
            client.get("/a", lambda event: None)
            remote.ask("set", "/a", str(number))
            answer = client.handler.async_result()
            take = answer.set

            def taken(value: Any, take: Any = take) -> None:
                order.append("answer")
                take(value)

            monkeypatch.setattr(answer, "set", taken)
            client._call(GetData(f"{client.chroot}/a", None), answer)
            assert answer.get(timeout=10)[0] == b"%d" % number
            assert order == ["watch", "answer"]


def test_crowd_of_processes(coordinator_url: str, client: Client) -> None:
    """Processes count one node up by compare-and-swap, under both handlers: every count arrives."""
    client.create("/count", b"0")
    handlers = ["threading", "gevent"] * (PROCESSES // 2)
    remotes = [Remote(coordinator_url, handler, timeout_seconds=20) for handler in handlers]
    try:
        for remote in remotes:
            remote.tell("increment", "/count", 50)
        for remote in remotes:
            assert remote.answer() >= 0
    finally:
        for remote in remotes:
            remote.__exit__()
    assert client.get("/count")[0] == b"%d" % (50 * PROCESSES)


def test_crowds_of_greenlets(coordinator_url: str) -> None:
    """Far more requests at once than kazoo's wake-ups fit into a socket: none is given up."""
    with connected(coordinator_url, handler="gevent", session_timeout_seconds=8) as client:

        def ask(_: int) -> list[bytes]:
            answers = [client.get_async("/") for _ in range(1500)]
            return [answer.get(timeout=30)[0] for answer in answers]

        askers = [gevent.spawn(ask, number) for number in range(3)]
        found = [asker.get(timeout=60) for asker in askers]
        assert [len(each) for each in found] == [1500] * 3
