"""`qdo cancel`: what is cancelled never runs, and what has begun is reported."""

from __future__ import annotations

import json
import os
import signal
from typing import Any

import pytest

import qdo
from qdo.coordination.znodes.queue_node import MAX_CANCELLED
from tests.support.app_runs import OperatorDesk
from tests.support.processes import Proc, paused, wait_until

ORDERS: dict[str, dict[str, Any]] = {
    "queue": {},
    "key": {"order": "key", "concurrency": 1},
    "none": {"order": "none", "concurrency": 1},
    "batch": {"batch": 2},
    "each": {"checkpoint": "message"},
}


@pytest.mark.parametrize("order", ORDERS)
def test_what_waits_is_cancelled_and_what_has_begun_is_not(desk: OperatorDesk, order: str) -> None:
    """In every order; the owner keeps running, loses nothing and repeats nothing."""
    ids = desk.send(*range(1, 31))
    held = [desk.hold(each) for each in (2, 9)]
    desk.work(**ORDERS[order])
    desk.wait_for(2)
    assert desk.outcomes(ids[1], code=4) == ["started"]
    held[0].unlink()
    desk.wait_for(9)
    assert desk.outcomes(ids[0], ids[8], code=4) == ["done", "started"]
    assert desk.outcomes(ids[8], code=4) == ["started"]
    assert desk.outcomes(ids[19]) == ["cancelled"]
    assert desk.outcomes(ids[8], ids[19], code=4) == ["started", "already-cancelled"]
    assert desk.outcomes(ids[24]) == ["cancelled"]
    held[1].unlink()
    node = desk.wait_done()
    assert desk.bodies() == [str(each) for each in range(1, 31) if each not in (20, 25)]
    assert node.out_of_order is None


def test_a_queue_that_passed_its_cancelled_messages(desk: OperatorDesk) -> None:
    """A failing message behind them repeats none of those that are done."""
    ids = desk.send(1, 2, 3)
    first, last = desk.hold(1), desk.hold(3)
    desk.work(policy=qdo.Policy(attempts=3, backoff_seconds=0.01))
    desk.wait_for(1)
    assert desk.outcomes(ids[1]) == ["cancelled"]
    first.unlink()
    desk.wait_for(3)
    wait_until(lambda: desk.node("q").out_of_order is None, "the record that it was passed")
    (desk.folder / "fail-4").touch()
    desk.send(4)
    last.unlink()
    wait_until(lambda: desk.bodies().count("4") == 3, "the attempts")
    desk.wait_done()
    assert desk.bodies() == ["1", "3", "4", "4", "4"]


def test_messages_of_other_lanes_run_on(desk: OperatorDesk) -> None:
    """A cancelled message of a busy key, and one that was not read yet."""
    ids = [desk.app.send("q", each, key="same") for each in range(1, 6)]
    held = desk.hold(1)
    desk.work(order="key", concurrency=5)
    desk.wait_for(1)
    assert desk.outcomes(ids[2]) == ["cancelled"]
    other = desk.send(6)
    desk.wait_for(6)
    assert desk.outcomes(*other, ids[2], code=4) == ["done", "already-cancelled"]
    held.unlink()
    desk.wait_done()
    assert desk.bodies() == ["1", "6", "2", "4", "5"]


def test_without_an_owner_the_node_is_changed(desk: OperatorDesk) -> None:
    """In one transaction with its entry in the action log; the next owner obeys. Also in a queue
    that no worker has seen."""
    ids = desk.send(1, 2, 3)
    assert desk.outcomes(ids[0], ids[2]) == ["cancelled", "cancelled"]
    assert desk.outcomes(ids[2]) == ["already-cancelled"]
    (entry,) = desk.audit("cancel")
    assert (entry.target, entry.after) == ("q", {"cancelled": 2})
    desk.drain()
    assert desk.bodies() == ["2"]
    assert desk.node("q").last == desk.broker.catalog.head("q")


def test_a_message_may_have_run_at_a_dead_owner(desk: OperatorDesk) -> None:
    """It had no time to record what ran; the command does not claim that nothing did."""
    ids = desk.send(1, 2)
    desk.hold(1)
    worker = desk.work("--session-timeout-seconds", "1")
    desk.wait_for(1)
    worker.kill()
    wait_until(lambda: not desk.client.get_children(desk.layout.workers), "the end of its session")
    ended = desk.qdo("cancel", "--yes", "q", ids[0], "-o", "jsonl")
    item = json.loads(ended.out)
    assert item["outcome"] == "cancelled"
    assert "may have run" in item["reason"]
    desk.drain()
    assert desk.bodies() == ["1", "2"]


