"""The differences between two looks."""

from __future__ import annotations

from dataclasses import replace

from qdo.fleet.protocol.audit_entries import AuditEntry
from qdo.ops.changes import Difference, Look, changes
from qdo.ops.queue_health import QueueHealth
from qdo.ops.status import QueueStatus
from qdo.ops.verdicts import Verdict

QUEUE = QueueStatus("q", "w-1", False, 0, 3, None, 1, None)
OK = Verdict(QueueHealth.OK)
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


def test_entries_come_in_their_order() -> None:
    entries = [replace(SEEK, id=id) for id in ("3", "2", "1")]
    before, after = Look([], [], entries[2:]), Look([], [], entries)
    assert len(list(changes(before, after))) == 2
