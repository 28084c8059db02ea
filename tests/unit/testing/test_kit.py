"""The testing kit: its runs, its results, and the calls it rejects."""

from __future__ import annotations

import asyncio
import datetime
import importlib
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import qdo
from qdo.errors import (
    NoJobError,
    NotFailingError,
    NotFoundError,
    NotSettledError,
    PolicyError,
    SettingsError,
    UsageError,
)
from qdo.ops.decisions import OperatorDecision
from qdo.system.clock import clock
from qdo.testing import POINTS, Clock, TestKit
from qdo.testing.clock import PATCHED, START

Act = Callable[[qdo.Message, Any], Any]


class KitSetup:
    """An app with one job, whose doing the test decides.

    :ivar seen: body and attempt of each start.
    """

    def __init__(self) -> None:
        self.seen: list[tuple[Any, int]] = []
        self.acts: dict[Any, Act] = {}
        self.contexts: list[str] = []
        self.app = qdo.App("stage", job_context=self._context)
        self.policy = qdo.Policy(attempts=3, backoff_seconds=2, backoff_max_seconds=60)

    def _context(self) -> Iterator[str]:
        self.contexts.append("entered")
        yield "shared"
        self.contexts.append("left")

    def job(self, **options: Any) -> None:
        self.app.job(**{"policy": self.policy, **options})(self._job)

    def _job(self, message: qdo.Message, context: Any) -> None:
        self.seen.append((message.body, message.attempt))
        act = self.acts.get(message.body)
        if act is not None:
            act(message, context)

    def on(self, body: Any, act: Act) -> None:
        self.acts[body] = act


def fail(message: qdo.Message, context: Any) -> None:
    raise ValueError("no")


@pytest.fixture
def stage() -> KitSetup:
    return KitSetup()


@pytest.fixture
def kit(stage: KitSetup) -> Iterator[TestKit]:
    stage.job()
    with TestKit(stage.app) as kit:
        yield kit


# --- sending and running ---------------------------------------------------------------


def test_messages_are_run_in_order_with_the_context(stage: KitSetup, kit: TestKit) -> None:
    """Everything that a job gets in a worker it gets here."""
    got: list[tuple[Any, ...]] = []
    stage.on("one", lambda message, context: got.append((message.key, message.headers, context)))
    sent = kit.send("q", "one", "key", {"a": "b"})
    stage.app.send_many([("q", "two"), ("p", b"raw")])
    assert stage.seen == []
    kit.run_until_idle()
    assert got == [("key", {"a": "b"}, "shared")]
    assert kit.done("q") == ["one", "two"]
    assert kit.done("p") == [b"raw"]
    first = kit.attempts("q")[0]
    assert (first.id, first.outcome, first.key, first.error) == (sent, "done", "key", None)
    assert kit.last("q") == first.position + 1
    assert (kit.waiting("q"), kit.backlog("q").count) == ([], 0)


def test_a_job_that_sends_is_followed_by_what_it_sent(stage: KitSetup, kit: TestKit) -> None:
    """To its own queue, and to one that did not exist."""
    stage.on("one", lambda message, context: stage.app.send_many([("q", "two"), ("new", "three")]))
    kit.send("q", "one")
    kit.run_until_idle()
    assert sorted(kit.done()) == ["one", "three", "two"]


def test_every_run_is_the_same(stage: KitSetup) -> None:
    """Ids, positions and fences, too: tests may compare them."""
    stage.job()
    stage.on("bad", fail)

    def play() -> list[Any]:
        with TestKit(stage.app) as kit:
            for body in ("one", "bad", "two"):
                kit.send("q", body)
                kit.send("p", body, delay_seconds=5)
            kit.run_until_settled()
            return [*kit.attempts(), *kit.steps]

    assert play() == play()


def test_messages_of_a_queue_without_a_job_wait(stage: KitSetup) -> None:
    """As in a worker; the others are run."""
    stage.job(queues="known")
    with TestKit(stage.app, without_job="un*") as kit:
        kit.send("unknown", 1)
        kit.send("known", 2)
        kit.run_until_idle()
        assert (kit.waiting("unknown"), kit.done()) == ([1], [2])


