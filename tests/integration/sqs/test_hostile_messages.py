"""Small messages that once stopped everything that was received with them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from tests.support.aws.server_process import ServerProcess
from tests.support.sqs_workers import SqsWorkers
from tests.unit.brokers.sqs.test_hostile_messages import HOSTILE

POISON = ["base64 that is not ASCII", "a deep pointer", "a deep key", "deep headers"]


@pytest.fixture
def stage(tmp_path: Path, moto_server: ServerProcess, aws_prefix: str) -> Iterator[SqsWorkers]:
    with closing(SqsWorkers(tmp_path, moto_server, aws_prefix, faults=False)) as made:
        yield made


@pytest.mark.slow
@pytest.mark.parametrize("queue", ["q", "q.fifo"])
def test_hostile_messages_hold_back_no_other(stage: SqsWorkers, queue: str) -> None:
    """Each ends in its first attempt, and those that were received with it are processed."""
    url = stage.make(queue)
    stage.job(options='order="key"' if queue == "q.fifo" else 'order="none"')
    for number, name in enumerate(POISON):
        body, attributes = HOSTILE[name]
        fifo = {"MessageGroupId": name.replace(" ", "-"), "MessageDeduplicationId": str(number)}
        stage.sqs.send_message(
            QueueUrl=url,
            MessageBody=body,
            MessageAttributes=attributes,
            **(fifo if queue == "q.fifo" else {}),
        )
        stage.send(queue, {"n": number})
    stage.start(visibility_seconds=30)
    stage.wait(len(POISON))
    stage.wait_empty(queue)
    assert sorted(stage.numbers()) == list(range(len(POISON)))
    assert stage.numbers("begin") == stage.numbers()
