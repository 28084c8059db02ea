"""Workers on queues whose settings do not suit their jobs.

The numbers are those of the traps of SQS in the documentation.
"""

from __future__ import annotations

import json
import signal

from tests.support.processes import whole_lines
from tests.support.sqs_workers import REGION, SqsWorkers

IDS = """
import time
import qdo

app = qdo.App("stage")


@app.job(order="none")
def job(message, context):
    with open("ids", "a") as file:
        file.write(f"{message.id}\\n")
        again = file.tell() > 40
    time.sleep(0 if again else 60)
"""


def redrive(stage: SqsWorkers, target: str, receives: int) -> str:
    arn = f"arn:aws:sqs:{REGION}:123456789012:{stage.prefix}{target}"
    return json.dumps({"deadLetterTargetArn": arn, "maxReceiveCount": str(receives)})


def test_trap_10_a_standard_queue_takes_no_job_with_an_order(sqs_stage: SqsWorkers) -> None:
    """One line at the start, with the remedy and the exit code of wrong usage."""
    sqs_stage.make("t")
    sqs_stage.make("u.fifo")
    worker = sqs_stage.start()
    assert worker.wait() == 2
    (line,) = [each for each in worker.output.splitlines() if "order" in each]
    assert "queue t" in line
    assert "jobs:job has order='queue'" in line
    assert '@app.job(order="none")' in line
    assert "u.fifo" not in line


def test_trap_10_a_message_that_comes_again_has_the_same_id(sqs_stage: SqsWorkers) -> None:
    """The MessageId: the key that a job uses in its own store to run only once."""
    sqs_stage.make("t")
    (sqs_stage.folder / "jobs.py").write_text(IDS)
    sent = sqs_stage.qdo("send", "t", "1")
    ids = sqs_stage.folder / "ids"
    first = sqs_stage.start()
    sqs_stage.until(lambda: len(whole_lines(ids)) == 1, "the job has begun")
    first.kill()
    sqs_stage.start()
    sqs_stage.until(lambda: len(whole_lines(ids)) == 2, "the message has come again")
    sqs_stage.wait_empty("t")
    assert whole_lines(ids) == [sent.out.strip()] * 2


def test_trap_05_06_07_a_worker_warns_of_lossy_settings(sqs_stage: SqsWorkers) -> None:
    """At its start, and works nevertheless."""
    sqs_stage.make("native.fifo")
    sqs_stage.make("low.fifo", RedrivePolicy=redrive(sqs_stage, "native.fifo", 5))
    sqs_stage.make("short.fifo", MessageRetentionPeriod="86400")
    sqs_stage.make("fine.fifo", MessageRetentionPeriod="1209600")
    sqs_stage.job('policy=qdo.Policy(attempts=3, then="block")')
    sqs_stage.send("low.fifo", {"n": 1})
    worker = sqs_stage.start()
    sqs_stage.wait(1)
    worker.send(signal.SIGTERM)
    assert worker.wait() == 0
    warnings = [line for line in worker.output.splitlines() if "WARNING" in line]
    (policy,) = [line for line in warnings if "SQS itself moves messages" in line]
    assert f"of low.fifo to {sqs_stage.prefix}native.fifo after 5 receives" in policy
    assert "breaks the order" in policy
    assert "raise maxReceiveCount to 30" in policy
    kept = sorted(line for line in warnings if "may block" in line)
    assert len(kept) == 2
    assert any("block short.fifo, and SQS deletes what waits there after 1 days" in x for x in kept)
    assert not any("fine.fifo" in line for line in warnings)