def test_messages_that_remain_without_a_job_fail_the_test(stage: KitSetup) -> None:
    """Also delayed ones; the app gets its broker back all the same."""
    stage.job(queues="known")
    kit = TestKit(stage.app, without_job=["fax-*", "letter"])
    kit.send("misspelled", 1)
    kit.send("misspelled", 2, delay_seconds=60)
    for queue in ("other", "fax-1", "letter", "known"):
        kit.send(queue, 1)
    stage.app.request("known", 1)  # the job takes messages of this name
    kit.run_until_idle()
    with pytest.raises(NoJobError) as caught:
        kit.close()
    assert caught.value.details == {
        "waiting": "2 messages of queue 'misspelled', 1 message of queue 'other', 1 request of"
        " pool 'known'",
        "globs": "'misspelled', 'other', 'known'",
    }
    with TestKit(stage.app) as again:
        assert again.waiting("misspelled") == []


def test_another_failure_of_the_test_comes_first(stage: KitSetup) -> None:
    """A missing job does not hide it."""
    stage.job(queues="known")

    def fails() -> None:
        with TestKit(stage.app) as kit:
            kit.send("unknown", 1)
            raise LookupError

    with pytest.raises(LookupError):
        fails()


def test_what_never_comes_to_rest_is_ended(stage: KitSetup) -> None:
    """The error names the thing to check, and the app is free again."""
    stage.job()
    stage.on("again", lambda message, context: stage.app.send("q", "again"))
    with TestKit(stage.app, most_attempts=50) as kit:
        kit.send("q", "again")
        with pytest.raises(NotSettledError) as caught:
            kit.run_until_idle()
        assert "50 attempts" in caught.value.details["goal"]
        assert all(word in caught.value.details["waiting"] for word in ("'q'", "'again'"))
    assert len(stage.seen) == 50


def test_time_does_not_pass_by_itself(stage: KitSetup, kit: TestKit) -> None:
    """Neither for waiting messages nor for the clock."""
    stage.on("bad", fail)
    kit.send("q", "bad")
    kit.send("p", "tomorrow", delay_seconds=86_400)
    kit.run_until_idle()
    kit.run_until_idle()
    assert (stage.seen, kit.clock.now) == ([("bad", 1)], START)
    assert kit.run_until_settled(most_seconds=100_000) == 86_400


# --- failing messages ------------------------------------------------------------------


def test_back_offs_last_as_long_as_the_policy_says(stage: KitSetup, kit: TestKit) -> None:
    """To the millisecond; the queue waits, another one does not."""
    stage.on("bad", fail)
    kit.send("q", "bad")
    kit.send("q", "after")
    kit.run_until_idle()
    marks = kit.failing()["q"]
    assert (marks.attempts, marks.error, marks.retry_at) == (1, "ValueError: no", START + 2)
    kit.advance(1.99)
    assert stage.seen == [("bad", 1)]
    kit.send("p", "other")
    kit.run_until_idle()
    assert kit.done() == ["other"]
    kit.advance(0.01)
    assert stage.seen[-1] == ("bad", 2)
    kit.advance(4)
    assert stage.seen[-2:] == [("bad", 3), ("after", 1)]
    (letter,) = kit.dead_letters("q")
    assert (letter.attempts, letter.error, letter.dead_at) == (3, "ValueError: no", START + 6)
    assert kit.failing() == {}
    assert [each.outcome for each in kit.attempts("q")] == ["retry", "retry", "dead-letter", "done"]


def test_a_pause_may_be_drawn_as_in_a_worker(stage: KitSetup) -> None:
    """With the random numbers of the test."""
    stage.job()
    stage.on("bad", fail)
    with TestKit(stage.app, chance=lambda: 0.0) as kit:
        kit.send("q", "bad")
        assert kit.run_until_settled() == 1 + 2


