"""The options of one worker's registration."""

from __future__ import annotations

from dataclasses import dataclass

from qdo.coordination.protocol.checkpoints import CheckpointTotals
from qdo.positions import TIME_POSITIONS, Positions
from qdo.queues import EVERYTHING, QueueFilter


@dataclass(frozen=True, slots=True)
class MemberOptions:
    """How a worker takes queues and records progress.

    :ivar checkpoint_seconds: shortest time between two checkpoints.
    :ivar filter: the queues that may be assigned to the worker.
    :ivar process: host and parent process of the worker, for people.
    :ivar wait_for_deleted: as rebalancer, assign no further queue before the names of the queues
        marked as deleted are known; see `rebalancer.Rebalancer`.
    :ivar positions: the broker's kind of positions.
    :ivar totals: where checkpoints are counted; None: nowhere.
    """

    checkpoint_seconds: float = 0.2
    filter: QueueFilter = EVERYTHING
    process: str = ""
    wait_for_deleted: bool = False
    positions: Positions = TIME_POSITIONS
    totals: CheckpointTotals | None = None
