"""The attempts that ended with their process, counted in its session."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from qdo.coordination import interrupted_attempts as crashes
from qdo.coordination.bulk_reads import read_nodes
from qdo.coordination.client import Client
from qdo.coordination.interrupted_attempts import InFlight, count_interrupted
from qdo.coordination.znodes.layout import Layout
from qdo.coordination.znodes.queue_node import FailureRecord, QueueNode
from qdo.coordination.znodes.worker_node import WorkerNode
from tests.support.coordinator_process import connected

LAYOUT = Layout.of("crash")


@pytest.fixture
def client(embedded_url: str) -> Iterator[Client]:
    """A session that has a worker node, with two queues."""
    with connected(embedded_url, handler="threading") as client:
        for path in LAYOUT.persistent:
            client.ensure_path(path)
        client.create(LAYOUT.worker("worker-1"), WorkerNode(("a", "b")).encode(), ephemeral=True)
        for queue in ("a", "b"):
            put(client, queue, QueueNode(last=40, owner="worker-1"))
        yield client


def put(client: Client, queue: str, node: QueueNode) -> None:
    path = LAYOUT.queue(queue)
    if client.exists(path):
        client.set(path, node.encode())
    else:
        client.create(path, node.encode())


def node(client: Client, queue: str) -> QueueNode:
    return QueueNode.parse(client.get(LAYOUT.queue(queue))[0])


def test_each_message_in_flight_gets_an_attempt(client: Client) -> None:
    """In one transaction; a further crash adds one more."""
    in_flight = [InFlight("a", "worker-1", 50), InFlight("b", "worker-1", 60)]
    assert count_interrupted(client, LAYOUT, in_flight, "died") == in_flight
    assert count_interrupted(client, LAYOUT, in_flight[:1], "died again") == in_flight[:1]
    assert node(client, "a").failure == FailureRecord(50, 2, "died again", crashed=True)
    assert node(client, "b").failure == FailureRecord(60, 1, "died", crashed=True)


def test_what_is_another_workers_is_left_alone(client: Client, embedded_url: str) -> None:
    """Queues that moved on, unknown ones, and workers of other sessions."""
    put(client, "a", QueueNode(last=40, owner="worker-2"))
    with connected(embedded_url, handler="threading") as other:
        assert count_interrupted(other, LAYOUT, [InFlight("b", "worker-1", 60)], "died") == []
    in_flight = [InFlight("a", "worker-1", 50), InFlight("nothing", "worker-1", 50)]
    assert count_interrupted(client, LAYOUT, in_flight, "died") == []
    assert node(client, "a").failure is None
    assert node(client, "b").failure is None


def test_a_late_checkpoint_is_read_again(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not overwritten, and the attempt is counted all the same."""
    late = [45, 46]

    def read_then_lose(client: Client, paths: Sequence[str]) -> list[Any]:
        found = read_nodes(client, paths)
        if late:
            put(client, "a", QueueNode(last=late.pop(0), owner="worker-1"))
        return found

    monkeypatch.setattr(crashes, "read_nodes", read_then_lose)
    in_flight = [InFlight("a", "worker-1", 50)]
    assert count_interrupted(client, LAYOUT, in_flight, "died") == in_flight
    assert node(client, "a") == QueueNode(
        last=46, owner="worker-1", failure=FailureRecord(50, 1, "died", crashed=True)
    )


def test_it_gives_up_in_the_end(
    client: Client, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Closing the session is more urgent; a warning names the queues that were not counted."""

    def read_then_lose(client: Client, paths: Sequence[str]) -> list[Any]:
        found = read_nodes(client, paths)
        put(client, "a", QueueNode(last=41, owner="worker-1"))
        return found

    monkeypatch.setattr(crashes, "read_nodes", read_then_lose)
    assert count_interrupted(client, LAYOUT, [InFlight("a", "worker-1", 50)], "died") == []
    assert [(each.levelname, each.args) for each in caplog.records] == [("WARNING", ("a",))]