@pytest.mark.parametrize("verdict", ["retry", "skip", "dead-letter"])
def test_a_blocked_queue_waits_for_a_decision(stage: KitSetup, verdict: OperatorDecision) -> None:
    """However much time passes, and whichever worker owns it; it decides as the commands do."""
    stage.policy = qdo.Policy(attempts=1, then="block")
    stage.job()
    stage.on("bad", fail)
    with TestKit(stage.app) as kit:
        kit.send("q", "bad")
        kit.send("q", "after")
        assert kit.run_until_settled() == 0
        kit.advance(3600)
        kit.hand_over()
        kit.run_until_idle()
        assert kit.blocked()["q"].blocked_since == START
        assert kit.failing() == {}
        del stage.acts["bad"]
        kit.decide("q", verdict)
        kit.run_until_idle()
        assert kit.blocked() == {}
        assert kit.done() == (["bad", "after"] if verdict == "retry" else ["after"])
        assert kit.skipped() == (["bad"] if verdict == "skip" else [])
        assert len(kit.dead_letters()) == (verdict == "dead-letter")
        with pytest.raises(NotFailingError):
            kit.decide("q", verdict)
        with pytest.raises(NotFoundError):
            kit.decide("nowhere", verdict)


def test_a_dead_letter_may_be_sent_again(stage: KitSetup, kit: TestKit) -> None:
    """By the broker of the kit, as `qdo dead-letters retry` does; its id stays."""
    stage.on("bad", fail)
    sent = kit.send("q", "bad")
    kit.send("q", "after")
    kit.run_until_settled()
    del stage.acts["bad"]
    (letter,) = kit.dead_letters()
    kit.broker.dead_letters.retry([(letter.queue, letter.position)])
    kit.run_until_idle()
    assert (kit.done(), kit.dead_letters()) == (["after", "bad"], [])
    assert kit.attempts()[-1].id == sent


def test_a_seek_replays(stage: KitSetup, kit: TestKit) -> None:
    """Under the worker that has the queue, and under the next one."""
    kit.send("q", 1)
    kit.send("q", 2)
    kit.run_until_idle()
    kit.seek("q", 0)
    assert kit.waiting("q") == [1, 2]
    kit.run_until_idle()
    kit.hand_over()
    kit.seek("q", kit.attempts("q")[0].position)
    kit.run_until_idle()
    assert kit.done() == [1, 2, 1, 2, 2]
    with pytest.raises(NotFoundError):
        kit.seek("nowhere", 0)


def test_a_job_may_stop_its_worker(stage: KitSetup, kit: TestKit) -> None:
    """The run is over, everything is handed over, no attempt is counted."""
    stage.on("full", lambda message, context: (_ for _ in ()).throw(qdo.Stop("the disk is full")))
    kit.send("p", "before")
    kit.send("q", "full")
    kit.send("q", "after", delay_seconds=5)
    kit.run_until_idle()
    assert (kit.stops, stage.contexts) == (["the disk is full"], ["entered", "left"])
    kit.advance(60)
    assert stage.seen == [("before", 1), ("full", 1), ("full", 1)]
    del stage.acts["full"]
    kit.run_until_idle()
    assert kit.done() == ["before", "full", "after"]
    assert kit.attempts(outcome="done")[1].attempt == 1


# --- later and once --------------------------------------------------------------------


def test_delayed_messages_come_at_their_time(stage: KitSetup, kit: TestKit) -> None:
    """By delay and by date, from tests and from jobs."""
    moment = datetime.datetime.fromtimestamp(START + 100, datetime.UTC)
    stage.on("hour", lambda message, context: stage.app.send("q", "more", delay_seconds=3600))
    kit.send("q", "date", at=moment)
    kit.send("q", "minute", delay_seconds=60)
    kit.send("q", "hour", delay_seconds=3600)
    kit.run_until_idle()
    assert (kit.done(), kit.backlog("q").delayed) == ([], 3)
    kit.advance(59.9)
    assert kit.done() == []
    kit.advance(0.1)
    assert kit.done() == ["minute"]
    kit.advance(40)
    assert kit.done() == ["minute", "date"]
    assert kit.run_until_settled() == 2 * 3600 - 100
    assert kit.done()[2:] == ["hour", "more"]


def test_deduplication_follows_the_clock(kit: TestKit) -> None:
    """Within the window once, after it again."""
    first = kit.send("q", 1, dedup_key="k", dedup_seconds=10)
    kit.advance(9)
    assert kit.send("q", 2, dedup_key="k") == first
    kit.advance(1)
    assert kit.send("q", 3, dedup_key="k") != first
    kit.run_until_idle()
    assert kit.done() == [1, 3]


