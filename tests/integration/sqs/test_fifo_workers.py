"""Workers on FIFO queues: the order of message groups through failures, blocks and dead letters.

The numbers are those of the traps of SQS in the documentation.
"""

from __future__ import annotations

import json
import signal
from contextlib import closing

import pytest

from tests.support.aws.clients import client
from tests.support.aws.messages import raw_messages
from tests.support.sqs_workers import REGION, SqsWorkers

POLICIES = {
    "blocking": 'policy=qdo.Policy(attempts=1, then="block")',
    "failing": "policy=qdo.Policy(attempts=9, backoff_seconds=3600, backoff_max_seconds=3600)",
}
VERDICTS = ("retry", "skip", "dead-letter")
COMMANDS = {
    "retry": ("retry-now",),
    "skip": ("skip", "--yes"),
    "dead-letter": ("dead-letters", "add"),
}


def test_trap_04_a_failing_message_holds_its_group_only(sqs_stage: SqsWorkers) -> None:
    """Those before it are deleted, those behind it wait, and other groups continue."""
    sqs_stage.make("t.fifo")
    sqs_stage.job(
        'order="key", policy=qdo.Policy(attempts=9, backoff_seconds=1.2, backoff_max_seconds=1.2)'
    )
    sqs_stage.send("t.fifo", {"n": 0}, {"n": 1}, {"n": 2, "fails": 2}, {"n": 3}, key="a")
    sqs_stage.send("t.fifo", *({"n": n} for n in range(6)), key="b")
    sqs_stage.start()
    sqs_stage.wait(1, "fail")
    sqs_stage.wait(6, key="b")
    sqs_stage.until(lambda: sqs_stage.left("t.fifo") == 2, "all but two are deleted")
    assert sqs_stage.numbers(key="a") == [0, 1]
    sqs_stage.send("t.fifo", {"n": 6}, key="b")
    sqs_stage.send("t.fifo", {"n": 4}, key="a")
    sqs_stage.wait(7, key="b")
    assert sqs_stage.numbers(key="a") == [0, 1]
    sqs_stage.wait_empty()
    assert sqs_stage.numbers(key="a") == [0, 1, 2, 3, 4]
    assert sqs_stage.numbers(key="b") == [0, 1, 2, 3, 4, 5, 6]
    assert sqs_stage.numbers("begin", key="a") == [0, 1, 2, 2, 2, 3, 4]
    assert sqs_stage.requests("ReceiveMessage", "t.fifo", "entries") == 12


def test_trap_05_followers_stay_out_of_the_native_dead_letters(sqs_stage: SqsWorkers) -> None:
    """Neither does the head: it is tried in place, and attempts are counted by qdo alone."""
    sqs_stage.make("native.fifo")
    target = f"arn:aws:sqs:{REGION}:123456789012:{sqs_stage.prefix}native.fifo"
    redrive = json.dumps({"deadLetterTargetArn": target, "maxReceiveCount": 3})
    sqs_stage.make("t.fifo", RedrivePolicy=redrive)
    sqs_stage.job("policy=qdo.Policy(attempts=9, backoff_seconds=0.7, backoff_max_seconds=0.7)")
    sqs_stage.send("t.fifo", {"n": 0, "fails": 6}, *({"n": n} for n in range(1, 10)))
    sqs_stage.start()
    sqs_stage.wait(1, "fail", attempt=6)
    sqs_stage.wait_empty("t.fifo")
    assert sqs_stage.left("native.fifo") == 0
    assert sqs_stage.numbers() == list(range(10))
    assert sqs_stage.requests("ReceiveMessage", "t.fifo", "entries") == 10
    assert sqs_stage.requests("ReceiveMessage", "native.fifo") == 0


def test_trap_06_a_dead_letter_is_kept_with_its_error(sqs_stage: SqsWorkers) -> None:
    """In the queue of qdo, with the error in attributes; the rest keep their order."""
    sqs_stage.make("t.fifo")
    sqs_stage.job('policy=qdo.Policy(attempts=2, backoff_seconds=0.02, then="dead-letter")')
    sqs_stage.send("t.fifo", {"n": 0}, {"n": 1, "fails": 9}, {"n": 2}, {"n": 3}, key="a")
    sqs_stage.start()
    sqs_stage.wait_empty()
    assert sqs_stage.numbers() == [0, 2, 3]
    assert sqs_stage.numbers("begin") == [0, 1, 1, 2, 3]
    with closing(sqs_stage.broker()) as broker:
        (letter,) = broker.dead_letters.records("t.fifo")
    assert (letter.error, letter.attempts, letter.key) == ("ValueError: no 1", 2, "a")
    assert "raise ValueError" in letter.traceback
    url = sqs_stage.sqs.get_queue_url(QueueName=f"{sqs_stage.prefix}dead-letters.fifo")
    sqs_stage.server.ask("/_advance", {"seconds": 120})  # the listing has hidden it
    (raw,) = raw_messages(client("sqs", sqs_stage.server.url, region=REGION), url["QueueUrl"])
    assert json.loads(raw["Body"]) == {"n": 1, "fails": 9}
    texts = [each.get("StringValue", "") for each in raw["MessageAttributes"].values()]
    assert any("ValueError: no 1" in text for text in texts)


