"""Bodies in S3 from sending to the end of their jobs: real workers, and a proxy that spoils."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.aws.clients import client
from tests.support.aws.fault_proxy import Proxy
from tests.support.cli import QDO, WORKER, Ended, command

REGION = "eu-west-1"
LARGE = "x" * 5000
APP = """
import qdo

app = qdo.App("a", attempts=1)


@app.job(order="none")
def note(message, context):
    if message.body == "fail":
        raise ValueError("as asked for")
    if message.body == "fail" + "x" * 5000:
        raise ValueError("a large one, as asked for")
    with open("seen", "a") as file:
        print(len(message.body), message.key, file=file)
"""

Run = Callable[..., Ended]


@pytest.fixture
def proxy(moto_proxy: Proxy) -> Proxy:
    return moto_proxy


@pytest.fixture
def stored(moto_url: str, aws_bucket: str) -> Callable[[], int]:
    """Return how many objects the bucket of this test has; the bucket is made before."""
    s3: Any = client("s3", moto_url, region=REGION)
    where = {"LocationConstraint": REGION}
    s3.create_bucket(Bucket=aws_bucket, CreateBucketConfiguration=where)
    return lambda: len(s3.list_objects_v2(Bucket=aws_bucket).get("Contents", ()))


@pytest.fixture
def run(proxy: Proxy, aws_prefix: str, aws_bucket: str, tmp_path: Path) -> Run:
    """Run a command on the queues of this test, with their bucket."""
    options = f"create=standard&wait_seconds=0&idle_seconds=0.2&bucket={aws_bucket}&max_body=100"
    broker = f"sqs://{REGION}/{aws_prefix}?endpoint={proxy.url}&{options}&visibility_seconds=2"
    (tmp_path / "noting.py").write_text(APP)

    def run(*arguments: str) -> Ended:
        return command(*arguments, cwd=tmp_path, env={"QDO_BROKER": broker, "QDO_APP": "a"})

    return run


def send(run: Run, body: str, *arguments: str) -> None:
    ended = run(*QDO, "send", "q", json.dumps(body), *arguments)
    assert ended.code == 0, ended.err


def work(run: Run) -> str:
    ended = run(*WORKER, "noting:app", "--burst")
    assert ended.code == 0, ended.err
    return ended.err


def put_offloaded(proxy: Proxy, prefix: str, bucket: str, body: bytes, attribute: str) -> None:
    """Send a message whose body is in S3, as the client for Java does."""
    sqs, s3 = (client(service, proxy.url, region=REGION) for service in ("sqs", "s3"))
    s3.put_object(Bucket=bucket, Key=attribute, Body=body)
    place = {"s3BucketName": bucket, "s3Key": attribute}
    sqs.send_message(
        QueueUrl=sqs.get_queue_url(QueueName=f"{prefix}q")["QueueUrl"],
        MessageBody=json.dumps(["software.amazon.payloadoffloading.PayloadS3Pointer", place]),
        MessageAttributes={attribute: {"DataType": "Number", "StringValue": str(len(body))}},
    )


def test_bodies_of_other_programs_reach_their_job(
    run: Run,
    stored: Callable[[], int],
    proxy: Proxy,
    aws_prefix: str,
    aws_bucket: str,
    tmp_path: Path,
) -> None:
    """The client for Java has a marker of its own. Plain text need not be JSON, in S3 or not."""
    send(run, "1st")  # creates the queue
    put_offloaded(proxy, aws_prefix, aws_bucket, json.dumps(LARGE).encode(), "SQSLargePayloadSize")
    put_offloaded(proxy, aws_prefix, aws_bucket, b"plain text" * 100, "ExtendedPayloadSize")
    sqs = client("sqs", proxy.url, region=REGION)
    url = sqs.get_queue_url(QueueName=f"{aws_prefix}q")["QueueUrl"]
    sqs.send_message(QueueUrl=url, MessageBody="plain text")
    work(run)
    seen = (tmp_path / "seen").read_text().splitlines()
    assert sorted(seen) == ["10 None", "1000 None", "3 None", "5000 None"]
    assert stored() == 0


def test_trap_20_an_object_stays_until_its_message_is_deleted(
    run: Run, stored: Callable[[], int], proxy: Proxy
) -> None:
    """The next receiver of the message needs the object; it is deleted afterwards."""
    send(run, LARGE)
    proxy.spoil("error", "DeleteMessageBatch", count=2)
    work(run)
    faults = [(entry.action, entry.fault) for entry in proxy.log()]
    assert faults.count(("DeleteMessageBatch", "error")) == 2
    assert [each for each in faults if each[0] in ("DeleteMessageBatch", "POST")][-2:] == [
        ("DeleteMessageBatch", "pass"),
        ("POST", "pass"),
    ]
    assert stored() == 0


def test_trap_20_an_object_that_cannot_be_deleted_is_named(
    run: Run, stored: Callable[[], int], proxy: Proxy, tmp_path: Path
) -> None:
    """Its message is done, so the object is not needed anymore."""
    send(run, LARGE)
    proxy.spoil("denied", "POST", count=0)
    said = work(run)
    assert "bodies of deleted messages stay in S3" in said
    assert "s3:DeleteObject" in said
    assert stored() == 1
    work(run)
    assert (tmp_path / "seen").read_text() == "5000 None\n"


def test_a_body_that_cannot_be_stored_is_not_sent(
    run: Run, stored: Callable[[], int], proxy: Proxy
) -> None:
    """A message without its body would be of no use."""
    proxy.spoil("denied", "PUT", count=0)
    ended = run(*QDO, "send", "q", json.dumps(LARGE))
    assert ended.code == 5
    assert "s3:PutObject on bucket 'test-" in ended.err
    assert proxy.log("SendMessageBatch") == []


def test_a_body_that_cannot_be_read_for_a_while_is_waited_for(
    run: Run, stored: Callable[[], int], proxy: Proxy, tmp_path: Path
) -> None:
    """Its message is released meanwhile, and received again after growing pauses."""
    send(run, LARGE)
    proxy.spoil("error", "GET", count=4)
    proxy.spoil("reset-before", "GET", count=1)
    work(run)
    assert (tmp_path / "seen").read_text() == "5000 None\n"
    assert stored() == 0


def test_a_large_dead_letter_has_an_object_of_its_own(run: Run, stored: Callable[[], int]) -> None:
    """Sent again it has another one; with its letter the first is gone."""
    send(run, "fail" + LARGE)
    work(run)
    assert stored() == 1
    ended = run(*QDO, "dead-letters", "list", "-o", "json")
    (letter,) = ended.items()
    assert letter["body"] == "fail" + LARGE
    assert "a large one, as asked for" in letter["error"]
    assert run(*QDO, "dead-letters", "retry", "q", "--all", "--yes").code == 0
    assert stored() == 1
    ended = run(*QDO, "dead-letters", "list")
    assert ended.err.strip() == "no dead letters"
