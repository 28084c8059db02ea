"""`qdo purge`: drops what waits, and nothing that arrives later."""

from __future__ import annotations

from typing import Any

import pytest

import qdo
from qdo.coordination.queue_admin import AT_ONCE
from qdo.ops.seek import plan_purge, purge
from qdo.ops.status import Statuses, queue_statuses
from qdo.ops.verdicts import QueueHealth, judge_all
from tests.support.app_runs import OperatorDesk
from tests.support.processes import wait_until


@pytest.mark.parametrize("order", ["queue", "key", "none"])
def test_drops_what_waits_behind_a_running_job(desk: OperatorDesk, order: Any) -> None:
    """The message in flight ends, later ones run, and nothing is repeated."""
    options = {} if order == "queue" else {"concurrency": 1}
    _, held, _ = desk.begin_first(*range(1, 6), order=order, **options)
    (item,) = desk.items("purge", "--yes", "q", "--reason", "spam")
    assert (item["queue"], item["waiting"], item["executed"]) == ("q", 5, True)
    desk.wait_heard()
    desk.send(6, 7)
    held.unlink()
    desk.wait_done()
    assert desk.bodies() == ["1", "6", "7"]
    (entry,) = desk.audit("purge")
    assert (entry.target, entry.reason) == ("q", "spam")


def test_owners_of_several_queues_follow(desk: OperatorDesk) -> None:
    """One transaction moves them all, while their jobs run."""
    for number in (1, 2, 3):
        desk.send(f"{number}-a", f"{number}-b", queue=f"q{number}")
    held = [desk.hold(f"{number}-a") for number in (1, 2, 3)]
    desk.work()
    wait_until(lambda: len(desk.pids()) == 3, "three jobs run", 60.0)
    items = desk.items("purge", "--yes", "q*")
    assert [(each["waiting"], each["executed"]) for each in items] == [(2, True)] * 3
    desk.wait_heard()
    for number, file in enumerate(held, 1):
        desk.send(f"{number}-c", queue=f"q{number}")
        file.unlink()
    for number in (1, 2, 3):
        queue = f"q{number}"
        wait_until(lambda: desk.bodies(queue) == [f"{number}-a", f"{number}-c"], queue, 60.0)  # noqa: B023