@pytest.mark.parametrize("handover", [False, True], ids=["same-owner", "after-a-handover"])
@pytest.mark.parametrize("policy", POLICIES)
def test_trap_06_a_decision_is_about_one_message(
    sqs_stage: SqsWorkers, policy: str, handover: bool
) -> None:
    """Whichever worker owns it. A blocked queue is not polled; a backoff holds no decision up."""
    queues = {verdict: f"{verdict}.fifo" for verdict in VERDICTS}
    sqs_stage.job(POLICIES[policy])
    for queue in (*queues.values(), "idle.fifo"):
        sqs_stage.make(queue)
    for queue in queues.values():
        sqs_stage.send(queue, {"n": 0}, {"n": 1, "until": "mended"}, {"n": 2}, {"n": 3})
    worker = sqs_stage.start()
    for queue in queues.values():
        sqs_stage.until(lambda q=queue: sqs_stage.node(q).failures != (), f"{queue} fails")  # type: ignore[misc]
    if handover:
        worker.send(signal.SIGTERM)
        assert worker.wait() == 0
        sqs_stage.start()

    def polls(queue: str) -> int:
        return sqs_stage.requests("ReceiveMessage", queue)

    def wait_for_polls(more: int) -> None:
        goal = polls("idle.fifo") + more
        sqs_stage.until(lambda: polls("idle.fifo") >= goal, "polls of another queue")

    if policy == "blocking":
        wait_for_polls(3)
        before = {queue: polls(queue) for queue in queues.values()}
        wait_for_polls(3)
        assert {queue: polls(queue) for queue in queues.values()} == before
    sqs_stage.open("mended")
    for verdict, queue in queues.items():
        assert sqs_stage.numbers("begin", queue=queue) == [0, 1]
        decide(sqs_stage, verdict, queue)
    sqs_stage.wait_empty()
    assert sqs_stage.numbers("begin", queue=queues["retry"]) == [0, 1, 1, 2, 3]
    assert sqs_stage.numbers("begin", queue=queues["skip"]) == [0, 1, 2, 3]
    assert sqs_stage.numbers("begin", queue=queues["dead-letter"]) == [0, 1, 2, 3]
    with closing(sqs_stage.broker()) as broker:
        letters = broker.dead_letters.records()
    assert [(each.queue, each.attempts) for each in letters] == [(queues["dead-letter"], 1)]


def decide(sqs_stage: SqsWorkers, decision: str, queue: str) -> None:
    """Decide about the message of a queue that fails or blocks it."""
    (failure,) = sqs_stage.node(queue).failures
    ended = sqs_stage.qdo(*COMMANDS[decision], queue, str(failure.position))
    assert ended.code == 0, ended.err


def test_a_message_that_hangs_is_skipped(sqs_stage: SqsWorkers) -> None:
    """Its queue continues under the same claim, and the others run once."""
    sqs_stage.make("q.fifo")
    sqs_stage.send("q.fifo", {"n": 0, "seconds": 3600}, {"n": 1})
    sqs_stage.start()
    sqs_stage.until(lambda: sqs_stage.numbers("begin", queue="q.fifo")[:1] == [0], "the start")
    ended = sqs_stage.qdo("ps", "q.fifo", "-o", "json")
    found = {each["id"] for each in json.loads(ended.out)["items"]}
    ended = sqs_stage.qdo("skip", "--yes", "q.fifo", *found)
    assert ended.code == 0, ended.err
    sqs_stage.wait_empty()
    assert sorted(sqs_stage.numbers("begin", queue="q.fifo")) == [0, 1]


MANY = """
@app.job("b.fifo", batch=10, batch_wait_seconds=0.1)
def many(batch, context):
    say("call", batch[0])
    time.sleep(batch[0].body.get("seconds", 0))
    for index, message in enumerate(batch):
        if message.body.get("fails", 0) >= message.attempt:
            say("fail", message)
            raise qdo.FailedAt(index) from ValueError("no")
        say("end", message)
"""


def test_trap_14_a_batch_job_gets_a_group_ten_at_a_time(sqs_stage: SqsWorkers) -> None:
    """Longer than the visibility timeout, with one that fails: each once, in order."""
    sqs_stage.make("b.fifo")
    sqs_stage.job('"other"', MANY)
    bodies = [{"n": n, "seconds": 2.5 * (n == 10), "fails": 2 * (n == 14)} for n in range(30)]
    sqs_stage.send("b.fifo", *bodies)
    sqs_stage.start()
    sqs_stage.wait_empty()
    assert sqs_stage.numbers() == list(range(30))
    assert sqs_stage.numbers("fail") == [14, 14]
    assert len(sqs_stage.said("call")) <= 10
    assert sqs_stage.requests("ReceiveMessage", "b.fifo", "entries") == 30


@pytest.mark.parametrize("batch", [3, 50])
def test_a_batch_of_one_group_does_not_wait_in_vain(sqs_stage: SqsWorkers, batch: int) -> None:
    """SQS returns no more of the group until the ten messages that it returned are done."""
    sqs_stage.make("b.fifo")
    more = MANY.replace(
        "batch=10, batch_wait_seconds=0.1", f"batch={batch}, batch_wait_seconds=600"
    )
    sqs_stage.job('"other"', more)
    sqs_stage.send("b.fifo", *({"n": n} for n in range(40)))
    sqs_stage.start()
    sqs_stage.wait(40)
    assert sqs_stage.numbers() == list(range(40))
