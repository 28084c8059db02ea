"""`qdo ps` lists the messages that run now, and where their code stands."""

from __future__ import annotations

import json
from typing import Any

from tests.support.app_runs import AppRuns
from tests.support.cli import Ended
from tests.support.processes import children, freeze, wait_until

APP = "from tests.apps.held import app\n"
QUEUES = ("greenlet", "thread", "process", "async")


def ps(runs: AppRuns, *arguments: str) -> Ended:
    return runs.qdo("ps", *arguments)


def items(runs: AppRuns, *arguments: str) -> list[dict[str, Any]]:
    return ps(runs, "-o", "json", *arguments).items()


def test_every_executor_shows_its_messages(runs: AppRuns) -> None:
    ids = {queue: runs.app.send(queue, 1) for queue in QUEUES}
    ids |= {"lanes-1": runs.app.send("lanes-1", 1)}
    runs.start(APP, "--processes", "2")
    wait_until(lambda: _answers(runs, len(ids)), "all messages run")
    found = {each["queue"]: each for each in items(runs)}
    assert {queue: each["id"] for queue, each in found.items()} == ids
    assert {each["attempt"] for each in found.values()} == {1}
    assert all(0 <= each["seconds"] < 60 for each in found.values())
    assert found["greenlet"]["where"].startswith("held.py:")
    assert found["greenlet"]["where"].endswith(" until_released")
    assert found["lanes-1"]["where"].endswith(" until_released")
    assert found["thread"]["where"].endswith(" until_released_in_a_thread")
    assert [each.rpartition(" ")[2] for each in found["thread"]["stack"]] == [
        "in_thread",
        "until_released_in_a_thread",
    ]

    # Of some queues, some workers, or the longest.
    assert [each["queue"] for each in items(runs, "lanes-*")] == ["lanes-1"]
    owner = found["thread"]["worker"]
    assert {each["worker"] for each in items(runs, "--worker", owner)} == {owner}
    ended = ps(runs, "--limit", "1")
    assert len(ended.out.splitlines()) == 2
    assert "1 of 5 messages" in ended.err
    assert "in_thread" in ps(runs, "thread", "--stacks").out
    assert ps(runs, "--worker", "nobody").code == 6
    assert ps(runs, "--timeout", "0").code == 2
    # A read leaves no entry, which would evict those of changes.
    assert runs.client.get_children(runs.layout.fleet.actionlog) == []

    (runs.folder / "go").touch()
    wait_until(lambda: items(runs) == [], "all messages are done")


def test_queue_show_has_the_messages_in_flight(runs: AppRuns) -> None:
    ids = [runs.app.send("lanes-1", number) for number in range(2)]
    runs.start(APP)
    wait_until(lambda: _answers(runs, 2), "both messages run")
    (item,) = runs.qdo("queues", "lanes-1", "-o", "json").items()
    assert {each["id"] for each in item["runs"]} == set(ids)
    assert (item["in_flight"], item["runs_error"]) == (2, None)
    assert all(each["stack"] and each["attempt"] == 1 for each in item["runs"])
    ended = runs.qdo("queues", "lanes-1")
    assert all(f"{id}, attempt 1, for ~" in ended.out for id in ids)
    assert ended.out.count("in_lanes") == 1  # the stack of the first

    entries = len(runs.client.get_children(runs.layout.fleet.actionlog))
    (item,) = runs.qdo("queues", "lanes-1", "--no-ask", "-o", "json").items()
    assert (item["runs"], item["in_flight"], item["runs_error"]) == (None, None, None)
    assert len(runs.client.get_children(runs.layout.fleet.actionlog)) == entries


def test_queue_show_does_without_the_answer_of_the_owner(runs: AppRuns) -> None:
    """Within a bounded time; everything else is shown. `qdo ps` says that a worker is missing."""
    runs.app.send("greenlet", 1)
    proc = runs.start(APP)
    wait_until(lambda: _answers(runs, 1), "the message runs")
    for pid in children(proc.pid):
        freeze(pid, runs.coordinator)
    ended = runs.qdo("queues", "greenlet")
    assert ended.code == 0, ended.err
    assert "unknown: worker-0000000000 has not answered" in ended.out
    assert "owner" in ended.out
    assert ps(runs, "--timeout", "0.5s").code == 4


def test_a_blocked_loop_is_named(runs: AppRuns) -> None:
    """Its parent knows the message, and `qdo action` has its stack."""
    id = runs.app.send("busy", 1)
    runs.start(APP)
    wait_until(lambda: "event loop blocked" in ps(runs).err, "the answer of the parent")
    ended = ps(runs)
    assert f"queue busy, message {id}" in ended.err
    assert " stacks`" in ended.err


def _answers(runs: AppRuns, count: int) -> bool:
    ended = ps(runs, "-o", "json")
    return ended.code == 0 and len(json.loads(ended.out)["items"]) == count
