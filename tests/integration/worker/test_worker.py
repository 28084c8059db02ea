"""The worker engine on the embedded broker; the tests play the coordinator."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import gevent
import pytest
from gevent.event import Event

from qdo.brokers.embedded.reader import CommitListener
from qdo.coordination.protocol.claims import Claim
from qdo.errors import (
    CoordinatorAccountError,
    CoordinatorUnreachableError,
    NodeRefusedError,
    QdoError,
)
from qdo.message import Message
from qdo.outcomes import DeadLetter
from qdo.system.processes import SIGN
from qdo.worker.duties import watchdog
from qdo.worker.duties.burst import FleetSurvey
from qdo.worker.engine.slot import ClaimReports, Slot, TurnResult
from qdo.worker.executors.base import JobAborted
from tests.support.engine import EngineSetup, until

_pause = time.sleep
"""For job threads, also where gevent has patched the module."""


def of(seen: list[tuple[str, Any]], queue: str) -> list[Any]:
    return [body for name, body in seen if name == queue]


# --- order, fairness, wake-up ---------------------------------------------------------


def test_every_queue_is_processed_in_order_and_recorded(engine: EngineSetup) -> None:
    """Sent before and after the claim; nothing twice."""
    seen = engine.collect("queue", "body")
    queues = [f"q{number}" for number in range(20)]
    engine.app.send_many([(queue, number) for number in range(100) for queue in queues])
    engine.start(*queues)
    engine.app.send_many([(queue, number) for number in range(100, 200) for queue in queues])
    until(lambda: len(seen) >= 4000)
    for queue in queues:
        assert of(seen, queue) == list(range(200))
    assert engine.end() == 0
    for queue in queues:
        assert engine.registrar.recorded[queue] == engine.broker.catalog.backlog(queue, 0).head
    assert engine.member.stopped.is_set()


def test_an_idle_queue_is_woken_without_polling(engine: EngineSetup) -> None:
    """No fetch while nothing is sent: what starts a message is its wake-up."""
    started = engine.collect()
    engine.start("q")
    until(engine.dispatcher.all_idle)
    turns: list[str] = []
    pipeline = engine.pipeline
    plain = pipeline.turn

    def turn(slot: Slot, member: ClaimReports, claim: Claim) -> TurnResult:
        turns.append(slot.queue)
        return plain(slot, member, claim)

    pipeline.turn = turn  # type: ignore[method-assign]
    gevent.sleep(0.3)
    assert turns == []
    for count in range(1, 21):
        engine.send("q", count)
        until(lambda count=count: len(started) == count)  # type: ignore[misc]
    assert len(turns) <= 41  # the message's own and one that finds the tip


# --- claims that end ------------------------------------------------------------------


class Gated:
    """A job that stops in message `body` until the test lets it continue."""

    def __init__(self, engine: EngineSetup, body: Any) -> None:
        self.body = body
        self._engine = engine
        self.entered = Event()
        self.gate = Event()
        self.seen: list[tuple[Any, int]] = []
        self.ended: list[Any] = []
        engine.app.job()(self.job)

    def begin(self, *queues: str) -> None:
        """Send three messages to the queue `q`, and start the worker; return at the gate."""
        self._engine.send("q", 1, 2, 3)
        self._engine.start(*queues)
        self.entered.wait()

    def job(self, message: Message, context: Any) -> None:
        self.seen.append((message.body, message.fence))
        if message.body == self.body and not self.gate.is_set():
            self.entered.set()
            self.gate.wait()
        self.ended.append(message.body)


def test_a_queue_given_back_finishes_its_message_and_records_it(engine: EngineSetup) -> None:
    """`finished` comes after the message in flight; the next owner repeats nothing."""
    gated = Gated(engine, 2)
    gated.begin("q")
    engine.member.take_back("q")
    assert ("finished", "q") not in engine.member.events
    gated.gate.set()
    until(lambda: ("finished", "q") in engine.member.events)
    assert gated.ended == [1, 2]
    engine.member.grant("q")
    until(lambda: gated.ended == [1, 2, 3])


# --- registrations --------------------------------------------------------------------


@pytest.mark.parametrize(("executor", "sleep"), [("greenlet", gevent.sleep), ("thread", _pause)])
def test_a_job_that_waited_does_not_start_in_a_later_session(
    engine: EngineSetup, executor: Any, sleep: Callable[[float], None]
) -> None:
    """Its middleware waited; another worker may have run the message in between."""
    steps: list[str] = []
    go: list[bool] = []

    @engine.app.middleware
    def wait(call_next: Any, message: Message, context: Any) -> None:
        steps.append("waits")
        try:
            while not go:
                sleep(0.01)
            call_next(message, context)
        finally:
            steps.append("over")

    @engine.app.job(executor=executor)
    def job(message: Message, context: Any) -> None:
        steps.append("job")

    engine.send("q", 1)
    engine.start("q")
    until(lambda: steps == ["waits"])
    engine.member.expire()
    until(SIGN.leased)
    go.append(True)
    until(lambda: "over" in steps)
    engine.member.grant("q")
    until(lambda: len(steps) > 4)
    assert steps == ["waits", "over", "waits", "job", "over"]


@pytest.mark.parametrize(
    "refusal",
    [
        CoordinatorUnreachableError(url="x", reason="away"),
        CoordinatorAccountError(url="x", account="account sasl:app"),
        NodeRefusedError(path="/x", account="account sasl:app"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_a_lost_session_is_followed_by_a_new_registration(
    engine: EngineSetup, refusal: QdoError
) -> None:
    """The worker retries whatever refuses it, and old greenlets never touch the new one."""
    gated = Gated(engine, 2)
    gated.begin("q")
    old = engine.member
    engine.registrar.refusals = [refusal] * 2
    old.expire()
    until(lambda: len(engine.registrar.members) == 2 and engine.member.started.is_set())
    assert old.stopped.is_set()
    engine.member.grant("q")
    said = list(old.events)
    gated.gate.set()
    until(lambda: gated.ended[-1:] == [3])
    assert old.events == said
    assert gated.ended.count(2) == 2
    assert engine.end() == 0


def test_a_stop_before_the_registration_ends_the_worker(engine: EngineSetup) -> None:
    """Asked to stop at once, it does."""
    engine.collect("queue", "body")
    engine.worker.request_stop()
    assert engine.worker.run() == 0


# --- the way down ---------------------------------------------------------------------


def test_draining_takes_no_message_more_and_repeats_none(engine: EngineSetup) -> None:
    """The message in flight is finished and recorded; the context outlives it."""
    story: list[str] = []

    @engine.app.context
    @contextlib.contextmanager
    def context() -> Iterator[dict[str, int]]:
        story.append("set up")
        yield {"value": 5}
        story.append("torn down")

    entered, gate = Event(), Event()

    @engine.app.job()
    def job(message: Message, context: Any) -> None:
        entered.set()
        gate.wait()
        story.append(f"job {message.body} {context['value']}")

    engine.send("q", 1, 2)
    engine.start("q")
    entered.wait()
    engine.stop()
    until(lambda: engine.worker.state == "draining")
    gate.set()
    assert engine.join() == 0
    assert story == ["set up", "job 1 5", "torn down"]
    assert engine.broker.catalog.backlog("q", engine.registrar.recorded["q"]).count == 1


def test_unfinished_jobs_are_logged_and_aborted(
    make: Callable[..., EngineSetup], caplog: pytest.LogCaptureFixture
) -> None:
    """Exit code 1; its message is not done."""
    engine = make(drain_seconds=0.05)
    ids: list[str] = []
    aborted: list[BaseException] = []

    @engine.app.job()
    def job(message: Message, context: Any) -> None:
        ids.append(message.id)
        try:
            Event().wait()
        except JobAborted as error:
            aborted.append(error)
            raise

    engine.send("slow", 1)
    engine.start("slow", "idle")
    until(lambda: ids)
    assert engine.end() == 1
    assert len(aborted) == 1
    (record,) = [each for each in caplog.records if ids[0] in map(str, each.args or ())]
    assert (record.name, record.levelname) == ("qdo.worker.drain", "ERROR")
    assert "slow" in (record.args or ())
    assert engine.registrar.recorded.get("slow", 0) == 0
    assert ("finished", "slow") in engine.member.events
    assert engine.broker.dead_letters.records() == []


def test_a_second_stop_aborts_at_once(make: Callable[..., EngineSetup]) -> None:
    """Long before `drain_seconds` are over."""
    engine = make(drain_seconds=3600)
    gated = Gated(engine, 1)
    engine.send("q", 1)
    engine.start("q")
    gated.entered.wait()
    engine.stop()
    until(lambda: engine.worker.state == "draining")
    assert engine.end() == 1
    assert gated.ended == []
    assert ("finished", "q") in engine.member.events


def test_draining_without_a_session_waits_for_running_jobs(engine: EngineSetup) -> None:
    """The context is not torn down under them."""
    story: list[str] = []

    @engine.app.context
    @contextlib.contextmanager
    def context() -> Iterator[None]:
        yield
        story.append("torn down")

    entered, gate = Event(), Event()

    @engine.app.job()
    def job(message: Message, context: Any) -> None:
        entered.set()
        gate.wait()
        story.append("job")

    engine.send("q", 1)
    engine.start("q")
    entered.wait()
    engine.registrar.refusals = [CoordinatorUnreachableError(url="x", reason="away")] * 1000
    engine.member.expire()
    until(lambda: len(engine.registrar.refusals) < 1000)
    engine.stop()
    until(lambda: engine.worker.state == "draining")
    gate.set()
    assert engine.join() == 1, "its progress is not recorded"
    assert story == ["job", "torn down"]


def test_a_duty_that_dies_stops_the_worker(
    engine: EngineSetup, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is named, with exit code 1; messages in flight are finished and queues released."""
    seen = engine.collect("queue", "body")
    engine.send("q", 1)
    engine.start("q")
    until(lambda: seen)

    def broken() -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(engine.dispatcher, "note_progress", broken)
    assert engine.join() == 1
    assert ("CRITICAL", ("progress",)) in [(each.levelname, each.args) for each in caplog.records]
    assert ("finished", "q") in engine.member.events


