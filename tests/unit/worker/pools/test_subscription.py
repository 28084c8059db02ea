"""Requests in the hands of a worker, with a store whose answers get lost."""

from __future__ import annotations

import copy
import json
import logging
from typing import Any

import pytest

import qdo
from qdo.brokers.requests import RUNNING, NewRequest, Take
from qdo.errors import KeyMissingError, QueueLimitError, RequestCancelledError, UsageError
from qdo.message import Message
from qdo.system.processes import SIGN
from tests.support.engine import until
from tests.support.fakes.pools import Make, PoolSetup


def fail(request: qdo.Request) -> None:
    raise ValueError("no")


def fail_once(request: qdo.Request) -> Any:
    if request.attempt == 1:
        raise ValueError("no")
    return request.body


def told(pool: PoolSetup) -> int:
    return len(pool.store.broker.reader("q", 0).fetch(100))


@pytest.mark.parametrize(("act", "outcome"), [(lambda request: 1, "done"), (fail, "failed")])
def test_an_end_whose_answer_was_lost_is_repeated(make: Make, act: Any, outcome: str) -> None:
    """By the job, or by the worker; one message tells of it."""
    pool = make(act, policy=qdo.Policy(attempts=1))
    pool.store.lost["end"] = 2
    pool.ask(1, then="q")
    until(lambda: pool.store.calls["end"] == 3)
    assert (pool.outcome(1), pool.runs, told(pool)) == (outcome, [(1, 1, 1)], 1)


def test_a_lost_answer_to_put_back_counts_one_attempt(make: Make) -> None:
    pool = make(fail_once)
    pool.store.lost["put_back"] = 1
    pool.ask(1)
    pool.finish(1)
    assert (pool.outcome(1), pool.runs) == ("done", [(1, 1, 1), (1, 2, 2)])


@pytest.mark.parametrize("places", [1, 4])
def test_the_oldest_is_one_of_ten_requests(make: Make, places: int) -> None:
    """More urgent ones pass it, but not forever."""
    pool = make(start=False, concurrency=places)
    pool.ask(-2, -1, priority=9)
    pool.ask(*range(30), priority=1)
    pool.start()
    pool.finish(*range(-2, 30))
    bodies = [body for body, _, _ in pool.runs]
    assert bodies.index(-2) < 10 <= bodies.index(-1) < 20


def test_a_late_note_does_not_end_a_pause(make: Make) -> None:
    """The answer to it was lost; it is stored once the job is paused, which pauses it again."""
    pool = make(lambda request: request.pause("approve?"))
    (handle,) = pool.ask(1)
    until(lambda: handle.state == "paused")
    record = pool.store.find("1")
    assert record is not None
    assert pool.store.note(record.take, RUNNING, "50 %")
    until(lambda: handle.state == "paused")
    handle.resume("yes")
    assert handle.result(timeout_seconds=10) == "yes"


def test_ends_are_repeated_until_the_store_is_back(make: Make) -> None:
    """Nothing is taken meanwhile, and the places stay taken."""
    pool = make(lambda request: fail(request) if request.body == 2 else 1, concurrency=2)
    pool.hold(1, 2)
    pool.ask(1, 2, 3)
    until(lambda: pool.running == 2)
    pool.store.down = True
    for gate in pool.gates.values():
        gate.set()
    until(lambda: pool.store.calls["end"] > 1 and pool.store.calls["put_back"] > 1)
    assert (pool.counts(), len(pool.runs)) == ((1, 2), 2)
    pool.store.down = False
    pool.finish(1, 2, 3)
    assert [run for run in pool.runs if run[0] != 2] == [(1, 1, 1), (3, 1, 1)]
    assert [run[1] for run in pool.runs if run[0] == 2] == [1, 2, 3]


@pytest.mark.parametrize(
    ("settings", "options", "most"), [({}, {"concurrency": 3}, 3), ({"concurrency": 2}, {}, 2)]
)
def test_no_more_is_taken_than_may_run(make: Make, settings: Any, options: Any, most: int) -> None:
    """The places of the job; beyond the lanes of the worker, one request waits for the next."""
    pool = make(settings=settings, **options)
    pool.hold(*range(8))
    pool.ask(*range(8))
    for body in range(8):
        until(lambda: any(run[0] == body for run in pool.runs))  # noqa: B023 - called at once
        pool.look()
        assert pool.counts()[1] <= most + len(settings)
        pool.gates[body].set()
    pool.finish(*range(8))
    assert pool.at_once == most


def test_a_rate_lets_one_request_wait_in_hand(make: Make) -> None:
    pool = make(per_queue_rate="1/h")
    pool.ask(*range(5))
    until(lambda: pool.counts() == (4, 1))
    pool.look()
    assert (pool.counts(), pool.runs) == ((4, 1), [])


