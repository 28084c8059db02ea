"""Jobs on SQS that run in threads, in processes and on an asyncio loop."""

from __future__ import annotations

import signal

import pytest

from tests.support.sqs_workers import SqsWorkers

LOOP = """
import asyncio

@app.job("a*.fifo", order="key")
async def on_a_loop(message, context):
    say("begin", message)
    while "gate" in message.body and not os.path.exists(message.body["gate"]):
        await asyncio.sleep(0.01)
    await asyncio.sleep(message.body.get("seconds", 0))
    say("end", message)
"""


def test_order_and_hiding_hold_wherever_jobs_run(sqs_stage: SqsWorkers) -> None:
    """A job longer than the visibility timeout runs once; those behind it wait for it."""
    sqs_stage.make("t.fifo")
    sqs_stage.job('order="key", executor="process"')
    sqs_stage.send("t.fifo", {"n": 0, "seconds": 3.0}, *({"n": n} for n in range(1, 10)), key="a")
    sqs_stage.send("t.fifo", *({"n": n} for n in range(20, 30)), key="b")
    worker = sqs_stage.start()
    sqs_stage.wait(20)
    sqs_stage.wait_empty()
    assert sqs_stage.numbers("begin", key="a") == list(range(10))
    assert sqs_stage.numbers("begin", key="b") == list(range(20, 30))
    assert sqs_stage.numbers("end")[-10:] == list(range(10))
    worker.send(signal.SIGTERM)
    assert worker.wait() == 0, worker.output


@pytest.mark.parametrize("executor", ["thread", "process", "asyncio"])
def test_the_job_of_a_reclaimed_message_ends_before_it_reruns(
    sqs_stage: SqsWorkers, executor: str
) -> None:
    """SQS may deliver the message again: it never runs twice at the same time here."""
    queue = "a.fifo" if executor == "asyncio" else "t.fifo"
    options = 'order="key"' + (f', executor="{executor}"' if executor != "asyncio" else "")
    sqs_stage.make(queue)
    sqs_stage.job(options, LOOP if executor == "asyncio" else "")
    sqs_stage.send(queue, {"n": 0, "gate": "rejected"}, {"n": 1}, {"n": 2}, key="a")
    worker = sqs_stage.start()
    sqs_stage.until(lambda: sqs_stage.said("begin") != [], "the job has begun")
    sqs_stage.fail_entries(
        "ChangeMessageVisibilityBatch", queue, code="ReceiptHandleIsInvalid", sender_fault=True
    )
    worker.wait_for_line("SQS rejected ChangeMessageVisibilityBatch")
    sqs_stage.open("rejected")
    sqs_stage.wait(1, n=2)
    sqs_stage.wait_empty()
    said = [(each["what"], each["n"]) for each in sqs_stage.said()]
    again = said.index(("begin", 0), 1)
    assert said[:again] in ([("begin", 0)], [("begin", 0), ("end", 0)])
    assert said[again:] == [(what, n) for n in range(3) for what in ("begin", "end")]