def test_a_thread_that_dies_stops_the_worker(
    engine: EngineSetup, caplog: pytest.LogCaptureFixture, monkeypatch: Any
) -> None:
    """Without its doorbell thread a worker would own queues that nothing wakes."""
    seen = engine.collect("queue", "body")
    engine.send("q", 1)
    engine.start("q")
    until(lambda: seen)

    def broken(listener: CommitListener) -> float:
        raise OSError("a bug")

    monkeypatch.setattr(CommitListener, "step", broken)
    engine.send("q", 2)
    assert engine.join() == 1
    assert ("CRITICAL", ("doorbell",)) in [(each.levelname, each.args) for each in caplog.records]


def test_a_failed_coordination_loop_stops_the_worker(
    engine: EngineSetup, caplog: pytest.LogCaptureFixture
) -> None:
    """A member that died of a bug is not replaced by the next that would."""
    engine.collect("queue", "body")
    engine.start("q")
    engine.member.failure = RuntimeError("a bug")
    engine.member.expire()
    assert engine.join() == 1
    assert ("CRITICAL", ("registration",)) in [
        (each.levelname, each.args) for each in caplog.records
    ]


# --- burst, discovery, watchdog -------------------------------------------------------


def test_burst_ends_when_everything_is_done(make: Callable[..., EngineSetup]) -> None:
    """Not while a queue of the broker has no worker, or waits at another one."""
    engine = make(burst=True)
    seen = engine.collect("queue", "body")
    surveys: list[FleetSurvey] = []
    plain = engine.registrar.survey

    def survey(queues: Iterable[str]) -> FleetSurvey:
        surveys.append(plain(queues))
        return surveys[-1]

    engine.registrar.survey = survey  # type: ignore[method-assign]
    engine.send("q", *range(50))
    engine.send("orphan", 1)
    engine.send("elsewhere", 1)
    engine.registrar.elsewhere["elsewhere"] = 0
    engine.start("q")
    waiting = FleetSurvey(unattended=["orphan"], elsewhere={"elsewhere": 0})
    until(lambda: surveys and surveys[-1] == waiting)
    engine.member.grant("orphan")
    until(lambda: surveys[-1] == FleetSurvey(unattended=[], elsewhere={"elsewhere": 0}))
    count = len(surveys)
    until(lambda: len(surveys) > count)
    assert not engine.ended()
    engine.registrar.elsewhere["elsewhere"] = engine.broker.catalog.backlog("elsewhere", 0).head
    assert engine.join() == 0
    assert len(seen) == 51


