"""How an owner reads the node of its queue again, and records its progress."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from qdo.coordination.protocol.checkpoints import BATCH, Checkpoints
from qdo.coordination.protocol.claims import Claim, OwnedQueue, QueueState
from qdo.coordination.protocol.lease import Lease
from qdo.coordination.protocol.machine import NodeRead
from qdo.coordination.protocol.owned_queues import Recovery
from qdo.coordination.protocol.ownership import Ownership
from qdo.coordination.znodes.layout import Layout
from qdo.coordination.znodes.queue_node import FailureRecord, OutOfOrderProgress, QueueNode
from qdo.coordination.znodes.values import MAX_TRANSACTION_BYTES
from qdo.positions import TIME_POSITIONS

LAYOUT = Layout.of("app")


def owned(queue: str = "q", last: int = 1) -> OwnedQueue:
    """Return a queue of the worker w1, as after its claim."""
    slot = OwnedQueue(queue)
    slot.state = QueueState.OWNED
    slot.node, slot.version = QueueNode(last, owner="w1"), 3
    slot.claim = Claim.of(queue, 7, slot.node, Lease(10.0, 0.0), TIME_POSITIONS)
    return slot


@pytest.mark.parametrize(("owner", "is_lost"), [("w1", False), ("w2", True), ("", True)])
def test_a_node_that_names_another_owner_ends_the_claim(owner: str, is_lost: bool) -> None:
    """A foreign program may have written it: this owner must not write over the next one."""
    slot, lost, asked = owned(), [], []
    queues: Any = SimpleNamespace(slots={"q": slot}, lost=lost.append)
    machine: Any = SimpleNamespace(ask=lambda request, then: asked.append(then))
    unused: Any = None
    recovery = Recovery(machine, LAYOUT, "w1", queues, unused, TIME_POSITIONS, lambda slot: None)
    recovery.read(slot)
    asked.pop()(NodeRead(QueueNode(5, owner=owner).encode(), 4, 0, 0))
    assert lost == ([slot] if is_lost else [])
    assert slot.version == (3 if is_lost else 4)
    assert not slot.busy


def test_a_queue_has_one_write_in_flight() -> None:
    """A second one would carry an old version. It follows at once, whatever the interval."""
    asked: list[Any] = []
    machine: Any = SimpleNamespace(ask=lambda request, then: asked.append(request))
    node: Any = SimpleNamespace(path="/w1")
    unused: Any = None
    checkpoints = Checkpoints(
        LAYOUT, machine, node, unused, clock=lambda: 0.0, interval_seconds=30.0
    )
    slot = owned()
    assert slot.claim is not None
    slot.claim.done = 5
    checkpoints.mark(slot)
    slot.busy = True
    checkpoints.hurry()
    checkpoints.flush(1.0)
    assert asked == []
    assert checkpoints.due() > 1.0
    slot.busy = False
    checkpoints.flush(1.1)
    assert len(asked) == 1
    slot.busy = False
    slot.claim.done = 6
    checkpoints.mark(slot)
    checkpoints.flush(1.2)
    assert len(asked) == 1


def test_a_claim_is_recorded_up_to_what_is_done() -> None:
    slot = owned(last=4)
    assert slot.claim is not None
    ownership: Any = SimpleNamespace(slots={"q": slot})
    for done, is_recorded in ((4, True), (5, False)):
        slot.claim.done = done
        assert Ownership.recorded(ownership, slot.claim) is is_recorded
    slot.claim.done = 4
    slot.claim.failure = FailureRecord(5, 0, begun_by=("w1",))
    assert not Ownership.recorded(ownership, slot.claim)
    slot.state = QueueState.RELEASING
    assert Ownership.recorded(ownership, slot.claim)
    slot.state = QueueState.OWNED
    slot.node = slot.progressed()
    assert Ownership.recorded(ownership, slot.claim)


def test_large_nodes_share_a_transaction_only_while_they_fit() -> None:
    """ZooKeeper drops the connection for a request that is too large."""
    unused: Any = None
    checkpoints = Checkpoints(
        LAYOUT, unused, unused, unused, clock=lambda: 0.0, interval_seconds=1.0
    )
    failing = tuple(FailureRecord(position, 1, "x" * 300) for position in range(1, 151))
    large, small = QueueNode(out_of_order=OutOfOrderProgress(other_failures=failing)), QueueNode(1)
    chosen = [(OwnedQueue(f"q{n}"), large if n < 40 else small) for n in range(40 + 2 * BATCH)]
    batches = list(checkpoints._batches(chosen))
    assert [slot for batch in batches for slot, _, _ in batch] == [slot for slot, _ in chosen]
    for batch in batches:
        assert len(batch) <= BATCH
        assert sum(len(op.data) for _, _, op in batch) <= MAX_TRANSACTION_BYTES
