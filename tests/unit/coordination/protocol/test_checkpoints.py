"""How queues are divided up among transactions."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from qdo.coordination.protocol.checkpoints import BATCH, Checkpoints
from qdo.coordination.protocol.claims import OwnedQueue
from qdo.coordination.znodes.layout import Layout
from qdo.coordination.znodes.queue_node import FailureRecord, OutOfOrderProgress, QueueNode
from qdo.coordination.znodes.values import MAX_TRANSACTION_BYTES


def test_large_nodes_share_a_transaction_only_while_they_fit() -> None:
    """ZooKeeper drops the connection for a request that is too large."""
    owner = cast(Any, SimpleNamespace(path="/w"))
    nothing: Any = None
    checkpoints = Checkpoints(
        Layout.of("app"), owner, nothing, clock=lambda: 0.0, interval_seconds=1.0
    )
    failing = tuple(FailureRecord(position, 1, "x" * 300) for position in range(1, 151))
    large, small = QueueNode(out_of_order=OutOfOrderProgress(other_failures=failing)), QueueNode(1)
    chosen = [(OwnedQueue(f"q{n}"), large if n < 40 else small) for n in range(40 + 2 * BATCH)]
    batches = list(checkpoints._batches(chosen))
    assert [slot for batch in batches for slot, _, _ in batch] == [slot for slot, _ in chosen]
    for batch in batches:
        assert len(batch) <= BATCH
        assert sum(len(op.data) for _, _, op in batch) <= MAX_TRANSACTION_BYTES
