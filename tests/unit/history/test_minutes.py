"""Totals of minutes: nothing is counted twice, and nothing disappears unnoticed."""

from __future__ import annotations

import pytest

from qdo.errors import SettingsError
from qdo.fleet.audit_entries import AuditEntry
from qdo.history.address import history_error
from qdo.history.recorder import (
    BOUNDS,
    FIRST_BUCKET,
    MAX_KEPT,
    SLOW_SECONDS,
    Recorder,
    bucket_of,
    percentile,
)
from qdo.history.writer import IDLE_SECONDS, Minutes, attempts_in, pause_after
from qdo.message import Batch, Message
from qdo.settings.settings import Settings
from qdo.worker.duties.leading import keep_action


class RecordedMinutes(Minutes):
    """The totals of a worker whose job does nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.recorder = Recorder()
        self._call = self.recorder.bind(lambda message, context: None)

    def attempt(self, at: float, count: int = 1, *queues: str) -> None:
        """Run a job so often in each queue; look at the counts at a time."""
        for queue in queues or ("q",):
            for position in range(count):
                self._call(Message(queue, position, None), None)
        self.collect(self.recorder.counts, at)


@pytest.fixture
def minutes() -> RecordedMinutes:
    return RecordedMinutes()


def total(minutes: Minutes) -> int:
    return sum(attempts_in(counts) for _, counts in minutes.unstored())


def test_minutes_hold_totals_and_not_increments(minutes: RecordedMinutes) -> None:
    minutes.attempt(60.0, 3)
    (first,) = minutes.unstored()
    minutes.confirm([first])
    minutes.attempt(61.0, 2)
    (second,) = minutes.unstored()
    assert first[0] == second[0] == ("q", 60)
    assert [attempts_in(each) for each in (first[1], second[1])] == [3, 5]


def test_a_row_that_grew_while_it_was_written_stays_unstored(minutes: RecordedMinutes) -> None:
    minutes.attempt(60.0)
    written = minutes.unstored()
    minutes.attempt(60.5)
    minutes.confirm(written)
    assert total(minutes) == 2


def test_rows_above_the_limit_are_counted_and_dropped(minutes: RecordedMinutes) -> None:
    minutes.attempt(60.0, 2, *(f"q{number}" for number in range(MAX_KEPT + 7)))
    minutes.limit()
    assert (len(minutes), minutes.dropped) == (MAX_KEPT, 14)


def test_what_was_stored_of_a_dropped_row_stays_stored(minutes: RecordedMinutes) -> None:
    minutes.attempt(60.0, 3)
    minutes.confirm(minutes.unstored())
    minutes.attempt(61.0, 4)
    minutes.limit(0)
    minutes.attempt(62.0, 5)
    assert (total(minutes), minutes.dropped) == (3 + 5, 4)


def test_idle_queues_are_forgotten_and_their_counts_kept(minutes: RecordedMinutes) -> None:
    minutes.attempt(60.0, 3)
    held = minutes.recorder.counts["q"]
    minutes.collect(minutes.recorder.counts, 60.0 + IDLE_SECONDS)
    assert minutes.recorder.counts == {}
    held[FIRST_BUCKET] += 1  # the loop had looked the list up before it was removed
    minutes.attempt(61.0 + IDLE_SECONDS, 5)
    minutes.collect(minutes.recorder.counts, 62.0 + IDLE_SECONDS)
    assert total(minutes) == 9


def test_stored_minutes_take_no_memory(minutes: RecordedMinutes) -> None:
    for minute in range(100):
        minutes.attempt(60.0 * minute)
        minutes.confirm(minutes.unstored())
    assert len(minutes._totals) <= 2


def test_durations_are_counted_by_class() -> None:
    assert [bucket_of(each) for each in (0.0, 0.00009, 0.0002, 1e9)] == [0, 0, 1, len(BOUNDS)]
    counts = [90, 0, 9, *[0] * 12, 1]
    assert percentile(counts, 0.5) == BOUNDS[0]
    assert percentile(counts, 0.95) == BOUNDS[2]
    assert percentile(counts, 1.0) == BOUNDS[-1]
    assert percentile([0] * 16, 0.95) is None


def test_slow_and_failed_attempts_get_rows_of_their_own() -> None:
    times = iter((0.0, SLOW_SECONDS, 20.0, 23.0))
    recorder = Recorder(clock=lambda: next(times), now=lambda: 5.0)

    def job(message: Message, context: object) -> None:
        if message.position:
            raise ValueError("broken")

    call = recorder.bind(job)
    call(Message("q", 0, None, id="slow"), None)
    failing = Message("q", 1, None, id="bad", attempt=2)
    with pytest.raises(ValueError, match="broken"):
        call(failing, None)
    recorder.ended(failing, "retry", "ValueError: with a secret")
    slow, bad = recorder.runs
    assert (slow.id, slow.outcome, slow.seconds) == ("slow", "done", SLOW_SECONDS)
    assert (bad.id, bad.outcome, bad.attempt, bad.seconds) == ("bad", "retry", 2, 3.0)
    assert bad.error == "ValueError: with a secret"


def test_runs_above_the_limit_are_counted_and_dropped() -> None:
    recorder = Recorder()
    for position in range(MAX_KEPT + 3):
        recorder.ended(Message("q", position, None), "dead-letter", "E")
    assert (len(recorder.runs), recorder.dropped_runs) == (MAX_KEPT, 3)


def test_messages_of_a_batch_share_its_time() -> None:
    times = iter((0.0, 4.0))
    recorder = Recorder(clock=lambda: next(times))
    batch = Batch([Message("q", 1, None), Message("q", 2, None)])
    recorder.bind_batch(lambda batch, context: None)(batch, None)  # type: ignore[arg-type]
    recorder.batch_done(batch)
    assert recorder.counts["q"][FIRST_BUCKET + bucket_of(2.0)] == 2


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("mysql://host/db", "must have the form sqlite:PATH or postgresql://"),
        ("postgresql://ann:secret@host/db", "must not contain a password"),
        ("postgresql://host/db?schema=x", "has no option 'schema'"),
        ("sqlite:", "must name a file"),
        ("mysql://ann:secret@host/db", r"\*\*\*@host"),
    ],
)
def test_invalid_addresses_are_refused_without_passwords(url: str, reason: str) -> None:
    with pytest.raises(SettingsError, match=reason) as caught:
        Settings(app="a", history=url)
    assert caught.value.exit_code == 2
    assert "secret" not in str(caught.value)


def test_the_thread_writes_less_often_with_many_queues() -> None:
    assert [pause_after(taken) for taken in (0.0, 0.03, 0.3)] == [1.0, 1.0, pytest.approx(6.0)]


def test_a_history_is_optional() -> None:
    assert history_error("") is None
    assert Settings(app="a").history == ""


def test_actions_have_limited_room() -> None:
    recorder = Recorder()
    entry = AuditEntry("1", 1.0)
    assert all(keep_action(recorder, entry) for _ in range(MAX_KEPT))
    assert not keep_action(recorder, entry)
    assert len(recorder.actions) == MAX_KEPT


def test_claims_cost_the_loop_only_appends() -> None:
    """Nothing is written without a thread that takes the rows."""
    recorder = Recorder()
    for fence in range(10_000):
        recorder.owners.claimed("q", fence, "worker-1")
        recorder.owners.ended("q", fence, "drained")
    assert len(recorder.owners.pending) == 20_000
