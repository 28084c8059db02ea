"""Workers on SQS that stop, hand over or pause: the next owner gets their messages at once.

The numbers are those of the traps of SQS in the documentation.
"""

from __future__ import annotations

import signal
import uuid
from collections import Counter
from typing import Any

import pytest

from tests.support.processes import paused
from tests.support.sqs_workers import SqsWorkers, once_in_order
from tests.support.zookeeper import Ensemble


@pytest.mark.parametrize("queue", ["t.fifo", "s"])
def test_trap_09_messages_of_an_open_poll_are_released_at_stop(
    sqs_stage: SqsWorkers, queue: str
) -> None:
    """Another worker gets it long before the visibility timeout of 60 s."""
    sqs_stage.make(queue)
    sqs_stage.job('order="none"')
    long = {"wait_seconds": 5, "visibility_seconds": 60}
    first = sqs_stage.start(**long)
    sqs_stage.until(lambda: sqs_stage.open_polls(queue) == 1, "the first worker polls")
    second = sqs_stage.start(**long)
    second.wait_for_line("registered")
    first.send(signal.SIGTERM)
    sqs_stage.until(lambda: sqs_stage.open_polls(queue) == 2, "both have a poll open")
    sqs_stage.send(queue, {"n": 1})
    sqs_stage.wait(1)
    assert sqs_stage.requests("ReceiveMessage", queue, "entries") == 2
    assert first.wait() == 0
    assert sqs_stage.numbers("begin") == [1]
    sqs_stage.wait_empty()


def test_trap_09_a_worker_with_idle_polls_ends_when_they_do(sqs_stage: SqsWorkers) -> None:
    """None of the queues is polled once more."""
    for number in range(20):
        sqs_stage.make(f"q{number}.fifo")
    worker = sqs_stage.start(wait_seconds=2)
    sqs_stage.until(
        lambda: all(sqs_stage.open_polls(queue) for queue in sqs_stage.urls), "all are polled"
    )
    polls = {queue: sqs_stage.requests("ReceiveMessage", queue) for queue in sqs_stage.urls}
    worker.send(signal.SIGTERM)
    assert worker.wait() == 0
    assert sum(map(sqs_stage.open_polls, sqs_stage.urls)) == 0
    for queue, before in polls.items():
        assert sqs_stage.requests("ReceiveMessage", queue) <= before + 1


def test_trap_09_what_is_held_is_given_back(sqs_stage: SqsWorkers) -> None:
    """The running job ends and its message is deleted; other workers run the rest at once."""
    sqs_stage.make("t.fifo")
    sqs_stage.send("t.fifo", {"n": 0, "gate": "open"}, *({"n": n} for n in range(1, 10)))
    first = sqs_stage.start(visibility_seconds=60)
    sqs_stage.wait(1, "begin")
    second = sqs_stage.start(visibility_seconds=60)
    second.wait_for_line("registered")
    first.send(signal.SIGTERM)
    first.wait_for_line("step 2")
    sqs_stage.open("open")
    sqs_stage.wait(10)
    assert first.wait() == 0
    sqs_stage.wait_empty()
    assert sqs_stage.numbers("begin") == list(range(10))
    assert len({each["pid"] for each in sqs_stage.said("end", n=0)}) == 1
    assert sqs_stage.said("end", n=0)[0]["pid"] != sqs_stage.said("end", n=1)[0]["pid"]


