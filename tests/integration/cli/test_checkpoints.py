"""`qdo admin checkpoints`: positions in a file, and queues of running workers moved to them."""

from __future__ import annotations

import copy
import json
import os
import signal
from collections.abc import Callable
from typing import Any

from qdo.coordination.queue_admin import KEY
from qdo.coordination.znodes.queue_node import QueueNode
from qdo.fleet.audit import read_entries
from qdo.ops.checkpoints import read_checkpoints
from tests.support.app_runs import AppRuns
from tests.support.cli import Ended
from tests.support.processes import Proc, wait_until


def checkpoints(runs: AppRuns, *arguments: str, app: str = "desk", broker: str = "") -> Ended:
    places = ("--app", app, "--broker", broker or runs.broker_url)
    return runs.qdo("admin", "checkpoints", *arguments, *places)


def items(ended: Ended, code: int = 0) -> dict[str, dict[str, Any]]:
    assert ended.code == code, ended.err
    found = json.loads(ended.out)
    assert found["schema"] == "qdo.checkpoints-import/1"
    return {each["queue"]: each for each in found["items"]}


def processed(runs: AppRuns, queue: str, count: int) -> None:
    """Wait until a queue has so many runs, and its node has the last of them."""
    wait_until(lambda: len(runs.runs(queue)) == count, f"{count} runs of {queue}")
    head = runs.broker.catalog.head(queue)
    wait_until(lambda: runs.node(queue).last == head, "the checkpoint")


def exported(runs: AppRuns) -> list[dict[str, Any]]:
    ended = checkpoints(runs, "export", "--file", "saved.jsonl")
    assert (ended.code, ended.out) == (0, ""), ended.err
    return [json.loads(line) for line in (runs.folder / "saved.jsonl").read_text().splitlines()]


def write(runs: AppRuns, lines: list[dict[str, Any]]) -> None:
    (runs.folder / "saved.jsonl").write_text("".join(json.dumps(each) + "\n" for each in lines))


def audited(runs: AppRuns) -> list[tuple[str, str]]:
    found = read_entries(runs.client, runs.layout, limit=1000)
    return [(each.target, each.reason) for each in reversed(found)]


def test_a_running_worker_follows_an_import_once(runs: AppRuns) -> None:
    """Messages after the saved position run again, and a repetition of the import moves nothing."""
    runs.app.send_many([("a", 1), ("b", 1)])
    runs.work()
    processed(runs, "a", 1)
    processed(runs, "b", 1)
    head, *lines = exported(runs)
    assert (head["schema"], head["app"], head["broker"], head["queues"]) == (
        ("qdo.checkpoints/1", "desk", "sqlite", 2)
    )
    assert {each["queue"]: int(each["last"]) for each in lines} == {
        name: runs.node(name).last for name in "ab"
    }
    runs.app.send_many([("a", 2), ("a", 3)])
    processed(runs, "a", 3)
    found = items(
        checkpoints(runs, "import", "saved.jsonl", "--yes", "--reason", "bad deploy", "-o", "json")
    )
    assert {name: each["outcome"] for name, each in found.items()} == {"a": "move", "b": "same"}
    assert found["a"]["new"] == next(each["last"] for each in lines if each["queue"] == "a")
    processed(runs, "a", 5)
    assert [body for body, _ in runs.runs("a")] == ["1", "2", "3", "2", "3"]
    assert audited(runs) == [("a", "bad deploy"), ("b", "bad deploy")]
    before = {name: runs.node(name) for name in "ab"}
    again = items(checkpoints(runs, "import", "saved.jsonl", "-o", "json"))
    assert {each["outcome"] for each in again.values()} == {"imported"}
    assert {name: runs.node(name) for name in "ab"} == before
    assert len(runs.runs("b")) == 1


def test_an_import_into_a_new_coordinator_repeats_nothing(runs: AppRuns) -> None:
    runs.app.send_many([(name, number) for name in "abc" for number in range(3)])
    with runs.work() as proc:
        for name in "abc":
            processed(runs, name, 3)
        proc.send(signal.SIGTERM)
        assert proc.wait() == 0
    exported(runs)
    runs.client.delete(runs.layout.root, recursive=True)
    ended = checkpoints(runs, "import", "saved.jsonl", "-o", "json")
    assert {each["outcome"] for each in items(ended, 5).values()} == {"create"}
    assert not runs.client.exists(runs.layout.queues) or not runs.client.get_children(
        runs.layout.queues
    )
    items(checkpoints(runs, "import", "saved.jsonl", "--yes", "-o", "json"))
    runs.app.send("a", 3)
    runs.work()
    processed(runs, "a", 4)
    assert [body for body, _ in runs.runs("a")] == ["0", "1", "2", "3"]
    assert len(runs.runs("b")) == len(runs.runs("c")) == 3


def test_a_dry_run_changes_nothing(runs: AppRuns) -> None:
    runs.app.send_many([("a", 1), ("b", 2)])
    for name in "ab":
        runs.client.create(runs.layout.queue(name), QueueNode().encode(), makepath=True)
    exported(runs)
    runs.client.set(runs.layout.queue("a"), QueueNode(last=5).encode())
    before = runs.node("a")
    found = items(checkpoints(runs, "import", "saved.jsonl", "--dry-run", "-o", "json"))
    assert (found["a"]["old"], found["a"]["new"]) == ("5", "earliest")
    assert not any(each["executed"] for each in found.values())
    assert runs.node("a") == before
    assert audited(runs) == []


