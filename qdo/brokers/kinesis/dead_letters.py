"""The dead letters of Kinesis: objects in an S3 bucket.

Kinesis cannot look up single records, and a queue node is too small for bodies. Each dead letter is
one object, ``PREFIX/APP/SHARD/MESSAGE.json``, where MESSAGE is the message's id. If a worker stores
the same message twice, the store keeps the first dead letter.
"""

from __future__ import annotations

import base64
import json
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from qdo.broker_errors import AwsError
from qdo.brokers.aws.address import ServiceAddress
from qdo.brokers.aws.clients import make_client
from qdo.brokers.aws.errors import BOTO_ERRORS, code_of, is_not_found, translate, translation
from qdo.brokers.dead_letters import DeadLetterRecord, DeadLetterStore, checked_fields
from qdo.brokers.kinesis.positions import POSITIONS
from qdo.errors import QdoError, UnsupportedError
from qdo.system.native import run_parallel

log = logging.getLogger(__name__)

READ_SECONDS = 60.0
NO_STORE_REMEDY = (
    "add dead_letters=s3://BUCKET/PREFIX to the broker's address, or give its job"
    ' Policy(then="block") or "skip"'
)

_SUFFIX = ".json"
_EXISTS = "PreconditionFailed"


class KinesisDeadLetters(DeadLetterStore):
    """The dead letters of one app's stream. Safe to use from several threads.

    :param resend: a function that sends a dead letter again and returns its new position.
    """

    def __init__(
        self,
        place: ServiceAddress,
        bucket: str,
        prefix: str,
        app: str,
        resend: Callable[[DeadLetterRecord], int],
    ) -> None:
        self._resend = resend
        self._place = ServiceAddress("s3", place.region, place.endpoint)
        self._bucket = bucket
        self._folder = f"{prefix}/{app}/" if prefix else f"{app}/"
        self._client: Any = make_client(self._place, connections=16, read_seconds=READ_SECONDS)

    def check(self) -> None:
        with translate(self._place, "bucket", self._bucket):
            self._client.head_bucket(Bucket=self._bucket)

    def store(self, record: DeadLetterRecord) -> None:
        dated = replace(record, dead_at=record.dead_at or time.time())
        try:
            self._client.put_object(
                Bucket=self._bucket,
                Key=self._name(record.queue, record.position),
                Body=written(dated),
                ContentType="application/json",
                IfNoneMatch="*",
            )
        except BOTO_ERRORS as error:
            if code_of(error) != _EXISTS:
                raise translation(error, self._place, "bucket", self._bucket) from error

    def records(self, queue: str | None = None) -> list[DeadLetterRecord]:
        found = run_parallel(self._read_or_warn, list(self._names(queue)))
        letters = [letter for letter in found if letter is not None]
        return sorted(letters, key=lambda letter: (letter.dead_at, letter.position))

    def get(self, queue: str, position: int) -> DeadLetterRecord | None:
        letter = self._read(self._name(queue, position))
        return None if letter is None or letter.position != position else letter

    def counts(self) -> Mapping[str, int]:
        return Counter(name.removeprefix(self._folder).split("/")[0] for name in self._names(None))

    def retry(self, keys: Sequence[tuple[str, int]]) -> list[int | None]:
        """Send dead letters again in the given order, then delete them."""
        # Sending and deleting are not one transaction. After an interruption, a dead letter may
        # remain although its message was sent again.
        return [self._retry(queue, position) for queue, position in keys]

    def _retry(self, queue: str, position: int) -> int | None:
        record = self.get(queue, position)
        if record is None:
            return None
        moved = self._resend(record)
        try:
            self._discard(queue, position)
        except QdoError as error:  # the letter is sent, so continue with the others
            log.warning(
                "a dead letter was sent again, and stays a dead letter; discard it: %s of"
                " queue %r: %s",
                POSITIONS.message_id(position, 0),
                queue,
                error,
            )
        return moved

    def discard(self, keys: Sequence[tuple[str, int]]) -> list[bool]:
        return [self._discard(queue, position) for queue, position in keys]

    def _discard(self, queue: str, position: int) -> bool:
        if self.get(queue, position) is None:
            return False
        with translate(self._place, "bucket", self._bucket):
            self._client.delete_object(Bucket=self._bucket, Key=self._name(queue, position))
        return True

    def close(self) -> None:
        self._client.close()

    def _name(self, queue: str, position: int) -> str:
        message = POSITIONS.message_id(position, 0).replace(":", "-")
        return f"{self._folder}{queue}/{message}{_SUFFIX}"

    def _names(self, queue: str | None) -> Iterator[str]:
        start = self._folder if queue is None else f"{self._folder}{queue}/"
        with translate(self._place, "bucket", self._bucket):
            pages = self._client.get_paginator("list_objects_v2").paginate(
                Bucket=self._bucket, Prefix=start
            )
            for page in pages:
                for found in page.get("Contents", ()):
                    if str(found["Key"]).endswith(_SUFFIX):
                        yield str(found["Key"])

    def _read(self, name: str) -> DeadLetterRecord | None:
        try:
            answer = self._client.get_object(Bucket=self._bucket, Key=name)
            text: bytes = answer["Body"].read()
        except BOTO_ERRORS as error:
            if is_not_found(error) and code_of(error) != "NoSuchBucket":
                return None
            raise translation(error, self._place, "bucket", self._bucket) from error
        try:
            letter = read(text)
            if self._name(letter.queue, letter.position) != name:
                # A retry would send the letter to a queue that the operator did not name.
                raise ValueError("it has the name of another dead letter")
            return letter
        except Exception as error:
            raise _ForeignObjectError(
                service="S3",
                action="reading a dead letter",
                resource=f"object {name!r} of bucket {self._bucket!r}",
                code=type(error).__name__,
                reason="it is not a dead letter of qdo: move it elsewhere",
            ) from error

    def _read_or_warn(self, name: str) -> DeadLetterRecord | None:
        """Return a dead letter; warn and return None if the object is not a dead letter."""
        try:
            return self._read(name)
        except _ForeignObjectError as error:
            log.warning("an object among the dead letters is passed over: %s", error)
            return None


