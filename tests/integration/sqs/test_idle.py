"""Workers on SQS: queues that are empty, come late, vanish, or of which nothing comes.

The numbers are those of the traps of SQS in the documentation.
"""

from __future__ import annotations

import signal

from tests.support.sqs_workers import SqsWorkers


def polls(stage: SqsWorkers, queue: str) -> int:
    return stage.requests("ReceiveMessage", queue)


def test_polls_of_a_released_queue_stop(sqs_stage: SqsWorkers) -> None:
    """A second worker takes half of the queues: only one worker polls each queue."""
    queues = [f"q{number}.fifo" for number in range(4)]
    for queue in queues:
        sqs_stage.make(queue)
    sqs_stage.start()
    sqs_stage.until(lambda: all(polls(sqs_stage, queue) for queue in queues), "all are polled")
    sqs_stage.start().wait_for_line("registered")
    before = {queue: polls(sqs_stage, queue) for queue in queues}
    sqs_stage.until(
        lambda: all(polls(sqs_stage, queue) > before[queue] + 3 for queue in queues), "more polls"
    )
    for _ in range(50):
        assert all(sqs_stage.open_polls(queue) <= 1 for queue in queues)


def test_trap_13_a_backlog_of_which_nothing_comes_is_said(sqs_stage: SqsWorkers) -> None:
    """SQS gives no error where too much is in flight: the worker's log and `qdo queues` show it."""
    sqs_stage.make("t.fifo")
    sqs_stage.make("other.fifo")
    sqs_stage.send("t.fifo", {"n": 0}, {"n": 1})
    stuck = sqs_stage.sqs.receive_message(
        QueueUrl=sqs_stage.urls["t.fifo"], MaxNumberOfMessages=1, VisibilityTimeout=600
    )["Messages"]
    worker = sqs_stage.start()
    (line,) = worker.wait_for_line("no poll brings any")[:1]
    assert "t.fifo" in line.string
    assert "other.fifo" not in line.string
    assert sqs_stage.said() == []
    table = sqs_stage.qdo("queues").out
    assert any("t.fifo" in row and "2" in row for row in table.splitlines())
    sqs_stage.sqs.change_message_visibility(
        QueueUrl=sqs_stage.urls["t.fifo"],
        ReceiptHandle=stuck[0]["ReceiptHandle"],
        VisibilityTimeout=0,
    )
    sqs_stage.wait(2)
    sqs_stage.wait_empty()


def test_trap_17_a_deleted_queue_is_retired_and_may_come_back(
    sqs_stage: SqsWorkers,
) -> None:
    """One clear line for each request that fails, no traceback; its node is kept as a tombstone."""
    sqs_stage.job(more="SqsCatalog.list_seconds = 1.0")
    for name in ("gone.fifo", "stays.fifo"):
        sqs_stage.make(name)
    sqs_stage.send("gone.fifo", {"n": 0}, {"n": 1})
    worker = sqs_stage.start()
    sqs_stage.wait(2)
    sqs_stage.wait_empty()
    sqs_stage.until(lambda: sqs_stage.node("gone.fifo").last > 0, "progress is recorded")
    last = sqs_stage.node("gone.fifo").last
    sqs_stage.sqs.delete_queue(QueueUrl=sqs_stage.urls["gone.fifo"])
    sqs_stage.until(lambda: sqs_stage.node("gone.fifo").deleted, "it is retired")
    lines = [each.string for each in worker.wait_for_line(r"gone.fifo, fence \d+: cannot read")]
    assert all("gone.fifo' does not exist in region eu-west-1" in line for line in lines)
    assert "Traceback" not in worker.output
    sqs_stage.until(lambda: sqs_stage.node("gone.fifo").owner == "", "it is released")
    assert sqs_stage.node("gone.fifo").last >= last
    before = polls(sqs_stage, "gone.fifo")
    other = polls(sqs_stage, "stays.fifo")
    sqs_stage.until(lambda: polls(sqs_stage, "stays.fifo") > other + 3, "the other one is polled")
    assert polls(sqs_stage, "gone.fifo") <= before + 1
    sqs_stage.make("gone.fifo")
    sqs_stage.send("gone.fifo", {"n": 2})
    sqs_stage.wait(1, n=2)
    sqs_stage.wait_empty()
    worker.send(signal.SIGTERM)
    assert worker.wait() == 0


def test_trap_17_a_queue_that_is_deleted_while_its_job_runs(sqs_stage: SqsWorkers) -> None:
    """The job ends or is stopped, other queues continue, and the worker stops cleanly."""
    for name in ("gone.fifo", "stays.fifo"):
        sqs_stage.make(name)
    sqs_stage.send("gone.fifo", {"n": 0, "gate": "open"}, {"n": 1})
    worker = sqs_stage.start()
    sqs_stage.wait(1, "begin")
    sqs_stage.sqs.delete_queue(QueueUrl=sqs_stage.urls.pop("gone.fifo"))
    sqs_stage.until(lambda: sqs_stage.node("gone.fifo").deleted, "it is retired")
    sqs_stage.open("open")
    sqs_stage.send("stays.fifo", {"n": 5})
    sqs_stage.wait(1, n=5)
    sqs_stage.until(lambda: sqs_stage.node("gone.fifo").owner == "", "it is released")
    assert sqs_stage.numbers("begin", queue="gone.fifo") in ([0], [0, 1])
    worker.send(signal.SIGTERM)
    assert worker.wait() == 0
    assert "Traceback" not in worker.output


def test_trap_19_nobody_looks_at_messages_by_receiving_them(sqs_stage: SqsWorkers) -> None:
    """Seeking is rejected with exit code 5, and nothing else receives even one message."""
    sqs_stage.make("t.fifo")
    sqs_stage.send("t.fifo", {"n": 0})
    for where in ("earliest", "2026-11-20T00:00:00Z"):
        ended = sqs_stage.qdo("seek", "t.fifo", where, "--yes")
        assert ended.code == 5, ended.err
        assert "another position" in ended.err
    for words in (("queues",), ("workers",), ("dead-letters", "list")):
        assert sqs_stage.qdo(*words).code == 0
    assert polls(sqs_stage, "t.fifo") == 0
