"""The proxy that spoils requests, before the servers that it is used with."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
from botocore.exceptions import ClientError, ConnectionClosedError, ReadTimeoutError

from tests.support.aws import clients
from tests.support.aws.fault_proxy import FAULTS, FaultRule, Proxy, proxying


@pytest.fixture(scope="module")
def before_sqs(sqs_url: str) -> Iterator[Proxy]:
    with proxying(sqs_url) as proxy:
        yield proxy


@pytest.fixture(scope="module")
def before_moto(moto_url: str) -> Iterator[Proxy]:
    with proxying(moto_url) as proxy:
        yield proxy


@pytest.fixture
def proxy(before_sqs: Proxy) -> Proxy:
    before_sqs.clear()
    return before_sqs


@pytest.fixture
def sqs(proxy: Proxy) -> Any:
    return clients.client("sqs", proxy.url, read_timeout=1)


@pytest.fixture
def queue(sqs: Any, aws_prefix: str) -> str:
    return str(sqs.create_queue(QueueName=f"{aws_prefix}standard")["QueueUrl"])


def waiting(sqs: Any, queue: str) -> int:
    """Return how many messages can be received."""
    names = ["ApproximateNumberOfMessages"]
    found = sqs.get_queue_attributes(QueueUrl=queue, AttributeNames=names)
    return int(found["Attributes"][names[0]])


def test_queues_are_named_by_the_proxys_address(proxy: Proxy, queue: str) -> None:
    """A client that goes by the URL of a queue stays behind the proxy."""
    assert queue.startswith(proxy.url)


@pytest.mark.parametrize(
    ("fault", "code", "status"),
    [
        ("throttle", "RequestThrottled", 400),
        ("limit", "ThrottlingException", 400),
        ("error", "InternalFailure", 500),
        ("unavailable", "ServiceUnavailable", 503),
        ("expired", "ExpiredToken", 403),
        ("unknown", "InvalidClientTokenId", 403),
        ("denied", "AccessDenied", 403),
    ],
)
def test_sqs_refuses_without_doing_anything(
    proxy: Proxy, sqs: Any, queue: str, fault: str, code: str, status: int
) -> None:
    """Each injected error has SQS's code and status."""
    proxy.spoil(fault, "SendMessage")
    with pytest.raises(ClientError) as error:
        sqs.send_message(QueueUrl=queue, MessageBody="x")
    assert error.value.response["Error"]["Code"] == code
    assert error.value.response["ResponseMetadata"]["HTTPStatusCode"] == status
    assert waiting(sqs, queue) == 0
    (entry,) = proxy.log("SendMessage")
    assert (entry.fault, entry.status, entry.service) == (fault, status, "sqs")


def test_a_denial_names_the_action_and_the_resource(proxy: Proxy, sqs: Any, queue: str) -> None:
    """As the words of AWS do."""
    proxy.spoil("denied", "ReceiveMessage")
    name = queue.rpartition("/")[2]
    with pytest.raises(ClientError, match=rf"sqs:receivemessage on resource: arn:.*:{name} "):
        sqs.receive_message(QueueUrl=queue)


@pytest.mark.parametrize(("fault", "done"), [("reset-before", 0), ("reset-after", 1)])
def test_a_connection_breaks_before_or_after_the_work(
    proxy: Proxy, sqs: Any, queue: str, fault: str, done: int
) -> None:
    """The client cannot distinguish the two."""
    proxy.spoil(fault, "SendMessage")
    with pytest.raises(ConnectionClosedError):
        sqs.send_message(QueueUrl=queue, MessageBody="x")
    assert waiting(sqs, queue) == done


def test_an_answer_can_stay_out_though_the_work_is_done(proxy: Proxy, sqs: Any, queue: str) -> None:
    """The client waits for it until its patience is over."""
    proxy.spoil("unanswered", "SendMessage", seconds=5)
    with pytest.raises(ReadTimeoutError):
        sqs.send_message(QueueUrl=queue, MessageBody="x")
    assert waiting(sqs, queue) == 1