def test_waiting_for_too_long_is_refused(kit: TestKit) -> None:
    """The message states the length of the wait, and what waits."""
    kit.send("q", 1, delay_seconds=7200)
    with pytest.raises(NotSettledError, match=r"3600 s.*7200 s") as caught:
        kit.run_until_settled(most_seconds=3600)
    assert "'q'" in caught.value.details["waiting"]


def test_what_does_not_settle_is_named(stage: KitSetup, kit: TestKit) -> None:
    """A message that fails again and again is named by its queue and error."""
    stage.on("bad", fail)
    kit.send("mail", "bad")
    with pytest.raises(NotSettledError) as caught:
        kit.run_until_settled(most_seconds=1)
    assert all(word in caught.value.details["waiting"] for word in ("'mail'", "ValueError: no"))


# --- executors and deadlines --------------------------------------------------------------


@pytest.mark.parametrize("executor", ["greenlet", "thread", "process"])
def test_every_executor_is_the_thread_of_the_test(stage: KitSetup, executor: str) -> None:
    """A job may access the test's objects, whatever its executor elsewhere."""
    threads: list[int] = []
    stage.job(executor=executor)
    stage.on(1, lambda message, context: threads.append(threading.get_ident()))
    with TestKit(stage.app) as kit:
        kit.send("q", 1)
        kit.run_until_idle()
    assert threads == [threading.get_ident()]


def test_coroutines_run_to_their_end() -> None:
    """They may await, and their errors are reported."""
    app = qdo.App("async")

    @app.job(policy=qdo.Policy(attempts=1))
    async def job(message: qdo.Message, context: Any) -> None:
        await asyncio.sleep(0)
        if message.body == "bad":
            raise ValueError("no")
        if message.body == "send":
            await app.asend("q", "sent")

    with TestKit(app) as kit:
        for body in ("send", "bad"):
            kit.send("q", body)
        kit.run_until_idle()
        assert kit.done() == ["send", "sent"]
        assert kit.dead_letters()[0].error == "ValueError: no"

        async def within() -> None:
            kit.run_until_idle()

        with pytest.raises(UsageError, match="coroutine"):
            asyncio.run(within())


@pytest.mark.parametrize("kind", ["plain", "async"])
def test_a_job_that_spends_too_long_is_stopped(kind: str) -> None:
    """At its deadline; before that it gets a stop signal, and others record their progress."""
    app = qdo.App("slow")
    stopping: list[bool] = []

    def work(message: qdo.Message, context: Any) -> None:
        kit.spend(1)
        for _ in range(message.body):
            kit.spend(1)
            stopping.append(message.stopping)

    async def awork(message: qdo.Message, context: Any) -> None:
        work(message, context)

    app.job(timeout_seconds=10, policy=qdo.Policy(attempts=1))(work if kind == "plain" else awork)
    with TestKit(app) as kit:
        kit.send("q", 8)
        kit.send("q", 100)
        kit.run_until_idle()
        assert stopping[:8] == [False] * 7 + [True]
        assert len(stopping) == 8 + 9
        (letter,) = kit.dead_letters()
        assert letter.error.startswith("JobTimeoutError: job ")
        assert [each.seconds for each in kit.attempts()] == [9, 10]
        assert kit.clock.now == START + 19


def test_time_within_a_job_is_spent_by_jobs_only(stage: KitSetup, kit: TestKit) -> None:
    """Tests advance, jobs spend; the reverse is rejected, and fails no message."""
    with pytest.raises(UsageError, match=r"advance\(\)"):
        kit.spend(1)
    stage.on(1, lambda message, context: kit.advance(1))
    stage.on(2, lambda message, context: kit.hand_over())
    for body, remedy in ((1, "use kit.spend"), (2, "raise qdo.Stop")):
        kit.send("q", body)
        with pytest.raises(UsageError, match=remedy):
            kit.run_until_idle()
        del stage.acts[body]
        kit.run_until_idle()
    assert [each.outcome for each in kit.attempts()] == ["done", "done"]
    assert kit.failing() == {}


