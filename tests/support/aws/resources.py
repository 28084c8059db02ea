"""Queues and streams that a test creates at AWS, and that are always deleted at its end."""

from __future__ import annotations

import os
import threading
import uuid
from typing import Any

import boto3
import pytest
from botocore.exceptions import ClientError

from tests.support.aws.clients import REAL
from tests.support.processes import wait_until

LISTED_SECONDS = 120.0
GONE = ("AWS.SimpleQueueService.NonExistentQueue", "QueueDoesNotExist", "ResourceNotFoundException")


def ambient_region() -> str:
    """Return the region of the ambient credentials; skip or fail a test that may not use them."""
    if os.environ.get(REAL) != "1":
        pytest.skip(f"runs on AWS itself, only with {REAL}=1 and credentials")
    session = boto3.session.Session()
    if not session.region_name:
        pytest.fail(f"{REAL}=1 needs a region: set AWS_DEFAULT_REGION, or one in your profile")
    if session.get_credentials() is None:
        pytest.fail(f"{REAL}=1 needs credentials where boto3 looks for them")
    return str(session.region_name)


class Resources:
    """Creates and deletes resources. A context manager.

    All names begin with a unique `prefix`. Resources that qdo creates with this prefix, such as
    its dead-letter queues, are deleted, too.

    :param endpoint: of a server that behaves like AWS, None for AWS itself.
    """

    def __init__(self, region: str, endpoint: str | None = None) -> None:
        self.prefix = f"qdo-test-{uuid.uuid4().hex[:12]}-"
        session = boto3.session.Session(region_name=region)
        self.sqs: Any = session.client("sqs", endpoint_url=endpoint)
        self.kinesis: Any = session.client("kinesis", endpoint_url=endpoint)
        self._stands_in = endpoint is not None
        self._queues: list[str] = []
        self._streams: list[str] = []

    def queue(self, name: str) -> str:
        """Create a queue, FIFO if its name ends so; return its URL once it is usable."""
        attributes = {"FifoQueue": "true"} if name.endswith(".fifo") else {}
        made = self.sqs.create_queue(
            QueueName=self.prefix + name,
            Attributes=attributes,
            tags={"made-by": "tests of qdo"},
        )
        url = str(made["QueueUrl"])
        self._queues.append(url)
        # AWS lists a queue some time after its creation, and requires a second before its use.
        wait_until(lambda: url in self._listed(), f"{name} is listed", LISTED_SECONDS)
        if not self._stands_in:
            threading.Event().wait(1.0)
        return url

    def stream(self, name: str, shards: int) -> str:
        """Create a stream, wait until it is usable, and return its name."""
        full = self.prefix + name
        self.kinesis.create_stream(StreamName=full, ShardCount=shards)
        self._streams.append(full)
        self.kinesis.get_waiter("stream_exists").wait(
            StreamName=full, WaiterConfig={"Delay": 2, "MaxAttempts": 90}
        )
        return full

    def close(self) -> None:
        """Delete everything; a failure does not prevent the other deletes."""
        faults = []
        for url in {*self._queues, *self._listed()}:
            faults += _tried(self.sqs.delete_queue, QueueUrl=url)
        for name in self._streams:
            faults += _tried(
                self.kinesis.delete_stream, StreamName=name, EnforceConsumerDeletion=True
            )
        if faults:
            raise RuntimeError(f"not deleted, do it by hand ({self.prefix}): {faults}")

    def _listed(self) -> list[str]:
        found = self.sqs.list_queues(QueueNamePrefix=self.prefix, MaxResults=1000)
        return list(found.get("QueueUrls", ()))

    def __enter__(self) -> Resources:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _tried(act: Any, **arguments: Any) -> list[str]:
    try:
        act(**arguments)
    except ClientError as error:
        if error.response["Error"]["Code"] not in GONE:
            return [f"{arguments}: {error}"]
    return []
