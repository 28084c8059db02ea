"""Decisions about failing messages, carried out by real workers: at once, and about no other."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest

import qdo
from qdo.coordination.znodes.worker_node import WorkerNode
from tests.support.app_runs import OperatorDesk
from tests.support.processes import wait_until

ORDERS: dict[str, dict[str, Any]] = {
    "queue": {},
    "key": {"order": "key"},
    "none": {"order": "none"},
    "batch": {"batch": 2},
    "each": {"checkpoint": "message"},
}
DECISIONS = {
    "retry": ("retry-now", "q"),
    "skip": ("skip", "--yes", "q"),
    "dead-letter": ("dead-letters", "add", "q"),
}
HOUR = qdo.Policy(attempts=9, backoff_seconds=3600, backoff_max_seconds=3600)
SOON = qdo.Policy(attempts=999, backoff_seconds=0.02, backoff_max_seconds=0.02)
EACH_ORDER = pytest.mark.parametrize("order", ORDERS)
ENDING = pytest.mark.parametrize("decision", ["skip", "dead-letter"])
EACH = pytest.mark.parametrize("decision", DECISIONS)


def decide(desk: OperatorDesk, decision: str, *ids: str, code: int = 0) -> None:
    ended = desk.qdo(*DECISIONS[decision], *ids)
    assert ended.code == code, ended.err


def letters(desk: OperatorDesk) -> list[bytes]:
    return [each.body for each in desk.broker.dead_letters.records("q")]


def fail(desk: OperatorDesk, *bodies: int) -> list[str]:
    """Send messages whose job fails, and wait until their next attempt is an hour away."""
    for body in bodies:
        (desk.folder / f"fail-{body}").touch()
    before = len(desk.node("q").failures)
    ids = desk.send(*bodies)
    wait_until(lambda: len(desk.node("q").failures) == before + len(bodies), "the failures")
    return ids


def interrupt(desk: OperatorDesk, body: int) -> str:
    """Send a message whose first attempt dies with its process; return it in the second one.

    That attempt lasts until its `hold` file is deleted.
    """
    desk.hold(body)
    (id,) = desk.send(body)
    wait_until(lambda: (str(body), 1) in desk.runs("q"), "the first attempt")
    os.kill(desk.pids()[-1], signal.SIGKILL)
    wait_until(lambda: (str(body), 2) in desk.runs("q"), "the second attempt")
    return id


def release(desk: OperatorDesk, body: int) -> None:
    (desk.folder / f"hold-{body}").unlink()


@EACH_ORDER
@EACH
def test_a_failing_message_does_not_wait_for_its_backoff(
    desk: OperatorDesk, decision: str, order: str
) -> None:
    """What is decided about it is done at once, and the messages behind it run once."""
    desk.known()
    desk.work(policy=HOUR, **ORDERS[order])
    (id,) = fail(desk, 1)
    desk.send(2, 3)
    (desk.folder / "fail-1").unlink()
    decide(desk, decision, id)
    node = desk.wait_done()
    assert node.failures == ()
    runs = [("1", 1)] * (2 if decision == "retry" else 1)
    assert sorted(desk.runs("q")) == [*runs, ("2", 1), ("3", 1)]
    assert letters(desk) == ([b"1"] if decision == "dead-letter" else [])
    decide(desk, decision, id, code=5)


@EACH_ORDER
@EACH
@pytest.mark.parametrize("fails", [False, True], ids=["succeeds", "fails"])
def test_a_running_attempt_ends_first(
    local: OperatorDesk, decision: str, order: str, fails: bool
) -> None:
    """If it succeeds the message is done; if it fails, the decision applies."""
    local.resist()
    local.known()
    local.work(policy=SOON, **ORDERS[order])
    id = interrupt(local, 1)
    decide(local, decision, id)
    local.send(2, 3)
    if fails:
        (local.folder / "fail-1").touch()
    release(local, 1)
    if fails and decision == "retry":
        wait_until(lambda: local.runs("q").count(("1", 1)) >= 2, "the third attempt")
        (local.folder / "fail-1").unlink()
    node = local.wait_done()
    assert node.failures == ()
    runs = [run for run in local.runs("q") if run[0] == "1"]
    assert runs[:2] == [("1", 1), ("1", 2)]
    assert bool(runs[2:]) == (fails and decision == "retry")
    assert sorted(run for run in local.runs("q") if run[0] != "1") == [("2", 1), ("3", 1)]
    assert letters(local) == ([b"1"] if fails and decision == "dead-letter" else [])


@EACH_ORDER
@ENDING
@pytest.mark.parametrize("attempt", [1, 2])
def test_a_running_attempt_is_ended(
    local: OperatorDesk, decision: str, order: str, attempt: int
) -> None:
    """The queue continues, and no other queue notices."""
    local.known("q", "other")
    local.work(policy=SOON, **ORDERS[order])
    local.hold(1)
    id = interrupt(local, 1) if attempt == 2 else local.send(1)[0]
    wait_until(lambda: ("1", attempt) in local.runs("q"), "the attempt")
    local.hold(9)
    local.send(9, queue="other")
    local.wait_for(9, queue="other")
    local.send(2, 3)
    decide(local, decision, id)
    assert local.wait_done().failures == ()
    release(local, 9)
    local.wait_done("other")
    assert local.runs("other") == [("9", 1)]
    ended = [("1", each + 1) for each in range(attempt)]
    assert sorted(local.runs("q")) == [*ended, ("2", 1), ("3", 1)]
    records = local.broker.dead_letters.records("q")
    assert [(each.body, each.attempts) for each in records] == (
        [(b"1", 1)] if decision == "dead-letter" else []
    )
    decide(local, decision, id, code=5)


HANGING = """
import time

