"""The events that a dashboard has seen: each change once, many as one, in bounded memory."""

from __future__ import annotations

from typing import Any

from qdo.coordination.znodes.queue_node import QueueNode
from qdo.coordination.znodes.worker_node import WorkerNode
from qdo.fleet.pauses import new_pause, pause_queues
from tests.support.dashboard.shop import LAYOUT, FilledShop, Visitor
from tests.support.processes import wait_until
from tests.unit.dashboard.test_event_log import judged

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
    pause_queues(shop.client, LAYOUT, new_pause(["x-*"], "they move"))

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
