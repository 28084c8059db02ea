"""Samples from the last readings of the app, for the lines of the charts."""

from __future__ import annotations

import math
from array import array
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from qdo.ops.status import Statuses

# Maximum number of samples of all queues together (16 MiB): 20 samples for each of 100,000 queues,
# or 400 for each of 5,000.
MOST_VALUES = 2_000_000
MOST_SAMPLES = 400
SUM_SECONDS = 5
# One hour of sums. Each sum stands for `SUM_SECONDS`.
MOST_SUMS = 720


@dataclass(frozen=True, slots=True)
class QueuePoint:
    """The state of a queue at a Unix time. Unknown values are None."""

    at: float
    age_seconds: float | None
    backlog: int | None


class QueueSamples:
    """Keeps samples of the last readings."""

    def __init__(self) -> None:
        # For each reading: time, index of names, ages and backlogs. Readings of the same queues
        # share an index.
        self._readings: deque[tuple[float, Mapping[str, int], array[float], array[float]]] = deque()
        self._names: Sequence[str] = ()
        self._index: Mapping[str, int] = {}
        self._sums: dict[int, tuple[float, float | None]] = {}

    def add(self, statuses: Statuses, requests: int | None = 0) -> None:
        """Store a sample of each queue. Forget the oldest samples.

        :param requests: number of waiting requests in all pools, or None if unknown.
        """
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
        known = [each.backlog for each in statuses.queues if each.backlog is not None]
        total = None
        if requests is not None and (known or not names):
            total = float(sum(known) + requests)
        self._sums[int(statuses.at // SUM_SECONDS)] = statuses.at, total
        for old in sorted(self._sums)[:-MOST_SUMS]:
            del self._sums[old]

    def backlogs(self, since: float) -> list[tuple[float, float | None]]:
        """Return times since a Unix time, with the total backlogs of queues and pools."""
        return sorted(each for each in tuple(self._sums.values()) if each[0] >= since)

    def of(self, queue: str) -> list[QueuePoint]:
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
