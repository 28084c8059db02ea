"""Messages whose body is in S3, in the formats of AWS's extended clients; pure functions.

- The current format has the attribute `ExtendedPayloadSize` and the class
  `software.amazon.payloadoffloading.PayloadS3Pointer` in the body.
- The legacy format has `SQSLargePayloadSize` and `com.amazon.sqs.javamessaging.MessageS3Pointer`.

The clients mix them. The Java client 2.x writes the legacy attribute with the current class by
default, and the Python client writes the legacy format with `use_legacy_attribute`. When they
receive, some clients request or know only one of the attributes. So qdo reads every combination
and writes both attributes. It writes the current class, which all supported clients read.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from qdo.brokers.aws.address import BodyPointer

SIZE_MARKERS = ("ExtendedPayloadSize", "SQSLargePayloadSize")
"""Attributes that mark a message with a pointer; their value is the size of its body in bytes."""
POINTER_CLASS = "software.amazon.payloadoffloading.PayloadS3Pointer"
LEGACY_POINTER_CLASS = "com.amazon.sqs.javamessaging.MessageS3Pointer"

_MOST_DIGITS = 15
_MAX_KEY_BYTES = 1024


def pointer_entry(
    made: Mapping[str, Any], attributes: Mapping[str, Any], pointer: BodyPointer, size: int
) -> dict[str, Any]:
    """Return a SendMessageBatch entry with its body replaced by a pointer to S3.

    :param attributes: the attributes that the message keeps.
    :param size: size of the body in S3, in bytes.
    """
    number = {"DataType": "Number", "StringValue": str(size)}
    place = {"s3BucketName": pointer.bucket, "s3Key": pointer.key}
    return {
        **made,
        "MessageBody": json.dumps([POINTER_CLASS, place]),
        "MessageAttributes": {**attributes, **dict.fromkeys(SIZE_MARKERS, number)},
    }


def pointer_of(text: str, attributes: Mapping[str, Mapping[str, Any]]) -> BodyPointer | None:
    """Return the place in S3 that a message points to; None if the message is not a pointer.

    :param text: the body of the message in SQS.
    """
    if not any(name in attributes for name in SIZE_MARKERS):
        return None
    try:
        name, place = json.loads(text)
        bucket, key = place["s3BucketName"], place["s3Key"]
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    if name not in (POINTER_CLASS, LEGACY_POINTER_CLASS):
        return None
    if not isinstance(bucket, str) or not isinstance(key, str):
        return None
    if not 0 < len(key.encode("utf-8", "replace")) <= _MAX_KEY_BYTES:
        return None  # boto3 and S3 would reject the request
    return BodyPointer(bucket, key)


def stated_size(attributes: Mapping[str, Mapping[str, Any]]) -> int:
    """Return the size of a body in S3 according to its sender, 0 if unusable."""
    for name in SIZE_MARKERS:
        text = str(attributes.get(name, {}).get("StringValue", ""))
        if text.isascii() and text.isdigit() and len(text) <= _MOST_DIGITS:
            return int(text)
    return 0
