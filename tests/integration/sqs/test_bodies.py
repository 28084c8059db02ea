"""Bodies in S3: a worker deletes them when their messages are deleted, and never before.

The number is that of the trap of SQS in the documentation.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from qdo.brokers.base import Outgoing
from tests.support.aws.clients import client
from tests.support.aws.fault_proxy import Proxy
from tests.support.aws.server_process import ServerProcess
from tests.support.sqs_workers import REGION, SqsWorkers


@pytest.fixture
def stage(
    tmp_path: Path, moto_server: ServerProcess, moto_proxy: Proxy, aws_prefix: str
) -> Iterator[SqsWorkers]:
    """A stage on moto, which has S3, with a proxy before it."""
    made = SqsWorkers(tmp_path, moto_server, aws_prefix, faults=False)
    with closing(made):
        made.take_proxy(moto_proxy)
        yield made


def test_trap_20_a_body_in_s3_is_deleted_after_its_message(
    stage: SqsWorkers, aws_bucket: str
) -> None:
    """While deletes of messages fail it stays; a job that fails finds it again."""
    s3 = client("s3", stage.server.url, region=REGION)
    where: dict[str, Any] = {"LocationConstraint": REGION}
    s3.create_bucket(Bucket=aws_bucket, CreateBucketConfiguration=where)

    def objects() -> int:
        return len(s3.list_objects_v2(Bucket=aws_bucket).get("Contents", ()))

    stage.make("t.fifo")
    stage.spoil("error", "DeleteMessageBatch", "t.fifo", count=3)
    with closing(stage.broker(bucket=aws_bucket, max_body=100)) as broker:
        for number in range(3):
            body = b'{"n":%d,"fails":%d,"pad":"%s"}' % (number, number == 1, b"x" * 500)
            broker.send(Outgoing("t.fifo", body, "k", None))
    assert objects() == 3
    stage.start(bucket=aws_bucket, max_body=100, visibility_seconds=10)
    stage.wait(3)
    stage.wait_empty()
    stage.until(lambda: objects() == 0, "the bodies are deleted")
    assert stage.numbers("begin") == [0, 1, 1, 2]
    actions = [(each.action, each.status) for each in stage.all_asked()]
    gone = actions.index(("DeleteMessageBatch", 200))
    assert ("DeleteMessageBatch", 500) in actions[:gone]
    bodies = [each for each in stage.all_asked() if f"/{aws_bucket}" in each.name]
    deleted = [each.time for each in bodies if each.action in ("DELETE", "POST")]
    assert min(deleted) > stage.all_asked()[gone].time
