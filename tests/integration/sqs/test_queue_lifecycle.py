"""Workers on SQS whose queues appear and vanish, and whose senders ring."""

from __future__ import annotations

import os
import signal

import pytest

from tests.support.sqs_workers import SqsWorkers


def test_a_standard_queue_that_appears_is_not_run_in_order(sqs_stage: SqsWorkers) -> None:
    """Named once with the remedy; its messages are not even received. Others continue."""
    sqs_stage.make("strict.fifo")
    worker = sqs_stage.start()
    sqs_stage.send("strict.fifo", {"n": 1})
    sqs_stage.wait(1)
    sqs_stage.make("loose")
    sqs_stage.send("loose", {"n": 2})
    worker.wait_for_line('loose is not processed.*order="none"')
    sqs_stage.send("strict.fifo", {"n": 3})
    sqs_stage.wait(2)
    assert sqs_stage.numbers() == [1, 3]
    assert sqs_stage.counts("loose") == {"waiting": 1, "hidden": 0}
    assert sqs_stage.requests("ReceiveMessage", "loose") == 0
    assert worker.output.count("loose is not processed") == 1
    # Nor does it keep the place of a process that died empty.
    os.kill(sqs_stage.child(worker), signal.SIGKILL)
    sqs_stage.send("strict.fifo", {"n": 4})
    sqs_stage.wait(3)
    worker.wait_for_line("loose is not processed", count=2)
    assert sqs_stage.numbers() == [1, 3, 4]


def test_a_ring_ends_the_rest_of_a_queue(
    sqs_stage: SqsWorkers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a quiet time the owner would not have asked for an hour."""
    monkeypatch.setenv("QDO_DOORBELL", "true")
    sqs_stage.make("q.fifo")
    sqs_stage.start(wait_seconds=0, idle_seconds=3600)
    sqs_stage.until(lambda: sqs_stage.requests("ReceiveMessage", "q.fifo") >= 5, "a long rest")
    assert sqs_stage.qdo("send", "q.fifo", '{"n": 1}', env={"QDO_DOORBELL": "true"}).code == 0
    sqs_stage.wait(1)
    sqs_stage.wait_empty()
