"""The item of `qdo status`."""

from __future__ import annotations

from dataclasses import replace

import pytest

from qdo.brokers.requests import PoolCounts
from qdo.ops.items import LONG_SECONDS, MOST_RUNS, group_items, overview
from qdo.ops.snapshot import MESSAGES, LongRun
from qdo.ops.status import QueueStatus
from qdo.ops.verdicts import QueueHealth, Verdict
from tests.support.fakes.statuses import queue_status


def judged(queue: str, seconds: float, state: QueueHealth) -> tuple[QueueStatus, Verdict]:
    running = LongRun("m", 1, seconds)
    return queue_status(queue, owner="w", backlog=1, running=running), Verdict(state)


def test_long_runs_are_named_before_their_queue_is_late() -> None:
    """The longest first; those of the worst queues are not repeated."""
    found = [judged(f"q{number}", LONG_SECONDS + number, QueueHealth.OK) for number in range(5)]
    found.append(judged("short", LONG_SECONDS - 1, QueueHealth.OK))
    found.append(judged("late", 90.0, QueueHealth.LAGGING))
    item = overview("a", [], found)
    assert [each["queue"] for each in item["long_runs"]] == ["q4", "q3", "q2"]
    assert len(item["long_runs"]) == MOST_RUNS
    assert [each["queue"] for each in item["worst"]] == ["late"]


def test_dead_letters_have_a_notice() -> None:
    """No state tells of them: their queues go on. Failed requests are dead letters."""
    found = []
    for queue, count in (("a", 2), ("b", 0), ("c", None), ("d", 30), ("e", 1), ("f", 1)):
        status, verdict = judged(queue, 0.0, QueueHealth.IDLE)
        found.append((replace(status, dead_letters=count), verdict))
    item = overview("a", [], found, pools={"p": PoolCounts(1, 2, 0, None, failed=5)})
    (notice,) = item["notices"]
    assert notice["reason"] == "39 dead letters: d (30), p (5), a (2) and 2 more"
    assert notice["remedy"] == "qdo dead-letters --by error"
    assert item["requests"] == {"waiting": 1, "running": 2, "paused": 0}


def test_unknown_dead_letters_are_not_none() -> None:
    """Neither if a queue does not know them, nor if no queue is known."""
    status, verdict = judged("q", 0.0, QueueHealth.OK)
    assert overview("a", [], [(status, verdict)])["dead_letters"] == 0
    unknown = replace(status, dead_letters=None)
    assert overview("a", [], [(unknown, verdict)])["dead_letters"] is None
    assert overview("a", [], [], unread=(MESSAGES,))["dead_letters"] is None


def test_notices_are_part_of_the_item() -> None:
    notice = {"check": "disk", "status": "failed", "reason": "full", "remedy": "free it"}
    assert overview("a", [], [], [notice])["notices"] == [notice]


# --- groups --------------------------------------------------------------------------------


QUEUE = queue_status(owner="w-1", backlog=3, dead_letters=1, behind_seconds=5.0)
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
