"""Verdicts on queues with hand-made histories."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from typing import Any

import pytest

from qdo.coordination.znodes.queue_node import FailureRecord
from qdo.coordination.znodes.worker_report import MOST_RUNS, WorkerReport
from qdo.ops.snapshot import LongRun, long_runs
from qdo.ops.status import QueueStatus, Statuses, unusable_of, wait_of
from qdo.ops.verdicts import QueueHealth, QueueSample, Verdict, VerdictRules, judge, judge_all
from qdo.queues import MAX_GLOBS_CHARACTERS, POOL, command_text
from tests.support.fakes.statuses import queue_status

NOW = 1_700_000_000.0
OWNED = queue_status(
    "tenant 7", owner="worker-1", last=100, backlog=3, behind_seconds=5.0,
    written=NOW - 1.0, reported=NOW - 1.0,
)  # fmt: skip
TIP = replace(OWNED, backlog=0, behind_seconds=0.0)
FREE = replace(OWNED, owner=None, reported=None, behind_seconds=90.0, written=NOW - 90)
STILL = replace(OWNED, written=NOW - 45, behind_seconds=40.0)
PLACE = "waits for a free place: 1 of 1 jobs run, and 9 queues wait"
KEPT = replace(OWNED, retention_seconds=86_400.0)
FAILED = FailureRecord(101, 3, "ValueError: no")
SLOW = replace(OWNED, behind_seconds=60.0, per_second=1 / 30, message_seconds=30.0)
BLOCKED = replace(FAILED, blocked_since=NOW - 9)


def verdict(*statuses: QueueStatus, workers: int | None = 2, every: float = 10.0) -> Verdict:
    """Return the verdict on readings of a queue, the last of which was read now."""
    first = NOW - every * (len(statuses) - 1)
    return judge([QueueSample(first + every * i, each, workers) for i, each in enumerate(statuses)])


@pytest.mark.parametrize(
    ("status", "state", "said"),
    [
        (TIP, "idle", ""),
        (replace(TIP, retention_seconds=86_400.0), "idle", ""),
        (replace(KEPT, behind_seconds=43_000.0), "lagging", "is 11h 56m old"),
        (
            replace(KEPT, behind_seconds=43_200.0, marks=FAILED),
            "expiring",
            "deletes it in 12h. Its next message failed in 3 attempts",
        ),
        (replace(KEPT, behind_seconds=9e6, fault="x"), "expiring", "in 0s. X."),
        (replace(TIP, running=LongRun("m", 1, 3.0)), "ok", ""),
        (OWNED, "ok", ""),
        (replace(OWNED, behind_seconds=60.0), "lagging", "is 1m old"),
        (replace(SLOW, sent_per_second=0.05), "lagging", "needs about 1m 30s: 2 a minute end,"),
        (replace(SLOW, sent_per_second=0.05), "lagging", "30s each; 3 a minute were sent."),
        (replace(SLOW, owner_gone=True), "ok", "It has no owner yet."),
        (replace(SLOW, behind_seconds=5.0), "catching-up", "needs about 1m 30s"),
        (replace(SLOW, behind_seconds=5.0, backlog=1), "ok", ""),
        (replace(SLOW, in_line=PLACE), "lagging", "queues wait: 2 a minute end, 30s each."),
        (replace(OWNED, backlog=1000), "catching-up", "1000 messages wait."),
        (replace(OWNED, backlog=999), "ok", ""),
        (replace(OWNED, lost=True, fault="trimmed"), "lost", "Trimmed."),
        (replace(OWNED, fault="its node is corrupt"), "stopped", "node is corrupt"),
        (replace(OWNED, marks=FAILED), "failing", "3 attempts"),
        (replace(OWNED, marks=BLOCKED), "blocked", "ValueError: no"),
        (replace(OWNED, marks=replace(BLOCKED, retry_at=NOW + 1)), "blocked", "waits for its key"),
        (replace(OWNED, marks=FailureRecord(101, 0, "429")), "ok", "429"),
        (replace(STILL, limits=("crm",)), "ok", "the limit crm."),
        (
            replace(OWNED, written=NOW - 95, behind_seconds=90.0, limits=("crm", "sms")),
            "lagging",
            "the limits crm, sms.",
        ),
        (replace(STILL, in_line=PLACE), "ok", ""),
        (replace(STILL, in_line=PLACE, behind_seconds=90.0), "lagging", "1 of 1 jobs"),
        (replace(STILL, in_line=PLACE, reported=NOW - 40), "stopped", "not reported"),
        (replace(STILL, limits=("crm",), reported=NOW - 40), "stopped", "not reported"),
        (replace(STILL, paused_job="OSError: away"), "failing", "Its job is paused"),
        (replace(STILL, paused_job="OSError", reported=NOW - 40), "stopped", "not reported"),
        (replace(STILL, rest_seconds=60.0), "ok", ""),
        (replace(STILL, rest_seconds=60.0, behind_seconds=80.0), "lagging", "rests for up to 1m"),
        (replace(STILL, rest_seconds=60.0, written=NOW - 95), "stopped", "nothing for"),
        (replace(OWNED, running=LongRun("m", 2, 300.0)), "stuck", "attempt 2"),
        (replace(OWNED, running=LongRun("m", 2, 299.0)), "ok", ""),
        (
            replace(OWNED, running=LongRun("m", 2, 60.0, 0.2)),
            "stuck",
            "m has run for 1m (usually 0.2s at most) on worker-1, attempt 2.",
        ),
        (
            replace(OWNED, running=LongRun("m", 2, 59.0, 0.2)),
            "ok",
            "m has run for 59s (usually 0.2s at most).",
        ),
        (replace(TIP, running=LongRun("m", 2, 12.0, 0.2)), "ok", "usually 0.2s at most"),
        (replace(OWNED, held="paused by ada"), "paused", "Paused by ada."),
        (FREE, "unowned", "No worker has claimed it"),
        (replace(FREE, unclaimed="assigned to w"), "unowned", "assigned to w"),
        (replace(FREE, untaken="no job"), "no-job", "No worker has a job"),
        (replace(FREE, untaken=POOL), "no-job", "It has the name of a pool"),
        (replace(FREE, untaken="excluded by all workers"), "no-worker", "leave it out"),
        (replace(FREE, waits_for=("shard-1",), behind_seconds=9.0), "ok", "shard-1"),
        (replace(FREE, waits_for=("shard-1",)), "lagging", "shard-1"),
        (replace(OWNED, owner_gone=True, written=NOW - 90), "ok", "no owner yet"),
        (
            replace(OWNED, reported=NOW - 40, behind_seconds=40.0),
            "stopped",
            "has not reported for 40s",
        ),
        (STILL, "stopped", "recorded nothing for 45s"),
        (
            replace(STILL, behind_seconds=None, in_flight=2),
            "stopped",
            "about 2 messages are in flight: another consumer",
        ),
        (replace(OWNED, in_flight=2), "ok", ""),
        (
            replace(OWNED, behind_seconds=60.0, running=LongRun("m", 1, 55.0)),
            "lagging",
            "Message m has run for 55s",
        ),
        (replace(OWNED, backlog=None, behind_seconds=None), "unknown", "not asked"),
        (replace(OWNED, backlog=None, behind_seconds=None, error="denied"), "unknown", "Denied."),
    ],
)
def test_one_reading(status: QueueStatus, state: str, said: str) -> None:
    found = verdict(status)
    assert found.state.value == state
    assert said in found.reason
    assert bool(found.remedy) or not (found.state.is_critical and status.fault is None)


def test_a_message_that_hangs_is_named_in_every_state() -> None:
    """Once, with the command that shows where its code stands unless there is a better one."""
    hangs = replace(OWNED, behind_seconds=90.0, running=LongRun("m", 1, 30.0, 0.2))
    late = verdict(hangs)
    blocked = verdict(replace(hangs, marks=BLOCKED))
    assert (late.state, blocked.state) == (QueueHealth.LAGGING, QueueHealth.BLOCKED)
    assert [each.reason.count("Message m has run") for each in (late, blocked)] == [1, 1]
    assert ["qdo ps" in each.remedy for each in (late, blocked)] == [True, False]


def test_the_remedy_of_a_failing_queue_can_be_copied() -> None:
    """With queue, quoted, and message filled in; what will run again is not dropped in haste."""
    failing = verdict(replace(OWNED, marks=FAILED)).remedy
    blocked = verdict(replace(OWNED, marks=BLOCKED)).remedy
    assert failing is not None
    assert blocked is not None
    name, position = shlex.quote(OWNED.queue), FAILED.position
    assert failing == f"qdo retry-now {name}"
    assert blocked.split(", ")[0] == failing
    assert f"qdo dead-letters add {name} {position} or qdo skip {name} {position}" in blocked


@pytest.mark.parametrize(
    ("decision", "said"),
    [("skip", "skip message 101; "), ("dead-letter", "make message 101 a dead letter; ")],
)
def test_a_decision_that_is_not_carried_out_is_not_a_failure(decision: str, said: str) -> None:
    """The message does not run again, and to decide about it once more would be refused."""
    decided = replace(OWNED, marks=replace(FAILED, decision=decision, retry_at=NOW + 600))
    found = verdict(decided)
    who = "its owner worker-1 has not carried it out yet."
    assert found == Verdict(
        QueueHealth.FAILING, f"An operator decided to {said}{who}", "qdo workers worker-1"
    )
    silent = verdict(replace(decided, reported=NOW - 40, behind_seconds=40.0))
    assert (silent.state, silent.remedy) == (QueueHealth.STOPPED, found.remedy)
    assert silent.reason == f"{found.reason} worker-1 has not reported for 40s."
    free = verdict(replace(decided, owner=None, backlog=None, behind_seconds=None))
    assert (free.state, free.remedy) == (QueueHealth.FAILING, "qdo workers")
    assert "no owner has carried it out yet" in free.reason


def test_an_unfinished_deletion_is_to_be_repeated() -> None:
    """Unless the broker no longer has the queue: then nothing is left to delete."""
    marked = replace(FREE, queue="-q", fault="its deletion was begun", deleted=True)
    assert verdict(marked).remedy == "qdo delete -- -q"
    assert verdict(replace(marked, missing=True)).remedy == ""


def test_without_workers_what_waits_has_none() -> None:
    assert verdict(FREE, workers=0).state is QueueHealth.NO_WORKER
    assert verdict(replace(TIP, owner=None), workers=0).state is QueueHealth.IDLE
    assert verdict(FREE, workers=None).state is QueueHealth.UNOWNED


def test_commands_take_a_name_with_a_hyphen_for_no_option() -> None:
    """Also with further arguments and options, and with the characters of globs."""
    odd = replace(OWNED, queue="--all", marks=FAILED)
    assert verdict(odd).remedy == "qdo retry-now -- --all"
    blocked = verdict(replace(odd, marks=BLOCKED)).remedy
    assert "qdo dead-letters add -- --all 101 or qdo skip -- --all 101" in blocked
    hangs = replace(OWNED, queue="-a*", running=LongRun("m", 2, 300.0))
    assert verdict(hangs).remedy == "qdo ps --stacks -- '-a[*]'"
    assert command_text("skip", "a b", "7", options="--yes") == "qdo skip 'a b' 7 --yes"


# --- the cases in which Burrow's rules err --------------------------------------------------


def test_a_job_that_takes_long_is_not_a_stop() -> None:
    """Burrow says STALL: the position has not moved."""
    long = replace(OWNED, written=NOW - 100, behind_seconds=100.0, running=LongRun("m", 1, 90.0))
    found = verdict(long)
    assert found.state is QueueHealth.LAGGING
    assert "m has run for 1m 30s" in found.reason


def test_an_idle_queue_that_gets_a_message_is_not_stopped() -> None:
    """Its last commit is old, because there was nothing to commit."""
    assert verdict(replace(OWNED, written=NOW - 9000, behind_seconds=0.2)).state is QueueHealth.OK


def test_a_queue_at_its_tip_without_a_worker_is_fine() -> None:
    """Burrow says STOP once the last commit is older than the window."""
    gone = replace(TIP, owner="w", owner_gone=True, written=NOW - 9000)
    assert verdict(gone).state is QueueHealth.IDLE


def test_steady_lateness_is_not_catching_up() -> None:
    late = replace(OWNED, behind_seconds=100.0, backlog=50)
    assert verdict(late, replace(late, last=200, backlog=50)).state is QueueHealth.LAGGING


# --- two readings ----------------------------------------------------------------------------


def test_a_smaller_backlog_catches_up_and_has_an_eta() -> None:
    before = replace(OWNED, backlog=1000, behind_seconds=300.0)
    found = verdict(before, replace(before, last=200, backlog=800))
    assert found.state is QueueHealth.CATCHING_UP
    assert found.eta_seconds == pytest.approx(40.0)


def test_a_smaller_age_counts_where_nothing_can_be_counted() -> None:
    before = replace(OWNED, backlog=None, behind_seconds=300.0)
    found = verdict(before, replace(before, behind_seconds=200.0))
    assert found.state is QueueHealth.CATCHING_UP
    assert found.eta_seconds == pytest.approx(20.0)


def test_a_position_that_went_back_without_a_seek_is_noticed() -> None:
    assert verdict(OWNED, replace(OWNED, last=50)).state is QueueHealth.REWOUND
    assert verdict(OWNED, replace(OWNED, last=50, seek=1)).state is QueueHealth.OK


def test_a_queue_that_was_created_again_is_another_one() -> None:
    """It begins at 0, and its smaller backlog tells nothing."""
    before = replace(OWNED, created=7, backlog=1000, behind_seconds=300.0)
    again = replace(before, created=9, last=0, backlog=1, behind_seconds=0.1)
    assert verdict(before, again).state is QueueHealth.OK
    assert verdict(before, replace(again, behind_seconds=90.0)).state is QueueHealth.LAGGING
    assert verdict(before, again, replace(again, last=8)).state is QueueHealth.OK
    assert verdict(before, again, replace(again, created=7)).state is QueueHealth.REWOUND


def test_a_queue_that_is_new_in_the_last_reading_is_judged() -> None:
    readings = [Statuses([], at=NOW - 5, workers=1), Statuses([OWNED], at=NOW, workers=1)]
    ((_, found),) = judge_all(readings)
    assert found.state is QueueHealth.OK


# --- order -----------------------------------------------------------------------------------


def test_a_pause_explains_lateness_but_hides_no_block() -> None:
    held = replace(OWNED, held="paused", behind_seconds=9000.0, written=NOW - 9000)
    assert verdict(held).state is QueueHealth.PAUSED
    blocked = replace(held, marks=replace(FAILED, blocked_since=1.0))
    assert verdict(blocked).state is QueueHealth.BLOCKED


def test_times_can_be_chosen() -> None:
    rules = VerdictRules(late_seconds=2.0, stuck_seconds=5.0)
    assert judge([QueueSample(NOW, OWNED, 1)], rules).state is QueueHealth.LAGGING
    slow = replace(OWNED, running=LongRun("m", 1, 6.0))
    assert judge([QueueSample(NOW, slow, 1)], rules).state is QueueHealth.STUCK


# --- reports of workers ------------------------------------------------------------------------


def test_the_most_specific_job_of_a_queue_has_the_reason() -> None:
    """A report names jobs; one that is too large, or names no such job, gives no reason."""
    facts = {"jobs": ["*", "vip-*"], "waits": {"*": ["crm"]}, "unusable": {"crm": "gone"}}
    (report,) = reported(facts)
    nothing = {"limits": (), "in_line": None, "rest_seconds": 0.0, "paused_job": None}
    assert wait_of("q", report) == {**nothing, "limits": ("crm",)}
    assert unusable_of(("crm",), report) == "gone"
    assert wait_of("vip-1", report) == wait_of("q", WorkerReport()) == nothing
    (large,) = reported(facts | {"jobs": ["*", *["x" * 100] * (MAX_GLOBS_CHARACTERS // 100 + 1)]})
    assert wait_of("q", large) == nothing


def test_messages_beyond_the_longest_runs_may_run() -> None:
    """A report lists a hundred: other queues of a busy worker are not stopped."""
    runs = [[f"q{number}", "id", 1, 50, None] for number in range(MOST_RUNS)]
    for busy, may_run in ((MOST_RUNS, False), (MOST_RUNS + 1, True)):
        (report,) = reported({"busy": busy, "concurrency": 500, "long_runs": runs})
        assert (wait_of("q", report)["in_line"] is not None) == may_run


def reported(*values: Any) -> list[WorkerReport]:
    return [WorkerReport.parse(json.dumps(value).encode()) for value in values]


def test_forged_reports_of_long_runs_are_left_out() -> None:
    good = [["q", "id", 1, 5, None], ["p", "id", 1, 50, 0.2]]
    bad = [None, 7, [], ["q"], ["q", "id", 1, 9], ["q", "id", True, 9, None], [1, 2, 3, 4, 5]]
    bad += [["q", "id", 1, -9, None], ["q", "id", 1, 9, -1], ["q", "id", 1, 9, "1"]]
    unreadable = {"long_runs": [["q", "id", 1, float("nan"), None]]}
    found = long_runs(reported({"long_runs": [*good, *bad]}, {"long_runs": "x"}, {}, unreadable))
    assert found == {"q": LongRun("id", 1, 5.0), "p": LongRun("id", 1, 50.0, 0.2)}


def test_the_longest_run_of_a_queue_counts() -> None:
    found = long_runs(
        reported({"long_runs": [["q", "a", 1, 5, 1]]}, {"long_runs": [["q", "b", 2, 9, None]]})
    )
    assert found == {"q": LongRun("b", 2, 9.0)}
