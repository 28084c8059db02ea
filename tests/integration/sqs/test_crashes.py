"""Worker processes that crash with SQS messages in flight, or done and not deleted.

The numbers are those of the traps of SQS in the documentation.
"""

from __future__ import annotations

import os
import signal
from contextlib import closing

import pytest

from tests.support.sqs_workers import SqsWorkers, once_in_order


@pytest.mark.parametrize("queue", ["t.fifo", "s"])
def test_trap_16_a_killed_job_runs_again_and_the_attempt_counts(
    sqs_stage: SqsWorkers, queue: str
) -> None:
    """Soon: messages of the dead process are released before the visibility timeout is over."""
    sqs_stage.make(queue)
    sqs_stage.job('order="none", concurrency=1' if queue == "s" else "")
    sqs_stage.send(queue, {"n": 0}, {"n": 1, "kills": 1}, {"n": 2}, {"n": 3})
    sqs_stage.start(visibility_seconds=60)
    sqs_stage.wait(2, "begin", n=1)
    sqs_stage.wait(4)
    sqs_stage.wait_empty()
    assert [each["attempt"] for each in sqs_stage.said("begin", n=1)] == [1, 2]
    assert sorted(set(sqs_stage.numbers())) == [0, 1, 2, 3]
    if queue == "t.fifo":
        assert once_in_order(sqs_stage.numbers("begin")) == [0, 1, 2, 3]


def test_trap_16_a_message_that_kills_processes_is_dead_lettered(
    sqs_stage: SqsWorkers,
) -> None:
    """After its attempts, of which none ever failed; the rest of the queue keeps its order."""
    sqs_stage.make("t.fifo")
    sqs_stage.job("policy=qdo.Policy(attempts=2, backoff_seconds=0.02)")
    sqs_stage.send("t.fifo", {"n": 0}, {"n": 1, "kills": 99}, {"n": 2}, {"n": 3})
    sqs_stage.start()
    sqs_stage.wait_empty()
    assert [each["attempt"] for each in sqs_stage.said("begin", n=1)] == [1, 2]
    assert once_in_order(sqs_stage.numbers()) == [0, 2, 3]
    with closing(sqs_stage.broker()) as broker:
        (letter,) = broker.dead_letters.records("t.fifo")
    assert (letter.queue, letter.attempts) == ("t.fifo", 2)
    assert "died of SIGKILL" in letter.error


@pytest.mark.parametrize("queue", ["t.fifo", "s"])
def test_trap_11_what_is_done_and_not_deleted_is_recognised(
    sqs_stage: SqsWorkers, queue: str
) -> None:
    """The next owner reads the record of the dead one: it deletes the message and runs nothing."""
    sqs_stage.make(queue)
    sqs_stage.job('order="none"' if queue == "s" else "")
    sqs_stage.fail_entries("DeleteMessageBatch", queue, 1000)
    sqs_stage.send(queue, *({"n": n} for n in range(8)))
    worker = sqs_stage.start()
    sqs_stage.wait(8)
    sqs_stage.until(lambda: len(sqs_stage.node(queue).unconfirmed) == 8, "all are recorded")
    os.kill(sqs_stage.child(worker), signal.SIGKILL)
    sqs_stage.server.ask("/_fail_entries", {})
    sqs_stage.send(queue, *({"n": n} for n in range(8, 11)))
    sqs_stage.wait_empty()
    assert sorted(sqs_stage.numbers("begin")) == list(range(11))
    if queue == "t.fifo":
        assert sqs_stage.numbers("begin") == list(range(11))
    sqs_stage.until(lambda: not sqs_stage.node(queue).unconfirmed, "nothing is left to record")


def test_trap_11_an_idle_queue_records_late_deletes(sqs_stage: SqsWorkers) -> None:
    """Deletes that succeed after the last checkpoint, without another message."""
    sqs_stage.make("t.fifo")
    sqs_stage.job()
    sqs_stage.fail_entries("DeleteMessageBatch", "t.fifo", 1000)
    sqs_stage.send("t.fifo", {"n": 0}, {"n": 1})
    sqs_stage.start()
    sqs_stage.until(lambda: len(sqs_stage.node("t.fifo").unconfirmed) == 2, "both are recorded")
    sqs_stage.server.ask("/_fail_entries", {})
    sqs_stage.wait_empty()
    sqs_stage.until(lambda: not sqs_stage.node("t.fifo").unconfirmed, "nothing is left to record")


def test_trap_11_what_cannot_be_deleted_survives_a_graceful_end(sqs_stage: SqsWorkers) -> None:
    """The worker stops although deletes fail, and the next one finishes its work."""
    sqs_stage.make("t.fifo")
    sqs_stage.fail_entries("DeleteMessageBatch", "t.fifo", 1000)
    sqs_stage.send("t.fifo", *({"n": n} for n in range(4)), {"n": 4, "gate": "open"}, {"n": 5})
    first = sqs_stage.start()
    sqs_stage.wait(5, "begin")
    first.send(signal.SIGTERM)
    first.wait_for_line("step 2")
    sqs_stage.open("open")
    assert first.wait() == 0
    sqs_stage.server.ask("/_fail_entries", {})
    sqs_stage.start()
    sqs_stage.wait_empty()
    assert sqs_stage.numbers("begin") == list(range(6))


def test_trap_11_after_kill_9_only_unrecorded_messages_rerun(sqs_stage: SqsWorkers) -> None:
    """At most `checkpoint_seconds` of work, in the same order, and nothing of it is lost."""
    sqs_stage.make("t.fifo")
    sqs_stage.job('order="key"')
    for key in ("a", "b"):
        sqs_stage.send("t.fifo", *({"n": n, "seconds": 0.02} for n in range(60)), key=key)
    worker = sqs_stage.start()
    sqs_stage.wait(40)
    os.kill(sqs_stage.child(worker), signal.SIGKILL)
    sqs_stage.wait_empty()
    for key in ("a", "b"):
        begun = sqs_stage.numbers("begin", key=key)
        assert once_in_order(begun) == list(range(60))
        assert once_in_order(sqs_stage.numbers("end", key=key)) == list(range(60))
        assert len(begun) <= 60 + 20
        for fence in {each["fence"] for each in sqs_stage.said("begin")}:
            numbers = sqs_stage.numbers("begin", key=key, fence=fence)
            assert numbers == sorted(set(numbers))


def test_trap_11_recorded_one_by_one_nothing_done_runs_again(sqs_stage: SqsWorkers) -> None:
    """With checkpoint="message" a crash at any time repeats only the job in flight."""
    sqs_stage.make("t.fifo")
    sqs_stage.job('checkpoint="message"')
    bodies = [{"n": n, "kills": int(n in (3, 6))} for n in range(9)]
    sqs_stage.send("t.fifo", *bodies)
    sqs_stage.start()
    sqs_stage.wait_empty()
    assert sqs_stage.numbers("begin") == [0, 1, 2, 3, 3, 4, 5, 6, 6, 7, 8]
    assert sqs_stage.numbers() == list(range(9))