@pytest.mark.parametrize("order", ["queue", "key", "none"])
def test_a_graceful_handover_repeats_nothing(sqs_stage: SqsWorkers, order: str) -> None:
    """Queues move to a second worker while they are worked on: each message once, in order."""
    kind = "" if order == "none" else ".fifo"
    sqs_stage.job(f'order="{order}"' + (", concurrency=1" if order == "none" else ""))
    queues = [f"q{number}{kind}" for number in range(4)]
    for queue in queues:
        sqs_stage.make(queue)
        for key in ("a", "b"):
            bodies: list[dict[str, Any]] = [{"n": n, "seconds": 0.04} for n in range(40)]
            bodies[5]["gate"] = "two"
            sqs_stage.send(queue, *bodies, key=key)
    sqs_stage.start()
    sqs_stage.wait(20)
    sqs_stage.start()
    sqs_stage.until(lambda: sqs_stage.assigned() == [2, 2], "both have a share")
    sqs_stage.open("two")
    sqs_stage.wait(320)
    sqs_stage.wait_empty()
    counts = Counter((each["queue"], each["key"], each["n"]) for each in sqs_stage.said("begin"))
    if order == "none":
        assert sum(counts.values()) == 320
    else:
        assert set(counts.values()) == {1}
        for queue in queues:
            for key in ("a", "b"):
                assert sqs_stage.numbers(queue=queue, key=key) == list(range(40))
    assert len({each["pid"] for each in sqs_stage.said("end")}) == 2


def test_trap_15_a_frozen_owner_runs_nothing_out_of_order(
    sqs_stage: SqsWorkers, coordinator_url: str
) -> None:
    """Another worker takes its queue; when it wakes up, its lease is over and it starts nothing."""
    sqs_stage.coordinator = coordinator_url
    sqs_stage.make("t.fifo")
    sqs_stage.job('order="key"')
    for key in ("a", "b"):
        bodies: list[dict[str, Any]] = [{"n": n, "seconds": 0.1} for n in range(12)]
        sqs_stage.send("t.fifo", *bodies, key=key)
    first = sqs_stage.start()
    sqs_stage.wait(4)
    child = sqs_stage.child(first)
    with paused(child, coordinator_url):
        sqs_stage.start()
        sqs_stage.until(
            lambda: any(each["pid"] != child for each in sqs_stage.said("begin")), "it took over"
        )
        sqs_stage.wait(10)
    sqs_stage.wait_empty()
    fences = sorted({each["fence"] for each in sqs_stage.said("begin")})
    assert len(fences) >= 2
    for key in ("a", "b"):
        begun = sqs_stage.said("begin", key=key)
        assert once_in_order(each["n"] for each in begun) == list(range(12))
        assert [each["fence"] for each in begun] == sorted(each["fence"] for each in begun)
        for fence in fences:
            numbers = [each["n"] for each in begun if each["fence"] == fence]
            assert numbers == sorted(set(numbers))


def test_trap_15_a_worker_without_coordinator_releases_messages(
    sqs_stage: SqsWorkers, zookeeper_server: Ensemble
) -> None:
    """It stops polling and releases waiting messages: other workers may own its queues by now.

    Only the message in flight stays hidden, until its job has ended.
    """
    sqs_stage.coordinator = zookeeper_server.url(f"/test-{uuid.uuid4().hex[:12]}")
    for queue in ("t.fifo", "idle.fifo"):
        sqs_stage.make(queue)
    sqs_stage.send("t.fifo", {"n": 0, "gate": "open"}, *({"n": n} for n in range(1, 10)))
    sqs_stage.start()
    sqs_stage.wait(1, "begin")
    sqs_stage.until(lambda: sqs_stage.counts("t.fifo")["hidden"] == 10, "all are held")
    (server,) = zookeeper_server.servers
    server.kill()
    try:
        sqs_stage.until(lambda: sqs_stage.counts("t.fifo")["waiting"] == 9, "nine are released")
        sqs_stage.until(lambda: not sqs_stage.open_polls("idle.fifo"), "no poll is open")
        polls = sqs_stage.requests("ReceiveMessage", "idle.fifo")
        action = "ChangeMessageVisibilityBatch"
        extended = sqs_stage.requests(action, "t.fifo") + 3
        sqs_stage.until(lambda: sqs_stage.requests(action, "t.fifo") >= extended, "extensions")
        assert sqs_stage.counts("t.fifo") == {"waiting": 9, "hidden": 1}
        assert sqs_stage.requests("ReceiveMessage", "idle.fifo") == polls
    finally:
        server.restart()
    sqs_stage.open("open")
    sqs_stage.wait_empty()
    assert sqs_stage.numbers("begin") == list(range(10))
