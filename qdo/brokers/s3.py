"""Bodies that are too large for SQS, as objects in a bucket of S3.

An object is stored before the message that points to it, and deleted after that message: what
ends in between leaves an object that nobody needs, never a message without its body. A rule of
the bucket that expires objects after the queue's retention clears these away.
"""

from __future__ import annotations

import contextlib
import logging
import uuid
from collections.abc import Iterable
from typing import Any

from qdo.brokers.aws import make_client
from qdo.brokers.aws_address import Place
from qdo.brokers.aws_errors import translated
from qdo.brokers.sqs_messages import Pointer
from qdo.errors import AccessDeniedError, ObjectTooLargeError

log = logging.getLogger(__name__)

DELETE_CHUNK = 1000
"""Objects that one request deletes, at most."""
READ_SECONDS = 60.0
MAX_S3_BODY = 64 * 1024 * 1024
"""Bytes of a body that is stored or read: it is in memory whole."""
CONNECTIONS = 100
"""As many queues of one worker may read bodies at once: urllib3 warns of each one beyond."""


class Objects:
    """The objects of one bucket. Safe to use from several threads or greenlets.

    Pointers to other buckets are not followed: whoever may send to a queue could else have the
    worker read, and delete, whatever its credentials reach.

    :param place: of SQS; S3 is spoken to in the same region, or at the same endpoint.
    :param connections: that are kept for further requests.
    """

    def __init__(self, place: Place, bucket: str, connections: int = CONNECTIONS) -> None:
        self._place = Place("s3", place.region, place.endpoint)
        self._bucket = bucket
        self._client: Any = make_client(
            self._place, connections=connections, read_seconds=READ_SECONDS
        )

    def is_ours(self, pointer: Pointer) -> bool:
        """Return whether a pointer may be followed."""
        return pointer.bucket == self._bucket

    def put(self, queue: str, body: bytes) -> Pointer:
        """Store a body; return where it is.

        :param queue: begins the object's name, for people who look into the bucket.
        """
        key = f"{queue}/{uuid.uuid4()}"
        with translated(self._place, "bucket", self._bucket):
            self._client.put_object(Bucket=self._bucket, Key=key, Body=body)
        return Pointer(self._bucket, key)

    def get(self, pointer: Pointer) -> bytes | None:
        """Return a body, None when the object is gone: so is its message, then.

        :raises AwsNotFoundError: there is no such bucket.
        :raises ObjectTooLargeError: it would take too much memory.
        """
        with translated(self._place, "bucket", self._bucket):
            try:
                answer = self._client.get_object(Bucket=pointer.bucket, Key=pointer.key)
            except self._client.exceptions.NoSuchKey:
                return None
            stream, size = answer["Body"], answer.get("ContentLength")
            body = b""
            if size is None:  # some that do as S3 does do not say it
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

    def delete(self, pointers: Iterable[Pointer]) -> None:
        """Delete objects whose messages are deleted; those that cannot be are named in the log.

        :raises QdoError: S3 does not answer, or refuses; see `aws_errors.translation`.
        """
        keys = [{"Key": pointer.key} for pointer in pointers if self.is_ours(pointer)]
        for start in range(0, len(keys), DELETE_CHUNK):
            chunk = keys[start : start + DELETE_CHUNK]
            with translated(self._place, "bucket", self._bucket):
                answer = self._client.delete_objects(
                    Bucket=self._bucket, Delete={"Objects": chunk, "Quiet": True}
                )
            for failed in answer.get("Errors", ()):
                log.warning(
                    "S3 object %s of bucket %s stays: %s; nobody needs it",
                    failed.get("Key"),
                    self._bucket,
                    failed.get("Message") or failed.get("Code"),
                )

    def check(self) -> None:
        """Raise what keeps the bucket from being used, so that it is known at the start."""
        # Who may not look at the bucket may be allowed to read and write its objects.
        with (
            contextlib.suppress(AccessDeniedError),
            translated(self._place, "bucket", self._bucket),
        ):
            self._client.head_bucket(Bucket=self._bucket)

    def close(self) -> None:
        """Let go of connections."""
        self._client.close()
