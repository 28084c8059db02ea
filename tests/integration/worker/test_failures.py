"""A worker and its failing messages: each outcome, each end of a policy, each observer."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import gevent
import pytest

import qdo
from qdo.coordination.znodes.queue_node import FailureRecord
from qdo.errors import PolicyError, UsageError
from qdo.message import Message
from qdo.worker.engine.slot import SlotState
from tests.support.cli import QDO, WORKER, command
from tests.support.engine import EngineSetup, until

LOUD = """
import qdo

app = qdo.App("loud", attempts=4, backoff_seconds=0.01, executor="{executor}")

@app.job("fails")
def fail(message, context):
    raise ValueError("x" * 200_000)

@app.job("chosen")
def choose(message, context):
    raise qdo.Retry(after=0.01) if message.attempt == 1 else qdo.DeadLetter("gone")
"""
FAST = {"backoff_seconds": 0.001, "backoff_max_seconds": 0.002}


class Failing:
    """A job that fails for the body "bad", and the outcome of each attempt."""

    def __init__(self, engine: EngineSetup, policy: qdo.Policy | None = None) -> None:
        self.runs: list[tuple[Any, int]] = []
        self.events: list[qdo.Event] = []
        self.told: list[str] = []
        self.raises: Any = ValueError("no")
        engine.app.job(policy=policy)(self.job)
        engine.app.observer(self.observe)
        engine.app.failure(self.failure)

    def job(self, message: Message, context: Any) -> None:
        self.runs.append((message.body, message.attempt))
        if message.body == "bad":
            raise self.raises

    def observe(self, event: qdo.Event) -> None:
        self.events.append(event)

    def failure(self, message: Message, context: Any, error: BaseException) -> None:
        self.told.append(str(error))

    def outcomes(self) -> list[tuple[int, str]]:
        return [(event.attempt, event.outcome) for event in self.events]


def head(engine: EngineSetup, queue: str = "q") -> FailureRecord | None:
    return engine.member.claims[queue].failure


def test_a_wait_is_not_a_failed_attempt(engine: EngineSetup) -> None:
    """More waits than attempts: nothing is counted, told or lost, and the order is kept."""
    failing = Failing(engine, qdo.Policy(attempts=2, **FAST))
    failing.raises = qdo.Retry(after=0.001, counts=False)
    engine.send("q", "bad", "two")
    engine.start("q")
    until(lambda: len(failing.runs) > 5)
    record = head(engine)
    assert record is not None
    assert (record.attempts, record.retry_delay) == (0, 0.001)
    failing.raises = ValueError("no")
    until(lambda: ("two", 1) in failing.runs)
    attempts = [attempt for body, attempt in failing.runs if body == "bad"]
    assert attempts == [1] * (len(attempts) - 1) + [2]
    assert {outcome for _, outcome in failing.outcomes()[:5]} == {"wait"}
    assert failing.outcomes()[-3:] == [(1, "retry"), (2, "dead-letter"), (1, "done")]
    assert failing.told == ["no", "no"]
    counters = engine.pipeline.counters.dump()
    assert (counters["processed"], counters["failed"], counters["retried"]) == (1, 2, 1)


def test_a_wait_goes_on_after_a_failed_attempt(engine: EngineSetup) -> None:
    """It keeps the number of failed attempts."""
    failing = Failing(engine, qdo.Policy(attempts=3, **FAST))
    failing.raises = qdo.Retry(after=0.001, counts=False)
    engine.send("q", "bad")
    first = engine.broker.reader("q", 0).fetch(1)[0][0]
    engine.registrar.marks["q"] = FailureRecord(first, 1, "no")
    engine.start("q")
    until(lambda: len(failing.runs) > 3)
    assert {attempt for _, attempt in failing.runs} == {2}
    record = head(engine)
    assert record is not None
    assert (record.attempts, record.error) == (1, "Retry: retry after 0.001 s")


def test_a_policy_may_block(engine: EngineSetup) -> None:
    """The queue waits with the message at its head; others of the worker continue."""
    failing = Failing(engine, qdo.Policy(attempts=2, then="block", **FAST))
    engine.send("q", "one", "bad", "two")
    engine.start("q", "other")
    until(lambda: engine.dispatcher.slots["q"].state is SlotState.HELD)
    engine.send("other", "more")
    until(lambda: ("more", 1) in failing.runs)
    assert ("two", 1) not in failing.runs
    marks = head(engine)
    assert marks is not None
    assert (marks.blocked, marks.attempts, marks.error) == (True, 2, "ValueError: no")
    assert marks.position > engine.member.claims["q"].done
    assert [each for each in failing.outcomes() if each[1] == "block"] == [(2, "block")]
    assert engine.member.components is not None
    engine.dispatcher.wake(["q"])  # a new message changes nothing
    assert engine.dispatcher.slots["q"].state is SlotState.HELD


@pytest.mark.parametrize("verdict", ["skip", "dead-letter"])
def test_an_operators_decision_is_acted_upon_before_all_else(
    engine: EngineSetup, verdict: str
) -> None:
    """The message does not run again; the queue continues behind it."""
    failing = Failing(engine, qdo.Policy(attempts=1, then="block"))
    engine.send("q", "bad", "two")
    engine.start("q")
    until(lambda: engine.dispatcher.slots["q"].state is SlotState.HELD)
    marks = head(engine)
    assert marks is not None
    engine.member.decide("q", FailureRecord(marks.position, 1, marks.error, decision=verdict))
    until(lambda: ("two", 1) in failing.runs)
    assert failing.runs == [("bad", 1), ("two", 1)]
    assert (1, verdict) in failing.outcomes()
    assert len(engine.broker.dead_letters.records("q")) == (verdict == "dead-letter")


def test_a_retried_queue_counts_from_one(engine: EngineSetup) -> None:
    """`qdo retry-now` takes the marks away."""
    failing = Failing(engine, qdo.Policy(attempts=1, then="block"))
    engine.send("q", "bad", "two")
    engine.start("q")
    until(lambda: engine.dispatcher.slots["q"].state is SlotState.HELD)
    failing.raises = qdo.Skip("mended")
    engine.member.decide("q", None)
    until(lambda: ("two", 1) in failing.runs)
    assert failing.runs == [("bad", 1), ("bad", 1), ("two", 1)]


def test_a_failing_message_is_retried_now(engine: EngineSetup) -> None:
    """`qdo retry-now` also ends the wait of a message that is not blocked."""
    hour = qdo.Policy(attempts=5, backoff_seconds=3600, backoff_max_seconds=3600)
    failing = Failing(engine, hour)
    engine.send("q", "bad", "two")
    engine.start("q")
    until(lambda: failing.outcomes() == [(1, "retry")])
    failing.raises = qdo.Skip("mended")
    engine.member.decide("q", None)
    until(lambda: ("two", 1) in failing.runs)
    assert failing.runs == [("bad", 1), ("bad", 1), ("two", 1)]


def test_a_blocked_queue_stays_so_for_its_next_owner(engine: EngineSetup) -> None:
    """It is claimed, and nothing of it runs."""
    failing = Failing(engine)
    engine.send("q", "bad", "two")
    engine.registrar.marks["q"] = FailureRecord(1 << 60, 3, "no", blocked_since=1.0)
    engine.start("q")
    until(lambda: engine.dispatcher.slots["q"].state is SlotState.HELD)
    assert failing.runs == []


def test_attempts_go_on_at_the_next_owner(engine: EngineSetup) -> None:
    """Of the message that failed, not of one before it."""
    failing = Failing(engine, qdo.Policy(attempts=4, **FAST))
    engine.send("q", "one", "bad", "two")
    position = engine.broker.reader("q", 0).fetch(2)[1][0]
    engine.registrar.marks["q"] = FailureRecord(position, 2, "ValueError: no")
    engine.start("q")
    until(lambda: ("two", 1) in failing.runs)
    assert failing.runs == [("one", 1), ("bad", 3), ("bad", 4), ("two", 1)]


def test_a_back_off_goes_on_at_the_next_owner(engine: EngineSetup) -> None:
    """A retry asked for in an hour does not come at once because its queue moved."""
    failing = Failing(engine)
    engine.send("q", "bad")
    position = engine.broker.reader("q", 0).fetch(1)[0][0]
    engine.registrar.marks["q"] = FailureRecord(position, 1, "Retry", retry_at=time.time() + 3600)
    engine.start("q")
    until(lambda: engine.dispatcher.slots["q"].state is SlotState.WAITING)
    assert failing.runs == []


def test_a_back_off_is_no_longer_where_another_clock_is_ahead(engine: EngineSetup) -> None:
    """Or where the clock was set back since: the queue waits for the pause, not for the hour."""
    failing = Failing(engine)
    engine.send("q", "bad")
    position = engine.broker.reader("q", 0).fetch(1)[0][0]
    hour = time.time() + 3600
    engine.registrar.marks["q"] = FailureRecord(
        position, 1, "ValueError: no", retry_at=hour, retry_delay=0.05
    )
    engine.start("q")
    until(lambda: ("bad", 2) in failing.runs)


def test_what_is_to_run_again_at_once_is_due_by_every_clock(engine: EngineSetup) -> None:
    """No pause is on record that would bound how long another clock has its queue wait."""
    failing = Failing(engine, qdo.Policy(attempts=100_000))
    failing.raises = qdo.Retry(0)
    engine.send("q", "bad")
    engine.start("q")
    until(lambda: head(engine) is not None)
    marks = head(engine)
    assert marks is not None
    assert (marks.retry_at, marks.retry_delay) == (0, 0)


def test_a_failed_attempt_is_recorded_with_the_release(engine: EngineSetup) -> None:
    """The next owner gets the count with the release."""
    failing = Failing(engine, qdo.Policy(attempts=5, backoff_seconds=30, backoff_max_seconds=60))
    engine.send("q", "bad")
    engine.start("q")
    until(lambda: len(failing.runs) == 1)
    claim = engine.member.claims["q"]
    until(lambda: claim.failure is not None)
    engine.member.take_back("q")
    until(lambda: "q" not in engine.member.claims)
    assert claim.failure is not None
    assert claim.failure.attempts == 1


def test_stop_drains_the_worker_and_counts_nothing(engine: EngineSetup) -> None:
    """The message is not done and has no attempt more; the worker ends in good order."""
    failing = Failing(engine)
    failing.raises = qdo.Stop("the disk is full")
    engine.send("q", "one", "bad", "two")
    engine.start("q")
    claim = engine.member.claims["q"]
    assert engine.join() == 0
    assert failing.runs == [("one", 1), ("bad", 1)]
    assert claim.failure is None
    assert failing.told == []
    assert [(each.outcome, each.error) for each in failing.events][-1] == (
        "stop",
        "the disk is full",
    )
    assert engine.broker.catalog.backlog("q", claim.done).count == 2
    counters = engine.pipeline.counters.dump()
    assert (counters["stopped"], counters["failed"], counters["processed"]) == (1, 0, 1)


def test_a_table_of_the_settings_wins_over_the_decorator(tmp_path: Path) -> None:
    """The most specific glob counts; the decorator supplies all values that it leaves out."""
    tables = [
        {"queues": "*", "attempts": 9},
        {"queues": "pay-*", "then": "skip", "rules": [{"exception": "KeyError", "attempts": 1}]},
    ]
    engine = EngineSetup(tmp_path, policies=tables)
    try:
        failing = Failing(engine, qdo.Policy(attempts=2, **FAST))
        failing.raises = ValueError("no")
        engine.send("pay-1", "bad", "two")
        engine.start("pay-1")
        until(lambda: ("two", 1) in failing.runs)
        assert failing.outcomes() == [(1, "retry"), (2, "skip"), (1, "done")]
        failing.events.clear()
        failing.raises = KeyError("k")
        engine.send("pay-1", "bad", "three")
        until(lambda: ("three", 1) in failing.runs)
        assert failing.outcomes() == [(1, "skip"), (1, "done")]
    finally:
        engine.close()


@pytest.mark.parametrize("name", ["Nothing", "no.such:Error", "os:path", "qdo.outcomes:Skip"])
def test_an_exception_that_cannot_be_had_is_refused_at_the_start(tmp_path: Path, name: str) -> None:
    """Not when the first message fails."""
    rules = [{"exception": name, "attempts": 1}]
    engine = EngineSetup(tmp_path, policies=[{"queues": "*", "rules": rules}])
    Failing(engine)
    try:
        with pytest.raises(PolicyError):
            engine.worker.run()
    finally:
        engine.close()


def test_an_observer_without_a_parameter_is_refused(engine: EngineSetup) -> None:
    with pytest.raises(UsageError, match=r"def wrong\(event\)"):

        @engine.app.observer
        def wrong() -> None: ...


def test_an_observer_that_fails_changes_nothing(
    engine: EngineSetup, caplog: pytest.LogCaptureFixture
) -> None:
    """Its error is logged, and the other observers are called."""

    @engine.app.observer
    def broken(event: qdo.Event) -> None:
        raise SystemExit("no")

    failing = Failing(engine)
    engine.send("q", "one", "two")
    engine.start("q")
    until(lambda: len(failing.events) == 2)
    first = failing.events[0]
    assert (first.queue, first.outcome, first.error, first.attempt) == ("q", "done", None, 1)
    assert (first.worker, first.seconds >= 0) == (engine.member.name, True)
    assert first.message_id
    records = [each for each in caplog.records if each.name.endswith(".observers")]
    assert {each.args for each in records} == {("q",)}
    assert {each.exc_info and each.exc_info[0] for each in records} == {SystemExit}


def test_a_lost_queue_is_observed(engine: EngineSetup) -> None:
    """Its message runs again elsewhere."""
    failing = Failing(engine)
    started = gevent.event.Event()
    go_on = gevent.event.Event()

    class Waiting(Exception):
        pass

    def job(message: Message, context: Any) -> None:
        started.set()
        go_on.wait()
        raise Waiting

    engine.app.job("lost")(job)
    engine.send("lost", "one")
    engine.start("lost")
    started.wait(5)
    engine.member.lose("lost")
    go_on.set()
    until(lambda: failing.outcomes() == [(1, "lost")])


def test_without_observers_the_job_itself_is_called(engine: EngineSetup) -> None:
    """A healthy message pays nothing."""
    from qdo.worker.engine.observers import Observers

    def job(message: Message, context: Any) -> None: ...

    assert Observers(()).bind(job) is job


class UnprintableError(Exception):
    """Cannot be shown."""

    def __str__(self) -> str:
        raise SystemExit("no text")

    __repr__ = __str__


def test_an_error_that_cannot_be_shown_ends_as_any_other(engine: EngineSetup) -> None:
    """Neither the log nor the record nor an observer makes the worker fail."""
    events: list[qdo.Event] = []
    engine.app.observer(events.append)

    @engine.app.job(policy=qdo.Policy(attempts=2, **FAST))
    def job(message: Message, context: Any) -> str:
        if message.body == "bad":
            raise UnprintableError
        return "a value that is ignored"

    engine.send("q", "bad", "two")
    engine.send("other", "one")
    engine.start("q", "other")
    until(lambda: [each.outcome for each in events if each.queue == "q"][-1:] == ["done"])
    until(lambda: any(each.queue == "other" for each in events))
    outcomes = [each.outcome for each in events if each.queue == "q"]
    assert outcomes == ["retry", "dead-letter", "done"]
    assert "UnprintableError" in str(next(each for each in events if each.queue == "q").error)


def test_observers_keep_nothing_of_a_released_queue(engine: EngineSetup) -> None:
    """Queues come and go for months; one that comes again has its worker's name."""
    failing = Failing(engine)
    engine.start()
    for number in (1, 2):
        engine.send("q", number)
        engine.member.grant("q")
        until(lambda number=number: len(failing.events) == number)  # type: ignore[misc]
        engine.member.take_back("q")
        until(lambda: "q" not in engine.dispatcher.slots)
        assert engine.pipeline._engine.observers.workers == {}
    assert [event.worker for event in failing.events] == [engine.member.name] * 2


