"""Messages that kill their process: real worker processes, their parent, and its bookkeeping."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from qdo.ops.decisions import decide
from tests.support.app_runs import AppRuns
from tests.support.processes import Proc, wait_until

APP = """
import os
import time

import qdo

app = qdo.App("poison", backoff_seconds=0.02, backoff_max_seconds=0.1)
out = open("out", "a", 1)

policy = qdo.Policy(attempts=3, backoff_seconds=0.02, backoff_max_seconds=0.1, then={then!r})

@app.job("keys", policy=policy, order="key")
@app.job(policy=policy)
def job(message, context):
    out.write(f"{{message.queue}} {{message.body}} {{message.attempt}} {{os.getpid()}}\\n")
    if message.body == "poison":
        os._exit(1)
    if message.body == "bomb":  # as the kernel ends a container that has no memory left
        parent = os.getppid()
        with open(f"/proc/{{parent}}/task/{{parent}}/children") as children:
            workers = set(map(int, children.read().split())) - {{os.getpid()}}
        for pid in (parent, *workers, os.getpid()):
            os.kill(pid, 9)
    if message.body == "mean":
        raise ValueError("no")
    if message.body == "slow":
        time.sleep(60)
    while message.body == "endless":
        pass
"""


class PoisonSetup(AppRuns):
    """The app, with a policy for messages that fail for the last time."""

    def begin(self, then: str = "dead-letter", *options: str) -> Proc:
        return self.start(APP.format(then=then), *options)


@pytest.fixture
def stage(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[PoisonSetup]:
    """On the embedded coordinator, or on the one that a test's parameter names."""
    coordinator = getattr(request, "param", "embedded_url")
    stage = PoisonSetup("poison", tmp_path, request.getfixturevalue(coordinator))
    yield stage
    stage.close()


def send(stage: PoisonSetup, queue: str, *bodies: Any) -> None:
    stage.app.send_many([(queue, body) for body in bodies])


EACH = pytest.mark.parametrize(
    "stage", ["embedded_url", "zookeeper_url", "database_url"], indirect=True
)
RUNS = [("one", 1), ("poison", 1), ("poison", 2), ("poison", 3)]


@EACH
@pytest.mark.parametrize("then", ["dead-letter", "skip"])
def test_a_poison_message_is_ended_by_its_policy(stage: PoisonSetup, then: str) -> None:
    """It kills its process three times; then the queue continues without it, in order."""
    send(stage, "q", "one", "poison", "two")
    stage.begin(then)
    wait_until(lambda: ("two", 1) in stage.runs("q"), "the message behind the poison")
    assert [run for run in stage.runs("q") if run[0] == "poison"] == RUNS[1:]
    letters = [(each.body, each.attempts) for each in stage.broker.dead_letters.records("q")]
    assert letters == ([(b'"poison"', 3)] if then == "dead-letter" else [])
    if letters:
        assert "code 1" in stage.broker.dead_letters.records("q")[0].error
    wait_until(lambda: stage.node("q").failure is None, "the end of the marks")


@pytest.mark.parametrize(
    ("stage", "queue"),
    [("embedded_url", "q"), ("zookeeper_url", "keys")],
    indirect=["stage"],
)
def test_a_message_that_kills_its_container_is_ended(stage: PoisonSetup, queue: str) -> None:
    """No process is left to count its attempts, so the next owners do."""
    for key, body in (("a", "one"), ("a", "bomb"), ("a", "two"), ("b", "three")):
        stage.app.send(queue, body, key=key)
    send(stage, "done", "calm")
    for _ in range(3):
        assert stage.begin().wait() == -signal.SIGKILL
        end_sessions(stage)
    stage.begin()
    behind = {("two", 1), ("three", 1)}
    wait_until(lambda: behind <= {*stage.runs(queue)}, "the messages behind it")
    wait_until(lambda: stage.runs("done"), "the message of the other queue")
    runs = stage.runs(queue) + stage.runs("done")
    assert [attempt for body, attempt in runs if body == "bomb"] == [1, 1, 3]
    assert {attempt for body, attempt in runs if body != "bomb"} == {1}
    assert {body for body, _ in runs} == {"one", "bomb", "two", "three", "calm"}
    (letter,) = stage.qdo("dead-letters", "-o", "json").items()
    assert (letter["queue"], letter["attempts"]) == (queue, 3)
    assert len(re.findall(r"worker-\d+", letter["error"])) == 3


def test_a_poison_message_blocks_until_an_operator_decides(stage: PoisonSetup) -> None:
    """The queue waits with its order kept; the others of its worker continue."""
    send(stage, "q", "one", "poison", "two")
    stage.begin("block")
    wait_until(lambda: is_blocked(stage, "q"), "the block")
    marks = stage.node("q").failure
    assert marks is not None
    assert (marks.attempts, marks.position > stage.node("q").last) == (3, True)
    send(stage, "other", "hello")
    wait_until(lambda: ("hello", 1) in stage.runs("other"), "the other queue")
    assert ("two", 1) not in stage.runs("q")
    decide(stage.client, stage.layout, "q", "retry", "first")
    wait_until(lambda: len(stage.runs("q")) >= 7, "three further attempts")
    wait_until(lambda: is_blocked(stage, "q"), "the next block")
    attempts = [attempt for body, attempt in stage.runs("q") if body == "poison"]
    assert attempts == [1, 2, 3, 1, 2, 3]
    decide(stage.client, stage.layout, "q", "dead-letter", "first")
    wait_until(lambda: ("two", 1) in stage.runs("q"), "the message behind the poison")
    assert [each.attempts for each in stage.broker.dead_letters.records("q")] == [3]


def end_sessions(stage: PoisonSetup) -> None:
    """Delete what the sessions of dead workers hold, as the coordinator does in the end."""
    for folder in (stage.layout.workers, stage.layout.election):
        for name in stage.client.get_children(folder):
            stage.client.delete(f"{folder}/{name}")


def is_blocked(stage: PoisonSetup, queue: str) -> bool:
    marks = stage.node(queue).failure if stage.client.exists(stage.layout.queue(queue)) else None
    return marks is not None and marks.blocked


def test_an_operators_kill_counts_no_attempt(stage: PoisonSetup) -> None:
    """A worker that was killed after a stop signal did not crash because of its message."""
    send(stage, "q", "endless")
    proc = stage.begin()
    wait_until(lambda: len(stage.runs("q")) == 1, "the attempt")
    for answer in ("signal: draining", "signal: aborting", "signal: killing"):
        proc.send(signal.SIGTERM)
        proc.wait_for_line(answer)
    proc.wait()
    assert stage.node("q").failure is None


@EACH
def test_kill_9_counts_an_attempt_of_the_message_in_flight(stage: PoisonSetup) -> None:
    """Only of the one in flight: messages done before it in the same process are untouched."""
    send(stage, "done", "one", "two")
    send(stage, "q", "slow")
    proc = stage.begin()
    wait_until(lambda: len(stage.pids()) == 3, "all messages begun")
    wait_until(lambda: stage.node("done").last > 0, "the checkpoint")
    os.kill(stage.pids()[0], signal.SIGKILL)
    proc.wait_for_line("it died with 1 message in flight")
    marks = stage.node("q").failure
    assert marks is not None
    assert (marks.attempts, marks.crashed, "SIGKILL" in marks.error) == (1, True, True)
    assert stage.node("done").failure is None
    wait_until(lambda: stage.runs("q")[-1] == ("slow", 2), "the second attempt")
    value = json.loads(stage.client.get(stage.layout.queue("q"))[0])
    assert value["failing"]["attempts"] == 1
