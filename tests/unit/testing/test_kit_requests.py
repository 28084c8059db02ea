"""Requests in a testing kit: the engine of a worker runs pools, on the clock of the test."""

from __future__ import annotations

import logging
from typing import Any

import pytest

import qdo
from qdo.errors import NotSettledError, RequestCancelledError, UsageError
from qdo.testing import TestKit
from qdo.testing.faults import Point

ENDS = {"value": "done", "flaky": "done", "bad": "failed", "letter": "failed", "not": "skipped"}
POINTS = ("before-take", "after-take", "before-job", "after-job", "before-end", "after-end")


class PoolApp:
    """A queue that asks a pool, whose requests end in every way.

    :ivar runs: attempt and take of each start, by body.
    """

    def __init__(self, **options: Any) -> None:
        self.app = qdo.App("pools")
        self.runs: dict[Any, list[tuple[int, int]]] = {}
        policy = qdo.Policy(attempts=3, backoff_seconds=2, backoff_max_seconds=60)
        self.app.job("do-*", pool=True, policy=policy, **options)(self.run)
        self.app.job("once", pool=True, policy=qdo.Policy(attempts=1))(self.run)
        self.app.job("orders")(self.order)

    def run(self, request: qdo.Request, context: Any) -> Any:
        self.runs.setdefault(request.body, []).append((request.attempt, request.take))
        if request.body == "bad" or (request.body == "flaky" and request.attempt == 1):
            raise ValueError("no")
        kinds = {"letter": qdo.DeadLetter, "not": qdo.Skip, "stop": qdo.Stop}
        if request.body in kinds and (request.body != "stop" or request.take == 1):
            raise kinds[request.body]("no")
        if request.body == "ask":
            return request.pause("sure?")
        return b"\x00\xff" if request.body == "bytes" else {"value": request.body}

    def order(self, message: qdo.Message, context: Any) -> None:
        match message.body:
            case {"ask": name}:
                self.app.request("do-it", name, id=name, then="orders", events=name == "ask")
            case {"outcome": "paused", "request": id}:
                self.app.handle(id).resume("yes")


def outcomes(kit: TestKit) -> dict[str, str]:
    return {each["id"]: each["outcome"] or each["state"] for each in kit.requests()}


def told(kit: TestKit) -> list[tuple[str, str]]:
    bodies = [kit._world.body_of("orders", row) for row in kit._world.rows("orders", 0)]
    return sorted((each["request"], each["outcome"]) for each in bodies if "request" in each)


def test_requests_retry_after_their_backoffs_and_end_once() -> None:
    pools = PoolApp()
    with TestKit(pools.app) as kit:
        kit.app.send_many([("orders", {"ask": name}) for name in ENDS])
        kit.run_until_idle()
        assert outcomes(kit) == {**ENDS, "flaky": "waiting", "bad": "waiting"}
        kit.advance(1.9)
        assert outcomes(kit)["flaky"] == "waiting"
        assert kit.run_until_settled() == pytest.approx(4.1)
        assert (outcomes(kit), told(kit)) == (ENDS, sorted(ENDS.items()))
        assert pools.runs["bad"] == [(1, 1), (2, 2), (3, 3)]
        assert [each.body for each in kit.attempts("do-it", "skip")] == ["not"]


def test_delayed_requests_wait_and_cancelled_ones_never_run() -> None:
    pools = PoolApp()
    with TestKit(pools.app) as kit:
        later, never = (kit.app.request("do-it", n, delay_seconds=60) for n in ("bytes", "never"))
        kit.holds.pause("once")
        held = kit.app.request("once", 1)
        assert never.cancel()
        with pytest.raises(NotSettledError):
            kit.run_until_settled(most_seconds=30)
        kit.advance(60)
        assert (later.result(), held.state) == (b"\x00\xff", "waiting")
        with pytest.raises(RequestCancelledError):
            never.result()
        kit.holds.resume()
        kit.run_until_idle()
        assert (held.result(), list(pools.runs)) == ({"value": 1}, ["bytes", 1])


def test_a_job_resumes_the_request_of_another_job() -> None:
    """Events tell it. Without one the kit would wait forever."""
    with TestKit(PoolApp().app) as kit:
        kit.send("orders", {"ask": "ask"})
        kit.run_until_idle()
        assert [each["result"] for each in kit.requests("do-it")] == ["yes"]
        assert told(kit) == [("ask", "done"), ("ask", "paused"), ("ask", "started")]
        unanswered = kit.app.request("do-else", "ask")
        for wait in (kit.run_until_idle, unanswered.result):
            with pytest.raises(UsageError):
                wait()


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["crash", "lease"])
def test_a_fault_at_any_step_ends_each_request_once(
    fault: str, caplog: pytest.LogCaptureFixture
) -> None:
    """One message tells of each, and no attempt goes beyond the policy."""
    caplog.set_level(logging.CRITICAL, logger="qdo")
    step = left = 0
    while not left:
        step += 1
        pools = PoolApp(concurrency=2)
        with TestKit(pools.app) as kit:
            if fault == "lease":
                kit.lose_lease_at(nth=step)
            else:
                kit.crash_at(nth=step)
            kit.app.send_many([("orders", {"ask": name}) for name in ENDS])
            kit.run_until_settled()
            kit.hand_over()
            kit.run_until_settled()
            left = kit.faults_left
        assert (outcomes(kit), told(kit)) == (ENDS, sorted(ENDS.items()))
        for runs in pools.runs.values():
            assert runs == sorted(set(runs))
            assert runs[-1][0] <= 3
    assert {each.point for each in kit.steps if each.queue == "do-it"} >= {*POINTS}


@pytest.mark.parametrize(
    ("point", "failed"), [("after-take", 1), ("before-end", 1), ("after-end", 0)]
)
def test_a_crash_counts_as_a_failed_attempt(point: Point, failed: int) -> None:
    """The policy decides whether it runs again; a request that is over stays over."""
    for pool, end in (("do-it", "done"), ("once", "failed" if failed else "done")):
        with TestKit(PoolApp().app) as kit:
            kit.app.request(pool, 1)
            kit.crash_at(point, queue=pool)
            kit.run_until_settled()
            assert [(each["outcome"], each["failed"]) for each in kit.requests()] == [(end, failed)]


def test_a_request_in_hand_is_cancelled_at_once() -> None:
    """It waits for the backoff of a crash."""
    pools = PoolApp()
    with TestKit(pools.app) as kit:
        handle = kit.app.request("do-it", 1, id="a")
        kit.crash_at("after-take")
        kit.run_until_idle()
        assert handle.state == "running"
        assert handle.cancel()
        kit.run_until_idle()
        assert (outcomes(kit), pools.runs) == ({"a": "cancelled"}, {})


def test_a_stopped_worker_puts_back_without_counting() -> None:
    """What it did not start, and the request whose job stopped it."""
    pools = PoolApp()
    with TestKit(pools.app, concurrency=1) as kit:
        for body in ("stop", 1, 2):
            kit.app.request("do-it", body)
        kit.run_until_idle()
        assert {each["state"] for each in kit.requests()} == {"waiting"}
        kit.run_until_idle()
        attempts = {body: [run[0] for run in runs] for body, runs in pools.runs.items()}
        assert attempts == {"stop": [1, 1], 1: [1], 2: [1]}
