"""Send, process, finish, clean up: the behavior of AWS itself, not of test servers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from qdo import App
from qdo.coordination.client import connect
from qdo.coordination.znodes.layout import Layout
from qdo.coordination.znodes.queue_node import QueueNode
from tests.support.aws.resources import Resources
from tests.support.cli import WORKER, Ended, command
from tests.support.processes import wait_until

pytestmark = pytest.mark.timeout(900)
"""Counts of SQS may be a minute old, and its lists, too."""
APP = """
import json, os
import qdo

app = qdo.App("trip")

@app.job({options})
def job(message, context):
    if message.body == "broken":
        raise ValueError("it always fails")
    line = json.dumps([message.queue, message.key, message.body, message.id]) + "\\n"
    fd = os.open("seen.jsonl", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(fd, line.encode())
    os.close(fd)
"""
PATIENCE_SECONDS = 240.0


def sqs_address(resources: Resources, region: str, options: str) -> str:
    """Return the address of a test's own queues, with short polls: a worker's end waits for one."""
    return f"sqs://{region}/{resources.prefix}{options or '?'}&wait_seconds=1"


def work(folder: Path, broker: str, messages: int, options: str = "") -> Ended:
    """Run a worker until it has started so many messages."""
    (folder / "trip.py").write_text(APP.format(options=options))
    return command(
        *WORKER,
        "trip:app",
        "--broker",
        broker,
        "--max-messages",
        str(messages),
        "--max-seconds",
        "120",
        cwd=folder,
        env={"QDO_ATTEMPTS": "1"},
        timeout_seconds=PATIENCE_SECONDS,
    )


def seen(folder: Path) -> list[Any]:
    """Return the arguments of the job's calls."""
    path = folder / "seen.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def is_empty(sqs: Any, url: str) -> Callable[[], bool]:
    """Return a check whether a queue has no message left, visible or not."""
    names = ["ApproximateNumberOfMessages", "ApproximateNumberOfMessagesNotVisible"]

    def empty() -> bool:
        counts = sqs.get_queue_attributes(QueueUrl=url, AttributeNames=names)["Attributes"]
        return all(int(count) == 0 for count in counts.values())

    return empty


def test_a_standard_queue(resources: Resources, region: str, options: str, tmp_path: Path) -> None:
    """Every message is run, bodies and headers come through, nothing is left in the queue."""
    url = resources.queue("plain")
    broker = sqs_address(resources, region, options)
    with App("trip", broker=broker) as app:
        ids = app.send_many([("plain", {"n": n}, f"k{n}") for n in range(25)])
    ended = work(tmp_path, broker, 25, 'order="none"')
    assert ended.code == 0, ended.err
    assert sorted(found[3] for found in seen(tmp_path)) == sorted(ids)
    assert sorted(found[2]["n"] for found in seen(tmp_path)) == list(range(25))
    wait_until(is_empty(resources.sqs, url), "the queue is empty", PATIENCE_SECONDS)


def test_a_fifo_queue(resources: Resources, region: str, options: str, tmp_path: Path) -> None:
    """In order; a message that fails for good becomes a dead letter of qdo with its error."""
    url = resources.queue("strict.fifo")
    broker = sqs_address(resources, region, options)
    bodies = [*range(12), "broken", *range(12, 24)]
    with App("trip", broker=broker) as app:
        app.send_many([("strict.fifo", body, "one") for body in bodies])
    ended = work(tmp_path, broker, 25)
    assert ended.code == 0, ended.err
    assert [found[2] for found in seen(tmp_path)] == list(range(24))
    wait_until(is_empty(resources.sqs, url), "the queue is empty", PATIENCE_SECONDS)
    with App("trip", broker=broker) as app:
        wait_until(
            lambda: len(app.broker.dead_letters.records("strict.fifo")) == 1,
            "the dead letter is there",
            PATIENCE_SECONDS,
        )
        (letter,) = app.broker.dead_letters.records("strict.fifo")
    assert "it always fails" in letter.error


def test_a_stream(resources: Resources, region: str, options: str, tmp_path: Path) -> None:
    """In order per key, over two shards; a second worker resumes where the first one ended."""
    stream = resources.stream("events", shards=2)
    broker = f"kinesis://{region}/{stream}{options}"
    keys = [f"key-{number}" for number in range(5)]
    with App("trip", broker=broker) as app:
        app.send_many([(stream, n, key) for n in range(6) for key in keys])
        ended = work(tmp_path, broker, 30)
        assert ended.code == 0, ended.err
        app.send_many([(stream, 6, key) for key in keys])
        ended = work(tmp_path, broker, 5)
        assert ended.code == 0, ended.err
    found = seen(tmp_path)
    for key in keys:
        assert [body for _, name, body, _ in found if name == key] == list(range(7))
    client = connect(f"sqlite:{tmp_path / 'qdo-data' / 'coordination.db'}")
    client.open()
    try:
        for shard in {queue for queue, _, _, _ in found}:
            node = QueueNode.parse(client.get(Layout.of("trip").queue(shard))[0])
            assert node.position is not None
            assert node.last > 0
            assert not node.owner
    finally:
        client.stop()
        client.close()


def test_a_worker_that_needs_an_order_refuses_a_standard_queue(
    resources: Resources, region: str, options: str, tmp_path: Path
) -> None:
    """Before it takes anything; one line with the remedy."""
    resources.queue("refused")
    ended = work(tmp_path, sqs_address(resources, region, options), 1)
    assert ended.code == 2
    assert 'order="none"' in ended.err
    assert seen(tmp_path) == []
