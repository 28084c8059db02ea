"""The differences between two looks."""

from __future__ import annotations

import json
from dataclasses import replace

from qdo.coordination.znodes.worker_report import WorkerReport
from qdo.fleet.audit_entries import AuditEntry
from qdo.history.reports import RecordedOwner
from qdo.ops.changes import Difference, Look, changes, ends_of, past_changes
from qdo.ops.verdicts import QueueHealth, Verdict
from qdo.ops.worker_status import WorkerStatus
from tests.support.fakes.statuses import queue_status

QUEUE = queue_status(owner="w-1", backlog=3, dead_letters=1)
OK = Verdict(QueueHealth.OK)
KILLED = "it died of SIGKILL, and worker-0000000009 replaces it"
LOST = "it released none of its queues: host a"
SEEK = AuditEntry("1", 0.0, "ada@vm", command="seek", target="q", reason="again")


def test_nothing_new_is_no_event() -> None:
    look = Look([(QUEUE, OK)], ["w-1"], [SEEK])
    assert list(changes(look, look)) == []


def test_every_kind_of_event_in_order() -> None:
    before = Look([(QUEUE, OK), (replace(QUEUE, queue="old"), OK)], ["w-1"], [])
    blocked = Verdict(QueueHealth.BLOCKED, "A message failed.")
    moved = replace(QUEUE, owner="w-2", last=9)
    after = Look([(moved, blocked), (replace(QUEUE, queue="new"), OK)], ["w-2"], [SEEK])
    assert list(changes(before, after)) == [
        Difference("seek", "q", "", "", "again", "ada@vm"),
        Difference("worker", "w-1", "there", "gone"),
        Difference("worker", "w-2", "", "new"),
        Difference("queue", "old", "there", "gone"),
        Difference("queue", "new", "", "new"),
        Difference("owner", "q", "w-1", "w-2"),
        Difference("state", "q", "ok", "blocked", "A message failed."),
    ]


def test_the_past_is_told_by_its_witnesses_in_order() -> None:
    """The action log, the workers, those that the leader has lost, and the claims of a history."""
    lost = {"name": "worker-0000000001", "process": "host a", "queues": 2, "at": 3.0}
    node = {"started": 1.0, "lost_workers": [lost, {"name": "forged"}, 7]}
    report = WorkerReport.parse(json.dumps(node).encode())
    workers = [WorkerStatus("worker-0000000002", 1, 1, 9.0, report)]
    claim = RecordedOwner(2.0, 5.0, "worker-0000000001", "a", 7, 1, "drained")
    entries = [replace(SEEK, at=4.0), replace(SEEK, id="0", at=0.5)]
    assert past_changes(entries, workers, [("q", claim)], 1.0) == [
        (1.0, Difference("worker", "worker-0000000002", "", "new")),
        (2.0, Difference("owner", "q", "", "worker-0000000001")),
        (3.0, Difference("worker", "worker-0000000001", "there", "gone", LOST)),
        (4.0, Difference("seek", "q", "", "", "again", "ada@vm")),
        (5.0, Difference("owner", "q", "worker-0000000001", "", "drained")),
    ]


def test_later_ends_have_their_reason_once() -> None:
    """A lost worker, and a process that its parent has replaced; earlier ends are not repeated."""

    def look(lost: list[object], deaths: list[object], *names: str) -> Look:
        node = {"started": 1.0, "host": "a", "lost_workers": lost, "deaths": deaths}
        report = WorkerReport.parse(json.dumps(node).encode())
        workers = [WorkerStatus("worker-0000000009", 1, 1, 9.0, report)]
        return Look([], [*names, "worker-0000000009"], [], [*ends_of(workers)])

    old = {"name": "worker-0000000001", "process": "host a", "queues": 2, "at": 2.0}
    new = {**old, "name": "worker-0000000002", "at": 3.0}
    before = look([old], [], "worker-0000000002", "worker-0000000003")
    after = look([old, new], [[7, 4.0, "died of SIGKILL"]])
    assert list(changes(before, after)) == [
        Difference("worker", "worker-0000000002", "there", "gone", LOST),
        Difference("worker", "a process 7", "there", "gone", KILLED),
        Difference("worker", "worker-0000000003", "there", "gone"),
    ]


def test_entries_come_in_their_order() -> None:
    entries = [replace(SEEK, id=id) for id in ("3", "2", "1")]
    before, after = Look([], [], entries[2:]), Look([], [], entries)
    assert len(list(changes(before, after))) == 2