def test_a_running_request_is_cancelled_once(make: Make) -> None:
    """Its job is interrupted; a job that is not leaves its own outcome."""
    pool = make()
    pool.hold(1)
    (handle,) = pool.ask(1, then="q")
    until(lambda: pool.running)
    assert handle.cancel("enough")
    assert handle.cancel("again")
    pool.finish(1)
    until(lambda: not pool.running)
    with pytest.raises(RequestCancelledError) as raised:
        handle.result()
    assert raised.value.details["reason"] == "again"
    assert (handle.cancel(), told(pool), pool.runs) == (True, 1, [(1, 1, 1)])


def test_a_pause_outlasts_a_lapse_of_the_lease(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """The request does not begin again, and its answers are not lost."""
    looks: list[bool] = []

    def leased() -> bool:
        looks.append(True)
        return len(looks) > 20

    pool = make(lambda request: request.pause("sure?"))
    (handle,) = pool.ask(1)
    until(lambda: handle.state == "paused")
    monkeypatch.setattr(SIGN, "leased", leased)
    until(lambda: len(looks) > 20)
    handle.resume("yes")
    pool.finish(1)
    assert (pool.outcome(1), pool.runs) == ("done", [(1, 1, 1)])


def test_a_paused_request_that_is_cancelled_has_not_failed(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its job learns that before the worker does."""
    monkeypatch.setattr("qdo.worker.pools.subscription.MARKS_SECONDS", 60.0)
    policy = qdo.Policy(attempts=1)
    pool = make(lambda request: request.pause("sure?"), policy=policy, concurrency=1)
    (handle,) = pool.ask(1, then="q")
    until(lambda: handle.state == "paused")
    handle.cancel("no")
    pool.finish(1)
    assert (pool.outcome(1), told(pool)) == ("cancelled", 1)


def test_middleware_that_leaves_out_the_job_ends_requests(make: Make) -> None:
    """As it ends messages, although the answer to that end is lost."""
    pool = make(start=False)
    pool.app.middleware(lambda call_next, message, context: None)
    pool.store.lost["end"] = 1
    pool.start()
    pool.ask(1)
    pool.finish(1)
    pool.look()
    assert (pool.app.handle("1").result(), pool.runs) == (None, [])


@pytest.mark.parametrize("copied", [False, True])
def test_a_reported_end_is_stored_once(make: Make, copied: bool) -> None:
    """By the process of the job; middleware may pass a copy of the message on."""
    pool = make(start=False)

    def passing(call_next: Any, message: Message, context: Any) -> None:
        call_next(copy.copy(message) if copied else message, context)

    pool.app.middleware(passing)
    pool.start()
    pool.ask(1)
    pool.finish(1)
    pool.look()
    assert (pool.app.handle("1").result(), pool.store.calls["end"]) == (1, 1)


def test_a_request_that_waits_for_its_backoff_takes_no_place(make: Make) -> None:
    policy = qdo.Policy(attempts=2, backoff_seconds=600, backoff_max_seconds=600)
    pool = make(fail_once, concurrency=1, policy=policy)
    pool.ask("slow", 1)
    until(lambda: pool.store.find("1").failed == 1)  # type: ignore[union-attr]
    assert pool.counts() == (2, 0)
    assert pool.store.take("other", "p", 2, []).next_due is not None


def test_crashed_attempts_end_with_the_policy(make: Make) -> None:
    """The request does not run again, and the hook learns its id."""
    failures: list[Message] = []
    app = qdo.App("test", job_failure=lambda message, context, error: failures.append(message))
    pool = make(app=app, policy=qdo.Policy(attempts=2), start=False)
    pool.ask(1, then="q")
    for owner in ("a", "b"):
        pool.store.take(owner, "p", 1, [])
        pool.store.give_back(owner)
    pool.start()
    pool.finish(1)
    assert (pool.outcome(1), pool.runs, told(pool)) == ("failed", [], 1)
    assert [each.id for each in failures] == ["1"]


def test_a_missing_key_counts_no_attempt(make: Make) -> None:
    def act(request: qdo.Request) -> None:
        raise KeyMissingError(queue="p", key="k", place="the file")

    pool = make(act)
    pool.ask(1)
    until(lambda: pool.counts() == (1, 0) and pool.runs)
    record = pool.store.find("1")
    assert record is not None
    assert (record.failed, record.take) == (0, Take("1", "", 1))


def test_a_take_that_is_answered_after_a_close_is_put_back(make: Make) -> None:
    """At once, not by the leader, and without a failed attempt."""
    pool = make()
    pool.look()
    ((own, _),) = pool.duty._claims.values()
    taken = pool.store.take

    def late(*args: Any) -> Any:
        answer = taken(*args)
        if answer.requests:
            own.close()
            own.may_start = lambda: False  # as the engine, which closes it once the claim is over
        return answer

    pool.store.take = late  # type: ignore[method-assign]
    pool.ask(1)
    until(lambda: (found := pool.store.find("1")) and found.take == Take("1", "", 1))
    assert (pool.runs, pool.store.find("1").failed) == ([], 0)  # type: ignore[union-attr]


def test_a_look_during_a_take_is_not_lost(make: Make) -> None:
    """A request that arrives after the take has looked does not wait for the next look."""
    pool = make()
    pool.look()
    ((own, _),) = pool.duty._claims.values()
    take = pool.store.take

    def late(*args: Any) -> Any:
        answer = take(*args)
        own.look(0.0)
        return answer

    pool.store.take = late  # type: ignore[method-assign]
    assert own.look(0.0)
    assert own.reader(0).fetch(1) == []
    assert not own.at_tip()


# --- what the broker refuses ------------------------------------------------------------


def ask_with(pool: PoolSetup, reply: Any) -> Any:
    """Ask with a reply that no client would send."""
    pool.store.ask([NewRequest("p", "1", (b"1", None), b"", reply=json.dumps(reply))])
    return pool.app.handle("1")


HOSTILE = {
    "tag": ({"then": "q", "tag": "x"}, "tag"),
    "name": ({"then": ["q"]}, "QueueNameError"),
    "limit": ({"then": "full"}, "QueueLimitError"),
    "key": ({"then": "locked"}, "KeyMissingError"),
    "headers": ({"then": "of no tenant"}, "LookupError"),
}


def refuse(pool: PoolSetup, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the app and its broker refuse the messages of `HOSTILE`."""
    refusals = {
        "full": QueueLimitError(queue="full", limit=1),
        "locked": KeyMissingError(queue="locked", key="k", place="the file"),
        "of no tenant": LookupError("no tenant here"),
    }
    ready = type(pool.app).ready

    def checked(app: qdo.App, messages: Any) -> Any:
        for each in messages:
            if each.queue in refusals:
                raise refusals[each.queue]
        return ready(app, messages)

    monkeypatch.setattr(type(pool.app), "ready", checked)


@pytest.mark.parametrize("hostile", HOSTILE)
@pytest.mark.parametrize("how", ["done", "failed", "cancelled", "left out"])
def test_a_refused_message_ends_its_request(
    make: Make,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    hostile: str,
    how: str,
) -> None:
    """Once, without the message; the error says why, and the place is free."""
    reply, reason = HOSTILE[hostile]
    pool = make(
        fail if how == "failed" else lambda request: 1,
        policy=qdo.Policy(attempts=1),
        concurrency=1,
        start=False,
    )
    refuse(pool, monkeypatch)
    if how == "left out":
        pool.app.middleware(lambda call_next, message, context: None)
    pool.start()
    if how == "cancelled":
        pool.hold(1)
    handle = ask_with(pool, {**reply, "events": True})
    if how == "cancelled":
        until(lambda: pool.running)
        assert handle.cancel("enough")
    pool.finish(1)
    record = pool.store.find("1")
    assert record is not None
    assert (record.outcome, len(pool.runs)) == (
        "cancelled" if how == "cancelled" else "failed",
        0 if how == "left out" else 1,
    )
    assert reason in (record.error or "")
    told = [each for each in caplog.records if "without its message" in each.message]
    assert [each.levelno for each in told] == [logging.ERROR]
    pool.ask(2)
    pool.finish(2)


def test_a_waiting_request_with_a_refused_message_is_cancelled(make: Make) -> None:
    pool = make(start=False)
    assert ask_with(pool, {"then": ["q"]}).cancel("enough")
    assert pool.outcome(1) == "cancelled"


def test_a_refused_retry_ends_its_request(make: Make) -> None:
    """It would be refused each time."""
    pool = make(fail, concurrency=1)
    pool.store.put_back = _refusing  # type: ignore[method-assign]
    pool.ask(1)
    pool.finish(1)
    assert (pool.outcome(1), len(pool.runs)) == ("failed", 1)


def _refusing(*args: Any) -> Any:
    raise UsageError(reason="no")


def test_an_end_that_is_always_refused_costs_no_place(make: Make) -> None:
    """Its request stays this worker's, and is not run again."""
    pool = make(concurrency=1)
    end = pool.store.end
    pool.store.end = lambda take, *args, **options: (  # type: ignore[method-assign]
        _refusing() if take.id == "1" else end(take, *args, **options)
    )
    pool.ask(1, 2)
    pool.finish(2)
    pool.look()
    assert (pool.outcome(1), pool.runs) == (None, [(1, 1, 1), (2, 1, 1)])


def test_a_damaged_row_costs_only_itself(make: Make) -> None:
    """Another program wrote a time that is none; what was taken with it runs."""
    pool = make(start=False, concurrency=3)
    pool.ask(1, 2, 3)
    connection = pool.store.broker.writer.store.connection
    connection.execute("UPDATE requests SET headers = '[' WHERE id = '2'")
    pool.start()
    pool.finish(1, 2, 3)
    assert (pool.outcome(2), len(pool.runs)) == ("failed", 2)


def test_an_end_that_a_failover_lost_is_no_end(make: Make) -> None:
    """The job runs again: its request is not done with a value that no job returned."""
    pool = make(start=False)
    end, lost = pool.store.end, [1]
    pool.store.end = lambda *args, **options: (  # type: ignore[method-assign]
        bool(lost.pop()) if lost else end(*args, **options)
    )
    pool.start()
    (handle,) = pool.ask(1)
    assert handle.result(10) == 1
    assert pool.runs == [(1, 1, 1), (1, 1, 2)]