# --- faults ----------------------------------------------------------------------------


def test_a_crash_forgets_what_was_not_recorded(stage: KitSetup, kit: TestKit) -> None:
    """The next worker resumes behind `last`; the first worker's memory is lost."""
    for body in ("one", "two", "three"):
        kit.send("q", body)
    kit.crash_at("after-job", nth=2)
    kit.run_until_settled()
    assert [body for body, _ in stage.seen] == ["one", "two", "one", "two", "three"]
    assert kit.done() == ["one", "one", "two", "three"]
    workers = [each.worker for each in kit.attempts()]
    assert len(set(workers)) == 2
    fences = [each.fence for each in kit.attempts()]
    assert fences[0] < fences[1] == fences[3]


@pytest.mark.parametrize("host", [False, True])
def test_who_counts_the_attempt_of_a_crash(stage: KitSetup, kit: TestKit, host: bool) -> None:
    """The parent of a process counts it, with the backoff; if the host is gone, no one does."""
    kit.send("q", "one")
    kit.crash_at("before-job", host=host)
    kit.run_until_idle()
    if host:
        assert stage.seen == [("one", 1)]
    else:
        assert stage.seen == []
        assert kit.failing()["q"].crashed
        assert kit.run_until_settled() == 2
        assert stage.seen == [("one", 2)]


def test_a_message_that_always_crashes_is_ended_by_its_policy(
    stage: KitSetup, kit: TestKit
) -> None:
    """As in a fleet: a dead letter after its attempts, and the queue continues."""
    stage.on("poison", lambda message, context: kit.crash())
    kit.send("q", "poison")
    kit.send("q", "water")
    kit.run_until_settled()
    assert stage.seen == [("poison", 1), ("poison", 2), ("poison", 3), ("water", 1)]
    (letter,) = kit.dead_letters()
    assert (letter.attempts, "SIGKILL" in letter.error) == (3, True)


def test_a_job_cannot_catch_its_death(stage: KitSetup, kit: TestKit) -> None:
    """Whatever it catches, it is dead: its results do not count, and no hook is called."""

    def stubborn(message: qdo.Message, context: Any) -> None:
        try:
            kit.crash(host=True)
        except BaseException:  # noqa: BLE001 - what jobs do
            del stage.acts["one"]
            raise qdo.Skip("I will not die") from None

    stage.on("one", stubborn)
    failures: list[BaseException] = []
    stage.app.failure(lambda message, context, error: failures.append(error))
    kit.send("q", "one")
    kit.run_until_idle()
    assert (kit.skipped(), kit.done(), failures) == ([], ["one"], [])


def test_contexts_of_the_dead_are_not_torn_down(stage: KitSetup) -> None:
    """Not before the kit is closed: nothing cleans up after kill -9."""
    stage.job()
    with TestKit(stage.app) as kit:
        kit.send("q", 1)
        kit.run_until_idle()
        kit.crash()
        kit.crash()
        kit.send("q", 2)
        kit.run_until_idle()
        assert stage.contexts == ["entered", "entered"]
    assert stage.contexts == ["entered", "entered", "left", "left"]


@pytest.mark.parametrize("where", ["entered", "left"])
def test_an_error_of_the_context_is_the_tests(where: str) -> None:
    """It is raised where the worker would have failed, and leaves nothing behind."""

    def broken() -> Iterator[None]:
        if where == "entered":
            raise OSError("no database")
        yield
        raise OSError("no database")

    app = qdo.App("broken", job_context=broken)
    app.job()(lambda message, context: None)
    kit = TestKit(app)
    kit.send("q", 1)
    if where == "entered":
        with pytest.raises(OSError, match="no database"):
            kit.run_until_idle()
        kit.close()
    else:
        kit.run_until_idle()
        kit.crash()
        with pytest.raises(OSError, match="no database"):
            kit.close()
    with TestKit(app) as again:
        assert again.waiting("q") == []


