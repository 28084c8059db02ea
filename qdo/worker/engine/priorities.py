"""The lanes of a queue with ``order="priority"``: one for each priority, one of them at a time.

The queue is read as far as its window allows before a lane starts, so the most urgent message is
known. The lane of the oldest message goes first while one of two bounds is reached: one against
starvation, one against repetitions after a handover.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from qdo.encoding import parsed
from qdo.message import priority_of
from qdo.worker.engine.lane import Lane, LaneProgress
from qdo.worker.engine.slot import Row

STARTS = 1_000
"""The most messages that start before the oldest one that may start."""
RANGES = 400
"""Done ranges above the watermark from which the oldest message goes first. `lane.RUNS` is larger:
a clean handover repeats nothing."""
SLICE_SECONDS = 0.001
"""How long a lane runs messages until the event loop may learn of more urgent ones. A greenlet for
each message of no duration would take nine tenths of the rate."""


def priority_of_row(row: Row) -> int:
    return priority_of(parsed(row[3]) or {}) if row[3] else priority_of({})


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
        if self._passed >= STARTS:
            return min(ready, key=_position)
        if self._progress.ranges >= RANGES:
            oldest = min(self._lanes, key=_position)
            if oldest in ready:
                return oldest
        return min(ready, key=_priority)

    def admit(self, lane: Lane, others: Collection[Lane]) -> bool:
        """Return whether a running lane may start its next message, and count that start."""
        ready = (lane, *others)
        if self.first_of(ready) is not lane:
            return False
        self._passed = 0 if min(ready, key=_position) is lane else self._passed + 1
        return True


def _position(lane: Lane) -> int:
    return lane.rows[0][0]


def _priority(lane: Lane) -> Any:
    return lane.key


class PriorityLane(Lane):
    """The messages of one priority: it stops where another lane, or the broker, is next."""

    __slots__ = ()

    def _stops_here(self) -> bool:
        return super()._stops_here() or not self._owner.admits(self)
