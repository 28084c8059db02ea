"""Workers on SQS: the hidden, extended and deleted messages, according to the server.

The numbers are those of the traps of SQS in the documentation.
"""

from __future__ import annotations

import signal

from tests.support.processes import Proc
from tests.support.sqs_workers import SqsWorkers, once_in_order


def ended_well(worker: Proc) -> str:
    """Let a worker stop cleanly; return its counts."""
    worker.send(signal.SIGTERM)
    assert worker.wait() == 0, worker.output
    return next(line for line in worker.output.splitlines() if "totals:" in line)


def test_trap_01_a_job_over_the_visibility_timeout_runs_once(sqs_stage: SqsWorkers) -> None:
    """All ten of a receive stay hidden meanwhile, the tenth as long as the first."""
    sqs_stage.make("t.fifo")
    sqs_stage.send("t.fifo", {"n": 0, "seconds": 3.5}, *({"n": n} for n in range(1, 10)))
    worker = sqs_stage.start()
    sqs_stage.wait(1, "begin")
    seen = []

    def is_over() -> bool:
        seen.append(sqs_stage.counts("t.fifo"))
        return bool(sqs_stage.said("end"))

    sqs_stage.until(is_over, "the long job ends")
    assert seen[:-1] == [{"waiting": 0, "hidden": 10}] * len(seen[:-1])
    sqs_stage.wait(10)
    sqs_stage.wait_empty()
    assert sqs_stage.numbers("begin") == list(range(10))
    assert sqs_stage.requests("ReceiveMessage", "t.fifo", "entries") == 10
    assert sqs_stage.requests("ChangeMessageVisibilityBatch", "t.fifo") >= 2
    assert "0 expired" in ended_well(worker) or "expired" not in worker.output


def test_trap_02_a_refused_extension_ends_the_job(sqs_stage: SqsWorkers) -> None:
    """The message is neither deleted nor counted. It runs again, before those behind it."""
    sqs_stage.make("t.fifo")
    sqs_stage.job('order="key"')
    sqs_stage.send("t.fifo", {"n": 0, "seconds": 1.8}, {"n": 1}, {"n": 2}, key="a")
    sqs_stage.send("t.fifo", {"n": 10, "gate": "open"}, {"n": 11}, key="b")
    terms = {"code": "ReceiptHandleIsInvalid", "sender_fault": True}
    sqs_stage.fail_entries("ChangeMessageVisibilityBatch", "t.fifo", **terms)
    worker = sqs_stage.start()
    sqs_stage.wait(2, key="a", n=0, what="begin")
    assert sqs_stage.numbers(key="a") == []
    sqs_stage.wait(3, key="a")
    sqs_stage.open("open")
    sqs_stage.wait_empty()
    assert sqs_stage.numbers("begin", key="a") == [0, 0, 1, 2]
    assert sqs_stage.numbers("end", key="a") == [0, 1, 2]
    assert sqs_stage.numbers("begin", key="b") == [10, 11]
    assert [each["attempt"] for each in sqs_stage.said("begin")] == [1] * 6
    worker.wait_for_line("no longer held")
    assert "3 expired" in ended_well(worker)


def test_trap_14_a_message_group_is_received_ten_at_a_time(sqs_stage: SqsWorkers) -> None:
    """No more come until these are deleted; several groups come side by side."""
    sqs_stage.make("t.fifo")
    sqs_stage.job('order="key"')
    sqs_stage.send("t.fifo", *({"n": n, "gate": "open"} for n in range(15)), key="a")
    sqs_stage.start()
    sqs_stage.wait(1, "begin")
    sqs_stage.send("t.fifo", *({"n": n} for n in range(5)), key="b")
    sqs_stage.wait(5, key="b")
    assert sqs_stage.counts("t.fifo")["hidden"] <= 15
    assert sqs_stage.requests("ReceiveMessage", "t.fifo", "entries") == 15
    sqs_stage.open("open")
    sqs_stage.wait_empty()
    assert once_in_order(sqs_stage.numbers("begin", key="a")) == list(range(15))