def test_a_handover_in_good_order_repeats_nothing(stage: KitSetup, kit: TestKit) -> None:
    """The context is closed, and attempts and backoff are handed over."""
    stage.on("bad", fail)
    kit.send("q", "one")
    kit.send("q", "bad")
    kit.run_until_idle()
    kit.advance(1)
    kit.hand_over()
    kit.hand_over()
    assert stage.contexts == ["entered", "left"]
    kit.run_until_idle()
    assert kit.run_until_settled() == 1 + 4
    assert stage.seen == [("one", 1), ("bad", 1), ("bad", 2), ("bad", 3)]


def test_a_lost_lease_makes_two_owners_of_one_message(stage: KitSetup, kit: TestKit) -> None:
    """The second one runs while the first is frozen; the first starts nothing more."""
    for body in ("one", "two"):
        kit.send("q", body)
    kit.lose_lease_at("before-job")
    kit.run_until_idle()
    assert [body for body, _ in stage.seen] == ["one", "two", "one"]
    second, _, late = kit.attempts()
    assert late.fence < second.fence
    assert stage.contexts == ["entered", "entered", "left"]
    assert kit.waiting("q") == []
    kit.lose_lease()
    kit.send("q", "three")
    kit.run_until_idle()
    assert kit.done()[3:] == ["three"]


def test_the_lease_of_a_coroutine_is_not_lost_within_it() -> None:
    """Its event loop is in the way; the error states this, and no attempt is counted."""
    app = qdo.App("async")
    acts: list[Callable[[], None]] = []

    @app.job()
    async def job(message: qdo.Message, context: Any) -> None:
        while acts:
            acts.pop()()

    with TestKit(app) as kit:
        acts.append(kit.lose_lease)
        kit.send("q", 1)
        with pytest.raises(UsageError, match="coroutine"):
            kit.run_until_idle()
        kit.run_until_idle()
        assert kit.attempts()[-1].attempt == 1


def test_faults_count_what_they_are_told_to(stage: KitSetup, kit: TestKit) -> None:
    """By queue and number; a fault that has not happened is reported."""
    kit.crash_at("before-job", queue="b", nth=2, host=True)
    kit.crash_at("before-dead-letter")
    for queue in ("a", "b", "a", "b"):
        kit.send(queue, queue)
    kit.run_until_idle()
    assert kit.faults_left == 1
    assert kit.done("b") == ["b", "b", "b"]
    assert kit.done("a") == ["a", "a"]


@pytest.mark.parametrize(
    ("options", "part"),
    [
        ({"point": "before-jobs"}, "'before-job'"),
        ({"point": "xyz"}, "after-claim, "),
        ({"nth": 0}, "nth"),
    ],
)
def test_rejects_impossible_faults(kit: TestKit, options: dict[str, Any], part: str) -> None:
    """At the request."""
    with pytest.raises(UsageError, match=part):
        kit.crash_at(**options)


def test_points_come_in_pairs() -> None:
    """Before and after; a claim cannot fail half-way."""
    for point in POINTS:
        when, _, what = point.partition("-")
        assert what == "claim" or f"{'after' if when == 'before' else 'before'}-{what}" in POINTS


# --- the app, its settings, the clock ------------------------------------------------------


def test_the_app_gets_its_own_broker_back(tmp_path: Path) -> None:
    """While the kit is open nothing goes there, not even after the app was closed."""
    with qdo.App("mine", broker=f"sqlite:{tmp_path}/messages.db") as app:
        settings = app.use(qdo.Settings(app="mine", attempts=7))
        app.send("q", 1)
        with TestKit(app, without_job="q") as kit:
            app.close()
            app.send("q", 2)
            assert app.broker is kit.broker
            assert kit.waiting("q") == [2]
            with pytest.raises(UsageError, match="another TestKit"):
                TestKit(app, clock=kit.clock)
        assert app.settings is settings
        assert app.broker.catalog.backlog("q", 0).count == 1


