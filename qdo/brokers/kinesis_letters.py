"""Dead letters of Kinesis: objects in a bucket of S3.

A stream cannot hold what is to be found again by itself, and a queue node is too small for bodies.
Each letter is one object, ``PREFIX/APP/SHARD/MESSAGE.json``, where MESSAGE is the message's id. So
burying the same message twice finds the first letter in its place.
"""

from __future__ import annotations

import base64
import json
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from qdo.brokers.aws import make_client
from qdo.brokers.aws_address import Place
from qdo.brokers.aws_errors import BOTO_ERRORS, code_of, is_not_found, translated, translation
from qdo.brokers.base import DeadLetterRecord
from qdo.brokers.kinesis_positions import POSITIONS
from qdo.brokers.side_by_side import side_by_side
from qdo.errors import AwsError

READ_SECONDS = 60.0

_SUFFIX = ".json"
_EXISTS = "PreconditionFailed"


class KinesisLetters:
    """The dead letters of one app's stream. Safe to use from several threads.

    :param place: of Kinesis; S3 is spoken to in the same region, or at the same endpoint.
    """

    def __init__(self, place: Place, bucket: str, prefix: str, app: str) -> None:
        self._place = Place("s3", place.region, place.endpoint)
        self._bucket = bucket
        self._folder = f"{prefix}/{app}/" if prefix else f"{app}/"
        self._client: Any = make_client(self._place, connections=16, read_seconds=READ_SECONDS)

    def check(self) -> None:
        """Raise what keeps the bucket from being used, so that it is known at the start."""
        with translated(self._place, "bucket", self._bucket):
            self._client.head_bucket(Bucket=self._bucket)

    def bury(self, letter: DeadLetterRecord) -> None:
        """Store a letter, unless there is one for this message."""
        dated = replace(letter, dead_at=letter.dead_at or time.time())
        try:
            self._client.put_object(
                Bucket=self._bucket,
                Key=self._name(letter.queue, letter.position),
                Body=written(dated),
                ContentType="application/json",
                IfNoneMatch="*",
            )
        except BOTO_ERRORS as error:
            if code_of(error) != _EXISTS:
                raise translation(error, self._place, "bucket", self._bucket) from error

    def records(self, queue: str | None = None) -> list[DeadLetterRecord]:
        """Return the letters of a queue, or of all, oldest first."""
        found = side_by_side(self._read, list(self._names(queue)))
        letters = [letter for letter in found if letter is not None]
        return sorted(letters, key=lambda letter: (letter.dead_at, letter.position))

    def record(self, queue: str, position: int) -> DeadLetterRecord | None:
        """Return one letter, None when there is no such."""
        letter = self._read(self._name(queue, position))
        return None if letter is None or letter.position != position else letter

    def counts(self) -> Mapping[str, int]:
        """Return how many letters each queue has, of those that have any."""
        return Counter(name.removeprefix(self._folder).split("/")[0] for name in self._names(None))

    def discard(self, letters: Sequence[tuple[str, int]]) -> list[bool]:
        """Delete letters; return for each whether it existed."""
        return [self._discard(queue, position) for queue, position in letters]

    def _discard(self, queue: str, position: int) -> bool:
        if self.record(queue, position) is None:
            return False
        with translated(self._place, "bucket", self._bucket):
            self._client.delete_object(Bucket=self._bucket, Key=self._name(queue, position))
        return True

    def close(self) -> None:
        """Let go of connections."""
        self._client.close()

    def _name(self, queue: str, position: int) -> str:
        message = POSITIONS.message_id(position, 0).replace(":", "-")
        return f"{self._folder}{queue}/{message}{_SUFFIX}"

    def _names(self, queue: str | None) -> Iterator[str]:
        start = self._folder if queue is None else f"{self._folder}{queue}/"
        with translated(self._place, "bucket", self._bucket):
            pages = self._client.get_paginator("list_objects_v2").paginate(
                Bucket=self._bucket, Prefix=start
            )
            for page in pages:
                for found in page.get("Contents", ()):
                    if str(found["Key"]).endswith(_SUFFIX):
                        yield str(found["Key"])

    def _read(self, name: str) -> DeadLetterRecord | None:
        """Return a letter, None when it is gone."""
        try:
            answer = self._client.get_object(Bucket=self._bucket, Key=name)
            text: bytes = answer["Body"].read()
        except BOTO_ERRORS as error:
            if is_not_found(error) and code_of(error) != "NoSuchBucket":
                return None
            raise translation(error, self._place, "bucket", self._bucket) from error
        try:
            return read(text)
        except (ValueError, KeyError, TypeError) as error:
            raise AwsError(
                service="S3",
                action="reading a dead letter",
                resource=f"object {name!r} of bucket {self._bucket!r}",
                code=type(error).__name__,
                reason="it is none of qdo's: move it elsewhere",
            ) from error


def written(letter: DeadLetterRecord) -> bytes:
    """Return what is stored of a letter: a JSON object, its body in base64."""
    fields = asdict(letter)
    # As text: few readers of JSON take integers of 80 digits.
    fields["position"] = str(letter.position)
    fields["body"] = base64.b64encode(letter.body).decode()
    return json.dumps(fields, indent=1).encode()


def read(text: bytes) -> DeadLetterRecord:
    """Return the letter of what was stored.

    :raises ValueError, KeyError, TypeError: it is none.
    """
    fields = json.loads(text)
    fields["position"] = int(fields["position"])
    fields["body"] = base64.b64decode(fields["body"], validate=True)
    return DeadLetterRecord(**fields)
