"""Queues are added up, and what is unknown stays unknown."""

from __future__ import annotations

from dataclasses import replace

import pytest

from qdo.ops.items import group_items
from qdo.ops.status import QueueStatus
from qdo.ops.verdicts import QueueHealth, Verdict

QUEUE = QueueStatus(
    queue="q", owner="w-1", owner_gone=False, last=0, backlog=3, oldest=None, dead_letters=1,
    fault=None,
    behind_seconds=5.0,
)  # fmt: skip
IDLE = ("idle", 1, 3, None)
JUDGED = [
    (replace(QUEUE, queue="tenant-1"), Verdict(QueueHealth.OK)),
    (replace(QUEUE, queue="tenant-2", behind_seconds=90.0), Verdict(QueueHealth.LAGGING)),
    (replace(QUEUE, queue="mail", backlog=None, owner="w-2"), Verdict(QueueHealth.BLOCKED)),
    (replace(QUEUE, queue="-odd", behind_seconds=None, owner_gone=True), Verdict(QueueHealth.IDLE)),
]


@pytest.mark.parametrize(
    ("by", "expected"),
    [
        ("prefix", [("mail", 1, None, 5.0), ("tenant", 2, 6, 90.0), ("-odd", 1, 3, None)]),
        ("owner", [("w-2", 1, None, 5.0), ("w-1", 2, 6, 90.0), ("none", 1, 3, None)]),
        (
            "state",
            [("blocked", 1, None, 5.0), ("lagging", 1, 3, 90.0), ("ok", 1, 3, 5.0), IDLE],
        ),
    ],
)
def test_the_worst_group_comes_first(
    by: str, expected: list[tuple[str, int, int | None, float | None]]
) -> None:
    found = group_items(JUDGED, by)
    keys = ("group", "queues", "backlog", "behind_seconds")
    assert [tuple(each[key] for key in keys) for each in found] == expected


def test_a_group_counts_what_needs_attention() -> None:
    (tenant,) = [each for each in group_items(JUDGED, "prefix") if each["group"] == "tenant"]
    assert (tenant["attention"], tenant["state"], tenant["dead_letters"]) == (1, "lagging", 2)
    assert not tenant["approximate"]
