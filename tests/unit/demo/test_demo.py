"""The check at the end of `qdo demo` finds every violated guarantee."""

from __future__ import annotations

import io
import re
from contextlib import closing
from pathlib import Path

import pytest
from rich.console import Console

from qdo.demo.ledger import Ledger, LedgerReader, Record, audit
from qdo.demo.report import DemoReport, Display, KilledWorker, TableRow, print_report, running_again
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
KILLED = frozenset({1})


def test_audit_accepts_a_history_with_a_handover():
    found = audit(GOOD, {"q": 4})
    assert found.faults == ()
    assert (found.processed, found.repeats, found.claims) == (4, 0, 2)
    assert found.pauses == pytest.approx({"stayed": 0.5, "handed over": 0.5, "killed": 0.0})


def test_audit_does_not_depend_on_the_order_of_files():
    assert audit(GOOD[2:] + GOOD[:2], {"q": 4}).faults == ()


def test_audit_accepts_repeats_of_a_killed_worker():
    again = [*GOOD[:2], record(2, 2.0, fence=9, pid=2), record(3, 3.0, fence=9, pid=2)]
    found = audit(again, {"q": 3}, KILLED)
    assert found.faults == ()
    assert found.repeats == 1
    assert found.pauses["killed"] == pytest.approx(0.5)


def test_audit_counts_the_wait_for_a_retry_after_a_kill():
    """The new owner repeats message 2, and then waits for the retry of message 3."""
    records = [
        *GOOD[:2],
        record(2, 1.6, fence=9, pid=2),
        record(3, 3.0, fence=9, pid=2),
        record(4, 3.7, fence=9, pid=2),
    ]
    found = audit(records, {"q": 4}, KILLED)
    assert found.faults == ()
    assert found.pauses == pytest.approx({"stayed": 0.5, "handed over": 0.0, "killed": 0.9})


VIOLATIONS = {
    "lost at the end": (GOOD[:3], r"queue q: 1 \D+"),
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
    "message from nowhere": ([*GOOD, record(5, 4.0, 9, 2)], r"queue q: 1 \D+"),
    "queue unknown": ([*GOOD, record(1, 4.0, queue="r")], r"queue r \D+"),
    "nothing happened": ([], r"queue q: 4 \D+"),
}


@pytest.mark.parametrize(("records", "pattern"), VIOLATIONS.values(), ids=VIOLATIONS)
def test_audit_finds_every_violation(records: list[Record], pattern: str):
    faults = audit(records, {"q": 4}).faults
    assert any(re.fullmatch(pattern, fault) for fault in faults), faults


def test_ledger_reader_follows_a_growing_file(tmp_path: Path):
    reader = LedgerReader(tmp_path)
    assert reader.read() == []
    with closing(Ledger(tmp_path)) as ledger:
        ledger.note("a", 1, 7, 0.25)
        (first,) = reader.read()
        assert (first.queue, first.number, first.fence, first.started) == ("a", 1, 7, 0.25)
        ledger.note("a", 2, 7, 0.5)
        ledger.note("a", 2, 8, 0.5)
        assert [each.number for each in reader.read()] == [2, 2]
    assert reader.read() == []
    assert len(reader.records) == 3
    assert reader.distinct == 2


def test_ledger_reader_waits_for_the_end_of_a_line(tmp_path: Path):
    file = tmp_path / "42.ledger"
    reader = LedgerReader(tmp_path)
    file.write_text("a 1 7 0.1 0.2\na 2 7 0.")
    assert [each.number for each in reader.read()] == [1]
    file.write_text("a 1 7 0.1 0.2\na 2 7 0.3 0.4\n")
    assert [(each.number, each.pid) for each in reader.read()] == [(2, 42)]


def report(records: list[Record], recorded: QueueStatus) -> DemoReport:
    return DemoReport(
        records=records,
        sent={"q": 4},
        kill=KilledWorker("worker-0000000001", 1, frozenset({"q"}), 1.7, 0.1),
        workers=[
            TableRow("worker-0000000001", 1, 0, 2, "killed"),
            TableRow("worker-0000000002", 2, 1, 2, "drained"),
        ],
        moves=1,
        required_moves=1,
        statuses=[recorded],
    )


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
    assert print_report(Display(Console(file=out, width=100)), report(records, recorded)) is good
    assert ("✗" in out.getvalue()) is not good


def test_running_again_is_when_the_last_queue_resumes():
    kill = KilledWorker("w", 1, frozenset({"a", "b"}), at=10.0)
    records = [
        record(1, 9.0, queue="a"),
        record(1, 10.1, queue="a", pid=2),  # a repetition
        record(2, 10.6, queue="a", pid=2),
        record(3, 11.0, queue="a", pid=2),
        record(1, 10.4, queue="b", pid=2),
        record(1, 12.0, queue="other", pid=2),
    ]
    assert running_again(records, kill) == 10.6