class _ForeignObjectError(AwsError):
    """{service} rejected {action} on {resource}: {code}: {reason}"""


class NoDeadLetters(DeadLetterStore):
    """An empty store, for an address that configures no place for dead letters."""

    def check(self) -> None:
        """Raise no error, because there is no bucket."""

    def close(self) -> None:
        """Do nothing."""

    def store(self, record: DeadLetterRecord) -> None:
        raise self._unsupported()

    def records(self, queue: str | None = None) -> list[DeadLetterRecord]:
        return []

    def retry(self, keys: Sequence[tuple[str, int]]) -> list[int | None]:
        raise self._unsupported()

    def discard(self, keys: Sequence[tuple[str, int]]) -> list[bool]:
        raise self._unsupported()

    def _unsupported(self) -> UnsupportedError:
        return UnsupportedError(broker="Kinesis", what="keep dead letters", remedy=NO_STORE_REMEDY)


def written(letter: DeadLetterRecord) -> bytes:
    fields = asdict(letter)
    # Store the position as text, because few JSON parsers accept integers of 80 digits.
    fields["position"] = str(letter.position)
    fields["body"] = base64.b64encode(letter.body).decode()
    return json.dumps(fields, indent=1).encode()


def read(text: bytes) -> DeadLetterRecord:
    """Return the dead letter in a JSON text; raise an error of any type if it is not one."""
    fields = json.loads(text)
    return DeadLetterRecord(
        body=base64.b64decode(fields["body"], validate=True),
        key=_optional_text(fields["key"]),
        headers=_optional_text(fields["headers"]),
        traceback=str(fields["traceback"]),
        **checked_fields(fields),
    )


def _optional_text(value: Any) -> str | None:
    if value is not None and not isinstance(value, str):
        raise TypeError(f"not text: {value!r:.60}")
    return value
