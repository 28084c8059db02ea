"""`qdo delete` with real processes: what is done, refused, interrupted and repeated."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from qdo import App
from qdo.brokers.dead_letters import DeadLetterRecord
from qdo.coordination import queue_admin
from qdo.coordination.client import Client
from qdo.coordination.znodes.layout import Layout
from qdo.coordination.znodes.queue_node import QueueNode
from qdo.errors import QueueNotEmptyError
from qdo.fleet.audit import read_entries
from qdo.ops.delete import delete, plan_deletion
from tests.support.cli import QDO, WORKER, Ended, command
from tests.support.coordinator_process import connected

APP = """
import qdo

app = qdo.App("shop")


@app.job("*")
def job(message, context):
    if message.body == "fail":
        raise qdo.DeadLetter("no")
"""
LAYOUT = Layout.of("shop")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "shop.py").write_text(APP)
    return tmp_path


@pytest.fixture
def client(folder: Path) -> Iterator[Client]:
    with connected(f"sqlite:{folder}/qdo-data/coordination.db", handler="threading") as client:
        yield client


def qdo(folder: Path, *argv: str, **settings: str) -> Ended:
    env = {f"QDO_{name.upper()}": value for name, value in settings.items()}
    return command(*QDO, *argv, "--app", "shop", cwd=folder, env=env)


def process(folder: Path) -> None:
    assert command(*WORKER, "shop:app", "--burst", cwd=folder).code == 0


def queues(folder: Path) -> dict[str, int]:
    found = qdo(folder, "queues", "-o", "json").items()
    return {each["queue"]: each["backlog"] for each in found}


def test_a_deleted_queue_is_gone_until_it_is_sent_to(folder: Path) -> None:
    """First the plan, then the deletion; both nodes and messages go, and new ones are processed."""
    for name in ("a", "b"):
        assert qdo(folder, "send", name, "1").code == 0
    process(folder)
    plan = qdo(folder, "delete", "a", "-o", "json")
    assert plan.code == 5
    (item,) = json.loads(plan.out)["items"]
    assert (item["queue"], item["waiting"], item["executed"]) == ("a", 0, False)
    assert queues(folder) == {"a": 0, "b": 0}
    assert qdo(folder, "delete", "a", "--yes").code == 0
    assert queues(folder) == {"b": 0}
    paths = [
        each["path"] for each in json.loads(qdo(folder, "admin", "tree", "-o", "json").out)["items"]
    ]
    assert [each.rpartition("/")[2] for each in paths if "/queues/" in each] == ["b"]
    assert qdo(folder, "delete", "a", "--yes").code == 6
    assert qdo(folder, "send", "a", "2").code == 0
    assert queues(folder) == {"a": 1, "b": 0}
    process(folder)
    assert queues(folder) == {"a": 0, "b": 0}


def test_messages_and_dead_letters_are_kept(folder: Path) -> None:
    """Nothing changes for any of the named queues, if one of them is not empty."""
    qdo(folder, "send", "good", "1")
    qdo(folder, "send", "bad", '"fail"')
    process(folder)
    refused = qdo(folder, "delete", "good", "bad", "--yes")
    assert refused.code == 5
    assert "dead letters: 1" in refused.err
    assert queues(folder) == {"bad": 0, "good": 0}
    assert qdo(folder, "delete", "good", "bad", "--with-messages", "--yes").code == 0
    assert queues(folder) == {}
    assert json.loads(qdo(folder, "dead-letters", "list", "-o", "json").out)["items"] == []


def test_an_interrupted_deletion_can_be_repeated(folder: Path, client: Client) -> None:
    """Killed after the mark, or after the broker's part: the same command completes it."""
    qdo(folder, "send", "a", "1")
    process(folder)
    queue_admin.retire(client, LAYOUT, "a")
    assert QueueNode.parse(client.get(LAYOUT.queue("a"))[0]).deleted
    assert qdo(folder, "delete", "a", "--yes").code == 0
    client.create(LAYOUT.queue("a"), b'{"last": "5", "deleted": true, "retired": true}')
    assert qdo(folder, "delete", "a", "--yes").code == 0
    assert client.exists(LAYOUT.queue("a")) is None
    log = read_entries(client, LAYOUT, limit=9)
    assert [(each.command, each.target) for each in log] == [("delete", "a")] * 2


def test_a_failed_deletion_is_logged_with_its_undoing(folder: Path, client: Client) -> None:
    """Each change has its entry, the first one before any message is deleted."""
    qdo(folder, "send", "a", "1")
    process(folder)
    with App("shop", broker=f"sqlite:{folder}/qdo-data/messages.db") as app:
        plan = plan_deletion(client, LAYOUT, app.broker, "a")
        app.send("a", 2)
        with pytest.raises(QueueNotEmptyError):
            delete(client, LAYOUT, app.broker, plan, reason="no longer used")
    undone, begun = read_entries(client, LAYOUT, limit=9)
    assert begun.after == {"deleted": True}
    assert undone.after == {"deleted": False}
    assert begun.reason == undone.reason == "no longer used"
    assert not QueueNode.parse(client.get(LAYOUT.queue("a"))[0]).deleted