def test_burst_waits_for_a_message_that_is_retried(make: Callable[..., EngineSetup]) -> None:
    """A queue in backoff is not done."""
    engine = make(burst=True, attempts=3)
    attempts: list[int] = []

    @engine.app.job()
    def job(message: Message, context: Any) -> None:
        attempts.append(message.attempt)
        raise ValueError

    engine.send("q", 1)
    engine.start("q")
    assert engine.join() == 0
    assert attempts == [1, 2, 3]
    assert len(engine.broker.dead_letters.records()) == 1


def test_the_leader_creates_what_the_broker_knows(engine: EngineSetup) -> None:
    """All at first, and new queues as soon as they get a message."""
    engine.collect("queue", "body")
    engine.send("old", 1)
    engine.start()
    engine.member.leading = True
    until(lambda: engine.member.created == ["old"])
    engine.send("new", 1)
    engine.send("newer", 1)
    until(lambda: sorted(engine.member.created) == ["new", "newer", "old"])


def test_only_jobs_are_told_to_yield(
    make: Callable[..., EngineSetup], caplog: pytest.LogCaptureFixture
) -> None:
    """A hook of a job in a thread, and code outside of jobs, block the loop by themselves."""
    engine = make(session_timeout_seconds=1.0)

    def block(text: str) -> None:
        deadline = time.monotonic() + 10
        while text not in caplog.text and time.monotonic() < deadline:
            time.sleep(0.01)

    @engine.app.job(executor="thread")
    def job(message: Message, context: Any) -> None:
        pass

    @engine.app.observer
    def observe(event: Any) -> None:
        block("by queue q")

    engine.send("q", 1)
    engine.start("q")
    until(lambda: "runs again after" in caplog.text)
    gevent.spawn(block, "outside of jobs").join()
    text = caplog.text
    assert text.count("has been blocked for") == text.count("Make the code") == 2
    # The parent of a process ends it, and the attempt fails; this worker has no parent.
    assert "the process is ended" not in text


