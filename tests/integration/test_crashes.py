"""The attempts that ended with their process, counted in its session."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from qdo.coordination import crashes
from qdo.coordination.client import Client, connect
from qdo.coordination.crashes import InHand, count_crash
from qdo.coordination.layout import Layout, Marks, QueueNode, WorkerNode
from qdo.coordination.reads import read_nodes

LAYOUT = Layout.of("crash")


@pytest.fixture
def client(embedded_url: str) -> Iterator[Client]:
    """A session that has a worker node, with two queues."""
    client = connect(embedded_url, handler="threading")
    client.open(5.0)
    for path in LAYOUT.persistent:
        client.ensure_path(path)
    client.create(LAYOUT.worker("worker-1"), WorkerNode(("a", "b")).encode(), ephemeral=True)
    for queue in ("a", "b"):
        put(client, queue, QueueNode(last=40, owner="worker-1"))
    yield client
    client.stop()
    client.close()


def put(client: Client, queue: str, node: QueueNode) -> None:
    path = LAYOUT.queue(queue)
    if client.exists(path):
        client.set(path, node.encode())
    else:
        client.create(path, node.encode())


def node(client: Client, queue: str) -> QueueNode:
    return QueueNode.parse(client.get(LAYOUT.queue(queue))[0])


def test_each_message_in_hand_gets_an_attempt(client: Client) -> None:
    """In one transaction; a further crash adds one more."""
    in_hand = [InHand("a", "worker-1", 50), InHand("b", "worker-1", 60)]
    assert count_crash(client, LAYOUT, in_hand, "died") == 2
    assert count_crash(client, LAYOUT, in_hand[:1], "died again") == 1
    assert node(client, "a").marks == Marks(50, 2, "died again", crashed=True)
    assert node(client, "b").marks == Marks(60, 1, "died", crashed=True)


def test_what_is_another_workers_is_left_alone(client: Client, embedded_url: str) -> None:
    """Queues that moved on, unknown ones, and workers of other sessions."""
    put(client, "a", QueueNode(last=40, owner="worker-2"))
    other = connect(embedded_url, handler="threading")
    other.open(5.0)
    try:
        assert count_crash(other, LAYOUT, [InHand("b", "worker-1", 60)], "died") == 0
    finally:
        other.stop()
        other.close()
    in_hand = [InHand("a", "worker-1", 50), InHand("nothing", "worker-1", 50)]
    assert count_crash(client, LAYOUT, in_hand, "died") == 0
    assert node(client, "a").marks is None
    assert node(client, "b").marks is None


def test_a_late_checkpoint_is_read_again(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is not overwritten, and the attempt is counted all the same."""
    late = [45, 46]

    def read_then_lose(client: Client, paths: Sequence[str]) -> list[Any]:
        found = read_nodes(client, paths)
        if late:
            put(client, "a", QueueNode(last=late.pop(0), owner="worker-1"))
        return found

    monkeypatch.setattr(crashes, "read_nodes", read_then_lose)
    assert count_crash(client, LAYOUT, [InHand("a", "worker-1", 50)], "died") == 1
    assert node(client, "a") == QueueNode(
        last=46, owner="worker-1", marks=Marks(50, 1, "died", crashed=True)
    )


def test_it_gives_up_in_the_end(
    client: Client, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Closing the session is more urgent; what was not counted is named."""

    def read_then_lose(client: Client, paths: Sequence[str]) -> list[Any]:
        found = read_nodes(client, paths)
        put(client, "a", QueueNode(last=41, owner="worker-1"))
        return found

    monkeypatch.setattr(crashes, "read_nodes", read_then_lose)
    assert count_crash(client, LAYOUT, [InHand("a", "worker-1", 50)], "died") == 0
    assert "is not counted for a" in caplog.text
