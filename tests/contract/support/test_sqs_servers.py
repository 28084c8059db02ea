"""The contract of every SQS server of the tests: the fast stub, compared with moto.

Where moto does less than SQS, the stub has tests of its own: `test_sqs_stub`.
"""

from __future__ import annotations

import json
import threading
import time
from typing import Any

import pytest
from botocore.exceptions import ClientError

from tests.support.aws import clients
from tests.support.aws.messages import bodies, receive, send


@pytest.fixture(params=["stub", "moto"])
def sqs(request: pytest.FixtureRequest) -> Any:
    """A boto3 client of each server."""
    url = request.getfixturevalue({"stub": "sqs_url", "moto": "moto_url"}[request.param])
    return clients.client("sqs", url)


def code(error: pytest.ExceptionInfo[ClientError]) -> str:
    return str(error.value.response["Error"]["Code"]).rpartition(".")[2]


def test_a_message_comes_back_as_it_was_sent(sqs: Any, standard: str) -> None:
    """Body and attributes."""
    attributes = {
        "text": {"DataType": "String", "StringValue": "grüß dich"},
        "count": {"DataType": "Number", "StringValue": "12"},
        "bytes": {"DataType": "Binary", "BinaryValue": b"\x00\xff"},
    }
    sent = sqs.send_message(
        QueueUrl=standard, MessageBody='{"ü": "€ 😀"}', MessageAttributes=attributes
    )
    (found,) = receive(sqs, standard, MessageAttributeNames=["All"])
    assert found["Body"] == '{"ü": "€ 😀"}'
    assert found["MessageAttributes"] == attributes
    assert found["MessageId"] == sent["MessageId"]


def test_system_attributes_tell_of_sending_and_receiving(sqs: Any, fifo: str) -> None:
    """Times in milliseconds, the group, and how often it was received."""
    before = int(time.time() * 1000)
    send(sqs, fifo, "one", group="g")
    (found,) = receive(sqs, fifo, VisibilityTimeout=0)
    (again,) = receive(sqs, fifo)
    known = found["Attributes"]
    assert before <= int(known["SentTimestamp"]) <= int(time.time() * 1000)
    assert (known["MessageGroupId"], known["MessageDeduplicationId"]) == ("g", "one")
    assert known["ApproximateReceiveCount"] == "1"
    assert again["Attributes"]["ApproximateReceiveCount"] == "2"
    assert found["MessageId"] == again["MessageId"]


def test_what_was_received_is_hidden_until_its_time_is_over(sqs: Any, standard: str) -> None:
    """No other consumer receives it until then; afterwards it comes with another handle."""
    send(sqs, standard, "one")
    (first,) = receive(sqs, standard, VisibilityTimeout=1)
    assert receive(sqs, standard) == []
    (second,) = receive(sqs, standard, WaitTimeSeconds=4)
    assert second["MessageId"] == first["MessageId"]
    assert second["ReceiptHandle"] != first["ReceiptHandle"]


def test_a_poll_answers_the_moment_something_is_sent(sqs: Any, standard: str) -> None:
    """It does not wait for its end, nor for other messages."""
    found: list[dict[str, Any]] = []
    poll = threading.Thread(target=lambda: found.extend(receive(sqs, standard, WaitTimeSeconds=20)))
    poll.start()
    send(sqs, standard, "one")
    poll.join(19)
    assert bodies(found) == ["one"]


def test_an_empty_poll_ends_in_time(sqs: Any, standard: str) -> None:
    """It brings nothing, not before the time that it was given."""
    began = time.monotonic()
    assert receive(sqs, standard, WaitTimeSeconds=1) == []
    assert time.monotonic() - began > 0.9


def test_what_is_deleted_does_not_come_back(sqs: Any, standard: str) -> None:
    """Deleting twice is not an error."""
    send(sqs, standard, "one", "two")
    messages = receive(sqs, standard, VisibilityTimeout=1)
    for message in [*messages, messages[0]]:
        sqs.delete_message(QueueUrl=standard, ReceiptHandle=message["ReceiptHandle"])
    assert receive(sqs, standard, WaitTimeSeconds=2) == []


def test_a_message_can_be_given_back(sqs: Any, standard: str) -> None:
    """With a visibility timeout of 0 it is visible at once."""
    send(sqs, standard, "one")
    (found,) = receive(sqs, standard)
    sqs.change_message_visibility(
        QueueUrl=standard, ReceiptHandle=found["ReceiptHandle"], VisibilityTimeout=0
    )
    assert bodies(receive(sqs, standard)) == ["one"]


def test_a_longer_time_out_counts_from_the_call(sqs: Any, standard: str) -> None:
    """A message whose time is extended stays hidden past its first end."""
    send(sqs, standard, "one")
    (found,) = receive(sqs, standard, VisibilityTimeout=1)
    sqs.change_message_visibility(
        QueueUrl=standard, ReceiptHandle=found["ReceiptHandle"], VisibilityTimeout=30
    )
    assert receive(sqs, standard, WaitTimeSeconds=2) == []