def test_a_worker_killed_before_it_answers(desk: OperatorDesk) -> None:
    """The command asks the next owner, or changes the node itself."""
    ids, held, process = desk.begin_first(1, 2, 3, 4)
    with paused(process, desk.broker_url, desk.coordinator):
        command = desk.begin("cancel", "--yes", "q", *ids[1:3], "--timeout", "30s", "-o", "jsonl")
        wait_until(lambda: desk.requests() == 1, "the request")
        os.kill(process, signal.SIGKILL)  # its parent starts another one
    assert command.wait(60.0) == 0, command.output
    assert outcomes_of(command) == ["cancelled", "cancelled"]
    held.unlink()
    desk.wait_done()
    assert desk.bodies() == ["1", "1", "4"]


def test_a_worker_killed_after_it_recorded(desk: OperatorDesk) -> None:
    """Whether or not its answer arrived, the command says what is true."""
    ids, held, process = desk.begin_first(1, 2, 3, 4)
    command = desk.begin("cancel", "--yes", "q", *ids[1:3], "--timeout", "30s", "-o", "jsonl")
    wait_until(lambda: desk.node("q").out_of_order is not None, "the record")
    os.kill(process, signal.SIGKILL)
    assert command.wait(60.0) == 0, command.output
    assert set(outcomes_of(command)) <= {"cancelled", "already-cancelled"}
    held.unlink()
    desk.wait_done()
    assert desk.bodies() == ["1", "1", "4"]


def test_a_killed_operator_leaves_nothing_undecided(desk: OperatorDesk) -> None:
    """The owner carries out the request; the repeated command reports it."""
    ids, held, process = desk.begin_first(1, 2, 3)
    with paused(process, desk.broker_url, desk.coordinator):
        command = desk.begin("cancel", "--yes", "q", ids[1], "--timeout", "30s")
        wait_until(lambda: desk.requests() == 1, "the request")
        command.kill()
    wait_until(lambda: desk.requests() == 0, "the end of the request")
    assert desk.outcomes(ids[1]) == ["already-cancelled"]
    held.unlink()
    desk.wait_done()
    assert desk.bodies() == ["1", "3"]


@pytest.mark.parametrize("owned", [True, False])
def test_of_two_operators_one_cancels(desk: OperatorDesk, owned: bool) -> None:
    """Each message once; the other operator learns that it was cancelled before."""
    ids = desk.send(*range(1, 9))
    desk.known()
    held = desk.hold(1)
    if owned:
        desk.work()
        desk.wait_for(1)
    both = [desk.begin("cancel", "--yes", "q", *ids[2:6], "-o", "jsonl") for _ in range(2)]
    assert [each.wait(60.0) for each in both] == [0, 0], [each.output for each in both]
    pairs = zip(*map(outcomes_of, both), strict=True)
    assert [sorted(pair) for pair in pairs] == 4 * [["already-cancelled", "cancelled"]]
    held.unlink()
    if owned:
        desk.wait_done()
    else:
        desk.drain()
    assert desk.bodies() == ["1", "2", "7", "8"]


def test_a_worker_that_does_not_answer(desk: OperatorDesk) -> None:
    """The command says that it does not know; the worker does not act later."""
    (first, second), held, process = desk.begin_first(1, 2)
    with paused(process, desk.broker_url, desk.coordinator):
        (item,) = desk.items("cancel", "--yes", "q", second, "--timeout", "0.5s", code=4)
    assert item["outcome"] == "unknown"
    assert item["reason"]
    held.unlink()
    desk.wait_done()
    assert desk.bodies() == ["1", "2"]
    assert desk.outcomes(first, second, code=4) == ["done", "done"]


def test_a_delayed_message_is_deleted(desk: OperatorDesk) -> None:
    """By its id, also where no worker has seen its queue; once it is due it is cancelled like all
    others. A second cancel knows of the first."""
    later = desk.send(1, 2, delay_seconds=3600.0)
    soon = desk.send(3, 4, delay_seconds=0.5)
    assert [each["outcome"] for each in desk.items("cancel", "q", later[0], "--dry-run")] == [
        "delayed"
    ]
    assert desk.outcomes(later[0]) == ["cancelled"]
    assert desk.outcomes(later[0]) == ["already-cancelled"]
    assert desk.broker.catalog.backlog("q", 0).delayed == 3
    (entry,) = desk.audit("cancel")
    assert entry.after == {"cancelled": 1}
    stop = desk.broker.listen(lambda names: None)
    wait_until(lambda: desk.broker.catalog.backlog("q", 0).count == 2, "the due messages")
    stop()
    assert desk.outcomes(soon[1], later[1]) == ["cancelled", "cancelled"]
    desk.drain()
    assert desk.bodies() == ["3"]