def test_an_answer_can_be_slow(proxy: Proxy, sqs: Any, queue: str) -> None:
    """It comes whole, and late."""
    proxy.spoil("slow", "SendMessage", seconds=0.5)
    began = time.monotonic()
    assert sqs.send_message(QueueUrl=queue, MessageBody="x")["MessageId"]
    assert time.monotonic() - began >= 0.5


def test_rules_are_counted(proxy: Proxy, sqs: Any, queue: str) -> None:
    """So many pass, so many are spoilt, and others are left alone."""
    proxy.spoil("error", "SendMessage", skip=1, count=2)
    outcomes = []
    for _ in range(4):
        sqs.list_queues()
        try:
            sqs.send_message(QueueUrl=queue, MessageBody="x")
        except ClientError:
            outcomes.append("failed")
        else:
            outcomes.append("sent")
    assert outcomes == ["sent", "failed", "failed", "sent"]
    assert [entry.fault for entry in proxy.log("ListQueues")] == ["pass"] * 4


def test_a_rule_without_a_count_holds_until_it_is_cleared(
    proxy: Proxy, sqs: Any, queue: str
) -> None:
    """For the queues that it names, and for all of their requests."""
    proxy.spoil("error", name=queue.rpartition("/")[2], count=0)
    for _ in range(3):
        with pytest.raises(ClientError):
            waiting(sqs, queue)
    sqs.list_queues()
    proxy.clear()
    assert waiting(sqs, queue) == 0


def test_a_fault_that_there_is_not_is_refused() -> None:
    """By its name, with those that there are."""
    assert "throttle" in FAULTS
    with pytest.raises(ValueError, match="no fault 'trottle'"):
        FaultRule("trottle")


@pytest.mark.parametrize(
    ("fault", "code"),
    [
        ("throttle", "ProvisionedThroughputExceededException"),
        ("limit", "LimitExceededException"),
        ("expired", "ExpiredTokenException"),
        ("denied", "AccessDeniedException"),
        ("error", "InternalFailure"),
    ],
)
def test_kinesis_refuses_in_its_own_words(
    before_moto: Proxy, aws_stream: str, fault: str, code: str
) -> None:
    """And works when nothing is spoilt; the log has the name of the stream."""
    before_moto.clear()
    kinesis = clients.client("kinesis", before_moto.url)
    kinesis.create_stream(StreamName=aws_stream, ShardCount=1)
    before_moto.spoil(fault, "PutRecord")
    terms = {"StreamName": aws_stream, "Data": b"x", "PartitionKey": "k"}
    with pytest.raises(ClientError) as error:
        kinesis.put_record(**terms)
    assert error.value.response["Error"]["Code"] == code
    assert kinesis.put_record(**terms)["ShardId"]
    assert {entry.name for entry in before_moto.log("PutRecord")} == {aws_stream}


def test_s3_passes_and_is_refused(before_moto: Proxy, aws_bucket: str) -> None:
    """Objects come through whole, large ones and those without a body, too."""
    before_moto.clear()
    s3 = clients.client("s3", before_moto.url)
    s3.create_bucket(Bucket=aws_bucket)
    body = bytes(range(256)) * 4096
    s3.put_object(Bucket=aws_bucket, Key="one", Body=body)
    assert s3.head_object(Bucket=aws_bucket, Key="one")["ContentLength"] == len(body)
    assert s3.get_object(Bucket=aws_bucket, Key="one")["Body"].read() == body
    before_moto.spoil("denied", "GET")
    with pytest.raises(ClientError) as error:
        s3.get_object(Bucket=aws_bucket, Key="one")
    assert error.value.response["Error"]["Code"] == "AccessDenied"
    s3.delete_object(Bucket=aws_bucket, Key="one")
    assert [entry.action for entry in before_moto.log("DELETE")] == ["DELETE"]
