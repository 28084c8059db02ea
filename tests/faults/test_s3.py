"""Faults between qdo and S3: bodies of messages of SQS, and dead letters of Kinesis.

SQS is the server of the tests' own, which locks message groups as SQS does; S3 is moto's.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from typing import Any

import pytest

from qdo.broker_errors import AwsNotFoundError, AwsUnreachableError, ObjectTooLargeError
from qdo.brokers.aws import sending as aws_sending
from qdo.brokers.aws.address import BodyPointer
from qdo.brokers.aws.clients import ATTEMPTS
from qdo.brokers.base import Outgoing
from qdo.brokers.dead_letters import DeadLetterRecord
from qdo.brokers.kinesis.positions import pack
from qdo.brokers.sqs.broker import SqsBroker
from qdo.brokers.sqs.codec import make_position
from tests.support.aws.clients import client
from tests.support.aws.fault_proxy import Proxy, proxying
from tests.support.aws.kinesis_server import KinesisStub
from tests.support.kinesis import opened
from tests.support.processes import alive
from tests.support.sqs_workers import REGION, SqsWorkers

RAW = '{"content-type":"application/octet-stream"}'
LARGE = b"x" * 500
LETTER = DeadLetterRecord(
    queue="q",
    position=make_position(5, 0, 7),
    body=LARGE,
    key=None,
    headers=RAW,
    error="ValueError: no",
    traceback="",
    attempts=1,
    worker="w",
    fence=1,
)
NOTE = """
@app.job("raw", order="none")
def note(message, context):
    with open("raw", "a") as file:
        print(len(message.body), file=file)
"""


class FaultyBucket:
    """The bucket of a test."""

    def __init__(self, url: str, name: str) -> None:
        self._s3: Any = client("s3", url, region=REGION)
        self.name = name
        where = {"LocationConstraint": REGION}
        self._s3.create_bucket(Bucket=name, CreateBucketConfiguration=where)

    def names(self) -> list[str]:
        found = self._s3.list_objects_v2(Bucket=self.name)
        return [each["Key"] for each in found.get("Contents", ())]

    def delete(self, name: str) -> None:
        self._s3.delete_object(Bucket=self.name, Key=name)


@pytest.fixture
def bucket(moto_url: str, aws_bucket: str) -> FaultyBucket:
    return FaultyBucket(moto_url, aws_bucket)


@pytest.fixture(scope="module")
def shared_proxy(sqs_url: str, moto_url: str) -> Iterator[Proxy]:
    with proxying(sqs_url, moto_url) as proxy:
        yield proxy


@pytest.fixture
def proxy(shared_proxy: Proxy) -> Proxy:
    """Spoils requests to SQS and S3."""
    shared_proxy.clear()
    return shared_proxy


@pytest.fixture
def stage(sqs_stage: SqsWorkers, proxy: Proxy) -> SqsWorkers:
    sqs_stage.take_proxy(proxy)
    return sqs_stage


@pytest.fixture
def broker(stage: SqsWorkers, proxy: Proxy, bucket: FaultyBucket) -> Iterator[SqsBroker]:
    """One before which the proxy is."""
    with closing(stage.broker(endpoint=proxy.url, **options(bucket))) as broker:
        yield broker


def options(bucket: FaultyBucket) -> dict[str, Any]:
    return {"bucket": bucket.name, "max_body": 100, "wait_seconds": 0}


def start(stage: SqsWorkers, bucket: FaultyBucket, **more: Any) -> None:
    stage.start(bucket=bucket.name, max_body=100, **more)


def send(broker: SqsBroker, queue: str, *numbers: int, key: str | None = None, **more: Any) -> None:
    """Send bodies that go to S3."""
    for number in numbers:
        body = {"n": number, "pad": "x" * 500, **more}
        broker.send(Outgoing(queue, json.dumps(body).encode(), key, None))


# --- responses that are not from S3, such as a login page ---


def test_a_body_is_not_stored_because_somebody_else_says_so(
    stage: SqsWorkers,
    broker: SqsBroker,
    proxy: Proxy,
    bucket: FaultyBucket,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A message without its body would be lost; the sender gets an error."""
    monkeypatch.setattr(aws_sending, "PATIENCE_SECONDS", 1.0)
    stage.make("q")
    proxy.spoil("page", "PUT", count=0)
    with pytest.raises(AwsUnreachableError, match=r"200.*<html>"):
        send(broker, "q", 1)
    assert stage.left("q") == 0
    proxy.clear()
    send(broker, "q", 2)
    assert stage.left("q") == len(bucket.names()) == 1