def test_an_owner_that_is_farther_repeats_nothing(
    desk: OperatorDesk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither what it has recorded, nor what it has done since its last checkpoint."""
    desk.send(1)
    desk.known()
    monkeypatch.setenv("QDO_CHECKPOINT_SECONDS", "3")
    desk.work()
    desk.wait_done()
    for number in range(4):
        held = desk.hold(f"{number}-a")
        desk.send(f"{number}-a", f"{number}-b")
        desk.wait_for(f"{number}-a")
        plan = plan_purge(desk.fleet, "q")
        held.unlink()
        desk.send(f"{number}-c", f"{number}-d")
        desk.wait_for(f"{number}-d")
        if number == 1:
            desk.wait_done()
        purge(desk.fleet, plan)
        desk.send(f"{number}-e")
        desk.wait_for(f"{number}-e")
        desk.wait_done()
    assert desk.bodies() == ["1", *(f"{n}-{each}" for n in range(4) for each in "abcde")]


def test_a_dry_run_changes_nothing(desk: OperatorDesk) -> None:
    """It counts; a GLOB needs a confirmation, and a queue of that very name does not."""
    for queue in ("a1", "a2", "b"):
        desk.send(1, 2, queue=queue)
    desk.send(3, queue="a1", delay_seconds=3600.0)
    desk.known("a1", "a2", "b")
    items = desk.items("purge", "a*", "--delayed", "--dry-run")
    shown = [(each["queue"], each["waiting"], each["delayed"], each["executed"]) for each in items]
    assert shown == [("a1", 2, 1, False), ("a2", 2, 0, False)]
    assert desk.qdo("purge", "a*").code == 5
    assert desk.qdo("purge", "nothing*").code == 6
    assert [desk.node(each).last for each in ("a1", "a2", "b")] == [0, 0, 0]
    assert [each["delayed"] for each in desk.items("purge", "a*", "--yes")] == [None, None]
    assert desk.broker.catalog.backlog("a1", 0).delayed == 1
    assert [each["delayed"] for each in desk.items("purge", "--yes", "a1", "--delayed")] == [1]
    assert desk.broker.catalog.backlog("a1", 0).delayed == 0
    desk.drain()
    assert [desk.bodies(each) for each in ("a1", "a2", "b")] == [[], [], ["1", "2"]]


def test_what_fails_or_blocks_is_dropped(desk: OperatorDesk) -> None:
    """A blocked queue continues with what arrives later."""
    desk.send(1, 2)
    desk.known()
    (desk.folder / "fail-1").touch()
    desk.work(policy=qdo.Policy(attempts=1, then="block"))
    wait_until(lambda: desk.node("q").blocking != (), "the block")
    assert desk.qdo("purge", "--yes", "q").code == 0
    desk.send(3)
    desk.wait_done()
    assert desk.bodies() == ["1", "3"]
    assert desk.node("q").failure is None


def test_two_operators_at_once(desk: OperatorDesk) -> None:
    """Purge, cancel and seek in any order end in one of the results that a sequence has."""
    for number in range(4):
        queue = f"q{number}"
        ids = desk.send(1, 2, 3, queue=queue)
        desk.known(queue)
        second = [
            ("cancel", "--yes", queue, *ids[1:]),
            ("purge", "--yes", queue),
            ("seek", queue, "earliest", "--yes"),
            ("seek", queue, "latest", "--yes"),
        ][number]
        both = [desk.begin("purge", "--yes", queue), desk.begin(*second)]
        codes = [each.wait(60.0) for each in both]
        # What is purged first cannot be cancelled.
        assert codes in ([0, 0], [0, 4]), [each.output for each in both]
        desk.send(4, queue=queue)
    desk.drain()
    for number in range(4):
        runs = desk.bodies(f"q{number}")
        assert runs in (["4"], ["1", "2", "3", "4"] if number == 2 else ["4"])


def test_a_killed_operator_leaves_whole_queues(desk: OperatorDesk) -> None:
    """Each queue is purged or not; the repeated command purges the rest. Each has one entry."""
    names = [f"q{number:03}" for number in range(2 * AT_ONCE + 50)]
    desk.app.send_many([(name, 1) for name in names])
    desk.known(*names)
    operator = desk.begin("purge", "q*", "--yes")
    wait_until(lambda: desk.node(names[0]).last, "the first purge")
    operator.kill()
    purged = [name for name in names if desk.node(name).last]
    assert len(purged) % AT_ONCE == 0 or purged == names
    assert desk.qdo("purge", "q*", "--yes").code == 0
    entries = desk.audit("purge")
    assert [each.target for each in entries] == ["q*", "q*"]
    assert entries[-1].before == {"queues": len(names), "waiting": len(names), "delayed": 0}
    desk.send(2, queue=names[0])
    desk.drain()
    assert [desk.bodies(name) for name in names] == [["2"], *([] for _ in names[1:])]


def test_a_queue_that_is_created_again_was_not_rewound(desk: OperatorDesk) -> None:
    """Its second node begins before the end of the first one, and nobody moved it."""

    def read() -> Statuses:
        return queue_statuses(desk.client, desk.layout, desk.broker)

    desk.send(1)
    desk.work()
    wait_until(lambda: desk.bodies() == ["1"], "the first message")
    desk.wait_done()
    before = read()
    assert desk.qdo("delete", "q", "--yes").code == 0
    desk.hold(2)
    desk.send(2)
    desk.wait_for(2)
    after = read()
    ((status, verdict),) = judge_all([before, after])
    assert status.last < before.queues[0].last
    assert verdict.state is QueueHealth.OK
