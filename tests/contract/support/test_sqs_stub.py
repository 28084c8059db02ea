"""Features of the fast SQS server beyond moto, and its interface for tests."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from botocore.exceptions import ClientError

from tests.support.aws import clients
from tests.support.aws.messages import bodies, receive, send
from tests.support.aws.server_process import ServerProcess, serving
from tests.support.processes import wait_until


@pytest.fixture(scope="module")
def stub() -> Iterator[ServerProcess]:
    """A server of these tests' own: they move its clock."""
    with serving("tests.support.aws.sqs_server") as server:
        yield server


@pytest.fixture
def sqs(stub: ServerProcess) -> Any:
    return clients.client("sqs", stub.url)


def failures(answer: dict[str, Any]) -> list[tuple[str, str]]:
    return [(each["Id"], each["Code"]) for each in answer.get("Failed", [])]


def delete(sqs: Any, queue: str, messages: Sequence[dict[str, Any]]) -> list[tuple[str, str]]:
    """Delete in one batch; return the failed entries."""
    entries = [
        {"Id": str(number), "ReceiptHandle": message["ReceiptHandle"]}
        for number, message in enumerate(messages)
    ]
    return failures(sqs.delete_message_batch(QueueUrl=queue, Entries=entries))


def change(
    sqs: Any, queue: str, messages: Sequence[dict[str, Any]], seconds: int
) -> list[tuple[str, str]]:
    """Change the visibility in one batch; return the failed entries."""
    entries = [
        {"Id": str(number), "ReceiptHandle": each["ReceiptHandle"], "VisibilityTimeout": seconds}
        for number, each in enumerate(messages)
    ]
    return failures(sqs.change_message_visibility_batch(QueueUrl=queue, Entries=entries))


def advance(stub: ServerProcess, seconds: float) -> None:
    stub.ask("/_advance", {"seconds": seconds})


# --- FIFO


def test_a_deduplication_id_outlives_its_message(stub: ServerProcess, sqs: Any, fifo: str) -> None:
    """For five minutes the first one counts, deleted or not; then it is free."""
    send(sqs, fifo, "same", group="a")
    assert delete(sqs, fifo, receive(sqs, fifo)) == []
    send(sqs, fifo, "same", group="a")
    assert receive(sqs, fifo) == []
    advance(stub, 301)
    send(sqs, fifo, "same", group="a")
    assert bodies(receive(sqs, fifo)) == ["same"]


def test_the_clock_is_set_right_again(stub: ServerProcess, sqs: Any, fifo: str) -> None:
    """As after each test that shares the server with others."""
    send(sqs, fifo, "same", group="a")
    advance(stub, 301)
    stub.ask("/_advance", {})
    send(sqs, fifo, "same", group="a")
    assert bodies(receive(sqs, fifo)) == ["same"]


def test_as_many_of_one_group_as_fit_come_first(sqs: Any, fifo: str) -> None:
    """A second group fills the rest."""
    for number in range(6):
        send(sqs, fifo, f"a{number}", group="a")
        send(sqs, fifo, f"b{number}", group="b")
    found = bodies(receive(sqs, fifo))
    assert found == ["a0", "a1", "a2", "a3", "a4", "a5", "b0", "b1", "b2", "b3"]


def test_an_expired_handle_of_a_fifo_queue_is_refused(
    stub: ServerProcess, sqs: Any, fifo: str
) -> None:
    """Whether or not the message was received again meanwhile, entry by entry."""
    send(sqs, fifo, "1", "2", group="a")
    old = receive(sqs, fifo, VisibilityTimeout=30)
    advance(stub, 31)
    assert delete(sqs, fifo, old) == [
        ("0", "ReceiptHandleIsInvalid"),
        ("1", "ReceiptHandleIsInvalid"),
    ]
    assert change(sqs, fifo, old[:1], 60) == [("0", "MessageNotInflight")]
    new = receive(sqs, fifo)
    assert delete(sqs, fifo, old) == [
        ("0", "ReceiptHandleIsInvalid"),
        ("1", "ReceiptHandleIsInvalid"),
    ]
    assert delete(sqs, fifo, new) == []