def test_what_somebody_else_answers_is_no_body(
    stage: SqsWorkers, broker: SqsBroker, proxy: Proxy, bucket: FaultyBucket
) -> None:
    """Bytes above all, which can be anything: the job gets its own, later."""
    stage.job(more=NOTE)
    stage.make("raw")
    broker.send(Outgoing("raw", LARGE, None, RAW))
    proxy.spoil("page", "GET", name=bucket.name, count=2)
    start(stage, bucket)
    stage.wait_empty()
    assert (stage.folder / "raw").read_text() == "500\n"
    assert len([each for each in proxy.log("GET") if each.fault == "page"]) == 2


def test_a_foreign_answer_is_not_sent_as_a_dead_letter_body(
    stage: SqsWorkers, broker: SqsBroker, proxy: Proxy
) -> None:
    stage.make("q")
    broker.dead_letters.store(LETTER)
    (entry,) = broker.dead_letters.find()
    proxy.spoil("page", "GET")
    with pytest.raises(AwsUnreachableError, match="status 200"):
        broker.dead_letters.retry([(entry.queue, entry.position)])
    assert stage.left("q") == 0
    assert broker.dead_letters.get(entry.queue, entry.position).body == LARGE  # type: ignore[union-attr]


def test_a_foreign_answer_does_not_store_a_kinesis_dead_letter(
    kinesis: KinesisStub, moto_url: str, aws_stream: str, bucket: FaultyBucket
) -> None:
    """Its queue would continue behind it, and it would be lost."""
    kinesis.make(aws_stream)
    shard = "shardId-000000000000"
    with (
        proxying(kinesis.url, moto_url) as proxy,
        closing(opened(proxy.url, aws_stream, f"dead_letters=s3://{bucket.name}/x")) as broker,
    ):
        made = replace(LETTER, queue=shard, position=pack(7, 0, 5))
        proxy.spoil("page", "PUT")
        with pytest.raises(AwsUnreachableError, match="status 200"):
            broker.dead_letters.store(made)
        assert broker.dead_letters.records() == []
        broker.dead_letters.store(made)
        assert [each.body for each in broker.dead_letters.records()] == [LARGE]


@pytest.mark.parametrize("fault", ["error", "denied"])
def test_a_retried_kinesis_dead_letter_that_remains_is_reported(
    kinesis: KinesisStub,
    moto_url: str,
    aws_stream: str,
    bucket: FaultyBucket,
    caplog: pytest.LogCaptureFixture,
    fault: str,
) -> None:
    """A sender that gets only an error sends the message again, and never one behind it."""
    kinesis.make(aws_stream)
    shard = "shardId-000000000000"
    places = [(shard, pack(number, 0, 5)) for number in (7, 8)]
    with (
        proxying(kinesis.url, moto_url) as proxy,
        closing(opened(proxy.url, aws_stream, f"dead_letters=s3://{bucket.name}/x")) as broker,
    ):
        for _, position in places:
            broker.dead_letters.store(replace(LETTER, queue=shard, position=position))
        proxy.spoil(fault, "DELETE", count=0)
        moved = broker.dead_letters.retry(places)
        assert None not in moved
        assert len(broker.reader(shard, 0).fetch(10)) == 2
        assert caplog.text.count("was sent again, and stays a dead letter") == 2


# --- objects that are gone, or cannot be deleted ---


def test_bytes_whose_object_is_gone_are_no_empty_body(
    stage: SqsWorkers, broker: SqsBroker, bucket: FaultyBucket
) -> None:
    """A rule of the bucket may have deleted it; the job would take it for an empty body."""
    stage.job(more=NOTE)
    stage.make("raw")
    broker.send(Outgoing("raw", LARGE, None, RAW))
    bucket.delete(*bucket.names())
    start(stage, bucket)
    stage.wait_empty()
    (found,) = broker.dead_letters.records()
    assert "BodyDecodeError" in found.error
    assert not (stage.folder / "raw").exists()
    assert "missing from S3" in stage.output()


@pytest.mark.parametrize("fault", ["error", "denied", "page"])
def test_a_dead_letter_is_acted_on_though_its_object_stays(
    stage: SqsWorkers, broker: SqsBroker, proxy: Proxy, caplog: pytest.LogCaptureFixture, fault: str
) -> None:
    """The dead letter was retried or discarded, and the caller learns of the leftover object."""
    stage.make("q")
    for name in (7, 8):
        broker.dead_letters.store(replace(LETTER, position=make_position(5, 0, name)))
    one, two = [(each.queue, each.position) for each in broker.dead_letters.find()]
    proxy.spoil(fault, "POST", count=0)
    (moved,) = broker.dead_letters.retry([one])
    assert moved is not None
    assert broker.dead_letters.discard([two]) == [True]
    assert broker.dead_letters.find() == []
    assert stage.left("q") == 1
    assert (
        len([each for each in caplog.records if each.name == "qdo.brokers.sqs.dead_letters"]) == 2
    )


