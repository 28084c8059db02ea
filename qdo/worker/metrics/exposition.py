"""Metrics in the text format of Prometheus."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import accumulate
from typing import Any

from qdo.errors import SettingsError
from qdo.worker.metrics.catalog import Metric, MetricKind
from qdo.worker.metrics.totals import Series

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def check_library() -> None:
    """Raise SettingsError if the library for metrics is missing."""
    try:
        import prometheus_client  # noqa: F401
    except ImportError as error:
        raise SettingsError(
            name="http", reason=f"it needs prometheus-client ({error}): pip install 'qdo[metrics]'"
        ) from error


def exposition(values: Mapping[Metric, Series]) -> bytes:
    """Return metrics as text."""
    from prometheus_client import CollectorRegistry, generate_latest

    registry = CollectorRegistry()
    registry.register(_Collected(values))
    text: bytes = generate_latest(registry)
    return text


class _Collected:
    def __init__(self, values: Mapping[Metric, Series]) -> None:
        self._values = values

    def collect(self) -> Iterator[Any]:
        for metric, series in self._values.items():
            yield _family(metric, series)


def _family(metric: Metric, series: Series) -> Any:
    from prometheus_client import core

    if metric.kind is MetricKind.HISTOGRAM:
        family: Any = core.HistogramMetricFamily(metric.name, metric.help, labels=metric.labels)
        names = [*map(str, metric.bounds), "+Inf"]
        for labels, (*counts, seconds) in series.items():
            buckets = [*zip(names, accumulate(counts), strict=True)]
            family.add_metric(labels, buckets=buckets, sum_value=seconds)
        return family
    is_counter = metric.kind is MetricKind.COUNTER
    made: Any = core.CounterMetricFamily if is_counter else core.GaugeMetricFamily
    family = made(metric.name, metric.help, labels=metric.labels)
    for labels, (value,) in series.items():
        family.add_metric(labels, value)
    return family