Spoil = Callable[[list[dict[str, Any]]], object]
SPOILT: dict[str, Spoil] = {
    "a line is missing": lambda lines: lines.pop(),
    "a queue occurs twice": lambda lines: lines.append(lines[1]),
    "a position is not a number": lambda lines: lines[2].update(last="soon"),
    "a name is a path": lambda lines: lines[2].update(queue="../x"),
    "another schema": lambda lines: lines[0].update(schema="qdo.checkpoints/2"),
    "another app": lambda lines: lines[0].update(app="other"),
    "another kind of broker": lambda lines: lines[0].update(broker="kinesis"),
}


def test_a_spoilt_file_moves_no_queue(runs: AppRuns) -> None:
    """Also not the queues of the lines before."""
    runs.app.send_many([("a", 1), ("b", 2)])
    for name in "ab":
        runs.client.create(runs.layout.queue(name), QueueNode().encode(), makepath=True)
    lines = exported(runs)
    for name in "ab":
        runs.client.set(runs.layout.queue(name), QueueNode(last=5).encode())
    for what, spoil in SPOILT.items():
        spoilt = copy.deepcopy(lines)
        spoil(spoilt)
        write(runs, spoilt)
        assert checkpoints(runs, "import", "saved.jsonl", "--yes").code == 2, what
    assert [runs.node(name) for name in "ab"] == [QueueNode(last=5)] * 2
    assert audited(runs) == []


def test_no_queue_gets_a_position_that_it_lacks(runs: AppRuns) -> None:
    """A queue that the broker lacks is skipped; a position after the end becomes the end."""
    runs.app.send_many([("a", 1), ("b", 1), ("gone", 1)])
    for name in ("a", "b", "gone"):
        runs.client.create(runs.layout.queue(name), QueueNode().encode(), makepath=True)
    lines = exported(runs)
    head = runs.broker.catalog.head("a")
    lines[1]["last"] = str(head + 10**15)
    lines[3]["queue"] = "nowhere"
    write(runs, lines)
    found = items(checkpoints(runs, "import", "saved.jsonl", "--yes", "-o", "json"), 4)
    assert (found["a"]["outcome"], found["a"]["new"]) == ("move", str(head))
    assert (found["nowhere"]["outcome"], found["nowhere"]["new"]) == ("skipped", None)
    assert (runs.node("a").last, runs.node("gone")) == (head, QueueNode())
    assert not runs.client.exists(runs.layout.queue("nowhere"))


def test_a_repetition_completes_a_killed_import(runs: AppRuns) -> None:
    """It moves the rest, and leaves alone what was moved before the kill."""
    names = [f"q{number:03}" for number in range(150)]
    runs.app.send_many([(name, 1) for name in names])
    runs.client.ensure_path(runs.layout.queues)
    for name in names:
        runs.client.create(runs.layout.queue(name), QueueNode().encode())
    exported(runs)
    for name in names:
        runs.client.set(runs.layout.queue(name), QueueNode(last=5).encode())
    argv = ["-m", "qdo", "admin", "checkpoints", "import", "saved.jsonl", "--yes", "--app", "desk"]
    places = {"QDO_BROKER": f"sqlite:{runs.folder / 'messages.db'}"}
    places["QDO_COORDINATOR"] = runs.coordinator
    with Proc.python(*argv, env=places, cwd=runs.folder) as proc:
        wait_until(lambda: KEY in dict(runs.node(names[0]).extra), "the first queue")
        proc.kill()
    moved = {name for name in names if runs.node(name).seek == 1}
    assert 0 < len(moved) < len(names)
    runs.client.set(  # its worker has gone on since
        runs.layout.queue(names[0]), runs.node(names[0]).moved_to(7).encode()
    )
    found = items(checkpoints(runs, "import", "saved.jsonl", "--yes", "-o", "json"))
    assert {name for name, each in found.items() if each["outcome"] == "imported"} == moved
    nodes = [runs.node(name) for name in names]
    assert {node.seek for node in nodes} == {1}
    assert [node.last for node in nodes] == [7] + [0] * (len(names) - 1)
    assert len(audited(runs)) == len(names)


def test_an_export_replaces_neither_links_nor_devices(runs: AppRuns) -> None:
    """For root, the rename onto /dev/null would have left a file there."""
    runs.client.create(runs.layout.queue("a"), QueueNode(last=5).encode(), makepath=True)
    exported(runs)
    (runs.folder / "link").symlink_to("saved.jsonl")
    pipe = runs.folder / "pipe"
    os.mkfifo(pipe)
    reading = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    for name in ("link", "pipe"):
        assert checkpoints(runs, "export", "--file", name).code == 0
    received = os.read(reading, 65536).decode().splitlines()
    os.close(reading)
    assert pipe.is_fifo()
    assert (runs.folder / "link").is_symlink()
    written = (runs.folder / "saved.jsonl").read_text().splitlines()
    assert received[1:] == written[1:] != []


def test_an_export_names_queues_that_it_cannot_read(runs: AppRuns) -> None:
    for name, data in (("good", QueueNode(last=7).encode()), ("bad", b"garbage")):
        runs.client.create(runs.layout.queue(name), data, makepath=True)
    ended = checkpoints(runs, "export")
    assert ended.code == 4
    assert "bad" in ended.err
    assert [json.loads(line).get("queue") for line in ended.out.splitlines()] == [None, "good"]
    assert read_checkpoints(runs.client, runs.layout, "b*").checkpoints == []


def test_a_mailbox_has_no_checkpoints(runs: AppRuns) -> None:
    """SQS deletes messages when they are done: there is nothing to save."""
    assert checkpoints(runs, "export", broker="sqs://eu-west-1/x-").code == 5