def test_a_dead_letter_whose_object_is_gone_is_named(
    stage: SqsWorkers, broker: SqsBroker, bucket: FaultyBucket
) -> None:
    """It ends commands about all letters, and can be discarded then."""
    stage.make("q")
    broker.dead_letters.store(LETTER)
    bucket.delete(*bucket.names())
    (entry,) = broker.dead_letters.find()
    place = entry.queue, entry.position
    name = broker.positions.message_id(entry.position, broker.id_node)
    with pytest.raises(AwsNotFoundError, match=f"body of dead letter {name} of queue 'q'"):
        broker.dead_letters.get(*place)
    with pytest.raises(AwsNotFoundError, match=f"body of dead letter {name} of queue 'q'"):
        broker.dead_letters.retry([place])
    assert broker.dead_letters.discard([place]) == [True]


# --- reading bodies takes long, or fails ---


@pytest.mark.parametrize("queue", ["q", "q.fifo"])
def test_messages_stay_hidden_while_their_bodies_are_read(
    stage: SqsWorkers, broker: SqsBroker, proxy: Proxy, bucket: FaultyBucket, queue: str
) -> None:
    """Longer than SQS hides them: they are not received again, nor run again."""
    stage.job(options='"q", order="none"', more='app.job("*.fifo", order="key")(job)')
    stage.make(queue)
    send(broker, queue, *range(4), seconds=1.5)
    proxy.spoil("slow", "GET", name=bucket.name, count=0, seconds=0.8)
    start(stage, bucket, visibility_seconds=2)
    stage.wait(4)
    stage.wait_empty()
    assert sorted(stage.numbers("begin")) == [0, 1, 2, 3]
    assert broker.dead_letters.records() == []
    assert "is no longer held" not in stage.output()


@pytest.mark.parametrize("fault", ["denied", "error"])
def test_an_unreadable_body_blocks_only_its_message_group(
    stage: SqsWorkers, broker: SqsBroker, proxy: Proxy, bucket: FaultyBucket, fault: str
) -> None:
    """Other groups of its queue continue; order holds once it can be read."""
    stage.job(options='"*.fifo", order="key"')
    stage.make("q.fifo")
    send(broker, "q.fifo", 0, key="a")
    before = set(bucket.names())
    send(broker, "q.fifo", 1, key="a")
    (bad,) = set(bucket.names()) - before
    proxy.spoil(fault, "GET", name=bad, count=0)
    for number in range(3):
        send(broker, "q.fifo", number, key="b")
        send(broker, "q.fifo", number + 2, key="a")
    start(stage, bucket, visibility_seconds=4)
    stage.wait(3, key="b")
    assert stage.numbers(key="a") == [0]
    proxy.clear()
    stage.wait_empty()
    for key, count in (("a", 5), ("b", 3)):
        assert stage.numbers("begin", key=key) == list(range(count))
    assert "cannot be read" in stage.output()