# --- what the log shows ------------------------------------------------------------------


@pytest.mark.parametrize("executor", ["greenlet", "process"])
def test_the_log_has_the_first_and_last_traceback(tmp_path: Path, executor: str) -> None:
    """At every level, with file and line, and of limited length, like the error itself."""
    (tmp_path / "loud.py").write_text(LOUD.format(executor=executor))
    for queue in ("fails", "chosen"):
        assert command(*QDO, "send", "--app", "loud", queue, "1", cwd=tmp_path).code == 0
    work = (*WORKER, "loud:app", "--burst", "--log-level", "warning")
    ended = command(*work, cwd=tmp_path)
    assert ended.code == 0
    lines = ended.err.splitlines()
    assert sum("loud.py" in line and "line 8" in line for line in lines) == 2, ended.err
    assert 'loud.py", line 12' not in ended.err  # an outcome is not an error
    assert max(map(len, lines)) < 10_000
    assert len(ended.err) < 60_000
    letters = command(*QDO, "dead-letters", "--app", "loud", "-o", "jsonl", cwd=tmp_path)
    found = {letter["queue"]: letter for letter in map(json.loads, letters.out.splitlines())}
    assert found["fails"]["error"].startswith("ValueError: xxx")
    assert len(found["fails"]["error"]) < 1_100
    assert len(found["fails"]["traceback"]) < 20_000