@pytest.mark.parametrize(
    ("late", "left"),
    [("waiting", (1, 1, 0)), ("delayed", (0, 1, 0)), ("dead letter", (0, 0, 1))],
)
def test_what_came_after_the_plan_is_kept(
    folder: Path, late: str, left: tuple[int, int, int]
) -> None:
    """The queue is then restored; what the plan has found may be gone, and the rest never is."""
    qdo(folder, "send", "a", "1")
    qdo(folder, "send", "a", "2", "--delay", "1h")
    with App("shop", broker=f"sqlite:{folder}/qdo-data/messages.db") as app:
        broker = app.broker
        plan = plan_deletion(None, LAYOUT, broker, "a", with_messages=True)
        assert (plan.waiting, plan.delayed, plan.dead_letters) == (1, 1, 0)
        if late == "waiting":
            app.send("a", 3)
        elif late == "delayed":
            app.send("a", 3, delay_seconds=3600)
        else:
            letter = DeadLetterRecord("a", 1, b"3", None, None, "no", "", 1, "w", 1, 1.0)
            broker.dead_letters.store(letter)
        with pytest.raises(QueueNotEmptyError):
            delete(None, LAYOUT, broker, plan)
        assert plan.contents is not None
        backlog = broker.catalog.backlog("a", plan.contents.newest)
        dead = broker.dead_letters.counts().get("a", 0)
        assert (backlog.count, backlog.delayed, dead) == left
        again = plan_deletion(None, LAYOUT, broker, "a", with_messages=True)
        delete(None, LAYOUT, broker, again)
        assert queues(folder) == {}


def test_a_queue_that_was_used_again_keeps_its_progress(
    folder: Path, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An operator who stalls between the two stores does not delete what is new in one of them."""
    qdo(folder, "send", "a", "1")
    process(folder)
    with App("shop", broker=f"sqlite:{folder}/qdo-data/messages.db") as app:
        plan = plan_deletion(client, LAYOUT, app.broker, "a")
        delete_queue = app.broker.delete_queue

        def stall(*arguments: Any, **options: Any) -> None:
            delete_queue(*arguments, **options)
            app.send("a", 2)
            queue_admin.restore(client, LAYOUT, "a")  # of another operator whose deletion failed
            process(folder)

        monkeypatch.setattr(app.broker, "delete_queue", stall)
        delete(client, LAYOUT, app.broker, plan)
        assert queues(folder) == {"a": 0}
        assert QueueNode.parse(client.get(LAYOUT.queue("a"))[0]).last


def test_an_interrupted_deletion_is_named_until_it_is_repeated(
    folder: Path, client: Client
) -> None:
    """The operator's process died after it had marked the queue."""
    qdo(folder, "send", "a", "1")
    process(folder)
    queue_admin.retire(client, LAYOUT, "a")
    (item,) = qdo(folder, "queues", "-o", "json").items()
    assert (item["state"], item["remedy"]) == ("stopped", "qdo delete a")
    assert item["reason"] == "Its deletion was begun and has not finished."
    assert qdo(folder, "delete", "a", "--yes").code == 0
    assert queues(folder) == {}


def test_a_queue_that_no_worker_has_seen(folder: Path) -> None:
    """There is no coordinator yet, and nothing of the queue is done."""
    qdo(folder, "send", "a", "1")
    assert qdo(folder, "delete", "a", "--yes").code == 5
    assert qdo(folder, "delete", "a", "--yes", "--with-messages").code == 0
    assert queues(folder) == {}
    assert qdo(folder, "delete", "nothing", "--yes").code == 6


def test_a_queue_without_room_says_so(folder: Path) -> None:
    """Where names arrive past the limit of senders, `qdo queues` has the reason."""
    qdo(folder, "send", "a", "1")
    process(folder)
    qdo(folder, "send", "b", "1")
    shown = qdo(folder, "queues", "-o", "json", max_queues="1")
    faults = {each["queue"]: each["fault"] for each in json.loads(shown.out)["items"]}
    assert faults["a"] is None
    assert "max_queues is 1" in faults["b"]


def test_sending_to_one_queue_too_many(folder: Path) -> None:
    """Exit code 2, and nothing is stored."""
    assert qdo(folder, "send", "a", "1", max_queues="1").code == 0
    assert qdo(folder, "send", "b", "1", max_queues="1").code == 2
    assert qdo(folder, "send", "a", "1", max_queues="1").code == 0
    assert queues(folder) == {"a": 2}
