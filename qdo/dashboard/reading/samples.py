"""Ages and backlogs of queues over time, as the dashboard has read them, in bounded memory."""

from __future__ import annotations

import math
from array import array
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from qdo.ops.status import Statuses

MOST_VALUES = 2_000_000
"""Of all queues together: 16 MiB. 100,000 queues have 20 samples each, 5,000 have 400."""
MOST_SAMPLES = 400


@dataclass(frozen=True, slots=True)
class QueuePoint:
    """One queue at one time; None for what is unknown.

    :ivar at: Unix time.
    """

    at: float
    age_seconds: float | None
    backlog: int | None


class QueueSamples:
    """The samples of the last reads.

    One reading has two arrays of numbers and an index of names, which readings with the same
    queues share.
    """

    def __init__(self) -> None:
        self._readings: deque[tuple[float, Mapping[str, int], array[float], array[float]]] = deque()
        self._names: Sequence[str] = ()
        self._index: Mapping[str, int] = {}

    def add(self, statuses: Statuses) -> None:
        """Keep the sample of each queue, and forget the oldest ones."""
        names = [each.queue for each in statuses.queues]
        if names != self._names:
            self._names = names
            self._index = {name: place for place, name in enumerate(names)}
        ages = array("f", (_number(each.behind_seconds) for each in statuses.queues))
        backlogs = array("f", (_number(each.backlog) for each in statuses.queues))
        self._readings.append((statuses.at, self._index, ages, backlogs))
        most = min(MOST_SAMPLES, MOST_VALUES // max(1, len(names)))
        while len(self._readings) > max(2, most):
            self._readings.popleft()

    def of(self, queue: str) -> list[QueuePoint]:
        """Return the samples of a queue, oldest first."""
        points = []
        for at, index, ages, backlogs in tuple(self._readings):
            place = index.get(queue)
            if place is not None:
                backlog = _known(backlogs[place])
                count = None if backlog is None else round(backlog)
                points.append(QueuePoint(at, _known(ages[place]), count))
        return points


def _number(value: float | None) -> float:
    return math.nan if value is None else value


def _known(value: float) -> float | None:
    return None if math.isnan(value) else value
