"""The events that a dashboard has seen: each change once, many as one, in bounded memory."""

from __future__ import annotations

import pytest

from qdo.dashboard.reading import MOST_EVENTS, EventLog
from qdo.ops.changes import MOST_OF_A_KIND, Difference, summed_up
from qdo.ops.items import Judged
from qdo.ops.verdicts import QueueHealth, Verdict
from tests.support.fakes.statuses import queue_status


def judged(owners: dict[str, str], state: QueueHealth = QueueHealth.OK) -> Judged:
    return [
        (queue_status(name, owner=owner or None), Verdict(state)) for name, owner in owners.items()
    ]


@pytest.mark.slow
def test_a_mass_event_is_summed_up() -> None:
    """A worker with 30,000 queues is gone, and others take them one after the other."""
    names = [f"tenant-{number:07}" for number in range(100_000)]
    before = dict.fromkeys(names, "worker-1")
    after = {**before, **dict.fromkeys(names[:30_000], "")}
    log = EventLog()
    log.compare(1.0, judged(before), ["worker-1"], (), [])
    log.compare(2.0, judged(after), [], (), [])
    owner, worker = log.newest()
    assert (worker.change.subject, worker.change.after) == ("worker-1", "gone")
    assert owner.change.subject.startswith("30000 queues: tenant-0000000, ")
    assert (owner.change.before, owner.change.after) == ("worker-1", "")
    assert "summed up" in owner.change.reason
    assert len(owner.change.subject) < 300
    assert owner in log.newest("no-such-queue")


def test_many_groups_stay_few() -> None:
    """Each of 500 queues got another owner."""
    found = [Difference("owner", f"q{number}", "", f"w{number // 2}") for number in range(500)]
    sums = summed_up(found)
    assert len(sums) == MOST_OF_A_KIND
    assert sums[-1].subject.startswith("462 queues: ")
    few = found[:MOST_OF_A_KIND]
    assert summed_up(few) == few


def test_old_events_are_forgotten() -> None:
    log = EventLog()
    log.compare(0.0, [], [], (), [])
    for number in range(MOST_EVENTS):
        log.compare(number + 1.0, judged({"q": f"w{number}"}), ["w"], (), [])
    assert len(log.newest()) == MOST_EVENTS
    assert log.newest()[0].at == MOST_EVENTS


def test_what_cannot_be_read_has_not_changed() -> None:
    """Neither when it cannot be read nor when it can be read again."""
    log = EventLog()
    for unread, owner in (((), "w"), (("workers",), ""), ((), "w")):
        log.compare(1.0, judged({"q": owner}), ["w"] if owner else [], unread, [])
    assert log.newest() == []


def test_the_end_of_a_worker_has_its_reason() -> None:
    log = EventLog()
    ends = [(1.0, Difference("worker", "w-1", "there", "gone", "it died"))]
    log.compare(1.0, judged({}), ["w-1"], (), [])
    log.compare(2.0, judged({}), [], (), [], ends)
    assert [each.change for each in log.newest()] == [ends[0][1]]
