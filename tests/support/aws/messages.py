"""Looking at the messages of SQS as no worker would: by receiving them for the test alone."""

from __future__ import annotations

from typing import Any

from qdo.brokers.base import Row
from qdo.brokers.sqs import SqsBroker
from qdo.brokers.sqs_messages import RECEIVED_ATTRIBUTES, received
from qdo.brokers.sqs_positions import make_position

HIDE_SECONDS = 60


def raw_messages(client: Any, url: str) -> list[dict[str, Any]]:
    """Receive all messages of a queue, which are hidden for a minute then.

    Those of a FIFO queue are deleted: else they would hide others of their groups.
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
        Row(make_position(each.sent, each.sequence, each.message_id), each.body, each.key,
            each.headers)
        for each in map(received, raw_messages(broker.client, url))
    ]