def test_a_failing_message_has_begun(desk: OperatorDesk) -> None:
    """It is reported, and the queue blocks or retries as before."""
    ids = desk.send(1, 2, 3)
    (desk.folder / "fail-1").touch()
    desk.known()
    desk.work(policy=qdo.Policy(attempts=1, then="block"))
    wait_until(lambda: desk.node("q").failure is not None, "the failure")
    assert desk.outcomes(ids[0], ids[1], code=4) == ["failing", "cancelled"]
    (desk.folder / "fail-1").unlink()
    assert desk.qdo("retry-now", "q").code == 0
    desk.wait_done()
    assert desk.bodies()[-1] == "3"
    assert "2" not in desk.bodies()


def test_what_cannot_be_an_id_is_refused(local: OperatorDesk) -> None:
    """Before anything is changed: the other ids stay as well."""
    (id,) = local.send(1)
    local.known()
    for name in ("", "1 2", "\x1b[2J", "7" * 101, "../q", "%", "x" * 36):
        assert local.qdo("cancel", "q", id, "--", name).code == 2, name
    assert local.node("q").out_of_order is None


def test_ids_that_do_not_exist_are_named(local: OperatorDesk) -> None:
    """With the exit code for some targets, or for none."""
    (id,) = local.send(1)
    local.known()
    other, far = "3c06f05a-e6c5-11f1-8000-8fe557e2e22d", str(10**99)
    assert local.outcomes(other, far, code=6) == ["not-found", "not-found"]
    assert local.outcomes(other, id.upper(), code=4) == ["not-found", "cancelled"]
    assert local.qdo("cancel", "nowhere", id).code == 6


def test_a_queue_may_have_many_cancelled_messages(local: OperatorDesk) -> None:
    """Up to a limit, because they are kept in its node."""
    ids = local.send(*range(MAX_CANCELLED + 2))
    local.known()
    assert local.qdo("cancel", "--yes", "q", *ids).code == 2
    assert set(local.outcomes(*ids[:MAX_CANCELLED])) == {"cancelled"}
    assert local.qdo("cancel", "--yes", "q", ids[-1]).code == 2
    local.drain()
    assert local.bodies() == [str(MAX_CANCELLED), str(MAX_CANCELLED + 1)]


def outcomes_of(command: Proc) -> list[str]:
    """Return what a command that was started has printed."""
    lines = [line for line in command.output.splitlines() if line.startswith("{")]
    return [json.loads(line)["outcome"] for line in lines]


def test_a_decision_repeats_nothing_of_other_keys(
    desk: OperatorDesk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither what they have done since the last checkpoint, nor what is in flight."""
    monkeypatch.setenv("QDO_CHECKPOINT_SECONDS", "3")
    desk.known()
    (desk.folder / "fail-1").touch()
    desk.send(1)
    desk.work(order="key", concurrency=5, policy=qdo.Policy(attempts=1, then="block"))
    wait_until(lambda: desk.node("q").blocking != (), "the block")
    held = desk.hold(3)
    desk.send(2, 3)
    desk.wait_for(2, 3)
    (desk.folder / "fail-1").unlink()
    assert desk.qdo("retry-now", "q").code == 0
    held.unlink()
    desk.wait_done()
    assert desk.bodies() == ["1", "2", "3", "1"]


def test_cancelled_messages_do_not_wait(desk: OperatorDesk) -> None:
    """They raise no alarm, count nowhere, and keep no queue from being deleted."""
    desk.known()
    ids = desk.send(1, 2, 3)
    desk.outcomes(*ids[:2])
    (item,) = desk.items("queues")
    (peeked,) = desk.items("peek", "q")
    assert (item["backlog"], item["oldest"]) == (1, peeked["position"])
    assert desk.items("purge", "q", "--dry-run")[0]["waiting"] == 1
    assert desk.qdo("delete", "q", "--yes").code == 5
    assert desk.qdo("check", "--min-workers", "0").code == 2
    desk.outcomes(ids[2])
    (item,) = desk.items("queues")
    assert (item["state"], item["backlog"], item["behind_seconds"]) == ("idle", 0, 0.0)
    assert desk.items("peek", "q") == []
    assert desk.qdo("check", "--min-workers", "0").code == 0
    assert desk.items("purge", "q", "--dry-run")[0]["waiting"] == 0
    desk.send(4)
    assert desk.items("queues")[0]["backlog"] == 1
    assert desk.qdo("delete", "q", "--yes").code == 5
    desk.outcomes(desk.items("peek", "q")[0]["id"])
    ended = desk.qdo("delete", "q", "--yes")
    assert ended.code == 0, ended.err
    assert desk.items("queues") == []