def test_a_body_that_would_take_too_much_memory_is_not_read(
    stage: SqsWorkers, broker: SqsBroker, bucket: FaultyBucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """AWS's own clients store up to 2 GiB."""
    stage.make("q")
    send(broker, "q", 1)
    (name,) = bucket.names()
    assert broker.objects is not None
    pointer = BodyPointer(bucket.name, name)
    size = len(broker.objects.get(pointer) or b"")
    monkeypatch.setattr("qdo.brokers.aws.s3.MAX_S3_BODY", size - 1)
    with pytest.raises(ObjectTooLargeError, match=f"{name}.*{size}"):
        broker.objects.get(pointer)
    assert bucket.names() == [name]


def test_a_message_without_body_does_not_stop_a_standard_queue(
    stage: SqsWorkers, broker: SqsBroker, proxy: Proxy, bucket: FaultyBucket
) -> None:
    """A burst waits for it, although polls bring nothing meanwhile."""
    stage.job(options='"q", order="none"')
    stage.make("q")
    send(broker, "q", *range(6))
    bad = bucket.names()[0]
    proxy.spoil("denied", "GET", name=bad, count=2)
    stage.start("--burst", bucket=bucket.name, max_body=100).wait()
    assert sorted(stage.numbers("begin")) == list(range(6))
    assert stage.left("q") == 0


def test_a_stopping_worker_releases_messages_with_unread_bodies(
    stage: SqsWorkers, broker: SqsBroker, proxy: Proxy, bucket: FaultyBucket
) -> None:
    """It does not keep reading, maybe for minutes, while others wait for the messages."""
    stage.job(options='"*.fifo", order="key"')
    stage.make("q.fifo")
    send(broker, "q.fifo", *range(8), key="k")
    proxy.spoil("slow", "GET", name=bucket.name, count=0, seconds=1.5)
    worker = stage.start(bucket=bucket.name, max_body=100, visibility_seconds=60)
    stage.until(lambda: bool(proxy.log("GET")), "a body is asked for")
    worker.send(signal.SIGTERM)
    assert worker.wait() == 0
    assert stage.counts("q.fifo") == {"waiting": 8, "hidden": 0}
    assert "SQS does not answer" not in stage.output()


@pytest.mark.parametrize("queue", ["q", "q.fifo"])
def test_a_burst_waits_for_messages_with_unreadable_bodies(
    stage: SqsWorkers, broker: SqsBroker, proxy: Proxy, bucket: FaultyBucket, queue: str
) -> None:
    """They were hidden again: repeating the same receive request would not return them."""
    stage.job(options='"q", order="none"', more='app.job("*.fifo", order="key")(job)')
    stage.make(queue)
    send(broker, queue, 0)
    proxy.spoil("unanswered", "GET", name=bucket.name, count=ATTEMPTS, seconds=0.5)
    flags = {"bucket": bucket.name, "max_body": 100, "visibility_seconds": 4}
    stage.start("--burst", **flags).wait()
    assert "S3 in region" in stage.output()
    assert stage.numbers("begin") == [0]
    assert stage.left(queue) == 0


@pytest.mark.parametrize("queue", ["q", "q.fifo"])
def test_what_a_dead_process_read_bodies_of_is_shown_again(
    stage: SqsWorkers, broker: SqsBroker, proxy: Proxy, bucket: FaultyBucket, queue: str
) -> None:
    """The replacement process releases them, before their visibility timeout is over."""
    stage.job(options='"q", order="none"', more='app.job("*.fifo", order="key")(job)')
    stage.make(queue)
    send(broker, queue, *range(3))
    proxy.spoil("unanswered", "GET", name=bucket.name, seconds=60.0)
    worker = stage.start(bucket=bucket.name, max_body=100, visibility_seconds=30)
    stage.until(
        lambda: bool(stage.asked("ChangeMessageVisibilityBatch", queue)), "they are hidden again"
    )
    os.kill(stage.child(worker), signal.SIGKILL)
    stage.wait(3)  # long before the visibility timeout of 30 s
    assert sorted(stage.numbers("begin")) == [0, 1, 2]


def test_a_queue_that_is_given_away_does_not_wait_for_a_body(
    stage: SqsWorkers, broker: SqsBroker, proxy: Proxy, bucket: FaultyBucket
) -> None:
    """Its next owner has the messages although the one before is still reading."""
    stage.job(options='"*.fifo", order="key"')
    stage.make("q.fifo")
    send(broker, "q.fifo", *range(3), key="k")
    proxy.spoil("unanswered", "GET", name=bucket.name, seconds=60.0)
    times = {"wait_seconds": 10, "visibility_seconds": 600}
    first = stage.start(bucket=bucket.name, max_body=100, **times)
    stage.until(lambda: bool(proxy.log("GET")), "a body is asked for")
    stage.start(bucket=bucket.name, max_body=100, **times)
    stage.until(lambda: len(stage.assigned()) == 2, "there are two workers")
    first.send(signal.SIGTERM)
    stage.wait(3)
    assert alive(first.pid)  # it waits for its body until 20 s after the signal
    assert stage.numbers("begin") == [0, 1, 2]


def test_many_queues_read_bodies_at_once_without_a_warning(
    stage: SqsWorkers, broker: SqsBroker, proxy: Proxy, bucket: FaultyBucket
) -> None:
    """Connections that the pool does not keep are named one by one in the log."""
    stage.job(options='"*", order="none"')
    for number in range(20):
        stage.make(f"q{number}")
        send(broker, f"q{number}", number)
    proxy.spoil("slow", "GET", name=bucket.name, count=0, seconds=1.0)
    start(stage, bucket, visibility_seconds=10)
    stage.wait(20)
    stage.wait_empty()
    assert "Connection pool is full" not in stage.output()


# --- sending ---


@pytest.mark.parametrize("fault", ["error", "throttle"])
def test_a_body_that_s3_refuses_for_a_moment_is_sent(
    stage: SqsWorkers, broker: SqsBroker, proxy: Proxy, bucket: FaultyBucket, fault: str
) -> None:
    """It is retried like a message that SQS rejects for a moment: S3 throttles heavy senders."""
    stage.make("q")
    proxy.spoil(fault, "PUT", skip=1, count=4)
    send(broker, "q", 0, 1)
    assert stage.left("q") == len(bucket.names()) == 2


def test_nothing_is_stored_for_a_queue_that_is_missing(
    broker: SqsBroker, bucket: FaultyBucket
) -> None:
    """A sender that tries it again and again would fill the bucket."""
    with pytest.raises(AwsNotFoundError, match="SQS queue"):
        send(broker, "missing", 0)
    assert bucket.names() == []
