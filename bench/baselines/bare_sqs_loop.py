"""The least work of one process with SQS: receive ten, decode, call, delete ten.

``python -m bench.baselines.bare_sqs_loop ENDPOINT drain URL...``: visits the queues
in turn, forever.
``python -m bench.baselines.bare_sqs_loop ENDPOINT idle URL...``: a thread for each
queue, with long polls.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

import boto3
import ujson
from botocore.config import Config

from bench.peers import common as tally

RECEIVE = {"MaxNumberOfMessages": 10, "MessageSystemAttributeNames": ["All"]}
LONG_SECONDS = 20


def turn(sqs: Any, queue: str, job: Callable[[Any], None], wait_seconds: int) -> None:
    """Handle up to ten messages."""
    answer = sqs.receive_message(QueueUrl=queue, WaitTimeSeconds=wait_seconds, **RECEIVE)
    messages = answer.get("Messages", ())
    for message in messages:
        job(ujson.loads(message["Body"]))
    if messages:
        entries = [
            {"Id": str(number), "ReceiptHandle": message["ReceiptHandle"]}
            for number, message in enumerate(messages)
        ]
        sqs.delete_message_batch(QueueUrl=queue, Entries=entries)


def main(endpoint: str, way: str, queues: Sequence[str]) -> None:
    """Run the job for every message."""
    job = tally.from_environment()
    config = Config(max_pool_connections=len(queues), read_timeout=LONG_SECONDS + 10, proxies={})
    sqs = boto3.client("sqs", endpoint_url=endpoint, config=config)
    if way == "idle":
        for queue in queues:
            threading.Thread(target=_poll, args=(sqs, queue, job)).start()
        return
    # A long poll of one queue would delay all others.
    wait_seconds = LONG_SECONDS if len(queues) == 1 else 0
    while True:
        for queue in queues:
            turn(sqs, queue, job, wait_seconds)


def _poll(sqs: Any, queue: str, job: Callable[[Any], None]) -> None:
    while True:
        turn(sqs, queue, job, LONG_SECONDS)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
