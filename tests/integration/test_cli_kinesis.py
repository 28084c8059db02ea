"""Operators of a Kinesis stream: what `qdo queues` and `qdo seek` do, beside real workers."""

from __future__ import annotations

import contextlib
import datetime
import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from qdo.brokers.base import Outgoing
from qdo.brokers.kinesis import KinesisBroker
from tests.support.aws.kinesis_stub import KinesisStub
from tests.support.cli import QDO, Ended, command
from tests.support.kinesis import kinesis_url, opened
from tests.support.procs import Proc, wait_until, whole_lines

APP = """
import os
import qdo
from qdo.brokers.kinesis import KinesisBroker

KinesisBroker.list_seconds = 0.5
app = qdo.App("streams", session_timeout_seconds=4.0)
out = os.open("out", os.O_WRONLY | os.O_APPEND | os.O_CREAT)

@app.job()
def job(message, context):
    os.write(out, f"{message.queue} {message.body} {message.id}\\n".encode())
"""
WAIT_SECONDS = 40.0


class Stage:
    """A stream, its workers, and an operator."""

    def __init__(self, kinesis: KinesisStub, stream: str, folder: Path) -> None:
        self.kinesis = kinesis
        self.stream = stream
        self.folder = folder
        self.broker: KinesisBroker = opened(kinesis.url, stream)
        (folder / "jobs.py").write_text(APP)
        self._env = {
            "QDO_APP": "streams",
            "QDO_BROKER": kinesis_url(kinesis.url, stream),
            "QDO_COORDINATOR": f"sqlite:{folder / 'coordination.db'}",
        }
        self._workers = contextlib.ExitStack()
        self.sent = 0

    def start(self) -> Proc:
        argv = ("-m", "qdo.cli.worker", "jobs:app")
        return self._workers.enter_context(Proc.python(*argv, env=self._env, cwd=self.folder))

    def send(self, count: int, queue: str = "") -> None:
        for _ in range(count):
            self.broker.send_many([Outgoing(queue or self.stream, b"%d" % self.sent, "k")])
            self.sent += 1

    def seen(self) -> list[int]:
        """Return the numbers of the messages that were run, in order."""
        return [int(line.split()[1]) for line in whole_lines(self.folder / "out")]

    def ids(self) -> list[str]:
        return [line.split()[2] for line in whole_lines(self.folder / "out")]

    def wait(self, count: int) -> None:
        wait_until(lambda: len(self.seen()) >= count, f"{count} messages are run", WAIT_SECONDS)

    def qdo(self, *words: str) -> Ended:
        return command(*QDO, *words, cwd=self.folder, env=self._env)

    def item(self, *words: str) -> dict[str, Any]:
        """Return the only item that a command gives."""
        ended = self.qdo(*words, "-o", "json")
        assert ended.code == 0, ended.err
        (found,) = json.loads(ended.out)["items"]
        return dict(found)

    def close(self) -> None:
        self._workers.close()
        self.broker.close()


@pytest.fixture
def stage(kinesis: KinesisStub, aws_stream: str, tmp_path: Path) -> Iterator[Stage]:
    kinesis.make(aws_stream, 1)
    with contextlib.closing(Stage(kinesis, aws_stream, tmp_path)) as stage:
        yield stage


def test_a_live_shard_goes_where_the_operator_says(stage: Stage) -> None:
    """Back to the beginning, to a record, to a time; forth to the end. Nothing is counted."""
    (shard,) = stage.broker.queues()
    stage.send(5)
    stage.start()
    stage.wait(5)
    wait_until(lambda: stage.item("queues")["position"] is not None, "progress is recorded")
    listed = stage.item("queues")
    assert listed["backlog"] is None
    assert 0 <= listed["behind_seconds"] < 5
    assert stage.qdo("queues").out.splitlines()[0].split()[3:5] == ["BACKLOG", "AGE"]

    planned = stage.item("seek", shard, "earliest")
    assert (planned["executed"], planned["waiting_after"]) == (False, None)
    assert planned["before_position"] == stage.ids()[-1]
    assert planned["after"] == "earliest"
    stage.item("seek", shard, "earliest", "--execute")
    stage.wait(10)
    assert stage.seen() == [0, 1, 2, 3, 4] * 2

    third = stage.ids()[2]
    done = stage.item("seek", shard, third, "--execute")
    assert done["after_position"] == third
    stage.wait(12)
    assert stage.seen()[10:] == [3, 4]

    moment = datetime.datetime.now(datetime.timezone.utc).isoformat()
    stage.send(2)
    stage.wait(14)
    stage.item("seek", shard, moment, "--execute")
    stage.wait(16)
    assert stage.seen()[12:] == [5, 6, 5, 6]


def test_what_waits_is_passed_over_with_latest(stage: Stage) -> None:
    """While nobody works; the next worker begins with what comes then."""
    (shard,) = stage.broker.queues()
    stage.send(1)
    worker = stage.start()
    stage.wait(1)
    worker.send(signal.SIGTERM)
    assert worker.wait(30.0) == 0
    stage.send(3)
    planned = stage.item("seek", shard, "latest")
    assert planned["behind_before"] >= 0
    stage.item("seek", shard, "latest", "--execute")
    stage.start()
    stage.send(2)
    stage.wait(3)
    assert stage.seen() == [0, 4, 5]


def test_a_finished_shard_is_not_shown_and_can_be_run_again(
    stage: Stage,
) -> None:
    """The whole life of a shard, as operators see it."""
    (parent,) = stage.broker.queues()
    stage.send(3)
    stage.kinesis.split(stage.stream, parent)
    children = [name for name in stage.broker.queues() if name != parent]
    stage.send(2)
    stage.start()
    stage.wait(5)
    assert stage.seen() == [0, 1, 2, 3, 4]

    def listed() -> list[str]:
        ended = stage.qdo("queues", "-o", "jsonl")
        return [json.loads(line)["queue"] for line in ended.out.splitlines()]

    wait_until(lambda: listed() == sorted(children), "the tombstone is not shown", WAIT_SECONDS)
    done = stage.item("seek", parent, "earliest", "--execute")
    assert done["before_position"] == "SHARD_END"
    stage.wait(8)
    assert stage.seen()[5:] == [0, 1, 2]
    wait_until(lambda: listed() == sorted(children), "it is at rest again", WAIT_SECONDS)


def test_a_position_that_is_none_is_refused(stage: Stage) -> None:
    """With what would do."""
    (shard,) = stage.broker.queues()
    worker = stage.start()
    wait_until(lambda: stage.qdo("seek", shard, "earliest").code == 0, "the queue is known")
    for target in ("soon", "-1", "1:2:3"):
        ended = (
            stage.qdo("seek", shard, "--", target)
            if target[0] == "-"
            else stage.qdo("seek", shard, target)
        )
        assert ended.code == 2, ended.err
        assert "no place in a queue" in ended.err
    assert worker.output.count("Traceback") == 0
