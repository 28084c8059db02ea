"""The check at the end of `qdo demo` finds every violated guarantee."""

from __future__ import annotations

import io
import re
import time
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path

import pytest
from rich.console import Console

from qdo.demo.display import Display
from qdo.demo.ledger import Ledger, LedgerCheck, Record
from qdo.demo.scenario import print_report
from qdo.ops.status import QueueStatus
from tests.support.fakes.statuses import queue_status


def record(number: int, at: float, fence: int = 5, pid: int = 1, queue: str = "q") -> Record:
    """Return a message that took half a second."""
    return Record(queue, number, fence, at, at + 0.5, pid)


GOOD = [
    record(1, 0.0),
    record(2, 1.0),
    record(3, 2.0, fence=9, pid=2),
    record(4, 3.0, fence=9, pid=2),
]


def checked(records: Iterable[Record], count: int, *killed: int) -> LedgerCheck:
    check = LedgerCheck(Path("unused"), {"q": count})
    check.killed.update(killed)
    for each in records:
        check.add(each)
    return check


def test_check_accepts_a_history_with_a_handover():
    check = checked(GOOD, 4)
    assert check.faults == []
    assert check.done == {"q": 4}
    assert (check.processed, check.repeats) == (4, 0)


def test_check_accepts_repeats_of_a_killed_worker():
    again = [*GOOD[:2], record(2, 2.0, fence=9, pid=2), record(3, 3.0, fence=9, pid=2)]
    check = checked(again, 3, 1)
    assert check.faults == []
    assert check.repeats == 1
    assert check.done == {"q": 3}


VIOLATIONS = {
    "gap at a handover": ([GOOD[0], *GOOD[2:]], r"queue q, message 3: \D+2"),
    "out of order": (
        [record(1, 0.0), record(3, 1.0), record(2, 2.0), record(4, 3.0)],
        r"queue q, message 3: \D+2",
    ),
    "repeated within a claim": (
        [*GOOD, record(4, 4.0, fence=9, pid=2)],
        r"queue q, message 4: \D+4\D+",
    ),
    "repeated at a handover": (
        [*GOOD[:2], record(2, 1.6, fence=9, pid=2), *GOOD[2:]],
        r"queue q, message 2: \D+",
    ),
    "fence went back": (
        [*GOOD[:2], record(3, 2.0, fence=3, pid=2), record(4, 3.0, fence=3, pid=2)],
        r"queue q, message 3: \D+3\D+5",
    ),
    "shared fence": (
        [*GOOD[:2], record(3, 2.0, pid=2), record(4, 3.0, pid=2)],
        r"queue q, message 3: two processes \D+5",
    ),
    "two owners at once": (
        [*GOOD[:2], record(3, 1.2, fence=9, pid=2), GOOD[3]],
        r"queue q, message 3: \D+2\D+",
    ),
    "message from nowhere": ([*GOOD, record(5, 4.0, 9, 2)], r"queue q, message 5: \D+"),
    "queue unknown": ([*GOOD, record(1, 4.0, queue="r")], r"queue r, message 1: \D+"),
}


@pytest.mark.parametrize(("records", "pattern"), VIOLATIONS.values(), ids=VIOLATIONS)
def test_check_finds_every_violation(records: list[Record], pattern: str):
    faults = checked(records, 4).faults
    assert any(re.fullmatch(pattern, fault) for fault in faults), faults


@pytest.mark.parametrize("records", [GOOD[:3], []], ids=["lost at the end", "nothing happened"])
def test_check_finds_missing_messages(records: list[Record]):
    assert checked(records, 4).done != {"q": 4}


def test_check_follows_a_growing_ledger(tmp_path: Path):
    path = tmp_path / "ledger"
    check = LedgerCheck(path, {"a": 2})
    check.read()
    assert check.processed == 0
    with closing(Ledger(path)) as ledger:
        ledger.note("a", 1, 7, 0.25)
        check.read()
        assert check.done == {"a": 1}
        ledger.note("a", 2, 7, time.monotonic())
        check.read()
        check.read()
    assert check.done == {"a": 2}
    assert check.faults == []
    assert check.repeats == 0


def test_check_waits_for_the_end_of_a_line(tmp_path: Path):
    path = tmp_path / "ledger"
    check = LedgerCheck(path, {"a": 2})
    path.write_text("a 1 7 0.1 0.2 42\na 2 7 0.")
    check.read()
    assert check.done == {"a": 1}
    path.write_text("a 1 7 0.1 0.2 42\na 2 7 0.3 0.4 42\n")
    check.read()
    assert check.done == {"a": 2}
    assert check.faults == []


@pytest.mark.parametrize(
    ("records", "recorded", "good"),
    [
        (GOOD, queue_status(), True),
        (GOOD[:3], queue_status(), False),
        (GOOD, queue_status(backlog=1), False),
        (GOOD, queue_status(owner="worker-0000000002"), False),
    ],
    ids=["all kept", "not complete", "not recorded", "not released"],
)
def test_report_passes_only_if_every_check_passes(
    records: list[Record], recorded: QueueStatus, good: bool
):
    out = io.StringIO()
    display = Display(Console(file=out, width=100))
    assert print_report(display, checked(records, 4), [recorded]) is good
    assert ("✗" in out.getvalue()) is not good
