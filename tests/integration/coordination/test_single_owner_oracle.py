"""Invariants 1, 2 and 8 at every zxid of a real ZooKeeper, from its own transaction log."""

from __future__ import annotations

import random
import uuid
from collections.abc import Callable
from dataclasses import replace

import pytest

from qdo.coordination import queue_admin as operator
from qdo.coordination.client import Client, connect
from qdo.coordination.znodes.layout import Layout
from qdo.coordination.znodes.queue_node import QueueNode
from qdo.coordination.znodes.worker_node import WorkerNode
from tests.support.fleet import LAYOUT, MemberFleet
from tests.support.ownership_oracle import Oracle
from tests.support.zookeeper import Ensemble
from tests.support.zookeeper_txn_log import NodeChange, Txn, read_log

QUEUES = [f"q{number:02}" for number in range(40)]


@pytest.mark.parametrize("seed", [1, 4, 5, 8, 20121129])
def test_no_zxid_has_two_owners_or_a_last_that_went_back(
    zookeeper_server: Ensemble, seed: int, open_fleet: Callable[..., MemberFleet]
) -> None:
    """Joins, leaves, ended sessions, cut connections and seeks, in a seeded order."""
    dice = random.Random(seed)
    chroot = f"/test-{uuid.uuid4().hex[:12]}"
    url = zookeeper_server.url(chroot)
    fleet = open_fleet(url)
    looker = connect(url)
    looker.open()
    for _ in range(4):
        fleet.join()
    fleet.create_queues(QUEUES)
    fleet.wait(lambda: fleet.balanced(len(QUEUES)), "all is owned")
    try:
        for _ in range(40):
            _disturb(fleet, looker, dice)
        fleet.wait(lambda: fleet.balanced(len(QUEUES)), "all is owned again")
    finally:
        looker.stop()
        looker.close()
    fleet.close()
    oracle = Oracle(Layout(chroot + LAYOUT.root))
    oracle.replay(read_log(zookeeper_server.servers[0].folder / "data"))
    assert oracle.violations == []
    assert oracle.claims > 100
    assert oracle.releases > 20
    assert oracle.checkpoints > 100
    assert oracle.seeks > 2
    _check_fences(oracle, {(queue, fence) for queue, _, fence in fleet.ledger})


def _check_fences(oracle: Oracle, used: set[tuple[str, int]]) -> None:
    """Every fence stands for one claim: at or after its zxid, and before the queue's next."""
    assert len(used) > 100
    by_claim: dict[tuple[str, int], set[int]] = {}
    for queue, fence in used:
        claim = max(zxid for zxid in oracle.claim_zxids[queue] if zxid <= fence)
        by_claim.setdefault((queue, claim), set()).add(fence)
    assert all(len(fences) == 1 for fences in by_claim.values())


def _disturb(fleet: MemberFleet, looker: Client, dice: random.Random) -> None:
    index = dice.randrange(len(fleet.members))
    match dice.randrange(6):
        case 0 if len(fleet.members) < 6:
            fleet.join()
        case 1 if len(fleet.members) > 2:
            fleet.leave(index)
        case 2:
            fleet.end_session(index)
        case 3:
            queue = dice.choice(QUEUES)
            operator.seek(looker, LAYOUT, queue, dice.choice([0, 5, 10_000]))
        case _:
            fleet.drop_connection(index)


def _history(*steps: dict[str, bytes | None]) -> list[Txn]:
    return [
        Txn(zxid, 1, tuple(NodeChange(path, data) for path, data in step.items()))
        for zxid, step in enumerate(steps, start=1)
    ]


def _claim(layout: Layout, worker: str, queue: str, node: QueueNode) -> dict[str, bytes | None]:
    return {
        layout.queue(queue): replace(node, owner=worker).encode(),
        layout.worker(worker): WorkerNode((queue,)).encode(),
    }


def test_the_oracle_sees_a_second_owner() -> None:
    """A queue taken from a live worker that still lists it is a violation."""
    layout = Layout.of("a")
    oracle = Oracle(layout)
    oracle.replay(
        _history(
            _claim(layout, "worker-1", "q", QueueNode()),
            _claim(layout, "worker-2", "q", QueueNode()),
        )
    )
    assert any("listed by ['worker-1', 'worker-2']" in line for line in oracle.violations)


def test_the_oracle_sees_a_last_that_went_back() -> None:
    """Only a counted seek may move `last` back."""
    layout = Layout.of("a")
    path = layout.queue("q")
    oracle = Oracle(layout)
    oracle.replay(
        _history(
            {path: QueueNode(last=5).encode()},
            {path: QueueNode(last=3, seek=1).encode()},
            {path: QueueNode(last=2, seek=1).encode()},
        )
    )
    assert len(oracle.violations) == 1
    assert "went back from 3 to 2" in oracle.violations[0]


def test_the_oracle_sees_a_worker_that_lists_a_foreign_queue() -> None:
    """Worker nodes and queue nodes agree at every zxid."""
    layout = Layout.of("a")
    oracle = Oracle(layout)
    oracle.replay(_history({layout.worker("worker-1"): WorkerNode(("q",)).encode()}))
    assert len(oracle.violations) == 1
