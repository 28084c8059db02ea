"""Choose the next lane of a queue with ``order="priority"``. Such a queue runs one lane at a time.

Before a message starts, the worker reads as much of the queue as the window allows, to find the
most urgent message. At either of two limits, the lane of the oldest message goes first. `STARTS`
prevents starvation, and `RANGES` limits repetitions after a handover.
"""

from __future__ import annotations

from collections.abc import Collection
from operator import attrgetter

from qdo.worker.engine.lane import Lane, LaneProgress

# Maximum number of messages that may overtake the oldest message that may start.
STARTS = 1_000
# Number of done ranges above the watermark at which the oldest message goes first. `lane.RUNS` is
# larger, so a clean handover repeats no message.
RANGES = 400
# Seconds for which a lane runs before the queue chooses again. A greenlet for each very short
# message would cost nine tenths of the rate.
SLICE_SECONDS = 0.001


class Priorities:
    """Chooses the next lane of one queue.

    :param lanes: the current lanes, including waiting and blocked ones.
    """

    def __init__(self, progress: LaneProgress, lanes: Collection[Lane]) -> None:
        self._progress = progress
        self._lanes = lanes
        self._passed = 0

    def first_of(self, ready: Collection[Lane]) -> Lane:
        """Return the ready lane whose first message must start next."""
        oldest = min(ready, key=_position)
        full = self._progress.ranges >= RANGES and oldest is min(self._lanes, key=_position)
        return oldest if full or self._passed >= STARTS else min(ready, key=attrgetter("key"))

    def count(self, done: int, ready: Collection[Lane]) -> None:
        """Count a done message if it overtook a message that may start."""
        self._passed = self._passed + 1 if any(_position(lane) < done for lane in ready) else 0


def _position(lane: Lane) -> int:
    return lane.rows[0][0]
