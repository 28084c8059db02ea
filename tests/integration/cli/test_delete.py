"""`qdo delete` with real processes: what is done, refused, interrupted and repeated."""

from __future__ import annotations

from typing import Any

import pytest

from qdo import Policy
from qdo.brokers.dead_letters import DeadLetterRecord
from qdo.coordination import queue_admin
from qdo.coordination.znodes.queue_node import QueueNode
from qdo.errors import QueueNotEmptyError
from qdo.fleet.audit import read_entries
from qdo.ops.delete import delete, plan_deletion
from qdo.ops.fleet import Fleet
from tests.support.app_runs import OperatorDesk


def queues(desk: OperatorDesk) -> dict[str, int]:
    return {each["queue"]: each["backlog"] for each in desk.items("queues")}


def work(desk: OperatorDesk) -> None:
    desk.drain(policy=Policy(attempts=1))


def be_done(desk: OperatorDesk) -> None:
    """Record the messages of the queue `a` as done, as its worker would."""
    node = QueueNode(desk.broker.catalog.head("a"))
    desk.client.create(desk.layout.queue("a"), node.encode(), makepath=True)


def test_a_deleted_queue_is_gone_until_it_is_sent_to(local: OperatorDesk) -> None:
    """First the plan, then the deletion; both nodes and messages go, and new ones are processed."""
    for name in ("a", "b"):
        local.send(1, queue=name)
    work(local)
    (item,) = local.items("delete", "a", code=5)
    assert (item["queue"], item["waiting"], item["executed"]) == ("a", 0, False)
    assert queues(local) == {"a": 0, "b": 0}
    assert local.qdo("delete", "a", "--yes").code == 0
    assert queues(local) == {"b": 0}
    paths = [each["path"] for each in local.items("admin", "tree")]
    assert [each.rpartition("/")[2] for each in paths if "/queues/" in each] == ["b"]
    assert local.qdo("delete", "a", "--yes").code == 6
    local.send(2, queue="a")
    assert queues(local) == {"a": 1, "b": 0}
    work(local)
    assert queues(local) == {"a": 0, "b": 0}


def test_messages_and_dead_letters_are_kept(local: OperatorDesk) -> None:
    """Nothing changes for any of the named queues, if one of them is not empty."""
    local.send(1, queue="good")
    local.send("x", queue="bad")
    (local.folder / "fail-x").touch()
    work(local)
    refused = local.qdo("delete", "good", "bad", "--yes")
    assert refused.code == 5
    assert "dead letters: 1" in refused.err
    assert queues(local) == {"bad": 0, "good": 0}
    assert local.qdo("delete", "good", "bad", "--with-messages", "--yes").code == 0
    assert queues(local) == {}
    assert local.items("dead-letters", "list") == []


def test_an_interrupted_deletion_can_be_repeated(local: OperatorDesk) -> None:
    """Killed after the mark, or after the broker's part: the same command completes it. Until then
    `qdo queues` names it."""
    local.send(1, queue="a")
    be_done(local)
    queue_admin.retire(local.client, local.layout, "a")
    assert local.node("a").deleted
    (item,) = local.items("queues")
    assert (item["state"], item["remedy"]) == ("stopped", "qdo delete a")
    assert item["reason"] == "Its deletion was begun and has not finished."
    assert local.qdo("delete", "a", "--yes").code == 0
    local.client.create(local.layout.queue("a"), b'{"last": "5", "deleted": true, "retired": true}')
    assert local.qdo("delete", "a", "--yes").code == 0
    assert local.client.exists(local.layout.queue("a")) is None
    log = read_entries(local.client, local.layout, limit=9)
    assert [(each.command, each.target) for each in log] == [("delete", "a")] * 2


