"""Store bodies that are too large for SQS as objects in an S3 bucket.

qdo stores an object before the message that points to the object, and deletes the message before
the object. So an interruption can leave an unused object, but never a message without its body.
Operators set an expiry rule on the bucket, longer than the queue's retention, to delete unused
objects.
"""

from __future__ import annotations

import contextlib
import logging
import uuid
from collections.abc import Iterable
from typing import Any

from qdo.broker_errors import AccessDeniedError, ObjectTooLargeError
from qdo.brokers.aws.address import BodyPointer, ServiceAddress
from qdo.brokers.aws.clients import make_client
from qdo.brokers.aws.errors import translate

log = logging.getLogger(__name__)

# The maximum number of objects that one call deletes.
DELETE_CHUNK = 1000
READ_SECONDS = 60.0
# The maximum size of a body in bytes. The worker holds the body in memory.
MAX_S3_BODY = 64 * 1024 * 1024
# The number of queues that may read bodies at once in one worker; urllib3 warns about more.
CONNECTIONS = 100


class Objects:
    """The objects of one bucket. Safe to use from several threads or greenlets.

    :param place: the address of SQS; qdo uses S3 in the same region or at the same endpoint.
    :param bucket: the name of the bucket, or BUCKET/PREFIX.
    """

    # Methods do not follow pointers to other buckets, or to names without the prefix. Without this
    # rule, a sender could make the worker read or delete any object that the worker's credentials
    # allow. Methods raise the errors of `aws.errors.translation`.

    def __init__(self, place: ServiceAddress, bucket: str, connections: int = CONNECTIONS) -> None:
        self._place = ServiceAddress("s3", place.region, place.endpoint)
        self._bucket, _, prefix = bucket.partition("/")
        self._prefix = f"{prefix}/" if prefix else ""
        self._client: Any = make_client(
            self._place, connections=connections, read_seconds=READ_SECONDS
        )

    def is_ours(self, pointer: BodyPointer) -> bool:
        return pointer.bucket == self._bucket and pointer.key.startswith(self._prefix)

    def put(self, queue: str, body: bytes) -> BodyPointer:
        """Store a body under a name that begins with its queue; return its location."""
        key = f"{self._prefix}{queue}/{uuid.uuid4()}"
        with translate(self._place, "bucket", self._bucket):
            self._client.put_object(Bucket=self._bucket, Key=key, Body=body)
        return BodyPointer(self._bucket, key)

    def get(self, pointer: BodyPointer) -> bytes | None:
        """Return a body; None if the object is missing because its message was deleted.

        :raises ObjectTooLargeError: the body would take too much memory.
        """
        with translate(self._place, "bucket", self._bucket):
            try:
                answer = self._client.get_object(Bucket=pointer.bucket, Key=pointer.key)
            except self._client.exceptions.NoSuchKey:
                return None
            stream = answer["Body"]
            size = answer.get("ContentLength")
            body = b""
            if size is None:  # some S3-compatible services send no length
                body = stream.read(MAX_S3_BODY + 1)
                size = len(body)
            elif size <= MAX_S3_BODY:
                body = stream.read()
            if size > MAX_S3_BODY:
                stream.close()
                raise ObjectTooLargeError(
                    name=f"{pointer.bucket}/{pointer.key}", size=size, limit=MAX_S3_BODY
                )
        return body

    def delete(self, pointers: Iterable[BodyPointer]) -> None:
        """Delete the objects of deleted messages; log failures."""
        keys = [{"Key": pointer.key} for pointer in pointers if self.is_ours(pointer)]
        for start in range(0, len(keys), DELETE_CHUNK):
            chunk = keys[start : start + DELETE_CHUNK]
            with translate(self._place, "bucket", self._bucket):
                answer = self._client.delete_objects(
                    Bucket=self._bucket, Delete={"Objects": chunk, "Quiet": True}
                )
            for failed in answer.get("Errors", ()):
                log.warning(
                    "S3 object %s of bucket %s is unused but cannot be deleted: %s",
                    failed.get("Key"),
                    self._bucket,
                    failed.get("Message") or failed.get("Code"),
                )

    def check(self) -> None:
        """Raise an error if qdo cannot use the bucket; opening the broker calls this."""
        # A role that may not list the bucket may still read and write its objects.
        with (
            contextlib.suppress(AccessDeniedError),
            translate(self._place, "bucket", self._bucket),
        ):
            self._client.head_bucket(Bucket=self._bucket)

    def close(self) -> None:
        self._client.close()
