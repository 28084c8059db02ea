"""`qdo seek`: its output, its effects, and the targets it rejects."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from qdo import App
from qdo.coordination.client import Client
from qdo.coordination.znodes.layout import Layout
from qdo.coordination.znodes.queue_node import QueueNode
from qdo.positions import position_now
from tests.support.cli import Run
from tests.support.coordinator_process import connected

COMMAND = ("seek",)
QUEUE = Layout.of("a").queue("orders")


@pytest.fixture
def coordinator(own_folder: None) -> Iterator[Client]:
    """The default coordinator, with the node of one queue that has three messages."""
    with App("a") as app:
        app.send_many([("orders", number) for number in range(3)])
    with connected("sqlite:qdo-data/coordination.db") as client:
        client.create(QUEUE, b'{"last": "", "note": "kept"}', makepath=True)
        yield client


def node_of(client: Client) -> QueueNode:
    return QueueNode.parse(client.get(QUEUE)[0])


def test_an_unconfirmed_seek_changes_nothing(coordinator: Client, cli: Run) -> None:
    """It shows how many messages would wait before and after."""
    before = coordinator.get(QUEUE)[0]
    ended = cli("orders", "latest", "-o", "json")
    (item,) = ended.items(5)
    assert (item["waiting_before"], item["waiting_after"]) == (3, 0)
    assert "--yes" in ended.err
    assert coordinator.get(QUEUE)[0] == before


def test_a_seek_keeps_other_keys_and_is_counted(coordinator: Client, cli: Run) -> None:
    """Owners distinguish a seek from their own late write by the count."""
    assert cli("orders", "latest", "--yes").code == 0
    node = node_of(coordinator)
    assert node.last > 0
    assert node.seek == 1
    assert node.extra == (("note", "kept"),)
    assert cli("orders", "earliest", "--yes").code == 0
    assert (node_of(coordinator).last, node_of(coordinator).seek) == (0, 2)


@pytest.mark.parametrize("target", ["135471512647131000", "2012-01-29T17:34:24.713100Z"])
def test_a_position_can_be_a_number_or_a_time(coordinator: Client, cli: Run, target: str) -> None:
    """Both spellings name the same place."""
    assert cli("orders", target, "--yes").code == 0
    assert node_of(coordinator).last == 135471512647131000


def test_a_spoilt_node_is_repaired(coordinator: Client, cli: Run) -> None:
    """A queue that is stuck because of garbage resumes after a seek."""
    coordinator.set(QUEUE, b"garbage")
    now = position_now()
    assert cli("orders", str(now), "--yes").code == 0
    assert node_of(coordinator) == QueueNode(last=now, seek=1)


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("nowhere", "latest"), 6, "'nowhere'"),
        (("orders", "yesterday"), 2, "'yesterday'"),
        (("orders", "2999-01-01"), 2, "'2999-01-01'"),
        (("orders", "7" * 100), 2, "future"),
        (("orders", "7" * 5000), 2, "the target must be"),
    ],
)
def test_rejects_other_targets(
    coordinator: Client, cli: Run, arguments: tuple[str, ...], code: int, words: str
) -> None:
    """One line with the problem, and the documented exit code."""
    assert words in cli(*arguments).refusal(code)
