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
from pathlib import Path
from typing import Any

import pytest

from qdo.broker_errors import AwsNotFoundError, AwsUnreachableError, ObjectTooLargeError
from qdo.brokers.aws import sending as aws_sending
from qdo.brokers.aws.address import BodyPointer
from qdo.brokers.aws.clients import ATTEMPTS
from qdo.brokers.base import Outgoing
from qdo.brokers.dead_letters import DeadLetterRecord
from qdo.brokers.kinesis.broker import KinesisBroker
from qdo.brokers.kinesis.positions import pack
from qdo.brokers.sqs.codec import make_position
from tests.support.aws.clients import client
from tests.support.aws.fault_proxy import Proxy, proxying
from tests.support.aws.kinesis_server import KinesisStub
from tests.support.aws.server_process import ServerProcess
from tests.support.kinesis import opened
from tests.support.processes import alive
from tests.support.sqs_workers import REGION, SqsWorkers

SHARD = "shardId-000000000000"
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


class S3Workers(SqsWorkers):
    """Workers with a bucket for bodies, and a proxy before SQS and S3.

    :ivar faults: the proxy.
    :ivar bucket: the name of the bucket, which is asked directly here.
    :ivar sender: a broker behind the proxy.
    """

    def __init__(
        self, folder: Path, server: ServerProcess, prefix: str, faults: Proxy, bucket: str, s3: Any
    ) -> None:
        super().__init__(folder, server, prefix)
        self.take_proxy(faults)
        self.faults, self.bucket, self._s3 = faults, bucket, s3
        self.job('"q", order="none"', 'app.job("*.fifo", order="key")(job)')
        self.sender = self.broker(endpoint=faults.url, wait_seconds=0)

    def url(self, **options: Any) -> str:
        return super().url(**{"bucket": self.bucket, "max_body": 100, **options})

    def objects(self) -> list[str]:
        """Return the names of the objects in the bucket."""
        found = self._s3.list_objects_v2(Bucket=self.bucket)
        return [each["Key"] for each in found.get("Contents", ())]

    def delete(self, name: str) -> None:
        """Delete an object, as a rule of the bucket may."""
        self._s3.delete_object(Bucket=self.bucket, Key=name)

    def send_large(self, queue: str, *numbers: int, key: str | None = None, **more: Any) -> None:
        """Send bodies that go to S3."""
        for number in numbers:
            body = {"n": number, "pad": "x" * 500, **more}
            self.sender.send(Outgoing(queue, json.dumps(body).encode(), key, None))

    def close(self) -> None:
        self.sender.close()
        super().close()


@pytest.fixture(scope="module")
def shared_proxy(sqs_url: str, moto_url: str) -> Iterator[Proxy]:
    with proxying(sqs_url, moto_url) as proxy:
        yield proxy


@pytest.fixture
def s3(moto_url: str, aws_bucket: str) -> Any:
    """A client, and the bucket of the test."""
    made = client("s3", moto_url, region=REGION)
    where = {"LocationConstraint": REGION}
    made.create_bucket(Bucket=aws_bucket, CreateBucketConfiguration=where)
    return made


@pytest.fixture
def stage(
    tmp_path: Path,
    sqs_stub: ServerProcess,
    aws_prefix: str,
    aws_bucket: str,
    s3: Any,
    shared_proxy: Proxy,
) -> Iterator[S3Workers]:
    shared_proxy.clear()
    with closing(S3Workers(tmp_path, sqs_stub, aws_prefix, shared_proxy, aws_bucket, s3)) as stage:
        yield stage


@pytest.fixture
def keeping(
    kinesis: KinesisStub, moto_url: str, aws_stream: str, aws_bucket: str, s3: Any
) -> Iterator[tuple[Proxy, KinesisBroker]]:
    """A broker of a stream with dead letters in S3, and the proxy before both."""
    kinesis.make(aws_stream)
    letters = f"dead_letters=s3://{aws_bucket}/x"
    with (
        proxying(kinesis.url, moto_url) as proxy,
        closing(opened(proxy.url, aws_stream, letters)) as broker,
    ):
        yield proxy, broker


# --- responses that are not from S3, such as a login page ---