def test_a_fifo_dead_letter_is_a_new_message(sqs: Any, aws_prefix: str) -> None:
    """It gets a new sequence number, and keeps its id and its group."""
    fifo = {"FifoQueue": "true"}
    dead = sqs.create_queue(QueueName=f"{aws_prefix}dead.fifo", Attributes=fifo)["QueueUrl"]
    names = ["QueueArn"]
    arn = sqs.get_queue_attributes(QueueUrl=dead, AttributeNames=names)["Attributes"]["QueueArn"]
    policy = json.dumps({"deadLetterTargetArn": arn, "maxReceiveCount": 1})
    queue = sqs.create_queue(
        QueueName=f"{aws_prefix}s.fifo", Attributes={**fifo, "RedrivePolicy": policy}
    )["QueueUrl"]
    send(sqs, queue, "1", "2", group="g")
    (first,) = receive(sqs, queue, VisibilityTimeout=0, MaxNumberOfMessages=1)
    assert bodies(receive(sqs, queue)) == ["2"]
    (found,) = receive(sqs, dead)
    assert found["MessageId"] == first["MessageId"]
    known, before = found["Attributes"], first["Attributes"]
    assert known["SequenceNumber"] > before["SequenceNumber"]
    assert known["MessageGroupId"] == "g"
    assert known["DeadLetterQueueSourceArn"].endswith(":" + queue.rpartition("/")[2])


# --- standard


def test_an_old_handle_of_a_standard_queue_deletes_nothing(
    stub: ServerProcess, sqs: Any, standard: str
) -> None:
    """If the message was received again since; otherwise it deletes."""
    send(sqs, standard, "one")
    old = receive(sqs, standard, VisibilityTimeout=30)
    advance(stub, 31)
    new = receive(sqs, standard, VisibilityTimeout=30)
    assert delete(sqs, standard, old) == []
    advance(stub, 31)
    assert bodies(receive(sqs, standard, VisibilityTimeout=30)) == ["one"]
    assert new[0]["ReceiptHandle"] != old[0]["ReceiptHandle"]


def test_an_expired_handle_deletes_what_nobody_received_since(
    stub: ServerProcess, sqs: Any, standard: str
) -> None:
    """A standard queue only asks whether there is a newer handle."""
    send(sqs, standard, "one")
    old = receive(sqs, standard, VisibilityTimeout=30)
    advance(stub, 31)
    assert delete(sqs, standard, old) == []
    assert receive(sqs, standard) == []


@pytest.mark.parametrize(
    ("body", "wanted"),
    [("\x00", "InvalidMessageContents"), ("x" * 1_048_577, "InvalidParameterValue")],
)
def test_a_body_that_sqs_does_not_take_is_refused(
    sqs: Any, standard: str, body: str, wanted: str
) -> None:
    """Characters that SQS does not allow, and more than 1 MiB."""
    with pytest.raises(ClientError) as error:
        sqs.send_message(QueueUrl=standard, MessageBody=body)
    assert error.value.response["Error"]["Code"] == wanted


def test_a_batch_is_limited_as_a_whole(sqs: Any, standard: str) -> None:
    """To 1 MiB, attributes included."""
    entries = [{"Id": str(number), "MessageBody": "x" * 120_000} for number in range(9)]
    with pytest.raises(ClientError) as error:
        sqs.send_message_batch(QueueUrl=standard, Entries=entries)
    assert error.value.response["Error"]["Code"].endswith("BatchRequestTooLong")
    assert failures(sqs.send_message_batch(QueueUrl=standard, Entries=entries[:8])) == []


# --- the side for those who test


def test_a_poll_whose_connection_has_gone_still_receives(
    stub: ServerProcess, sqs: Any, standard: str
) -> None:
    """Its messages are in flight until their time is over, as with AWS."""
    body = json.dumps({"QueueUrl": standard, "WaitTimeSeconds": 20}).encode()
    head = (
        "POST / HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Amz-Target: AmazonSQS.ReceiveMessage\r\n"
        "Authorization: AWS4-HMAC-SHA256 Credential=x/20260101/us-east-1/sqs/aws4_request\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    name = standard.rpartition("/")[2]
    with socket.create_connection(("127.0.0.1", stub.port), timeout=5) as connection:
        connection.sendall(head.encode() + body)
        wait_until(lambda: stub.ask("/_log")["waiting"].get(name) == 1, "the poll waits")
        opened = stub.ask("/_log")["connections"]["open"]
    wait_until(lambda: stub.ask("/_log")["connections"]["open"] < opened, "the connection is gone")
    send(sqs, standard, "one")
    assert receive(sqs, standard) == []
    advance(stub, 31)
    assert bodies(receive(sqs, standard)) == ["one"]
