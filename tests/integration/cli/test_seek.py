"""`qdo seek`: its output, its effects, and the targets it rejects."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from qdo import App
from qdo.cli.framework import run
from qdo.cli.main import qdo
from qdo.coordination.client import Client
from qdo.coordination.znodes.layout import Layout
from qdo.coordination.znodes.queue_node import QueueNode
from qdo.positions import position_now
from tests.support.coordinator_process import connected

LAYOUT = Layout.of("shop")
SEEK = ("seek", "--app", "shop", "orders")


@pytest.fixture
def coordinator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Client]:
    """The default coordinator, with the node of one queue that has three messages."""
    monkeypatch.chdir(tmp_path)
    with App("shop") as app:
        for number in range(3):
            app.send("orders", number)
    with connected("sqlite:qdo-data/coordination.db") as client:
        client.create(LAYOUT.queue("orders"), b'{"last": "", "note": "kept"}', makepath=True)
        yield client


def node_of(client: Client) -> QueueNode:
    return QueueNode.parse(client.get(LAYOUT.queue("orders"))[0])


def test_an_unconfirmed_seek_changes_nothing(
    coordinator: Client, capsys: pytest.CaptureFixture[str]
) -> None:
    """It shows how many messages would wait before and after."""
    before = coordinator.get(LAYOUT.queue("orders"))[0]
    assert run(qdo, "qdo", [*SEEK, "latest", "-o", "json"]) == 5
    printed = capsys.readouterr()
    (item,) = json.loads(printed.out)["items"]
    assert (item["waiting_before"], item["waiting_after"]) == (3, 0)
    assert "--yes" in printed.err
    assert coordinator.get(LAYOUT.queue("orders"))[0] == before


def test_a_seek_keeps_other_keys_and_is_counted(coordinator: Client) -> None:
    """Owners distinguish a seek from their own late write by the count."""
    assert run(qdo, "qdo", [*SEEK, "latest", "--yes"]) == 0
    node = node_of(coordinator)
    assert node.last > 0
    assert node.seek == 1
    assert node.extra == (("note", "kept"),)
    assert run(qdo, "qdo", [*SEEK, "earliest", "--yes"]) == 0
    assert (node_of(coordinator).last, node_of(coordinator).seek) == (0, 2)


@pytest.mark.parametrize("target", ["135471512647131000", "2012-01-29T17:34:24.713100Z"])
def test_a_position_can_be_a_number_or_a_time(coordinator: Client, target: str) -> None:
    """Both spellings name the same place."""
    assert run(qdo, "qdo", [*SEEK, target, "--yes"]) == 0
    assert node_of(coordinator).last == 135471512647131000


def test_a_spoilt_node_is_repaired(coordinator: Client) -> None:
    """A queue that is stuck because of garbage resumes after a seek."""
    coordinator.set(LAYOUT.queue("orders"), b"garbage")
    now = position_now()
    assert run(qdo, "qdo", [*SEEK, str(now), "--yes"]) == 0
    assert node_of(coordinator) == QueueNode(last=now, seek=1)


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("seek", "--app", "shop", "nowhere", "latest"), 6, "'nowhere'"),
        ((*SEEK, "yesterday"), 2, "'yesterday'"),
        ((*SEEK, "2999-01-01"), 2, "'2999-01-01'"),
        ((*SEEK, "7" * 100), 2, "future"),
        ((*SEEK, "7" * 5000), 2, "the target must be"),
        (("seek", "orders", "latest"), 2, "--app"),
    ],
)
def test_rejects_other_targets(
    coordinator: Client,
    capsys: pytest.CaptureFixture[str],
    arguments: tuple[str, ...],
    code: int,
    words: str,
) -> None:
    """One line with the problem, and the documented exit code."""
    assert run(qdo, "qdo", arguments) == code
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert words in lines[0]
