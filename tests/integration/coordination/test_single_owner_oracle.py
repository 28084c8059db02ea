"""Invariants 1, 2 and 8 at every zxid of a real ZooKeeper, from its own transaction log."""

from __future__ import annotations

import random
import uuid
from collections.abc import Callable

import pytest

from qdo.coordination import queue_admin as operator
from qdo.coordination.client import Client
from qdo.coordination.znodes.layout import Layout
from qdo.coordination.znodes.queue_node import QueueNode
from qdo.coordination.znodes.worker_node import WorkerNode
from tests.support.coordinator_process import connected
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
    for _ in range(4):
        fleet.join()
    fleet.create_queues(QUEUES)
    fleet.wait(lambda: fleet.balanced(len(QUEUES)), "all is owned")
    with connected(url) as looker:
        for _ in range(40):
            _disturb(fleet, looker, dice)
        fleet.wait(lambda: fleet.balanced(len(QUEUES)), "all is owned again")
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


def _claim(layout: Layout, worker: str, queue: str) -> dict[str, bytes | None]:
    return {
        layout.queue(queue): QueueNode(owner=worker).encode(),
        layout.worker(worker): WorkerNode((queue,)).encode(),
    }


def _last(number: int, seek: int = 0) -> dict[str, bytes | None]:
    return {ORACLE.queue("q"): QueueNode(last=number, seek=seek).encode()}


ORACLE = Layout.of("a")
VIOLATIONS = {
    "a second owner": (
        (_claim(ORACLE, "worker-1", "q"), _claim(ORACLE, "worker-2", "q")),
        "listed by ['worker-1', 'worker-2']",
    ),
    "a last that went back without a seek": ((_last(5), _last(3, 1), _last(2, 1)), "from 3 to 2"),
    "a worker that lists a queue of nobody": (
        ({ORACLE.worker("worker-1"): WorkerNode(("q",)).encode()},),
        "q",
    ),
}


@pytest.mark.parametrize("name", VIOLATIONS)
def test_the_oracle_sees(name: str) -> None:
    steps, text = VIOLATIONS[name]
    oracle = Oracle(ORACLE)
    oracle.replay(_history(*steps))
    assert any(text in line for line in oracle.violations)