import gevent.monkey
import qdo

app = qdo.App("desk")


def note(message):
    with open("out", "a") as out:
        out.write(f"{{message.queue}} {{message.body}} {{message.attempt}} 0\\n")


@app.job("*"{options})
{kind} job(message, context):
    note(message)
    while message.body == 1:
        {hang}
"""
IN_C = "gevent.monkey.get_original('time', 'sleep')(3600)"


@pytest.mark.parametrize(
    ("kind", "options", "hang"),
    [
        ("def", "", "time.sleep(3600)"),
        ("async def", "", "import asyncio; await asyncio.sleep(3600)"),
        ("def", ", executor='thread'", "time.sleep(3600)"),
        ("def", ", executor='thread'", "pass"),
        ("def", ", executor='process'", "pass"),
        ("def", ", executor='process'", IN_C),
    ],
    ids=["greenlet", "asyncio", "thread", "thread-computes", "process", "process-in-c"],
)
def test_an_attempt_that_hangs_is_skipped(
    local: OperatorDesk, kind: str, options: str, hang: str
) -> None:
    """As its executor ends it at a deadline."""
    local.known()
    local.start(HANGING.format(kind=kind, options=options, hang=hang))
    (id,) = local.send(1)
    local.wait_for(1)
    local.send(2)
    decide(local, "skip", id)
    local.wait_done()
    assert local.runs("q") == [("1", 1), ("2", 1)]


def test_a_call_in_c_ends_with_its_worker(local: OperatorDesk) -> None:
    """Python cannot interrupt it: the log names the remedy, and the next owner skips it."""
    local.known()
    source = HANGING.format(kind="def", options=", executor='thread'", hang=IN_C)
    worker = local.start(source, "--drain-seconds", "0.1")
    (id,) = local.send(1)
    local.wait_for(1)
    local.send(2)
    decide(local, "skip", id)
    worker.wait_for_line(f"message {id} and is still running.*`qdo action WORKER restart`")
    assert local.node("q").failures != ()
    assert local.qdo("action", "worker-*", "restart", "--yes").code == 0
    assert local.wait_done().failures == ()
    assert local.runs("q") == [("1", 1), ("2", 1)]


@pytest.mark.parametrize("decision", DECISIONS)
def test_a_message_that_waits_is_not_decided_about(local: OperatorDesk, decision: str) -> None:
    """And one whose first attempt runs is not retried: nothing is changed."""
    local.known()
    local.work()
    local.hold(1)
    ids = local.send(1, 2)
    local.wait_for(1)
    seek = local.node("q").seek
    decide(local, decision, ids[1], code=5)
    if decision == "retry":
        decide(local, decision, ids[0], code=5)
    release(local, 1)
    assert local.wait_done().seek == seek
    assert local.runs("q") == [("1", 1), ("2", 1)]


@EACH
@pytest.mark.parametrize("order", ["key", "none"])
def test_a_decision_waits_for_no_other_message(
    desk: OperatorDesk, decision: str, order: str
) -> None:
    """It applies while a message of another key runs, which runs once."""
    desk.known()
    desk.work(policy=HOUR, order=order)
    desk.hold(2)
    (id,) = fail(desk, 1)
    desk.send(2)
    desk.wait_for(2)
    (desk.folder / "fail-1").unlink()
    decide(desk, decision, id)
    wait_until(lambda: desk.node("q").failures == (), "the end of the decision")
    runs = [("1", 1)] * (2 if decision == "retry" else 1)
    wait_until(lambda: sorted(desk.runs("q")) == [*runs, ("2", 1)], "the runs")
    assert letters(desk) == ([b"1"] if decision == "dead-letter" else [])
    release(desk, 2)
    assert desk.wait_done().failures == ()
    assert sorted(desk.runs("q")) == [*runs, ("2", 1)]


@EACH
@pytest.mark.parametrize("order", ["queue", "key"])
@pytest.mark.parametrize("drained", ["before", "after"])
def test_a_decision_during_a_shutdown(
    local: OperatorDesk, decision: str, order: str, drained: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The attempt that runs until then succeeds: nothing is left to do for the next owner."""
    local.resist()
    monkeypatch.setenv("QDO_CHECKPOINT_SECONDS", "30")
    local.known()
    worker = local.work(policy=SOON, **ORDERS[order])
    id = interrupt(local, 1)
    if drained == "before":
        worker.send(signal.SIGTERM)
        wait_until(lambda: owner(local).draining, "the shutdown")
        decide(local, decision, id)
    else:
        decide(local, decision, id)
        local.send(7, queue="other")  # its claim writes the node of the worker
        wait_until(lambda: not owner(local).reread, "the owner has seen it")
        worker.send(signal.SIGTERM)
        wait_until(lambda: owner(local).draining, "the shutdown")
    release(local, 1)
    assert worker.wait(60.0) == 0, worker.output
    local.send(2)
    local.drain(**ORDERS[order])
    assert local.runs("q") == [("1", 1), ("1", 2), ("2", 1)]
    assert (letters(local), local.node("q").failures) == ([], ())


