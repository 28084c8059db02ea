"""The backlog of a queue, without what never runs."""

from __future__ import annotations

import pytest

from qdo.brokers.base import Outgoing
from qdo.coordination.znodes.queue_node import OutOfOrderProgress, QueueNode
from qdo.ops.snapshot import backlog_of
from qdo.testing.memory_broker import MemoryBroker, MemoryStore


@pytest.mark.parametrize(
    ("done", "cancelled", "waiting"),
    [
        (0, (), (1, 2, 3, 4)),
        (0, (2, 3), (1, 4)),
        (0, (1, 2), (3, 4)),
        (0, (1, 3), (2, 4)),
        (1, (2, 3), (4,)),
        (2, (2, 3, 4), ()),
        (0, (1, 2, 3, 4), ()),
    ],
)
def test_cancelled_messages_are_no_backlog(
    done: int, cancelled: tuple[int, ...], waiting: tuple[int, ...]
) -> None:
    """Wherever they are: the oldest message is the first one that will run."""
    broker = MemoryBroker(MemoryStore(), "a")
    for body in range(4):
        broker.send(Outgoing("q", str(body).encode()))
    positions = [0, *(row[0] for row in broker.reader("q", 0).fetch(9))]
    progress = OutOfOrderProgress(cancelled=tuple(positions[each] for each in cancelled))
    node = QueueNode(positions[done], out_of_order=progress)
    found = backlog_of(broker, "q", node, positions[done])
    assert found.count == len(waiting)
    assert found.oldest == (positions[waiting[0]] if waiting else None)
    assert found.head == positions[-1]
