"""Workers on SQS when the network or SQS itself fails: nothing lost, order kept, nothing twice.

Each fault hits every kind of request of two workers on two FIFO queues and a standard one.
"""

from __future__ import annotations

import signal
from collections import Counter

import pytest

from tests.support.sqs_workers import SqsWorkers

ACTIONS = (
    "ReceiveMessage",
    "DeleteMessageBatch",
    "ChangeMessageVisibilityBatch",
    "GetQueueUrl",
    "ListQueues",
)
FIFO = ("a.fifo", "b.fifo")
EACH = 10


@pytest.fixture
def stage(sqs_proxied: SqsWorkers) -> SqsWorkers:
    """Two kinds of queues, and jobs that take long enough for extensions."""
    sqs_proxied.job('"*.fifo", order="key"', 'app.job("s", order="none", concurrency=5)(job)')
    return sqs_proxied


def send(stage: SqsWorkers) -> None:
    for queue in FIFO:
        for key in ("x", "y"):
            bodies = [{"n": n, "seconds": 1.2 if n == 4 else 0.02} for n in range(EACH)]
            stage.send(queue, *bodies, key=key)
    stage.send("s", *({"n": n, "seconds": 1.2 if n % 9 == 4 else 0.02} for n in range(EACH)))


def check(stage: SqsWorkers) -> None:
    """Check that everything was done once, in the order of each message group."""
    for queue in FIFO:
        for key in ("x", "y"):
            assert stage.numbers("begin", queue=queue, key=key) == list(range(EACH))
    assert sorted(stage.numbers("begin", queue="s")) == list(range(EACH))


@pytest.mark.parametrize(
    ("fault", "seconds"),
    [
        ("throttle", 0.0),
        ("error", 0.0),
        ("expired", 0.0),
        ("denied", 0.0),
        ("slow", 0.8),
        ("reset-before", 0.0),
        ("reset-after", 0.0),
        ("unanswered", 0.7),
    ],
)
def test_a_fault_loses_and_repeats_nothing(stage: SqsWorkers, fault: str, seconds: float) -> None:
    """Whatever fails: also where SQS has done the work and only its answer got lost."""
    workers = [stage.start(), stage.start()]
    for worker in workers:
        worker.wait_for_line("registered")
    for action in ACTIONS:
        # Workers that do not list queues ask for the address of each new one once.
        skip = 0 if action == "GetQueueUrl" else 1
        stage.spoil(fault, action, skip=skip, count=3, seconds=seconds)
    for queue in (*FIFO, "s"):
        stage.make(queue)
    send(stage)
    stage.wait_empty()
    check(stage)
    for worker in workers:
        worker.send(signal.SIGTERM)
    assert [worker.wait() for worker in workers] == [0, 0]
    assert "Traceback" not in stage.output()
    hit = Counter(each.action for each in stage.all_asked() if each.fault == fault)
    assert set(hit) == set(ACTIONS)


@pytest.mark.parametrize(
    "action", ["ReceiveMessage", "DeleteMessageBatch", "ChangeMessageVisibilityBatch"]
)
def test_what_is_not_allowed_is_said_in_one_line(stage: SqsWorkers, action: str) -> None:
    """It names action and queue; the other queue continues, and so does this one once allowed."""
    for queue in FIFO[:2]:
        stage.make(queue)
    stage.spoil("denied", action, FIFO[0], count=0)
    worker = stage.start()
    for queue in FIFO[:2]:
        stage.send(queue, {"n": 0, "seconds": 1.5}, {"n": 1}, key="x")
    stage.wait(2, queue=FIFO[1])
    pattern = rf"SQS denied sqs:{action} on queue '\S*{FIFO[0]}'"
    if action != "ReceiveMessage":  # IAM has no action for the batch
        pattern = rf"SQS denied sqs:{action.removesuffix('Batch')} on .*{FIFO[0]}'"
    (line,) = worker.wait_for_line(pattern)[:1]
    assert "docs/sqs.rst" in line.string
    assert "Traceback" not in worker.output
    if stage.proxy is not None:
        stage.proxy.clear()
    stage.wait_empty()
    assert stage.numbers(queue=FIFO[0]) == [0, 1]
    assert stage.numbers("begin", queue=FIFO[1]) == [0, 1]
