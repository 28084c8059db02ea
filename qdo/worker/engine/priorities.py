"""Which lane of a queue with ``order="priority"`` is next: one for each priority, one at a time.

The queue is read as far as its window allows before a message starts, so the most urgent message
is known. The lane of the oldest message goes first while one of two bounds is reached: one against
starvation, one against repetitions after a handover.
"""

from __future__ import annotations

from collections.abc import Collection
from operator import attrgetter

from qdo.worker.engine.lane import Lane, LaneProgress

# The most messages that pass the oldest one that may start.
STARTS = 1_000
# Done ranges above the watermark from which the oldest message goes first. `lane.RUNS` is larger: a
# clean handover repeats nothing.
RANGES = 400
# How long a lane runs messages until the event loop may learn of more urgent ones. A greenlet for
# each message of no duration would take nine tenths of the rate.
SLICE_SECONDS = 0.001


class Priorities:
    """Chooses the next lane.

    :param lanes: the lanes as they are now, those that wait or are blocked included.
    """

    def __init__(self, progress: LaneProgress, lanes: Collection[Lane]) -> None:
        self._progress = progress
        self._lanes = lanes
        self._passed = 0

    def first_of(self, ready: Collection[Lane]) -> Lane:
        """Return the lane whose first message is to start next."""
        oldest = min(ready, key=_position)
        full = self._progress.ranges >= RANGES and oldest is min(self._lanes, key=_position)
        return oldest if full or self._passed >= STARTS else min(ready, key=attrgetter("key"))

    def count(self, done: int, ready: Collection[Lane]) -> None:
        """Count a message that is done if it has passed one that may start."""
        self._passed = self._passed + 1 if any(_position(lane) < done for lane in ready) else 0


def _position(lane: Lane) -> int:
    return lane.rows[0][0]
