"""The names of metrics follow Prometheus's customs, and the page has all of them."""

from __future__ import annotations

import re
import sys
from typing import get_args

import pytest

from qdo.errors import SettingsError
from qdo.outcomes import OutcomeName
from qdo.worker.metrics import catalog
from qdo.worker.metrics.catalog import FROM_PARENT, FROM_WORKERS, Metric, MetricKind
from qdo.worker.metrics.duty import STATES
from tests.support.doc_pages import read

METRICS = (*FROM_WORKERS, *FROM_PARENT)


def documented() -> dict[str, tuple[list[str], str]]:
    """Return labels and meaning of each metric of the page."""
    rows = re.findall(r"   \* - `(qdo_\w+)`(?:; (.*))?\n     - .*\n     - (.*)\n", read("metrics"))
    return {name: (re.findall(r"`(\w+)`", labels), text) for name, labels, text in rows}


def served(metric: Metric) -> str:
    return metric.name + ("_total" if metric.kind is MetricKind.COUNTER else "")


def test_the_page_has_every_metric_with_its_meaning() -> None:
    assert documented() == {served(each): ([*each.labels], each.help) for each in METRICS}


def test_the_page_explains_every_value_of_a_label() -> None:
    page = read("metrics")
    assert [each for each in (*STATES, *get_args(OutcomeName)) if f"``{each}``" not in page] == []


def test_names_have_units() -> None:
    """Histograms measure seconds; gauges of times have the unit, too."""
    for metric in METRICS:
        assert metric.name.endswith("_seconds") == bool(
            metric.kind in (MetricKind.HISTOGRAM, MetricKind.MAX, MetricKind.MIN)
        )
        assert list(metric.bounds) == sorted(metric.bounds)


def test_no_label_names_a_single_queue() -> None:
    """With 100,000 queues each metric would have as many time series."""
    assert {label for metric in METRICS for label in metric.labels} == {
        *("queues", "outcome", "state", "change", "result", "action", "version", "python", "pool"),
        *("table", "reason", "kind"),
    }


def test_a_missing_library_is_an_error_with_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(SettingsError) as caught:
        catalog.check_library()
    assert caught.value.details["name"] == "http"
    assert "'qdo-queues[metrics]'" in str(caught.value)