def test_settings_are_those_in_code_and_of_the_kit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither file nor environment; the kit's win."""
    monkeypatch.setenv("QDO_ATTEMPTS", "9")
    app = qdo.App("chosen", attempts=2, backoff_seconds=5)
    app.job()(fail)
    app.job("policy", policy=qdo.Policy(then="skip"))(fail)
    with TestKit(app, backoff_seconds=1.5) as kit:
        kit.send("q", 1)
        assert kit.run_until_settled() == 1.5
        assert kit.dead_letters()[0].attempts == 2
        kit.send("policy", 1)
        assert kit.run_until_settled() == 1.5
        assert kit.attempts("policy")[-1].outcome == "skip"
        assert len(kit.attempts("policy")) == 2
    with pytest.raises(SettingsError, match="'attempts'"):
        TestKit(app, atempts=3)
    with TestKit(app) as kit:  # the rejected one has left nothing behind
        assert kit.done() == []


def test_policies_that_cannot_be_are_refused(stage: KitSetup) -> None:
    """At the first run, as a worker does at its start."""
    stage.job()
    tables = [{"queues": "*", "rules": [{"exception": "no.such:Error", "attempts": 1}]}]
    with TestKit(stage.app, policies=tables) as kit:
        kit.send("q", 1)
        with pytest.raises(PolicyError, match="exception"):
            kit.run_until_idle()


def test_two_apps_may_share_a_clock(stage: KitSetup) -> None:
    """Two clocks at the same time are rejected; afterwards all code uses the real one."""
    stage.job()
    other = qdo.App("other")
    with TestKit(stage.app) as kit:
        with pytest.raises(UsageError, match="clock"):
            TestKit(other)
        with TestKit(other, clock=kit.clock) as second:
            second.advance(10)
        assert kit.clock.now == START + 10
    assert abs(qdo.positions.position_now() - Clock(time.time()).position()) < 10**9
    for module, name in PATCHED.items():
        assert vars(importlib.import_module(module))[name] is {"time": time, "clock": clock}[name]


def test_the_clock_does_not_go_back(kit: TestKit) -> None:
    """Nor to a value that is not a number."""
    for seconds in (-1.0, float("nan")):
        with pytest.raises(UsageError, match="clock"):
            kit.advance(seconds)
    kit.clock.move(3)
    kit.clock.move_to(1)
    assert kit.clock.now == START + 3


def test_nothing_of_the_engine_asks_the_real_time() -> None:
    """All code run by the kit has the clock as an argument, or is on the list of stand-ins."""
    engine = (
        *("pipeline", "row_runner", "batches", "lane", "lanes", "outcomes", "subscriptions"),
        *("dispatcher", "fetcher", "slot", "jobs", "ends", "queue_ends", "request_ends"),
    )
    names = [f"qdo.worker.engine.{name}" for name in engine]
    names += ["qdo.worker.shared_memory", "qdo.worker.pools.subscription"]
    names += ["qdo.requests.jobs", "qdo.requests.calls", "qdo.brokers.embedded.broker"]
    names += ["qdo.message", "qdo.sending.messages", "qdo.jobs.retry", "qdo.encoding"]
    names += ["qdo.positions"]
    asking = {
        name: each
        for name in names
        for each in ("time", "clock")
        if hasattr(importlib.import_module(name), each)
    }
    assert asking == PATCHED
    assert "qdo.testing.kit" in sys.modules


@pytest.mark.parametrize("options", [{}, {"order": "key"}, {"batch": 2}], ids=str)
def test_the_broker_knows_which_queues_are_shards(options: dict[str, Any]) -> None:
    """And messages say so, with their app, however their job runs them."""
    app = qdo.App("shop", namespace="/staging")
    found: list[tuple[str, str, str | None]] = []

    @app.job(**options)
    def note(given: Any, context: Any) -> None:
        batch = given if "batch" in options else [given]
        found.extend((each.queue, each.app, each.stream) for each in batch)

    with TestKit(app) as kit:
        kit.send("report.2024-01", 1, "ada")
        users = app.stream("user", shards=1)
        users.send("ada", 1)
        kit.run_until_idle()
        kit.streams.split("user.-")
        users.send("ada", 2)
        kit.send("report.2024-01", {"not": "plain"}, "ada", {"a": "b"})
        kit.run_until_idle()
    scope = "/staging/shop"
    assert sorted(found) == [
        *[("report.2024-01", scope, None)] * 2,
        ("user.-", scope, "user"),
        ("user.80-", scope, "user"),
    ]
