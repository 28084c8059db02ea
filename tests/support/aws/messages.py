"""Sending messages to SQS queues for a test, and reading them, by receiving them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from qdo.brokers.base import Row
from qdo.brokers.sqs.broker import SqsBroker
from qdo.brokers.sqs.codec import RECEIVED_ATTRIBUTES, decode_received, make_position

HIDE_SECONDS = 60


def send(sqs: Any, queue: str, *bodies: str, group: str = "") -> None:
    """Send messages one after another."""
    for body in bodies:
        terms = {"MessageGroupId": group, "MessageDeduplicationId": body} if group else {}
        sqs.send_message(QueueUrl=queue, MessageBody=body, **terms)


def receive(sqs: Any, queue: str, **terms: Any) -> list[dict[str, Any]]:
    """Receive up to ten messages at once."""
    terms = {"MaxNumberOfMessages": 10, "MessageSystemAttributeNames": ["All"], **terms}
    found = sqs.receive_message(QueueUrl=queue, **terms)
    return list(found.get("Messages", []))


def bodies(messages: Sequence[dict[str, Any]]) -> list[str]:
    return [message["Body"] for message in messages]


def raw_messages(client: Any, url: str) -> list[dict[str, Any]]:
    """Receive all messages of a queue, which hides them for a minute.

    Messages of a FIFO queue are deleted. Otherwise they would block others of their groups.
    """
    found: list[dict[str, Any]] = []
    while messages := client.receive_message(
        QueueUrl=url,
        MaxNumberOfMessages=10,
        VisibilityTimeout=HIDE_SECONDS,
        MessageSystemAttributeNames=list(RECEIVED_ATTRIBUTES),
        MessageAttributeNames=["All"],
    ).get("Messages"):
        found += messages
        if url.endswith(".fifo"):
            for each in messages:
                client.delete_message(QueueUrl=url, ReceiptHandle=each["ReceiptHandle"])
    return found


def received_all(broker: SqsBroker, queue: str) -> list[Row]:
    """Receive all messages of a queue as rows."""
    url = broker.sqs_queues.url(queue)
    return [
        Row(
            make_position(each.sent, each.sequence, each.message_id),
            each.body,
            each.key,
            each.headers,
        )
        for each in map(decode_received, raw_messages(broker.client, url))
    ]


def received_message(
    body: str, attributes: dict[str, Any] | None = None, **system: str
) -> dict[str, Any]:
    """Return a message as SQS gives it to a consumer."""
    return {
        "MessageId": "5fea7756-0ea4-451a-a703-a558b933e274",
        "ReceiptHandle": "handle",
        "Body": body,
        "Attributes": {
            "SentTimestamp": "1700000000123",
            "ApproximateReceiveCount": "1",
            **system,
        },
        "MessageAttributes": attributes or {},
    }