def test_a_failed_deletion_is_logged_with_its_undoing(local: OperatorDesk) -> None:
    """Each change has its entry, the first one before any message is deleted."""
    local.send(1, queue="a")
    be_done(local)
    plan = plan_deletion(local.fleet, "a")
    local.send(2, queue="a")
    with pytest.raises(QueueNotEmptyError):
        delete(local.fleet, plan, reason="no longer used")
    undone, begun = read_entries(local.client, local.layout, limit=9)
    assert begun.after == {"deleted": True}
    assert undone.after == {"deleted": False}
    assert begun.reason == undone.reason == "no longer used"
    assert not local.node("a").deleted


@pytest.mark.parametrize(
    ("late", "left"),
    [("waiting", (1, 1, 0)), ("delayed", (0, 1, 0)), ("dead letter", (0, 0, 1))],
)
def test_what_came_after_the_plan_is_kept(
    local: OperatorDesk, late: str, left: tuple[int, int, int]
) -> None:
    """The queue is then restored; what the plan has found may be gone, and the rest never is."""
    local.send(1, queue="a")
    local.send(2, queue="a", delay_seconds=3600)
    broker = local.broker
    uncoordinated = Fleet(None, local.layout, broker)
    plan = plan_deletion(uncoordinated, "a", with_messages=True)
    assert (plan.waiting, plan.delayed, plan.dead_letters) == (1, 1, 0)
    if late == "waiting":
        local.app.send("a", 3)
    elif late == "delayed":
        local.app.send("a", 3, delay_seconds=3600)
    else:
        letter = DeadLetterRecord("a", 1, b"3", None, None, "no", "", 1, "w", 1, 1.0)
        broker.dead_letters.store(letter)
    with pytest.raises(QueueNotEmptyError):
        delete(uncoordinated, plan)
    assert plan.contents is not None
    backlog = broker.catalog.backlog("a", plan.contents.newest)
    dead = broker.dead_letters.counts().get("a", 0)
    assert (backlog.count, backlog.delayed, dead) == left
    again = plan_deletion(uncoordinated, "a", with_messages=True)
    delete(uncoordinated, again)
    assert queues(local) == {}


def test_a_queue_that_was_used_again_keeps_its_progress(
    local: OperatorDesk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An operator who stalls between the two stores does not delete what is new in one of them."""
    local.send(1, queue="a")
    be_done(local)
    plan = plan_deletion(local.fleet, "a")
    delete_queue = local.broker.delete_queue

    def stall(*arguments: Any, **options: Any) -> None:
        delete_queue(*arguments, **options)
        local.app.send("a", 2)
        # Of another operator whose deletion failed.
        queue_admin.restore(local.client, local.layout, "a")
        work(local)

    monkeypatch.setattr(local.broker, "delete_queue", stall)
    delete(local.fleet, plan)
    assert queues(local) == {"a": 0}
    assert local.node("a").last


def test_a_queue_that_no_worker_has_seen(local: OperatorDesk) -> None:
    """There is no coordinator yet, and nothing of the queue is done."""
    local.send(1, queue="a")
    assert local.qdo("delete", "a", "--yes").code == 5
    assert local.qdo("delete", "a", "--yes", "--with-messages").code == 0
    assert queues(local) == {}
    assert local.qdo("delete", "nothing", "--yes").code == 6


def test_a_queue_without_room_says_so(local: OperatorDesk) -> None:
    """Where names arrive past the limit of senders, `qdo queues` has the reason."""
    local.send(1, queue="a")
    be_done(local)
    local.send(1, queue="b")
    shown = local.qdo("queues", "-o", "json", QDO_MAX_QUEUES="1").items()
    faults = {each["queue"]: each["fault"] for each in shown}
    assert faults["a"] is None
    assert "max_queues is 1" in faults["b"]


def test_sending_to_one_queue_too_many(local: OperatorDesk) -> None:
    """Exit code 2, and nothing is stored."""
    assert local.qdo("send", "a", "1", QDO_MAX_QUEUES="1").code == 0
    assert local.qdo("send", "b", "1", QDO_MAX_QUEUES="1").code == 2
    assert local.qdo("send", "a", "1", QDO_MAX_QUEUES="1").code == 0
    assert queues(local) == {"a": 2}
