"""Adds up the metrics of worker processes, of which some have ended."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from qdo.worker.metrics.catalog import FROM_WORKERS, Metric, MetricKind

Labels = tuple[str, ...]
Series = dict[Labels, list[float]]
"""By the values of the labels: one number, or the counts and the sum of a histogram."""

_MERGE: dict[MetricKind, Callable[[float, float], float]] = {
    MetricKind.MAX: max,
    MetricKind.MIN: min,
}


def parse(values: Any) -> dict[Metric, Series]:
    """Return the metrics that a process has published.

    :param values: what was in its memory, which its jobs may have written.
    :raises ValueError: these are not metrics.
    """
    try:
        return {
            metric: _series(metric, values["metrics"].get(metric.name)) for metric in FROM_WORKERS
        }
    except (TypeError, LookupError, AttributeError, OverflowError, RecursionError) as error:
        raise ValueError("these are not metrics") from error


def _series(metric: Metric, rows: Any) -> Series:
    found: Series = {}
    size = len(metric.bounds) + 2 if metric.kind is MetricKind.HISTOGRAM else 1
    for labels, numbers in rows or ():
        key, counted = tuple(map(str, labels)), [float(each) for each in numbers]
        if len(key) != len(metric.labels) or len(counted) != size:
            raise ValueError(f"{metric.name} has other labels or classes")
        if not all(map(math.isfinite, counted)):
            raise ValueError(f"{metric.name} is not a number")
        found[key] = counted
    return found


class MetricTotals:
    """The counts of the processes that have ended."""

    def __init__(self) -> None:
        self._ended: dict[Metric, Series] = {metric: {} for metric in FROM_WORKERS}

    def end(self, values: dict[Metric, Series]) -> None:
        """Keep the counters and histograms of a process that has ended."""
        add({m: each for m, each in values.items() if m.adds_up}, self._ended)

    def copy(self) -> dict[Metric, Series]:
        """Return the counts so far, to which others can be added."""
        return {
            metric: {labels: list(numbers) for labels, numbers in series.items()}
            for metric, series in self._ended.items()
        }


def add(values: dict[Metric, Series], into: dict[Metric, Series]) -> None:
    """Add the metrics of a process to those of others."""
    for metric, series in values.items():
        _merge(metric, into[metric], series)


def _merge(metric: Metric, into: Series, series: Series) -> None:
    merge = _MERGE.get(metric.kind, float.__add__)
    for labels, numbers in series.items():
        before = into.get(labels)
        into[labels] = list(numbers) if before is None else list(map(merge, before, numbers))