def owner(desk: OperatorDesk) -> WorkerNode:
    path = desk.layout.worker(desk.node("q").owner)
    return WorkerNode.parse(desk.client.get(path)[0])


@pytest.mark.parametrize("order", ["key", "none"])
def test_other_failing_messages_keep_waiting(desk: OperatorDesk, order: str) -> None:
    """With their attempts and their backoffs: the decision is about one of them."""
    desk.known()
    desk.work(policy=HOUR, **ORDERS[order])
    ids = fail(desk, 1, 2, 3)
    others = [each for each in desk.node("q").failures if each.attempts == 1]
    assert len(others) == 3
    decide(desk, "skip", ids[1])
    wait_until(lambda: len(desk.node("q").failures) == 2, "the skip")
    desk.send(4)
    desk.wait_for(4)
    assert set(desk.node("q").failures) < set(others)
    assert sorted(desk.runs("q")) == [(each, 1) for each in "1234"]
    decide(desk, "skip", ids[1], code=5)
    decide(desk, "dead-letter", ids[0], ids[2])
    assert desk.wait_done().failures == ()
    assert sorted(letters(desk)) == [b"1", b"3"]


def test_a_decision_about_a_done_message_is_forgotten(local: OperatorDesk) -> None:
    """Also if an earlier message of another key is not done."""
    local.resist()
    local.known()
    local.work(policy=qdo.Policy(attempts=2, backoff_seconds=0.02, then="block"), order="key")
    (first,) = fail(local, 1)
    wait_until(lambda: local.node("q").blocking, "the block")
    second = interrupt(local, 2)
    decide(local, "dead-letter", second)
    release(local, 2)
    wait_until(
        lambda: local.node("q").failures == local.node("q").blocking, "the end of the second"
    )
    decide(local, "skip", first)
    assert local.wait_done().failures == ()
    assert letters(local) == []
    assert local.runs("q") == [("1", 1), ("1", 2), ("2", 1), ("2", 2)]