def test_a_body_is_not_stored_because_somebody_else_says_so(
    stage: S3Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A message without its body would be lost; the sender gets an error."""
    monkeypatch.setattr(aws_sending, "PATIENCE_SECONDS", 1.0)
    stage.make("q")
    stage.faults.spoil("page", "PUT", count=0)
    with pytest.raises(AwsUnreachableError, match=r"200.*<html>"):
        stage.send_large("q", 1)
    assert stage.left("q") == 0
    stage.faults.clear()
    stage.send_large("q", 2)
    assert stage.left("q") == len(stage.objects()) == 1


def test_what_somebody_else_answers_is_no_body(stage: S3Workers) -> None:
    """Bytes above all, which can be anything: the job gets its own, later."""
    stage.job(more=NOTE)
    stage.make("raw")
    stage.sender.send(Outgoing("raw", LARGE, None, RAW))
    stage.faults.spoil("page", "GET", name=stage.bucket, count=2)
    stage.start()
    stage.wait_empty()
    assert (stage.folder / "raw").read_text() == "500\n"
    assert len([each for each in stage.faults.log("GET") if each.fault == "page"]) == 2


def test_a_foreign_answer_is_not_sent_as_a_dead_letter_body(stage: S3Workers) -> None:
    stage.make("q")
    stage.sender.dead_letters.store(LETTER)
    (entry,) = stage.sender.dead_letters.find()
    stage.faults.spoil("page", "GET")
    with pytest.raises(AwsUnreachableError, match="status 200"):
        stage.sender.dead_letters.retry([(entry.queue, entry.position)])
    assert stage.left("q") == 0
    assert stage.sender.dead_letters.get(entry.queue, entry.position).body == LARGE  # type: ignore[union-attr]


def test_a_foreign_answer_does_not_store_a_kinesis_dead_letter(
    keeping: tuple[Proxy, KinesisBroker],
) -> None:
    """Its queue would continue behind it, and it would be lost."""
    proxy, broker = keeping
    made = replace(LETTER, queue=SHARD, position=pack(7, 0, 5))
    proxy.spoil("page", "PUT")
    with pytest.raises(AwsUnreachableError, match="status 200"):
        broker.dead_letters.store(made)
    assert broker.dead_letters.records() == []
    broker.dead_letters.store(made)
    assert [each.body for each in broker.dead_letters.records()] == [LARGE]


@pytest.mark.parametrize("fault", ["error", "denied"])
def test_a_retried_kinesis_dead_letter_that_remains_is_reported(
    keeping: tuple[Proxy, KinesisBroker], caplog: pytest.LogCaptureFixture, fault: str
) -> None:
    """A sender that gets only an error sends the message again, and never one behind it."""
    proxy, broker = keeping
    places = [(SHARD, pack(number, 0, 5)) for number in (7, 8)]
    for _, position in places:
        broker.dead_letters.store(replace(LETTER, queue=SHARD, position=position))
    proxy.spoil(fault, "DELETE", count=0)
    moved = broker.dead_letters.retry(places)
    assert None not in moved
    assert len(broker.reader(SHARD, 0).fetch(10)) == 2
    assert caplog.text.count("was sent again, and stays a dead letter") == 2


# --- objects that are gone, or cannot be deleted ---


def test_bytes_whose_object_is_gone_are_no_empty_body(stage: S3Workers) -> None:
    """A rule of the bucket may have deleted it; the job would take it for an empty body."""
    stage.job(more=NOTE)
    stage.make("raw")
    stage.sender.send(Outgoing("raw", LARGE, None, RAW))
    stage.delete(*stage.objects())
    stage.start()
    stage.wait_empty()
    (found,) = stage.sender.dead_letters.records()
    assert "BodyDecodeError" in found.error
    assert not (stage.folder / "raw").exists()
    assert "missing from S3" in stage.output()


@pytest.mark.parametrize("fault", ["error", "denied", "page"])
def test_a_dead_letter_is_acted_on_though_its_object_stays(
    stage: S3Workers, caplog: pytest.LogCaptureFixture, fault: str
) -> None:
    """The dead letter was retried or discarded, and the caller learns of the leftover object."""
    stage.make("q")
    for name in (7, 8):
        stage.sender.dead_letters.store(replace(LETTER, position=make_position(5, 0, name)))
    one, two = [(each.queue, each.position) for each in stage.sender.dead_letters.find()]
    stage.faults.spoil(fault, "POST", count=0)
    (moved,) = stage.sender.dead_letters.retry([one])
    assert moved is not None
    assert stage.sender.dead_letters.discard([two]) == [True]
    assert stage.sender.dead_letters.find() == []
    assert stage.left("q") == 1
    assert (
        len([each for each in caplog.records if each.name == "qdo.brokers.sqs.dead_letters"]) == 2
    )


def test_a_dead_letter_whose_object_is_gone_is_named(stage: S3Workers) -> None:
    """It ends commands about all letters, and can be discarded then."""
    stage.make("q")
    stage.sender.dead_letters.store(LETTER)
    stage.delete(*stage.objects())
    (entry,) = stage.sender.dead_letters.find()
    place = entry.queue, entry.position
    name = stage.sender.positions.message_id(entry.position, stage.sender.id_node)
    with pytest.raises(AwsNotFoundError, match=f"body of dead letter {name} of queue 'q'"):
        stage.sender.dead_letters.get(*place)
    with pytest.raises(AwsNotFoundError, match=f"body of dead letter {name} of queue 'q'"):
        stage.sender.dead_letters.retry([place])
    assert stage.sender.dead_letters.discard([place]) == [True]


# --- reading bodies takes long, or fails ---


@pytest.mark.parametrize("queue", ["q", "q.fifo"])
def test_messages_stay_hidden_while_their_bodies_are_read(stage: S3Workers, queue: str) -> None:
    """Longer than SQS hides them: they are not received again, nor run again."""
    stage.make(queue)
    stage.send_large(queue, *range(4), seconds=1.5)
    stage.faults.spoil("slow", "GET", name=stage.bucket, count=0, seconds=0.8)
    stage.start(visibility_seconds=2)
    stage.wait(4)
    stage.wait_empty()
    assert sorted(stage.numbers("begin")) == [0, 1, 2, 3]
    assert stage.sender.dead_letters.records() == []
    assert "is no longer held" not in stage.output()


@pytest.mark.parametrize("fault", ["denied", "error"])
def test_an_unreadable_body_blocks_only_its_message_group(stage: S3Workers, fault: str) -> None:
    """Other groups of its queue continue; order holds once it can be read."""
    stage.make("q.fifo")
    stage.send_large("q.fifo", 0, key="a")
    before = set(stage.objects())
    stage.send_large("q.fifo", 1, key="a")
    (bad,) = set(stage.objects()) - before
    stage.faults.spoil(fault, "GET", name=bad, count=0)
    for number in range(3):
        stage.send_large("q.fifo", number, key="b")
        stage.send_large("q.fifo", number + 2, key="a")
    stage.start(visibility_seconds=4)
    stage.wait(3, key="b")
    assert stage.numbers(key="a") == [0]
    stage.faults.clear()
    stage.wait_empty()
    for key, count in (("a", 5), ("b", 3)):
        assert stage.numbers("begin", key=key) == list(range(count))
    assert "cannot be read" in stage.output()


def test_a_body_that_would_take_too_much_memory_is_not_read(
    stage: S3Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """AWS's own clients store up to 2 GiB."""
    stage.make("q")
    stage.send_large("q", 1)
    (name,) = stage.objects()
    assert stage.sender.objects is not None
    pointer = BodyPointer(stage.bucket, name)
    size = len(stage.sender.objects.get(pointer) or b"")
    monkeypatch.setattr("qdo.brokers.aws.s3.MAX_S3_BODY", size - 1)
    with pytest.raises(ObjectTooLargeError, match=f"{name}.*{size}"):
        stage.sender.objects.get(pointer)
    assert stage.objects() == [name]


def test_a_message_without_body_does_not_stop_a_standard_queue(stage: S3Workers) -> None:
    """A burst waits for it, although polls bring nothing meanwhile."""
    stage.make("q")
    stage.send_large("q", *range(6))
    bad = stage.objects()[0]
    stage.faults.spoil("denied", "GET", name=bad, count=2)
    stage.start("--burst").wait()
    assert sorted(stage.numbers("begin")) == list(range(6))
    assert stage.left("q") == 0


def test_a_stopping_worker_releases_messages_with_unread_bodies(stage: S3Workers) -> None:
    """It does not keep reading, maybe for minutes, while others wait for the messages."""
    stage.make("q.fifo")
    stage.send_large("q.fifo", *range(8), key="k")
    stage.faults.spoil("slow", "GET", name=stage.bucket, count=0, seconds=1.5)
    worker = stage.start(visibility_seconds=60)
    stage.until(lambda: bool(stage.faults.log("GET")), "a body is asked for")
    worker.send(signal.SIGTERM)
    assert worker.wait() == 0
    assert stage.counts("q.fifo") == {"waiting": 8, "hidden": 0}
    assert "SQS does not answer" not in stage.output()


@pytest.mark.parametrize("queue", ["q", "q.fifo"])
def test_a_burst_waits_for_messages_with_unreadable_bodies(stage: S3Workers, queue: str) -> None:
    """They were hidden again: repeating the same receive request would not return them."""
    stage.make(queue)
    stage.send_large(queue, 0)
    stage.faults.spoil("unanswered", "GET", name=stage.bucket, count=ATTEMPTS, seconds=0.5)
    stage.start("--burst", visibility_seconds=4).wait()
    assert "S3 in region" in stage.output()
    assert stage.numbers("begin") == [0]
    assert stage.left(queue) == 0


@pytest.mark.parametrize("queue", ["q", "q.fifo"])
def test_what_a_dead_process_read_bodies_of_is_shown_again(stage: S3Workers, queue: str) -> None:
    """The replacement process releases them, before their visibility timeout is over."""
    stage.make(queue)
    stage.send_large(queue, *range(3))
    stage.faults.spoil("unanswered", "GET", name=stage.bucket, seconds=60.0)
    worker = stage.start(visibility_seconds=30)
    stage.until(
        lambda: bool(stage.asked("ChangeMessageVisibilityBatch", queue)), "they are hidden again"
    )
    os.kill(stage.child(worker), signal.SIGKILL)
    stage.wait(3)  # long before the visibility timeout of 30 s
    assert sorted(stage.numbers("begin")) == [0, 1, 2]


def test_a_queue_that_is_given_away_does_not_wait_for_a_body(stage: S3Workers) -> None:
    """Its next owner has the messages although the one before is still reading."""
    stage.make("q.fifo")
    stage.send_large("q.fifo", *range(3), key="k")
    stage.faults.spoil("unanswered", "GET", name=stage.bucket, seconds=60.0)
    times = {"wait_seconds": 10, "visibility_seconds": 600}
    first = stage.start(**times)
    stage.until(lambda: bool(stage.faults.log("GET")), "a body is asked for")
    stage.start(**times)
    stage.until(lambda: len(stage.assigned()) == 2, "there are two workers")
    first.send(signal.SIGTERM)
    stage.wait(3)
    assert alive(first.pid)  # it waits for its body until 20 s after the signal
    assert stage.numbers("begin") == [0, 1, 2]


def test_many_queues_read_bodies_at_once_without_a_warning(stage: S3Workers) -> None:
    """Connections that the pool does not keep are named one by one in the log."""
    stage.job(options='"*", order="none"')
    for number in range(20):
        stage.make(f"q{number}")
        stage.send_large(f"q{number}", number)
    stage.faults.spoil("slow", "GET", name=stage.bucket, count=0, seconds=1.0)
    stage.start(visibility_seconds=10)
    stage.wait(20)
    stage.wait_empty()
    assert "Connection pool is full" not in stage.output()


# --- sending ---


@pytest.mark.parametrize("fault", ["error", "throttle"])
def test_a_body_that_s3_refuses_for_a_moment_is_sent(stage: S3Workers, fault: str) -> None:
    """It is retried like a message that SQS rejects for a moment: S3 throttles heavy senders."""
    stage.make("q")
    stage.faults.spoil(fault, "PUT", skip=1, count=4)
    stage.send_large("q", 0, 1)
    assert stage.left("q") == len(stage.objects()) == 2


def test_nothing_is_stored_for_a_queue_that_is_missing(stage: S3Workers) -> None:
    """A sender that tries it again and again would fill the bucket."""
    with pytest.raises(AwsNotFoundError, match="SQS queue"):
        stage.send_large("missing", 0)
    assert stage.objects() == []
