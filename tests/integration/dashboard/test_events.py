"""The events that a dashboard has seen: each change once, many as one, in bounded memory."""

from __future__ import annotations

from typing import Any

import pytest

from qdo.coordination.znodes.queue_node import QueueNode
from qdo.coordination.znodes.worker_node import WorkerNode
from qdo.dashboard.reading import MOST_EVENTS, EventLog
from qdo.fleet.holds import new_hold, pause
from qdo.ops.changes import MOST_OF_A_KIND, Difference, Look, changes, summed_up
from qdo.ops.items import Judged
from qdo.ops.status import QueueStatus
from qdo.ops.verdicts import QueueHealth, Verdict
from tests.support.dashboard.shop import LAYOUT, FilledShop, Visitor
from tests.support.processes import wait_until

KEYS = ["time", "kind", "subject", "before", "after", "reason", "by"]


def events(visitor: Visitor, query: str = "") -> list[dict[str, Any]]:
    return visitor.items(f"/api/events{query}")


def test_events_have_the_keys_of_the_command(shop: FilledShop) -> None:
    """A new queue, a worker, its claim, and a command."""
    visitor = shop.visitor()
    visitor.page("/")
    assert events(visitor) == []
    shop.app.send("new-1", 1)
    path = shop.client.create(
        f"{LAYOUT.workers}/worker-", WorkerNode().encode(), ephemeral=True, sequence=True
    )
    worker = path.rpartition("/")[2]
    shop.client.set(LAYOUT.queue("blocked"), QueueNode(last=7, owner=worker).encode())
    pause(shop.client, LAYOUT, new_hold(["x-*"], "they move"))

    def kinds() -> set[str]:
        return {each["kind"] for each in events(visitor)}

    wait_until(lambda: {"queue", "worker", "owner", "state", "pause"} <= kinds(), "all are seen")
    found = events(visitor)
    assert all(list(each) == sorted(KEYS) for each in found)
    assert visitor.get("/api/events").get_json()["schema"] == "qdo.events/1"
    [new] = [each for each in found if each["kind"] == "queue"]
    assert (new["subject"], new["before"], new["after"]) == ("new-1", "", "new")
    [command] = [each for each in found if each["kind"] == "pause"]
    assert (command["subject"], command["reason"]) == ("x-*", "they move")
    assert [each["kind"] for each in events(visitor, "?kind=command")] == ["pause"]
    assert {each["subject"] for each in events(visitor, "?glob=new-*")} == {"new-1"}
    assert visitor.get("/api/events?kind=color").status_code == 400
    for page in ("/", "/events"):
        text = visitor.page(page)
        assert "new-1" in text
        assert "they move" in text
    assert "No event matches." in visitor.page("/events?glob=nothing")
    assert "new-1" not in visitor.page("/events?kind=worker")


def test_events_are_paged_on_the_server(local_shop: FilledShop) -> None:
    """A hundred to a page."""
    visitor = local_shop.visitor(pause_seconds=3600.0)
    visitor.page("/events")
    log = visitor.reader.events
    for number in range(25):
        looks = [judged({f"q{number}-{each}": "" for each in range(count)}) for count in (0, 10)]
        for each in looks:
            log.compare(float(number), each, [], (), [])
    text = visitor.page("/events?page=2")
    assert "101&ndash;200 of " in text
    assert text.count('scope="row"') == 100


def judged(owners: dict[str, str], state: QueueHealth = QueueHealth.OK) -> Judged:
    empty: dict[str, Any] = {
        "last": 0,
        "backlog": 0,
        "oldest": None,
        "dead_letters": 0,
        "fault": None,
    }
    return [
        (QueueStatus(queue=name, owner=owner or None, owner_gone=False, **empty), Verdict(state))
        for name, owner in owners.items()
    ]


@pytest.mark.slow
def test_a_mass_event_is_summed_up() -> None:
    """A worker with 30,000 queues is gone, and others take them one after the other."""
    names = [f"tenant-{number:07}" for number in range(100_000)]
    before = dict.fromkeys(names, "worker-1")
    after = {**before, **dict.fromkeys(names[:30_000], "")}
    log = EventLog()
    log.compare(1.0, judged(before), ["worker-1"], (), [])
    log.compare(2.0, judged(after), [], (), [])
    owner, worker = log.newest()
    assert (worker.change.subject, worker.change.after) == ("worker-1", "gone")
    assert owner.change.subject.startswith("30000 queues: tenant-0000000, ")
    assert (owner.change.before, owner.change.after) == ("worker-1", "")
    assert "summed up" in owner.change.reason
    assert len(owner.change.subject) < 300
    assert owner in log.newest("no-such-queue")


def test_many_groups_stay_few() -> None:
    """Each of 500 queues got another owner."""
    found = [Difference("owner", f"q{number}", "", f"w{number // 2}") for number in range(500)]
    sums = summed_up(found)
    assert len(sums) == MOST_OF_A_KIND
    assert sums[-1].subject.startswith("462 queues: ")
    few = found[:MOST_OF_A_KIND]
    assert summed_up(few) == few


def test_old_events_are_forgotten() -> None:
    log = EventLog()
    log.compare(0.0, [], [], (), [])
    for number in range(MOST_EVENTS):
        log.compare(number + 1.0, judged({"q": f"w{number}"}), ["w"], (), [])
    assert len(log.newest()) == MOST_EVENTS
    assert log.newest()[0].at == MOST_EVENTS


def test_what_cannot_be_read_has_not_changed() -> None:
    """Neither when it cannot be read nor when it can be read again."""
    log = EventLog()
    for unread, owner in (((), "w"), (("workers",), ""), ((), "w")):
        log.compare(1.0, judged({"q": owner}), ["w"] if owner else [], unread, [])
    assert log.newest() == []


def test_the_end_of_a_worker_has_its_reason() -> None:
    log = EventLog()
    ends = [(1.0, Difference("worker", "w-1", "there", "gone", "it died"))]
    log.compare(1.0, judged({}), ["w-1"], (), [])
    log.compare(2.0, judged({}), [], (), [], ends)
    assert [each.change for each in log.newest()] == [ends[0][1]]


@pytest.mark.parametrize("same", [True, False])
def test_looks_with_the_same_values_have_no_changes(same: bool) -> None:
    looks = [Look(judged({"a": "w", "b": "w" if same else "x"}), ["w"], ()) for _ in range(2)]
    assert list(changes(*looks)) == []