def test_a_group_is_locked_while_one_of_it_is_in_flight(sqs: Any, fifo: str) -> None:
    """The others wait until it is deleted; other groups do not."""
    send(sqs, fifo, "a1", "a2", group="a")
    send(sqs, fifo, "b1", group="b")
    (first,) = receive(sqs, fifo, MaxNumberOfMessages=1)
    assert bodies([first]) == ["a1"]
    assert bodies(receive(sqs, fifo)) == ["b1"]
    sqs.delete_message(QueueUrl=fifo, ReceiptHandle=first["ReceiptHandle"])
    assert bodies(receive(sqs, fifo)) == ["a2"]


def test_a_released_group_begins_with_what_was_released(sqs: Any, fifo: str) -> None:
    """Released messages keep their place in the group."""
    send(sqs, fifo, "a1", "a2", "a3", group="a")
    for found in reversed(receive(sqs, fifo)):
        sqs.change_message_visibility(
            QueueUrl=fifo, ReceiptHandle=found["ReceiptHandle"], VisibilityTimeout=0
        )
    assert bodies(receive(sqs, fifo)) == ["a1", "a2", "a3"]


def test_a_fifo_message_needs_a_group_and_a_deduplication_id(sqs: Any, fifo: str) -> None:
    """Each is rejected with its own code."""
    with pytest.raises(ClientError) as no_group:
        sqs.send_message(QueueUrl=fifo, MessageBody="x", MessageDeduplicationId="1")
    assert code(no_group) == "MissingParameter"
    with pytest.raises(ClientError) as no_id:
        sqs.send_message(QueueUrl=fifo, MessageBody="x", MessageGroupId="1")
    assert code(no_id) == "InvalidParameterValue"


def test_what_is_received_too_often_becomes_a_dead_letter(sqs: Any, aws_prefix: str) -> None:
    """The queue in its redrive policy gets it, with an attribute that names its source."""
    dead = sqs.create_queue(QueueName=f"{aws_prefix}dead")["QueueUrl"]
    arn = sqs.get_queue_attributes(QueueUrl=dead, AttributeNames=["QueueArn"])["Attributes"]
    policy = {"deadLetterTargetArn": arn["QueueArn"], "maxReceiveCount": 2}
    queue = sqs.create_queue(
        QueueName=f"{aws_prefix}source", Attributes={"RedrivePolicy": json.dumps(policy)}
    )["QueueUrl"]
    send(sqs, queue, "one")
    for _ in range(2):
        assert bodies(receive(sqs, queue, VisibilityTimeout=0)) == ["one"]
    assert receive(sqs, queue) == []
    assert bodies(receive(sqs, dead)) == ["one"]


def test_a_delayed_message_comes_later(sqs: Any, standard: str) -> None:
    """It is counted, but not received before it is due."""
    sqs.send_message(QueueUrl=standard, MessageBody="later", DelaySeconds=1)
    assert receive(sqs, standard) == []
    assert counts(sqs, standard) == {"": 0, "NotVisible": 0, "Delayed": 1}
    assert bodies(receive(sqs, standard, WaitTimeSeconds=4)) == ["later"]
    assert counts(sqs, standard) == {"": 0, "NotVisible": 1, "Delayed": 0}


def counts(sqs: Any, queue: str) -> dict[str, int]:
    """Return the three approximate numbers of messages."""
    found = sqs.get_queue_attributes(QueueUrl=queue, AttributeNames=["All"])["Attributes"]
    return {
        kind: int(found[f"ApproximateNumberOfMessages{kind}"])
        for kind in ("", "NotVisible", "Delayed")
    }


def test_entries_of_a_batch_fail_one_by_one(sqs: Any, standard: str) -> None:
    """The answer names those that were done and those that were not."""
    send(sqs, standard, "one")
    (found,) = receive(sqs, standard)
    answer = sqs.delete_message_batch(
        QueueUrl=standard,
        Entries=[
            {"Id": "good", "ReceiptHandle": found["ReceiptHandle"]},
            {"Id": "bad", "ReceiptHandle": "nonsense"},
        ],
    )
    assert [entry["Id"] for entry in answer["Successful"]] == ["good"]
    assert [(each["Id"], each["Code"]) for each in answer["Failed"]] == [
        ("bad", "ReceiptHandleIsInvalid")
    ]


@pytest.mark.parametrize(
    ("entries", "wanted"),
    [
        ([], "EmptyBatchRequest"),
        ([{"Id": str(number)} for number in range(11)], "TooManyEntriesInBatchRequest"),
        ([{"Id": "a"}, {"Id": "a"}], "BatchEntryIdsNotDistinct"),
        ([{"Id": "not so"}], "InvalidBatchEntryId"),
    ],
)
def test_a_batch_that_is_none_is_refused(
    sqs: Any, standard: str, entries: list[dict[str, str]], wanted: str
) -> None:
    """Empty, too large, ambiguous or ill-named."""
    with pytest.raises(ClientError) as error:
        sqs.send_message_batch(
            QueueUrl=standard, Entries=[{**each, "MessageBody": "x"} for each in entries]
        )
    assert code(error) == wanted
