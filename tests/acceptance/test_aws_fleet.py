"""Three workers on ZooKeeper over the queues people already have, and one of them is killed.

Queues of SQS, one for each key. Every message is run, each key's in their order, and only those run
twice that the killed process had in flight or had not reported to the service.
`tests.integration.kinesis.test_workers` does the same to a stream that is split.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support.aws.clients import client
from tests.support.aws.server_process import ServerProcess
from tests.support.cli import QDO, WORKER, clean_environment, command
from tests.support.journal import ORDER_VARIABLE, PATH_VARIABLE, Journal, Run
from tests.support.processes import Proc, wait_until

KEYS = 10
MESSAGES = 1500
WORKERS = 3
SESSION_SECONDS = 2.5
UNTOLD_SECONDS = 2.0
"""Messages done this long before the kill are deleted at SQS or recorded as done. Checkpoints and
deletes wait for half a second, and a busy machine takes its time."""


def interleaved(suffix: str = "") -> list[dict[str, Any]]:
    """Return the messages of all keys, numbered through, with the queue of each key."""
    dice = random.Random(11)
    return [
        {"key": key, "queue": key + suffix, "number": number}
        for number in range(MESSAGES)
        for key in [f"key-{dice.randrange(KEYS)}"]
    ]


class AwsFleet:
    """Workers of the journal app on one broker."""

    def __init__(self, folder: Path, broker: str, coordinator: str, order: str = "queue") -> None:
        self.folder = folder
        self.journal = Journal(folder / "runs.db")
        self.environment = {
            "QDO_APP": "journal",
            "QDO_BROKER": broker,
            "QDO_COORDINATOR": coordinator,
            "QDO_SESSION_TIMEOUT_SECONDS": str(SESSION_SECONDS),
            PATH_VARIABLE: str(self.journal.path),
            ORDER_VARIABLE: order,
        }

    def send(self, messages: Sequence[dict[str, Any]], *options: str) -> None:
        """Put messages into the broker with `qdo send`."""
        lines = "".join(json.dumps(each) + "\n" for each in messages).encode()
        arguments = ("send", *options, "--file", "-", "--key-field", "key")
        ended = command(*QDO, *arguments, cwd=self.folder, stdin=lines, env=self.environment)
        assert ended.err == f"sent {len(messages)} messages\n"

    def work(self) -> Proc:
        """Start the workers."""
        return Proc(
            [sys.executable, *WORKER, "tests.support.journal:app", "--processes", str(WORKERS)],
            cwd=self.folder,
            env={**clean_environment(), **self.environment},
        )

    def wait_done(self, count: int) -> None:
        """Wait until so many messages are done."""
        wait_until(lambda: len(self.journal.done()) >= count, f"{count} messages are done", 60.0)

    def kill_one(self) -> tuple[int, float]:
        """Kill the process that began a job last; return its id, and when it was alive last."""
        last = self.journal.runs()[-1]
        os.kill(last.pid, signal.SIGKILL)
        return last.pid, last.started

    def end(self, parent: Proc) -> None:
        """Stop the workers in good order, once another one is in the place of the killed one.

        A parent that starts no other one exits with 1.
        """
        parent.wait_for_line(": registered; ", count=WORKERS + 1)
        parent.send(signal.SIGTERM)
        assert parent.wait(60) == 0, parent.output


def check_order(runs: Sequence[Run], messages: Sequence[dict[str, Any]]) -> None:
    """The messages of each key were run in their order.

    A message may be run again later, and those behind it then: never one before it was its turn.
    """
    expected: dict[str, list[int]] = {}
    for each in messages:
        expected.setdefault(each["key"], []).append(each["number"])
    found: dict[str, list[int]] = {}
    for run in runs:
        numbers = found.setdefault(run.key, [])
        if run.number not in numbers:
            numbers.append(run.number)
    assert found == expected


def check_repeated(runs: Sequence[Run], killed: int, killed_at: float) -> None:
    """Messages that ran twice were in flight, or just done, in the killed process."""
    by_number: dict[int, list[Run]] = {}
    for run in runs:
        by_number.setdefault(run.number, []).append(run)
    repeated = [found for found in by_number.values() if len(found) > 1]
    assert [found for found in repeated if len(found) > 2 or found[0].pid != killed] == []
    early = [
        first
        for first, _ in repeated
        if first.ended is not None and first.ended < killed_at - UNTOLD_SECONDS
    ]
    assert early == []
    unfinished = [run for run in runs if run.ended is None]
    assert {run.pid for run in unfinished} <= {killed}


@pytest.mark.parametrize("kind", ["fifo", "standard"])
def test_queues_of_sqs(
    kind: str,
    sqs_stub: ServerProcess,
    sqs_url: str,
    aws_prefix: str,
    zookeeper_url: str,
    tmp_path: Path,
) -> None:
    """One queue for each key. Nothing is left in the queues, and requests are few."""
    options = f"endpoint={sqs_url}&create={kind}&visibility_seconds=8&wait_seconds=1"
    fleet = AwsFleet(
        tmp_path,
        f"sqs://us-east-1/{aws_prefix}?{options}",
        zookeeper_url,
        order="queue" if kind == "fifo" else "none",
    )
    messages = interleaved(".fifo" if kind == "fifo" else "")
    fleet.send(messages, "--queue-field", "queue")
    with fleet.work() as parent:
        fleet.wait_done(MESSAGES // 3)
        killed, killed_at = fleet.kill_one()
        fleet.wait_done(MESSAGES)
        fleet.end(parent)
    runs = fleet.journal.runs()
    check_repeated(runs, killed, killed_at)
    if kind == "fifo":
        check_order(runs, messages)
    assert left_in_queues(sqs_url, aws_prefix) == {}
    consuming = [
        each["requests"]
        for each in sqs_stub.ask("/_log")["requests"]
        if each["queue"].startswith(aws_prefix) and each["entries"] and "Send" not in each["action"]
    ]
    # Receives and deletes by ten are 0.2 a message.
    assert sum(consuming) < 0.5 * MESSAGES


def left_in_queues(url: str, prefix: str) -> dict[str, int]:
    """Return how many messages there are in each queue that has any, hidden ones as well."""
    sqs = client("sqs", url)
    found = {}
    for queue in sqs.list_queues(QueueNamePrefix=prefix)["QueueUrls"]:
        counts = sqs.get_queue_attributes(
            QueueUrl=queue,
            AttributeNames=[
                "ApproximateNumberOfMessages",
                "ApproximateNumberOfMessagesNotVisible",
            ],
        )["Attributes"]
        found[queue] = sum(map(int, counts.values()))
    sqs.close()
    assert len(found) == KEYS
    return {queue: count for queue, count in found.items() if count}
