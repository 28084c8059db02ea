"""Queues and streams that a test makes at AWS, and that are gone when it ends, however it ends."""

from __future__ import annotations

import threading
import uuid
from types import TracebackType
from typing import Any

import boto3
from botocore.exceptions import ClientError

from tests.support.procs import wait_until

LISTED_SECONDS = 120.0
GONE = ("AWS.SimpleQueueService.NonExistentQueue", "QueueDoesNotExist", "ResourceNotFoundException")


class Resources:
    """Makes and deletes; a context manager.

    All names begin with `prefix`, which nobody else has: what qdo itself makes below it, such as
    its dead-letter queues, is deleted, too.

    :param endpoint: of a server that does as AWS does, None for AWS itself.
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
        """Make a queue, FIFO where its name ends so; return its URL when it can be used."""
        attributes = {"FifoQueue": "true"} if name.endswith(".fifo") else {}
        made = self.sqs.create_queue(
            QueueName=self.prefix + name,
            Attributes=attributes,
            tags={"made-by": "tests of qdo"},
        )
        url = str(made["QueueUrl"])
        self._queues.append(url)
        # AWS lists a queue some time after it was made, and wants a second before it is used.
        wait_until(lambda: url in self._listed(), f"{name} is listed", LISTED_SECONDS)
        if not self._stands_in:
            threading.Event().wait(1.0)
        return url

    def stream(self, name: str, shards: int) -> str:
        """Make a stream, wait until it can be used, and return its name."""
        full = self.prefix + name
        self.kinesis.create_stream(StreamName=full, ShardCount=shards)
        self._streams.append(full)
        self.kinesis.get_waiter("stream_exists").wait(
            StreamName=full, WaiterConfig={"Delay": 2, "MaxAttempts": 90}
        )
        return full

    def close(self) -> None:
        """Delete everything; one that cannot be deleted keeps none of the others."""
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

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def _tried(act: Any, **arguments: Any) -> list[str]:
    try:
        act(**arguments)
    except ClientError as error:
        if error.response["Error"]["Code"] not in GONE:
            return [f"{arguments}: {error}"]
    return []