@pytest.mark.parametrize("limit", [0.4, 600.0])
def test_a_context_has_a_limit_of_its_own(
    make: Callable[..., EngineSetup],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    limit: float,
) -> None:
    """It computes for longer than a job may block the loop: starting is no blocked job."""
    monkeypatch.setattr(watchdog, "PATIENCE", 0.2)
    monkeypatch.setattr(watchdog, "OVERDUE_SECONDS", 0.0)
    monkeypatch.setattr(watchdog, "START_SECONDS", limit)
    engine = make(session_timeout_seconds=1.0)
    codes: list[int] = []
    builder = engine.worker._builder
    builder.process = replace(builder.process, exit=codes.append)

    @engine.app.context
    def resources() -> Iterator[None]:
        end = time.monotonic() + 0.8
        while time.monotonic() < end:
            time.sleep(0.01)
        yield

    with caplog.at_level("INFO"):
        engine.start()
    assert bool(codes) == (limit < 0.8)
    assert f"after {limit:g} s the process is ended" in caplog.text
    assert (f"has computed for more than {limit:g} s" in caplog.text) == bool(codes)


def test_the_component_says_what_the_worker_does(engine: EngineSetup) -> None:
    """State and counts; the last word is draining."""

    @engine.app.job()
    def job(message: Message, context: Any) -> None:
        if message.body == 2:
            raise DeadLetter("bad")

    engine.send("q", 1, 2, 3)
    engine.start("q")
    until(lambda: engine.pipeline.counters.attempts == 3)
    engine.stop()
    engine.join()
    last = engine.member.components[-1]
    assert (last["state"], last["processed"], last["dead_lettered"]) == ("draining", 2, 1)
    hour = last["last_hour"]
    assert [sum(hour[name]) for name in ("done", "failed", "dead_lettered")] == [2, 1, 1]
    assert engine.worker.state == "stopped"
