"""The facts that a worker reports: written, read, and written by other programs."""

from __future__ import annotations

import json
from dataclasses import fields
from typing import Any

import pytest

from qdo.coordination.znodes.values import encode
from qdo.coordination.znodes.worker_report import LastHour, LostWorker, WorkerReport
from tests.support.doc_pages import DOCS

LOST = LostWorker("worker-0000000001", "host a", 2, 3.5)
FULL = WorkerReport(
    worker="worker-0000000002",
    pid=7,
    zone="a",
    started=1.5,
    behind={"q": 2.0},
    waits={"q": ("crm",)},
    long_runs=(("q", "id", 1, 5.0, None),),
    live={"uses": 3},
    lost_workers=(LOST,),
    last_hour=LastHour(29_402_886, (5, 0, 3), (1,)),
)


def test_a_report_is_read_as_it_was_written() -> None:
    assert WorkerReport.parse(encode(FULL.dump())) == FULL
    assert WorkerReport.parse(None) == WorkerReport()


def test_every_fact_is_in_the_documentation() -> None:
    page = (DOCS / "znodes.rst").read_text(encoding="utf-8")
    assert [each.name for each in fields(WorkerReport) if f"`{each.name}`" not in page] == []


def test_a_fact_that_is_not_reported_is_not_written() -> None:
    written = WorkerReport().dump()
    assert "lost_workers" not in written
    assert "pid" not in written


def test_facts_with_a_label_have_a_text() -> None:
    assert ("zone", "a") in FULL.labelled()
    assert ("zone", None) in WorkerReport().labelled()


@pytest.mark.parametrize(
    ("forged", "expected"),
    [
        ({"pid": True}, {}),
        ({"pid": "7"}, {}),
        ({"started": 2**60}, {}),
        ({"started": 3}, {"started": 3.0}),
        ({"host": "a\nb"}, {"host": "a b"}),
        ({"behind": {"q": "1", "p": 1}}, {"behind": {"p": 1.0}}),
        ({"waits": {"q": "crm", "p": ["crm", 7]}}, {"waits": {"p": ("crm",)}}),
        ({"long_runs": {"q": 1}}, {}),
        ({"last_hour": {"minute": 1, "done": [1]}}, {}),
        ({"last_hour": {"minute": "1", "done": [], "failed": [], "dead_lettered": []}}, {}),
        ({"lost_workers": [{"name": "w"}, 7]}, {"lost_workers": ()}),
        ({"unknown": 1}, {}),
    ],
)
def test_values_of_other_programs_are_left_out(forged: Any, expected: Any) -> None:
    assert WorkerReport.parse(json.dumps(forged).encode()) == WorkerReport(**expected)
