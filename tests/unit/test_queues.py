"""Filters of workers: which queues they take, and how they stand in a worker's node."""

from __future__ import annotations

import json

import pytest

from qdo.coordination.znodes.worker_node import WorkerNode
from qdo.queues import EVERYTHING, QueueFilter


@pytest.mark.parametrize(
    ("queues", "exclude", "taken", "left"),
    [
        (("*",), (), ["a", ""], []),
        (("mail-*",), (), ["mail-1"], ["sms-1", "xmail-1", "Mail-1"]),
        (("mail-*", "sms-?"), (), ["mail-1", "sms-1"], ["sms-10"]),
        (("*",), ("mail-*",), ["sms-1"], ["mail-1"]),
        (("mail-*", "sms-*"), ("*-vip", "sms-9"), ["mail-1", "sms-1"], ["mail-vip", "sms-9", "x"]),
    ],
)
def test_what_a_filter_takes(
    queues: tuple[str, ...], exclude: tuple[str, ...], taken: list[str], left: list[str]
) -> None:
    """One glob of `queues` must match the whole name, and none of `exclude`."""
    takes = QueueFilter(queues, exclude)
    assert [takes.takes(name) for name in taken] == [True] * len(taken)
    assert [takes.takes(name) for name in left] == [False] * len(left)


def test_a_filter_is_shown_as_it_is_given() -> None:
    """Logs and listings can be copied to a command line."""
    assert str(EVERYTHING) == ""
    assert str(QueueFilter(("a*", "b"), ("c",))) == "--queues a* --queues b --exclude c"
    assert str(QueueFilter(exclude=("c",))) == "--exclude c"


def test_everything() -> None:
    """A star takes everything, whatever stands beside it, unless something is left out."""
    assert EVERYTHING.everything
    assert QueueFilter(("a", "*")).everything
    assert not QueueFilter(("a",)).everything
    assert not QueueFilter(("*",), ("a",)).everything


def test_a_worker_node_says_what_its_worker_takes() -> None:
    """Beside the published keys, and only where it is not everything."""
    node = WorkerNode(("mail-1",), filter=QueueFilter(("mail-*",), ("mail-vip",)))
    assert json.loads(node.encode()) == {
        "queues": ["mail-1"],
        "filter": {"queues": ["mail-*"], "exclude": ["mail-vip"]},
    }
    assert WorkerNode.parse(node.encode()) == node
    assert json.loads(WorkerNode(("a",)).encode()) == {"queues": ["a"]}


@pytest.mark.parametrize(
    "takes", [None, 3, "mail-*", [], {}, {"queues": "mail-*"}, {"queues": []}, {"queues": [3]}]
)
def test_nodes_without_a_readable_filter_mean_everything(takes: object) -> None:
    """So are those of workers that know nothing of filters."""
    data = json.dumps({"queues": ["a"], "filter": takes}).encode()
    assert WorkerNode.parse(data) == WorkerNode(("a",))
    assert WorkerNode.parse(b'{"queues": ["a"]}').filter == EVERYTHING
